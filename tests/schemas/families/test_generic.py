"""Definitions of operators that no family knows: their axes, what ties them, and their references."""

from __future__ import annotations

import torch
from generic_calls import derived

from kcap.schemas.definition import AxisConst, Definition

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


def randn(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def shapes(definition: Definition) -> dict[str, list[str] | None]:
    return {name: tensor.shape for name, tensor in (definition.inputs | definition.outputs).items()}


def test_dimensions_that_agree_share_an_axis_and_those_that_never_differ_are_constant():
    found = derived("aten::mul.Tensor", *((randn(n, 64), randn(n, 1)) for n in (1, 3, 8)))
    assert shapes(found) == {"self": ["n0", "d64"], "other": ["n0", "d1"], "output": ["n0", "d64"]}
    assert found.var_axes == ["n0"] and found.const_axes == {"d64": 64, "d1": 1}
    assert (found.name, found.op_type) == ("mul_tensor_f32_d64_d1", "mul")


def test_all_axes_of_a_single_call_are_constant():
    found = derived("aten::rsqrt", (randn(4, 5).abs(),))
    assert all(isinstance(axis, AxisConst) for axis in found.axes.values())
    assert shapes(found) == {"self": ["d4", "d5"], "output": ["d4", "d5"]}


def test_an_out_is_no_input_and_keeps_its_name():
    found = derived("aten::add.out", (randn(4), randn(4)), out=torch.empty(4))
    assert list(found.inputs) == ["self", "other"] and list(found.outputs) == ["out"]


def test_what_an_operator_writes_in_place_has_a_name_of_its_own():
    found = derived("aten::copy_", *((randn(n), randn(n, dtype=BF16)) for n in (2, 5)))
    assert list(found.inputs) == ["self", "src"] and list(found.outputs) == ["self_out"]
    assert found.name == "copy_inplace_f32_bf16"


def test_a_decomposition_is_written_out():
    found = derived("aten::silu", *((randn(n, 8, dtype=BF16),) for n in (1, 2)))
    assert "reference:decomposition" in found.tags
    assert "torch.ops.aten.silu" not in found.reference and "sigmoid" in found.reference
