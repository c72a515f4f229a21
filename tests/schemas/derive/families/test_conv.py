"""conv: aten's convolutions against the reference, names, bytes and FLOPs, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for

SETTINGS = [
    {},
    {"stride": [2], "padding": [1]},
    {"stride": [3], "padding": [0], "dilation": [2]},
    {"padding": [2], "groups": 2},
]


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolutions_of_aten(d: int, settings: dict[str, Any], with_bias: bool) -> None:
    groups = settings.get("groups", 1)
    x, w = randn(2, 4, *(11, 9, 8)[:d]), randn(6, 4 // groups, *(3, 2, 3)[:d], seed=1)
    whole = {"stride": [1], "padding": [0], "dilation": [1], "groups": 1, **settings}
    bias = randn(6, seed=2) if with_bias else None
    run = getattr(torch.ops.aten, f"conv{d}d").default
    kernel = agrees(f"aten::conv{d}d", run, input=x, weight=w, bias=bias, **whole)
    spread = {name: value * d if isinstance(value, list) else value for name, value in whole.items()}
    inner = {**spread, "transposed": False, "output_padding": [0] * d}
    single = agrees(f"aten::conv{d}d", run, input=x[0], weight=w, bias=bias, **whole)
    assert single.name == f"{kernel.name}_unbatched" and single.flops == int(kernel.flops) // 2
    below = agrees("aten::convolution", torch.ops.aten.convolution.default, input=x, weight=w, bias=bias, **inner)
    assert below.key == kernel.key


def test_names_and_costs_of_whispers_first_convolution() -> None:
    x, w, bias = (
        torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((1, 80, 3000), (384, 80, 3), (384,))
    )
    call_arguments = {
        "input": x,
        "weight": w,
        "bias": bias,
        "stride": [1],
        "padding": [1],
        "dilation": [1],
        "groups": 1,
    }
    kernel = kernel_of("aten::conv1d", **call_arguments)
    definition = checked(kernel)
    assert definition.name == "conv1d_bias_fp16_o384_c80_k3_p1_i3000" and definition.var_axes == ["batch_size"]
    assert kernel.flops == 2 * 384 * 80 * 3 * 3000
    cost = cost_function_for("conv")
    assert cost is not None
    assert cost(CostInputs(definition, {"input": x, "weight": w, "bias": bias})).flops == kernel.flops


def test_a_convolution_without_a_batch_is_a_definition() -> None:
    """vLLM's Whisper convolves each recording of sound by itself."""
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((128, 3000), (1280, 128, 3)))
    kernel = kernel_of("aten::conv1d", input=x, weight=w, bias=None, stride=[1], padding=[1])
    definition = checked(kernel)
    assert definition.var_axes == [] and definition.inputs["input"].shape == ["in_channels", "in_width"]
    cost = cost_function_for("conv")
    assert cost is not None and cost(CostInputs(definition, {"input": x, "weight": w})).flops == kernel.flops


def test_what_is_not_modelled_is_declined() -> None:
    x, w = torch.empty(1, 4, 9), torch.empty(4, 4, 3)
    assert declined("aten::conv1d", input=x, weight=w, padding="same")
    assert declined("aten::convolution", input=x, weight=w, transposed=True)
    assert declined("aten::conv1d", input=x[0, 0], weight=w)
    assert declined("aten::conv1d", input=x[None], weight=w)
    assert declined("aten::conv1d", input=x, weight=torch.empty(4, 4, 10))
