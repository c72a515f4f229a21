"""Lookups of rows of a table by index: embedding, index_select and indexing. Only the rows read are touched."""

from __future__ import annotations

import math

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.index_arguments import bytes_without_unread_rows, cut_to_rows_in_use, random_parts
from kcap.schemas.derive.invocation import Invocation, distinct_rows, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.recording.values import TensorSpec

REFERENCE = """import torch


@torch.no_grad()
def run(input_ids, weight):
    assert weight.shape == ({vocabulary}, {hidden})
    return weight[input_ids.to(torch.int64)]
"""


@family("embedding", "aten::embedding")
def embedding(call: Invocation) -> KernelInstance:
    """`indices`: any shape, joined to [num_tokens]; `weight`: [vocab_size, hidden_size]."""
    weight, ids = call.tensor("weight"), call.tensor("indices").reshape(-1)
    vocabulary, hidden = weight.shape
    row = hidden * weight.element_size()
    word = abbreviate(weight.dtype, torch.bfloat16) + abbreviate(ids.dtype, torch.int64)
    return KernelInstance(
        name=f"embedding{word}_v{vocabulary}_h{hidden}",
        op_type="embedding",
        axes={"num_tokens": None, "vocab_size": vocabulary, "hidden_size": hidden},
        inputs={"input_ids": tensor_arg(ids, "num_tokens"), "weight": tensor_arg(weight, "vocab_size", "hidden_size")},
        outputs={
            "output": lazy_arg(weight.dtype, ("num_tokens", "hidden_size"), lambda: call.result.reshape(-1, hidden))
        },
        reference=REFERENCE.format(vocabulary=vocabulary, hidden=hidden),
        description="Rows of the embedding table. Token ids are in [0, vocab_size).",
        touched=lambda: (ids.numel() + distinct_rows(ids)) * row + total_bytes(ids),
    )


@cost_function("embedding")
def embedding_cost(inputs: CostInputs) -> Cost:
    rows = len(inputs.index("input_ids").unique())
    return inputs.cost(rows * distinct_bytes(inputs["weight"][:1]) + inputs.read("input_ids"))


@valid_input("input_ids", "token_ids", "ids", "indices", op_types=("embedding",))
def token_ids(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    table = draft.first("weight", "table", "embedding")
    return draft.integers(0, draft.shape(table)[0], draft.shape(name)) if table else None


@valid_input("index", "indices_*", op_types=("index", "index_select"))
def index_rows(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Below the smallest axis of the indexed tensor: any axis may be meant."""
    if "self" not in draft or not (sizes := draft.shape("self")):
        return None
    return draft.integers(0, min(sizes), draft.shape(name))


def repeats_of(
    shape: tuple[int, ...], total: int, size: int, low: int, high: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """How often each element along an axis of `size` is repeated, `total` in all: at random between `low` and `high`,
    or one number for all where `shape` has room for one alone."""
    count = math.prod(shape)
    if count < 2:
        return torch.full(shape, total // max(size, 1))
    return random_parts(total, torch.full((count,), low), torch.full((count,), high), generator).reshape(shape)


@valid_input("repeats", op_types=("repeat_interleave",))
def repeats(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """They add up to the size that the operator was told, which is that of the axis in which the output differs."""
    (output,) = draft.definition.outputs.values()
    shape, sizes = draft.shape(name), draft.definition.sizes(output.shape or (), draft.axes)
    before, count = draft.shape("self") if "self" in draft else (), math.prod(shape)
    if len(before) == len(sizes):
        total, size = next((both for both in zip(sizes, before, strict=True) if both[0] != both[1]), (count, count))
    else:  # of all elements
        total, size = sizes[0], math.prod(before)
    return repeats_of(shape, total, size, 0, total, draft.generator)


@replay_rule("aten::repeat_interleave.self_Tensor", "aten::repeat_interleave.Tensor")
class RepeatInterleave(ReplayRule):
    """`repeats`, of which a Sample has the range alone, add up to `output_size`, where the operator is told it."""

    def prepare(self, bound: BoundCall) -> None:
        total, shape, before = bound["output_size"], bound.spec("repeats").shape, bound["self"]
        if not isinstance(total, int) or bound.content("repeats") is not None:
            return
        size = math.prod(shape)
        if isinstance(before, TensorSpec):
            size = before.numel if bound["dim"] is None else before.shape[bound.integer("dim")]
        drawn = repeats_of(shape, total, size, *bound.range_of("repeats", (0, total)))
        if int(drawn.sum()) * size != total * drawn.numel():
            raise Skip(f"its counts do not add up to {total} within the range that a Sample has")
        bound.set_content("repeats", drawn)


@replay_rule("aten::embedding")
class Embedding(ReplayRule):
    def trim_tables(self, bound: BoundCall) -> None:
        cut_to_rows_in_use(bound, "weight", "indices")


@replay_rule("aten::index_select", "aten::index_select.out")
class IndexSelect(ReplayRule):
    def touched(self, bound: BoundCall, total: int) -> int:
        table = bound.spec("self")
        return (
            bytes_without_unread_rows(total, table, bound.spec("index").numel, bound.integer("dim"))
            if table.shape
            else total
        )


@replay_rule("aten::index.Tensor")
class Index(ReplayRule):
    """Only one index tensor, in the first dimension: the rest is counted whole."""

    def touched(self, bound: BoundCall, total: int) -> int:
        match bound["indices"]:
            case [TensorSpec(dtype="int32" | "int64") as index]:
                return bytes_without_unread_rows(total, bound.spec("self"), index.numel, 0)
        return total
