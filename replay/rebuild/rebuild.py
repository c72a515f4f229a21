"""From a Call and one Sample to the operator that ran and its arguments: values are resolved, then memory is filled.

In the order of reading: `Rebuilder`; the arguments that a replay rule rebuilds; integer tensors that were not recorded
(`resolve_integers`). Those hold valid indices where an aten operator indexes by them. Outside aten nothing is guessed:
an operator may read memory at an index that nobody checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch

from kcap.replay.rebuild import memory, operators
from kcap.replay.rebuild.batches import StepBatches, sampled_routing
from kcap.replay.rebuild.launches import Launches, is_launch
from kcap.replay.rebuild.memory import (
    NO_BUFFERS,
    Target,
    build_inputs,
    clone_inputs,
    compact_shape,
    inputs_on_buffers,
    mapped_storages,
)
from kcap.replay.rebuild.operators import Operator, resolve_operator
from kcap.replay.rebuild.persistent import draw_dummy_weights, fp8_parameters
from kcap.schemas.derive import bound_call, families
from kcap.schemas.derive.bound_call import RANDOM_BLOCK, BoundCall, Inputs, Skip, bind_call, fill_repeating
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.recording import Argument, Call, Sample, SampledTensor, load
from kcap.schemas.recording.values import Group, Opaque, TensorSpec


@dataclass(frozen=True)
class ResolvedCall:
    """An invocation whose every value is known; nothing is allocated yet.

    `rebuilt_args`: arguments that the rule makes from the others. `input_bytes`: of one set of inputs. `dummies`:
    storages that are drawn as an engine's dummy weights.
    """

    operator: Operator
    rule: families.ReplayRule
    bound: BoundCall
    rebuilt_args: list[str]
    input_bytes: int
    dummies: frozenset[bound_call.StorageKey] = frozenset()

    @property
    def touched(self) -> int:
        """Of `input_bytes`, those that one invocation can touch."""
        return self.rule.touched(self.bound, self.input_bytes)


ResolveCollective: TypeAlias = "Callable[[Call], tuple[Operator, families.ReplayRule]]"


class Rebuilder:
    """Rebuilds Calls on one device. `home`: the type of device that they were recorded on.

    `root`: the Recording, if they are of one. `trust`: its kernel sources may run, whoever made it. `collective`:
    resolves those of a worker that has peers. `dummy_weights`: parameters of FP8 are drawn as engines draw dummy ones.
    """

    def __init__(
        self,
        device: str,
        home: str,
        root: Path | None,
        trust: bool = False,
        collective: ResolveCollective | None = None,
        dummy_weights: bool = False,
    ) -> None:
        self.target, self.collective, self.dummy_weights = Target(device, home), collective, dummy_weights
        self.recording = load(root) if root else None
        self.launches = Launches(self.recording, trust)
        self.batches = StepBatches(self.recording)

    def resolve(self, call: Call, sample: Sample | None, timed: bool = False) -> ResolvedCall:
        """Every value of `call` on `sample`; Skip says why it cannot be rebuilt here.

        `timed`: it is to be timed, not to be compared: of a table it keeps only the rows that it reads, and rows that
        several tokens write stay shared, as in the engine.
        """
        operator, rule = self._resolve_operator(call)
        bound = bind_call(call, sample, operator.schema, self._load)
        bound.routing, bound.timed = self._routing, timed
        name_arguments(bound, rule)
        self.batches.fill(bound, call, sample)
        rebuilt_args = apply_rule(bound, rule)
        if timed:
            rule.trim_tables(bound)
        resolve_integers(bound)
        resolve_mask(bound)
        sizes = memory.buffer_sizes(bound, self.target.device, self.target.home)
        input_bytes = memory.check_free(
            sizes, mapped_storages(bound, self.target), rule.extra_bytes(bound), self.target.device
        )
        dummies = fp8_parameters(bound, self.target) if self.dummy_weights else frozenset()
        return ResolvedCall(operator, rule, bound, rebuilt_args, input_bytes, dummies)

    def build(
        self, resolved: ResolvedCall, buffers: Mapping[bound_call.StorageKey, torch.Tensor] = NO_BUFFERS
    ) -> Inputs:
        """One set of arguments, some of its storages in `buffers`; torch's default generators draw the numbers."""
        inputs = build_inputs(resolved.bound, self.target, buffers)
        draw_dummy_weights(resolved.bound, self.target, inputs.buffers, resolved.dummies)
        return set_rebuilt_arguments(resolved, inputs)

    def clone(
        self, resolved: ResolvedCall, inputs: Inputs, storages: Collection[bound_call.StorageKey] | None = None
    ) -> Inputs:
        """The same arguments with the same content at other addresses: all storages, or those named."""
        return set_rebuilt_arguments(resolved, clone_inputs(resolved.bound, self.target, inputs, storages))

    @cached_property
    def _routing(self) -> dict[int, torch.Tensor]:
        return sampled_routing(self.recording) if self.recording else {}

    def _resolve_operator(self, call: Call) -> tuple[Operator, families.ReplayRule]:
        if call.group:
            if self.collective is None:
                raise Skip(f"it needs its process group (of {call.group.size})")
            return self.collective(call)
        if is_launch(call):
            return self.launches.resolve_launch(call, self.target.device)
        if operators.is_engine_class(call):
            return operators.resolve_class(call), families.replay_rule_for(call.operator)
        resolved = operators.resolve_function(call) if operators.is_function(call) else resolve_operator(call.operator)
        return resolved, families.replay_rule_for(call.operator)

    def _load(self, tensor: SampledTensor) -> torch.Tensor | None:
        return self.recording.value(tensor) if self.recording else None


