"""softmax, log_softmax and topk: aten's operators against references, names, what is declined."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_of_rows(function: str, dtype: torch.dtype) -> None:
    run = getattr(torch.ops.aten, function).int
    kernel = agrees(f"aten::{function}.int", run, self=randn(3, 5, 70, dtype=dtype), dim=-1, dtype=None)
    assert kernel.name == f"{function}{'' if dtype == torch.float32 else '_bf16'}_n70"
    wide = agrees(f"aten::{function}.int", run, self=randn(5, 70), dim=1, dtype=torch.float32)
    assert wide.name == f"{function}_bf16_to_fp32_n70"
    inner = getattr(torch.ops.aten, f"_{function}").default
    agrees(f"aten::_{function}", inner, self=randn(5, 70, dtype=dtype), dim=1, half_to_float=False)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_of_rows(ordered: bool, largest: bool) -> None:
    scores = randn(6, 256, dtype=torch.bfloat16)  # with equal ones
    settings = {"k": 8, "dim": -1, "largest": largest, "sorted": ordered}
    kernel = agrees("aten::topk", torch.ops.aten.topk, self=scores, **settings)
    words = f"{'' if largest else '_smallest'}{'' if ordered else '_unsorted'}"
    assert kernel.name == f"topk_bf16{words}_k8_n256"


def test_names_and_what_is_declined() -> None:
    logits = torch.empty(4, 128, device="meta")
    definition = checked(kernel_of("aten::topk", self=logits, k=8, dim=1, largest=True, sorted=False))
    assert definition.name == "topk_unsorted_k8_n128" and definition.var_axes == ["batch_size"]
    assert declined("aten::topk", self=logits, k=2, dim=0)
    assert declined("aten::softmax.int", self=logits, dim=0)
    assert declined("aten::softmax.int", self=logits, dim=-1, dtype=torch.float64)
