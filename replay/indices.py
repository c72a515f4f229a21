"""Values for integer tensors that were not recorded: valid indices for aten operators, small numbers elsewhere.

Outside aten nothing is guessed: an operator may read memory at an index that nobody checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from kcap.replay.bind import Bound
from kcap.replay.layout import compact
from kcap.replay.skip import Skip
from kcap.schemas.recording import Argument
from kcap.schemas.values import TensorSpec

Limit = Callable[[Bound], int]  # the first value that is no longer valid
SMALL = (1, 7)  # what an integer tensor holds when nothing is known of it: no zero, so that it can divide
DATA_ONLY = frozenset({"int8", "uint8"})  # quantized numbers, never wide enough to index with


def size(name: str, dim: int) -> Limit:
    return lambda bound: bound.spec(name).shape[dim]


def along(name: str = "self") -> Limit:
    """The size of `name` in the dimension that the argument `dim` names."""
    return lambda bound: (bound.spec(name).shape or (1,))[bound.integer("dim")]


def numel(name: str) -> Limit:
    return lambda bound: bound.spec(name).numel


def number(name: str) -> Limit:
    return lambda bound: bound.integer(name)


def classes(bound: Bound) -> int:
    shape = bound.spec("self").shape
    return shape[1] if len(shape) > 1 else shape[0]


def plane(bound: Bound) -> int:
    """Positions of one pooled plane: max_pool's indices count within it."""
    return math.prod(bound.spec("self").shape[-2:])


def smallest_size(bound: Bound) -> int:
    sizes = bound["size"]
    return min((n for n in sizes if isinstance(n, int)), default=0) if isinstance(sizes, list) else 0


def one_hot(bound: Bound) -> int:
    return max(bound.integer("num_classes"), 1)


ALONG = {"index": along()}
LIMITS: dict[str, dict[str, Limit]] = {
    "embedding": {"indices": size("weight", 0)},
    "embedding_renorm": {"indices": size("self", 0)},
    "embedding_dense_backward": {"indices": number("num_weights")},
    "embedding_bag": {"indices": size("weight", 0)},
    "_embedding_bag": {"indices": size("weight", 0)},
    "_embedding_bag_forward_only": {"indices": size("weight", 0)},
    "_embedding_bag_per_sample_weights_backward": {"indices": size("weight", 0), "offset2bag": size("grad", 0)},
    "_embedding_bag_dense_backward": {"indices": number("num_weights"), "offset2bag": size("grad", 0)},
    "nll_loss_forward": {"target": classes},
    "nll_loss_backward": {"target": classes},
    "nll_loss2d_forward": {"target": classes},
    "nll_loss2d_backward": {"target": classes},
    "nll_loss": {"target": classes},
    "nll_loss_nd": {"target": classes},
    "cross_entropy_loss": {"target": classes},
    "_sparse_coo_tensor_with_dims_and_tensors": {"indices": smallest_size},
    "one_hot": {"self": one_hot},
    "take": {"index": numel("self")},
    "put": {"index": numel("self")},
    "max_pool2d_with_indices_backward": {"indices": plane},
    "max_unpool2d": {"indices": plane},
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce", "gather"), ALONG),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "gather_backward"), ALONG),
    "take_along_dim": {"indices": lambda b: numel("self")(b) if b["dim"] is None else along()(b)},
}
OFFSETS = frozenset({"offsets"})  # arguments that hold the start of each bag: rising, the first is zero
INDEX_LISTS = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"})


def fill(bound: Bound) -> None:
    """Decide every integer tensor of `bound` that has no values yet; Skip where that would be a guess."""
    for path, spec, argument in undecided(bound):
        if bound.namespace != "aten" and spec.dtype not in DATA_ONLY:
            raise Skip(f"the values of its integer argument '{argument.name or path}' were not recorded")
        draw(bound, path, spec, argument)


def fill_indices(bound: Bound) -> None:
    """Decide those integer tensors of an aten operator by which it indexes; numbers that are only data stay open."""
    for path, spec, argument in undecided(bound):
        if bound.namespace == "aten" and (argument.name in OFFSETS or limit_of(bound, path, argument.name)):
            draw(bound, path, spec, argument)


def undecided(bound: Bound) -> Iterator[tuple[str, TensorSpec, Argument]]:
    """The integer tensors that have no values yet, with their paths and the arguments that they are in."""
    for path, spec in bound.integers():
        if path not in bound.contents and spec.numel:
            yield path, spec, bound.holder(path)


def draw(bound: Bound, path: str, spec: TensorSpec, argument: Argument) -> None:
    if argument.name in OFFSETS and "embedding_bag" in bound.base:
        bound.contents[path] = offsets(spec, bound.spec("indices").numel)
        return
    low, high = limits(bound, path, argument.name)
    bound.contents[path] = torch.randint(low, high + 1, compact(spec))


def limit_of(bound: Bound, path: str, name: str | None) -> Limit | None:
    """What bounds the values of an aten operator's integer tensor; None where they are data."""
    if bound.namespace != "aten":
        return None
    return index_limit(bound, path) if bound.base in INDEX_LISTS else LIMITS.get(bound.base, {}).get(name or "")


def limits(bound: Bound, path: str, name: str | None) -> tuple[int, int]:
    """The smallest and largest value to draw: the recorded range, cut to what the operator accepts."""
    low, high = bound.ranges.get(path, SMALL)
    limit = limit_of(bound, path, name)
    if limit is not None:
        first_invalid = limit(bound)
        if first_invalid <= 0:
            raise Skip(f"its argument '{name or path}' indexes an empty dimension")
        low, high = (low, high) if path in bound.ranges else (0, first_invalid - 1)
        low, high = max(0, min(low, first_invalid - 1)), max(0, min(high, first_invalid - 1))
    return low, max(low, high)


def index_limit(bound: Bound, path: str) -> Limit | None:
    """The limit of one tensor in the list of `index` and `index_put`: item i indexes dimension i of `self`.

    A mask (bool, uint8) before it takes as many dimensions as it has itself.
    """
    indices = bound["indices"]
    if not isinstance(indices, list) or "." not in path:
        return None
    dim = sum(_dims(item) for item in indices[: int(path.split(".")[1])])
    item = indices[int(path.split(".")[1])]
    if isinstance(item, TensorSpec) and item.dtype == "uint8":
        return lambda _: 2
    return size("self", dim)


def _dims(item: object) -> int:
    mask = isinstance(item, TensorSpec) and item.dtype in ("bool", "uint8")
    return len(item.shape) if mask and isinstance(item, TensorSpec) else 1


def offsets(spec: TensorSpec, total: int) -> torch.Tensor:
    """Bags of equal length: `spec.numel` rising starts within `total` indices."""
    return (torch.arange(spec.numel) * total // max(spec.numel, 1)).reshape(spec.shape)