def name_arguments(bound: BoundCall, rule: families.ReplayRule) -> None:
    """Give the first arguments the names that `rule` knows, where the operator's schema has none."""
    if rule.unnamed_args:
        names = rule.named([argument.name for argument in bound.args])
        bound.args[:] = [arg.model_copy(update={"name": name}) for arg, name in zip(bound.args, names, strict=True)]


def apply_rule(bound: BoundCall, rule: families.ReplayRule) -> list[str]:
    """Let `rule` set the values of `bound` that it knows; the names of the arguments that it will make later."""
    rebuilt_args = [name for name in rule.rebuilt_args if isinstance(bound[name], TensorSpec | Group | Opaque)]
    for name in rebuilt_args:
        if not isinstance(bound[name], Group):  # of which a family reads the size
            bound.set_value(name, None)
    rule.prepare(bound)
    return rebuilt_args


def set_rebuilt_arguments(resolved: ResolvedCall, inputs: Inputs) -> Inputs:
    """`inputs`, now with the arguments that the rule makes."""
    if not resolved.rebuilt_args:
        return inputs
    for name, value in resolved.rule.rebuild_args(resolved.bound, inputs).items():
        set_argument(resolved.bound, inputs, name, value)
    return inputs


def with_buffers(
    resolved: ResolvedCall, target: Target, inputs: Inputs, buffers: Mapping[bound_call.StorageKey, torch.Tensor]
) -> Inputs:
    """The arguments of `inputs`, some of whose storages are now `buffers`; nothing is filled."""
    replaced = inputs_on_buffers(resolved.bound, target, {**inputs.buffers, **buffers})
    for name in resolved.rebuilt_args:
        set_argument(resolved.bound, replaced, name, families.rebuilt_argument(resolved.bound, inputs, name))
    return replaced


def set_argument(bound: BoundCall, inputs: Inputs, name: str, value: Any) -> None:
    index = bound.index(name)
    if index is None:
        return
    if bound.args[index].keyword:
        inputs.kwargs[name] = value
    else:
        inputs.args[index] = value


IndexLimit = Callable[[BoundCall], int]  # the first value that is no longer valid


IntegerRange: TypeAlias = tuple[int, int]  # the least and the greatest
SMALL_INTEGERS: IntegerRange = (1, 7)  # of what nothing is known: without zero, so that it can divide
OF_BOOLS: IntegerRange = (0, 255)  # what bools are made of: those of the upper half are true
DATA_DTYPES = frozenset({"int8", "uint8"})  # quantized numbers, never wide enough to index with


def size_of_dim(name: str, dim: int) -> IndexLimit:
    return lambda bound: bound.spec(name).shape[dim]


def size_along_dim(name: str = "self") -> IndexLimit:
    """The size of `name` in the dimension that the argument `dim` names."""
    return lambda bound: (bound.spec(name).shape or (1,))[bound.integer("dim")]


def numel_of(name: str) -> IndexLimit:
    return lambda bound: bound.spec(name).numel


def integer_argument(name: str) -> IndexLimit:
    return lambda bound: bound.integer(name)


def class_count(bound: BoundCall) -> int:
    shape = bound.spec("self").shape
    return shape[1] if len(shape) > 1 else shape[0]


