"""Which storages of a Call hold what the model keeps from step to step, by the names and shapes of its arguments.

Parameters and key-value caches decide what rotates in the cache state `serving`. A step of many layers reads each of
them once, from memory: the other layers have evicted them from the L2. Activations rotate only if the L2 cannot hold
them: one kernel leaves them there for the next. A Recording has no addresses, so these rules go by names and shapes, in
this order:

1. A name that says so in all libraries: `weight`, `bias`, `w13`, `mat2`, `key_cache`, and `b` beside an `a` (`mat_b`
   beside a `mat_a`), with its scales and zeros (`b_scales`); but not `topk_weights`, which a router computed by its own
   `router_weight`. `matmul` calls it `other`: a matrix is a parameter, a stack of matrices is not.
2. `k`, `v` and `kv` are caches beside a table of pages; otherwise they are activations.
3. A kernel of inductor's has no names: floats that it does not write, with other rows than what it writes (`[4096]`
   beside `[64, 4096]`, but not `[2, 32, 4096]`), are parameters.
4. Rotary tables do not rotate (`cos_sin_cache`, or a table narrower than the rows that inductor's kernel writes): all
   layers read the same rows of one, the keys' kernel right after the queries'.

Everything else is an activation, and so is every table of indices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

import torch

from kcap.replay.rebuild.memory import Target, storage_key
from kcap.schemas.derive.bound_call import RANDOM_BLOCK, BoundCall, Skip, StorageKey, fill_repeating
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import TensorSpec

CACHE_WORDS = r"(k|v|kv)?_?caches?|(k|v|kv)_buffer|kv_pool"
STORED_WORDS = rf"q?weights?|bias|gamma|w\d*|mat2|{CACHE_WORDS}"
STORED_SUFFIX = r"(_(scales?|scale_inv|zeros?|zero_points?|zp|bias|sf|global_scale))?"
STORED_NAME = re.compile(rf"(.*_)?({STORED_WORDS}){STORED_SUFFIX}")
CACHE_NAME = re.compile(rf"(.*_)?({CACHE_WORDS}){STORED_SUFFIX}")
FIRST_FACTORS = frozenset({"a", "arg_a", "mat_a"})
SECOND_FACTOR = re.compile(  # of a product a @ b
    rf"(arg_|mat_|.*scales?_)?b{STORED_SUFFIX}|b_(q_weight|meta)|group_(scales|zeros)"
)
ADAPTER_NAME = "lora"  # vLLM's `lora_ptr`; its tables of indices end with the word, too
ROUTER_NAME = re.compile(r"top_?k|rout(?!er_weight$)|expert_weights")
PAGED_NAMES = frozenset({"k", "v", "kv", "key", "value"})
PAGE_TABLE_NAME = re.compile(r"(block|page)_?tables?|(paged_)?kv_(indices|page_indices)")
ROTARY_NAME = re.compile(r"((.*_)?(cos|sin)|freqs?_cis|rotary_cache)(_.*)?")
INDUCTOR_POINTER = re.compile(r"(in|out|in_out)_ptr\d+")


def persistent_storages(bound: BoundCall, target: Target) -> frozenset[StorageKey]:
    """The storages of `bound` that hold parameters or caches."""
    names = {plain_name(argument.name) for argument in bound.args}
    paged = any(PAGE_TABLE_NAME.fullmatch(name) for name in names)
    product = bool(names & FIRST_FACTORS)
    written = rows_written(bound)
    persistent: set[StorageKey] = set()
    for path, spec in bound.tensors():
        argument = bound.holder(path)
        name = plain_name(argument.name)
        matmul_weight = bound.base == "matmul" and name == "other" and len(spec.shape) == 2
        unnamed = INDUCTOR_POINTER.fullmatch(name) and not is_written(argument) and is_inductor_parameter(spec, written)
        if is_persistent_name(name, paged, product) or matmul_weight or unnamed:
            persistent.add(storage_key(spec, target))
    return frozenset(persistent)


def is_persistent_name(name: str, paged: bool = False, product: bool = False) -> bool:
    """Whether an argument of this name is a parameter or a cache.

    `paged`, `product`: there is a table of pages, or a first factor `a`, beside it.
    """
    name = plain_name(name)
    if ROUTER_NAME.search(name) or ROTARY_NAME.fullmatch(name):
        return False
    return (
        bool(STORED_NAME.fullmatch(name))
        or name == ADAPTER_NAME
        or (paged and name in PAGED_NAMES)
        or (product and bool(SECOND_FACTOR.fullmatch(name)))
    )


def plain_name(name: str | None) -> str:
    """Lower case, without the `_ptr` that kernels append."""
    lower = (name or "").lower()
    return lower if INDUCTOR_POINTER.fullmatch(lower) else lower.removesuffix("_ptr")


def is_written(argument: Argument) -> bool:
    return argument.written or plain_name(argument.name).startswith(("out_ptr", "in_out_ptr"))


def rows_written(bound: BoundCall) -> dict[int, int]:
    """The row counts that the kernel's outputs may have, each with its shortest row; none if no output is known."""
    shortest: dict[int, int] = {}
    for path, spec in bound.tensors():
        if is_written(bound.holder(path)) and len(spec.shape) > 1 and spec.numel:
            for count in row_counts(spec):
                shortest[count] = min(shortest.get(count, spec.numel), spec.numel // spec.shape[0])
    return shortest


def is_inductor_parameter(spec: TensorSpec, written: dict[int, int]) -> bool:
    """Whether the rows of a tensor that a kernel reads are not those that it writes, and it is no rotary table.

    A tensor without dimensions is none: it has no rows.
    """
    if not written or not spec.shape or BY_NAME[spec.dtype].kind != "float":
        return False
    return len(spec.shape) == 1 or (not row_counts(spec) & written.keys() and spec.shape[-1] >= min(written.values()))


def row_counts(spec: TensorSpec) -> set[int]:
    """The row counts of a tensor: leading dimensions may be a batch of sequences, later ones heads."""
    return {math.prod(spec.shape[:end]) for end in range(1, len(spec.shape))}


FP8_DTYPES = frozenset({"float8_e4m3fn", "float8_e5m2"})
DUMMY_LIMIT = 1e-3  # vLLM's and SGLang's `initialize_dummy_weights` draw uniformly between it and its negative
DUMMY_DEVIATION = 3e-4  # of e4m3 and of what is drawn so: all but 2 in 100 are rounded to zero


def draw_dummy_weights(
    bound: BoundCall,
    target: Target,
    buffers: Mapping[StorageKey, torch.Tensor],
    parameters: Collection[StorageKey],
) -> None:
    """Draw `parameters`, of FP8, as engines draw those of a checkpoint of FP8 that they do not load.

    Products take less power on them. Of wider floats the mantissas are as random as others.
    """
    dtypes = {storage_key(spec, target): spec.dtype for _, spec in bound.tensors()}
    for key in parameters:
        cells = buffers[key].view(torch_dtype(dtypes[key], Skip))
        block = torch.empty(min(RANDOM_BLOCK, len(cells)), device=cells.device, dtype=torch.float16)
        fill_repeating(cells, block.uniform_(-DUMMY_LIMIT, DUMMY_LIMIT).to(cells.dtype))


def fp8_parameters(bound: BoundCall, target: Target) -> frozenset[StorageKey]:
    """The storages of `bound` that hold parameters of FP8 and nothing else, as far as names tell them from caches."""
    others: set[StorageKey] = set()
    for path, spec in bound.tensors():
        name = plain_name(bound.holder(path).name)
        cache = name in PAGED_NAMES or CACHE_NAME.fullmatch(name) or INDUCTOR_POINTER.fullmatch(name)
        if cache or spec.dtype not in FP8_DTYPES:
            others.add(storage_key(spec, target))
    return persistent_storages(bound, target) - others
