"""cache_gather: the reference against plain loops, its replay rule, names and valid inputs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from paging import Batch, batch, starts

from kcap.replay.datasets.inputs import make_inputs
from kcap.replay.rebuild.rebuild import apply_rule
from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for, replay_rule_for
from kcap.schemas.flashinfer.definition import RandomInput, Workload
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

DEQUANT, GATHER = "_C_cache_ops::gather_and_maybe_dequant_cache", "_C_cache_ops::cp_gather_cache"
DIM, PAGE = 72, 16
Arguments = dict[str, Any]


def arguments(requests: Batch, first: list[int] | None, **more: Any) -> Arguments:
    """`requests.queries` rows of each sequence, from its token `first` on, into a workspace with room to spare."""
    return {
        "src_cache": randn(requests.pages, PAGE, DIM, seed=1),
        "dst": randn(requests.tokens + 9, DIM, seed=2),
        "block_table": requests.table,
        "cu_seq_lens": requests.starts,
        "seq_starts": None if first is None else torch.tensor(first, dtype=torch.int32),
        **more,
    }


def gathered(**call: Any) -> None:
    """Row by row, as csrc/cache_kernels.cu has it."""
    begins, first = call["cu_seq_lens"].tolist(), call["seq_starts"]
    for row, (begin, end) in enumerate(pairwise(begins)):
        for token in range(begin, end):
            position = token - begin + (0 if first is None else int(first[row]))
            page = int(call["block_table"][row, position // PAGE])
            call["dst"][token] = call["src_cache"][page, position % PAGE]


@pytest.mark.parametrize("operator", [DEQUANT, GATHER])
@pytest.mark.parametrize(("rows", "first"), [([40, 3, 17], None), ([0, 30, 16], [0, 16, 32]), ([7, 1, 20], [3, 2, 18])])
def test_rows_of_sequences_are_gathered(operator: str, rows: list[int], first: list[int] | None):
    """A chunk of a cached prompt begins with a page; the operator of context parallelism takes any token."""
    requests = batch(rows, [48, 50, 64], PAGE)
    more = {"token_to_seq": torch.zeros(requests.tokens), "num_tokens": requests.tokens}
    kernel = agrees(operator, gathered, **arguments(requests, first, **(more if operator == DEQUANT else {})))
    assert kernel.name == f"cache_gather{'_part' if first else ''}_d72_ps16"
    assert kernel.touched is not None and kernel.touched() == 2 * sum(rows) * DIM * 2


def test_names_and_what_is_declined():
    call_arguments = arguments(batch([40, 3], [40, 3], PAGE), [0, 0])
    definition = checked(kernel_of(DEQUANT, **call_arguments))
    assert list(definition.inputs) == ["src_cache", "workspace", "block_table", "cu_seq_lens", "seq_starts"]
    assert definition.const_axes == {"page_size": PAGE, "head_dim_kv": DIM}
    assert declined(DEQUANT, **{**call_arguments, "src_cache": torch.empty(5, PAGE, DIM, dtype=torch.uint8)})
    assert declined(GATHER, **call_arguments, batch_size=1)
    assert declined(GATHER, **{**call_arguments, "src_cache": randn(5, PAGE, 2, DIM)})


def test_valid_inputs_fill_the_workspace():
    kernel = kernel_of(GATHER, **arguments(batch([40, 3], [40, 3], PAGE), [0, 0]))
    definition, sizes = checked(kernel), kernel.sizes()
    inputs: dict[str, Any] = {name: RandomInput() for name in definition.inputs}
    workload = Workload(uuid="one", axes={name: sizes[name] for name in definition.var_axes}, inputs=inputs)
    made = dict(zip(definition.inputs, make_inputs(definition, workload, None).inputs, strict=True))
    rows, starts = made["cu_seq_lens"].diff(), made["seq_starts"]
    assert made["cu_seq_lens"][[0, -1]].tolist() == [0, 52] and rows.min() >= 0
    assert starts.min() >= 0 and not (starts % PAGE).any()
    assert (starts + rows).max() <= made["block_table"].shape[1] * PAGE
    cost = cost_function_for("cache_gather")
    assert cost is not None and cost(CostInputs(definition, made)).bytes == 2 * 52 * DIM * 2


def bound_call(**contents: torch.Tensor) -> BoundCall:
    shapes = {"block_table": (2, 9), "cu_seq_lens": (3,), "token_to_seq": (25,), "seq_starts": (2,)}
    values = {
        "src_cache": TensorSpec((900, PAGE, DIM), "bfloat16"),
        "dst": TensorSpec((64, DIM), "bfloat16", storage=1),
    }
    values |= {name: TensorSpec(shape, "int32", storage=n) for n, (name, shape) in enumerate(shapes.items(), 2)}
    bound = BoundCall(DEQUANT, [Argument(name=name, value=value) for name, value in values.items()])
    for name, value in contents.items():
        bound.set_content(name, value)
    return bound


def test_replay_cuts_the_cache_and_knows_each_rows_sequence():
    table = torch.tensor([[800, 7, 5] + [0] * 6, [9, 3] + [0] * 7])
    bound = bound_call(block_table=table, cu_seq_lens=starts([20, 3]), seq_starts=torch.tensor([16, 0]))
    apply_rule(bound, replay_rule_for(DEQUANT))
    assert bound.spec("src_cache").shape == (4, PAGE, DIM)
    used, rows = bound.content("block_table"), bound.content("token_to_seq")
    assert used is not None and used[0, :3].tolist() == [3, 1, 0] and used[1, 0] == 2
    assert rows is not None and rows.tolist() == [0] * 20 + [1] * 3 + [0] * 2
    with pytest.raises(Skip, match="no Sample holds its block table"):
        apply_rule(bound_call(cu_seq_lens=starts([20, 3])), replay_rule_for(DEQUANT))
