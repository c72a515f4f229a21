"""mrope: the reference against SGLang's Triton kernel, interpreted; positions of Workloads and of replay, cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched, randn
from interpreted import kernels
from test_chunked_delta_rule import made_by_rule
from test_sglang_delta_rule import bound_call

from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.derive.workload_draft import WorkloadDraft

OPERATOR = "triton::_triton_mrope_forward_fused.s01234567"
TOKENS, HEADS, KV, ROWS = 7, 4, 2, 50
SECTIONS = {"mrope_section_t": 4, "mrope_section_h": 6, "mrope_section_w": 6}
CONSTANTS = ("n_qh", "n_kh", "hd", "rd", "pad_n_qh", "pad_n_kh", "pad_hd", *SECTIONS)
SWITCHES = ("is_interleaved", "is_interleaved_glm", "is_neox_style")


def call(
    size: int = 32, rot: int = 32, dtype: torch.dtype = torch.bfloat16, table: torch.dtype | None = None, **more: Any
) -> dict[str, Any]:
    """Queries and keys are views of one projection."""
    q, k, _ = randn(TOKENS, (HEADS + 2 * KV) * size, dtype=dtype).split([HEADS * size, KV * size, KV * size], dim=1)
    angle = randn(ROWS, rot // 2, dtype=torch.float32, seed=1) * 3
    positions = torch.randint(0, ROWS, (3, TOKENS), generator=torch.Generator().manual_seed(2))
    sizes = dict(zip(CONSTANTS, (HEADS, KV, size, rot, HEADS, KV, size), strict=False)) | SECTIONS
    return {
        "q_ptr": q,
        "k_ptr": k,
        "cos_sin_cache_ptr": torch.cat((angle.cos(), angle.sin()), dim=1).to(table or dtype),
        "positions_ptr": positions,
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "positions_stride": TOKENS,
        **sizes,
        **dict.fromkeys(SWITCHES[:2], False),
        "is_neox_style": True,
        "axis_map_ptr": None,
        **more,
    }


def run(**arguments: Any) -> None:
    kernels("sglang", "kernels/ops/attention/rotary_triton.py")["_triton_mrope_forward_fused"][(TOKENS,)](**arguments)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_sglangs_kernel(interleaved: bool, neox: bool) -> None:
    """Floats that are turned by a table in bfloat16 show in which dtype it computes."""
    switches = {"is_interleaved": interleaved, "is_neox_style": neox}
    for dtype, table in ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        for rot, few in ((32, {"mrope_section_h": 2, "mrope_section_w": 3}), (24, {})):
            given = call(rot=rot, dtype=dtype, table=table, **switches, **few)
            instance = agrees(OPERATOR, run, **given)
    style = ("_neox" if neox else "_gptj") + "_style" + ("_interleaved" if interleaved else "")
    assert instance.name == f"mrope{style}_fp32cache_d32_rd24_t4_h6_w6"
    recorded = launched(OPERATOR.rpartition(".")[0], given, *CONSTANTS, *SWITCHES)
    assert recorded.definition() == checked(instance)


def test_what_is_declined() -> None:
    assert declined(OPERATOR, **call(is_interleaved_glm=True)) and declined(OPERATOR, **call(is_neox_style=None))
    assert declined(OPERATOR, **call(positions_ptr=torch.zeros(TOKENS, dtype=torch.int64)))


def test_positions_are_rows_of_the_table_and_cost_counts_what_turns() -> None:
    instance = kernel_of(OPERATOR, **call(rot=24))
    draft = WorkloadDraft(
        checked(instance), {"num_tokens": 40, "max_seq_len": 9}, {}, torch.Generator().manual_seed(0), made_by_rule
    )
    assert draft["positions"].shape == (3, 40) and 0 <= draft["positions"].min() <= draft["positions"].max() < 9
    cost, function = cost_of_instance(instance), cost_function_for("mrope")
    rows = min(len(axis.unique()) for axis in call()["positions_ptr"])
    assert cost.bytes == 4 * TOKENS * (HEADS + KV) * 24 + 8 * 3 * TOKENS + 2 * 24 * rows
    inputs = {name: arg.get() for name, arg in instance.inputs.items()}
    assert function is not None and function(CostInputs(checked(instance), inputs)).bytes == cost.bytes
    positions = bound_call(OPERATOR, call()).content("positions_ptr")
    assert positions is None or positions.max() < ROWS