def pooled_plane(bound: BoundCall) -> int:
    """Positions of one pooled plane: max_pool's indices count within it."""
    return math.prod(bound.spec("self").shape[-2:])


def smallest_sparse_size(bound: BoundCall) -> int:
    sizes = bound["size"]
    return min((n for n in sizes if isinstance(n, int)), default=0) if isinstance(sizes, list) else 0


def one_hot_classes(bound: BoundCall) -> int:
    return max(bound.integer("num_classes"), 1)


ALONG_DIM = {"index": size_along_dim()}
INDEX_LIMITS: dict[str, dict[str, IndexLimit]] = {
    "embedding": {"indices": size_of_dim("weight", 0)},
    "embedding_renorm": {"indices": size_of_dim("self", 0)},
    "embedding_dense_backward": {"indices": integer_argument("num_weights")},
    "embedding_bag": {"indices": size_of_dim("weight", 0)},
    "_embedding_bag": {"indices": size_of_dim("weight", 0)},
    "_embedding_bag_forward_only": {"indices": size_of_dim("weight", 0)},
    "_embedding_bag_per_sample_weights_backward": {
        "indices": size_of_dim("weight", 0),
        "offset2bag": size_of_dim("grad", 0),
    },
    "_embedding_bag_dense_backward": {"indices": integer_argument("num_weights"), "offset2bag": size_of_dim("grad", 0)},
    "nll_loss_forward": {"target": class_count},
    "nll_loss_backward": {"target": class_count},
    "nll_loss2d_forward": {"target": class_count},
    "nll_loss2d_backward": {"target": class_count},
    "nll_loss": {"target": class_count},
    "nll_loss_nd": {"target": class_count},
    "cross_entropy_loss": {"target": class_count},
    "_sparse_coo_tensor_with_dims_and_tensors": {"indices": smallest_sparse_size},
    "one_hot": {"self": one_hot_classes},
    "take": {"index": numel_of("self")},
    "put": {"index": numel_of("self")},
    "max_pool2d_with_indices_backward": {"indices": pooled_plane},
    "max_unpool2d": {"indices": pooled_plane},
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce", "gather"), ALONG_DIM),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "gather_backward"), ALONG_DIM),
    "take_along_dim": {"indices": lambda b: numel_of("self")(b) if b["dim"] is None else size_along_dim()(b)},
}


OFFSET_ARGUMENTS = frozenset({"offsets"})  # the start of each bag: ascending from zero
INDEX_LIST_OPERATORS = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"})
WRITES_BY_INDEX = ("index_put", "_index_put_impl", "_unsafe_index_put", "index_copy", "put", "scatter")
MASKED_WRITES = {"index_put": "values", "_index_put_impl": "values", "masked_scatter": "source"}
MASKS = ("indices", "mask")


def resolve_integers(bound: BoundCall) -> None:
    """Give values to every integer tensor of `bound` that has none yet; Skip where that would be a guess."""
    for path, spec, argument in unresolved_integers(bound):
        if bound.namespace != "aten" and spec.dtype not in DATA_DTYPES and not bound.in_group:
            raise Skip(f"the values of its integer argument '{argument.name or path}' were not recorded")
        draw_indices(bound, path, spec, argument)


def resolve_indices(bound: BoundCall) -> None:
    """Give values to the integer tensors by which an aten operator indexes; those that are only data stay open."""
    for path, spec, argument in unresolved_integers(bound):
        if bound.namespace == "aten" and (argument.name in OFFSET_ARGUMENTS or limit_of(bound, path, argument.name)):
            draw_indices(bound, path, spec, argument)


def resolve_mask(bound: BoundCall) -> None:
    """Give the mask of an aten operator that writes by it as many true elements as it has values to write."""
    if bound.namespace != "aten" or bound.base not in MASKED_WRITES:
        return
    masks = [
        (path, spec) for path, spec in bound.tensors() if spec.dtype == "bool" and bound.holder(path).name in MASKS
    ]
    written = bound[MASKED_WRITES[bound.base]]
    if len(masks) != 1 or not isinstance(written, TensorSpec) or not written.numel:
        return
    ((path, spec),) = masks
    shape = compact_shape(spec)
    cells = math.prod(shape)
    count = written.numel * cells // bound.spec("self").numel
    if 0 < count <= cells and (written.numel > 1 or bound.base == "masked_scatter"):
        bound.contents[path] = (torch.randperm(cells) < count).reshape(shape)


