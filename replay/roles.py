"""Which of an invocation's storages hold what the model keeps: parameters and key-value caches.

A step of many layers reads each of them once, from memory: whatever the L2 held of them, the other layers' have driven
out. What one kernel hands to the next, the activations, it leaves in the L2, as far as that has room. In the cache
state `serving` the first rotate and the others stay where they are. A record has no addresses, so the rule goes by what
a Call tells, in this order:

1. A name that says it, as all libraries name theirs: `weight`, `bias`, `w13`, `mat2`, `key_cache`, and `b` beside an
   `a`, each with its scales and zeros (`b_scales`); not `topk_weights`, which a router made. A `matmul` calls it
   `other`: a matrix is one, a stack of them is not.
2. `k`, `v` and `kv` are caches where a table of pages is an argument too; otherwise they are activations.
3. A kernel of inductor's names nothing: floats that it does not write to, of other rows than what it writes to
   (`[4096]` beside `[64, 4096]`, but not `[2, 32, 4096]`), are parameters.
4. But rotary tables stay (`cos_sin_cache`, or a table narrower than the rows that inductor's kernel writes): all layers
   read the same rows of one, the keys' kernel right behind the queries'.

Everything else is an activation, and so is every table of indices.
"""

from __future__ import annotations

import math
import re

from kcap.replay.bind import Bound
from kcap.replay.layout import Target, key_of
from kcap.replay.memory import Key
from kcap.schemas.dtypes import BY_NAME
from kcap.schemas.values import TensorSpec

KINDS = r"q?weights?|bias|gamma|w\d*|mat2|(k|v|kv)?_?caches?|(k|v|kv)_buffer|kv_pool"
OF_THEM = r"(_(scales?|scale_inv|zeros?|zero_points?|zp|bias|sf|global_scale))?"
NAME = re.compile(rf"(.*_)?({KINDS}){OF_THEM}")
SECOND = re.compile(rf"(arg_|.*scales?_)?b{OF_THEM}|b_(q_weight|meta)")  # of a product a @ b
ROUTED = re.compile(r"top_?k|rout|expert_weights")
PAGED = frozenset({"k", "v", "kv", "key", "value"})
TABLE = re.compile(r"(block|page)_?tables?|(paged_)?kv_(indices|page_indices)")
ROTARY = re.compile(r"((.*_)?(cos|sin)|freqs?_cis|rotary_cache)(_.*)?")
POINTER = re.compile(r"(in|out|in_out)_ptr\d+")


def kept(bound: Bound, target: Target) -> frozenset[Key]:
    """The storages of `bound` that hold parameters or caches."""
    names = {plain(argument.name) for argument in bound.args}
    paged = any(TABLE.fullmatch(name) for name in names)
    written = written_rows(bound)
    found: set[Key] = set()
    for path, spec in bound.tensors():
        argument = bound.holder(path)
        name = plain(argument.name)
        product = "a" in names or "arg_a" in names
        unnamed = POINTER.fullmatch(name) and not argument.written and unlike(spec, written)
        if named(name, paged, product) or multiplied(bound, name, spec) or unnamed:
            found.add(key_of(spec, target))
    return frozenset(found)


def named(name: str, paged: bool = False, product: bool = False) -> bool:
    """Whether an argument of this name is a parameter or a cache; `paged`, `product`: what is beside it."""
    name = plain(name)
    if ROUTED.search(name) or ROTARY.fullmatch(name):
        return False
    return bool(NAME.fullmatch(name)) or (paged and name in PAGED) or (product and bool(SECOND.fullmatch(name)))


def multiplied(bound: Bound, name: str, spec: TensorSpec) -> bool:
    """Whether a `matmul` multiplies its rows by this matrix."""
    return bound.base == "matmul" and name == "other" and len(spec.shape) == 2


def plain(name: str | None) -> str:
    """Lower case, without the `_ptr` that kernels add."""
    lower = (name or "").lower()
    return lower if POINTER.fullmatch(lower) else lower.removesuffix("_ptr")


def written_rows(bound: Bound) -> dict[int, int]:
    """The rows that what the kernel writes may have, and the fewest elements of one; none where nothing says that it is
    written."""
    found: dict[int, int] = {}
    for path, spec in bound.tensors():
        argument = bound.holder(path)
        writes = argument.written or plain(argument.name).startswith(("out_ptr", "in_out_ptr"))
        if writes and len(spec.shape) > 1 and spec.numel:
            for count in rows(spec):
                found[count] = min(found.get(count, spec.numel), spec.numel // spec.shape[0])
    return found


def unlike(spec: TensorSpec, written: dict[int, int]) -> bool:
    """Whether a tensor that a kernel reads has no row for each row of what it writes, and is no rotary table."""
    if not written or BY_NAME[spec.dtype].kind != "float":
        return False
    return len(spec.shape) == 1 or (not rows(spec) & written.keys() and spec.shape[-1] >= min(written.values()))


def rows(spec: TensorSpec) -> set[int]:
    """How many rows a tensor may be said to have: leading dimensions may be a batch of sequences, later ones heads."""
    return {math.prod(spec.shape[:end]) for end in range(1, len(spec.shape))}