def unresolved_integers(bound: BoundCall) -> Iterator[tuple[str, TensorSpec, Argument]]:
    """The integer tensors that have no values yet, with their paths and their arguments."""
    for path, spec in bound.integers():
        if path not in bound.contents and spec.numel:
            yield path, spec, bound.holder(path)


def draw_indices(bound: BoundCall, path: str, spec: TensorSpec, argument: Argument) -> None:
    if argument.name in OFFSET_ARGUMENTS and "embedding_bag" in bound.base:
        bound.contents[path] = bag_offsets(spec, bound.spec("indices").numel)
        return
    low, high = index_range(bound, path, argument.name)
    shape = compact_shape(spec)
    writes = bound.base in WRITES_BY_INDEX and limit_of(bound, path, argument.name) is not None
    if not writes or bound["accumulate"] or bound["reduce"]:  # then none is lost, in any order
        bound.contents[path] = draw_numbers(low, high, shape, spec.dtype)
    elif bound.base == "scatter" and shape:
        bound.contents[path] = draw_distinct(low, high, shape, bound.integer("dim"))
    else:
        bound.contents[path] = draw_distinct(low, high, (math.prod(shape),)).reshape(shape)


def draw_numbers(low: int, high: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Of many, those of one block again and again: hundreds of megabytes of packed weights would take seconds."""
    cells = torch.empty(math.prod(shape), dtype=torch_dtype(dtype) if dtype in DATA_DTYPES else torch.int64)
    most, size = torch.iinfo(cells.dtype).max, min(max(len(cells), 1), RANDOM_BLOCK)
    fill_repeating(cells, torch.randint(low, min(high, most) + 1, (size,), dtype=cells.dtype))
    return cells.reshape(shape)


def draw_distinct(low: int, high: int, shape: tuple[int, ...], dim: int = 0) -> torch.Tensor:
    """None twice along `dim`, where there are as many: of two that are written to one place, neither is the last."""
    span, count = high - low + 1, shape[dim]
    if not 0 < count <= span:
        return torch.randint(low, high + 1, shape)
    order = (torch.arange(count) * span // count + torch.randint(span // count, (count,)))[torch.randperm(count)]
    along, across = [1] * len(shape), list(shape)
    along[dim], across[dim] = count, 1
    return low + (order.view(along) + torch.randint(span, across)) % span


def limit_of(bound: BoundCall, path: str, name: str | None) -> IndexLimit | None:
    """The limit of an aten operator's integer tensor; None where its values are data."""
    if bound.namespace != "aten":
        return None
    if bound.base in INDEX_LIST_OPERATORS:
        return index_limit(bound, path)
    return INDEX_LIMITS.get(bound.base, {}).get(name or "")


def index_range(bound: BoundCall, path: str, name: str | None) -> tuple[int, int]:
    """The smallest and largest value to draw: the recorded range, clamped to what the operator accepts."""
    low, high = bound.ranges.get(path, SMALL_INTEGERS)
    limit = limit_of(bound, path, name)
    if limit is not None:
        first_invalid = limit(bound)
        if first_invalid <= 0:
            raise Skip(f"its argument '{name or path}' indexes an empty dimension")
        low, high = (low, high) if path in bound.ranges else (0, first_invalid - 1)
        low, high = max(0, min(low, first_invalid - 1)), max(0, min(high, first_invalid - 1))
    return low, max(low, high)


def index_limit(bound: BoundCall, path: str) -> IndexLimit | None:
    """The limit of one tensor in the list of `index` and `index_put`: item i indexes dimension i of `self`.

    A mask (bool, uint8) before it stands for as many dimensions as it has.
    """
    indices = bound["indices"]
    if not isinstance(indices, list) or "." not in path:
        return None
    dim = sum(_dims_taken(item) for item in indices[: int(path.split(".")[1])])
    item = indices[int(path.split(".")[1])]
    if isinstance(item, TensorSpec) and item.dtype == "uint8":
        return lambda _: 2
    return size_of_dim("self", dim)


def _dims_taken(item: object) -> int:
    mask = isinstance(item, TensorSpec) and item.dtype in ("bool", "uint8")
    return len(item.shape) if mask and isinstance(item, TensorSpec) else 1


def bag_offsets(spec: TensorSpec, total: int) -> torch.Tensor:
    """Bags of equal length: `spec.numel` ascending starts within `total` indices."""
    return (torch.arange(spec.numel) * total // max(spec.numel, 1)).reshape(spec.shape)
