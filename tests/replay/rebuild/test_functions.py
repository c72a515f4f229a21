"""A library's function that a tap recorded runs by its name, where a family knows it; nothing else can be named."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kcap.replay.rebuild import operators
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.recording.recording import Argument, Call
from kcap.schemas.recording.values import TensorSpec, Value


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    residual += input
    input.copy_(residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + eps) * weight)


def fp8_gemm_nt(a: list[torch.Tensor], b: list[torch.Tensor], d: torch.Tensor) -> None:
    d.copy_((a[0].float() * a[1]) @ (b[0].float() * b[1]).T)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = {"flashinfer": fused_add_rmsnorm, "vllm.third_party.deep_gemm": fp8_gemm_nt}
    for name, function in exported.items():
        module = ModuleType(name)
        vars(module).update(
            {function.__name__: function, "download": print, "BatchDecodeWithPagedKVCacheWrapper": dict}
        )
        monkeypatch.setitem(sys.modules, name, module)


def call(operator: str, **values: Value) -> Call:
    return Call(id=0, operator=operator, args=[Argument(name=name, value=value) for name, value in values.items()])


def test_it_is_rebuilt_and_runs_with_what_was_recorded() -> None:
    row = TensorSpec((3, 8), "float32", storage=0)
    recorded = call(
        "flashinfer::fused_add_rmsnorm",
        input=row,
        residual=TensorSpec((3, 8), "float32", storage=1),
        weight=TensorSpec((8,), "float32", storage=2),
        eps=1e-5,
    )
    rebuilder = Rebuilder("cpu", "cpu", None)
    resolved = rebuilder.resolve(recorded, None)
    inputs = rebuilder.build(resolved)
    x, residual, weight, _ = (value.clone() if isinstance(value, torch.Tensor) else value for value in inputs.args)
    resolved.operator.call(*inputs.args, **inputs.kwargs)
    torch.testing.assert_close(inputs.args[1], x + residual)
    torch.testing.assert_close(inputs.args[0], torch.nn.functional.rms_norm(x + residual, (8,), weight, 1e-5))
    written = [parameter.name for parameter in resolved.operator.schema.arguments if parameter.alias_info]
    assert written == ["input", "residual"]


def test_a_copy_inside_an_engine_will_do() -> None:
    codes, scale = TensorSpec((4, 8), "float8_e4m3fn", storage=0), TensorSpec((4, 1), "float32", storage=1)
    recorded = call(
        "deep_gemm::fp8_gemm_nt", a=[codes, scale], b=[codes, scale], d=TensorSpec((4, 4), "float32", storage=2)
    )
    rebuilder = Rebuilder("cpu", "cpu", None)
    resolved = rebuilder.resolve(recorded, None)
    inputs = rebuilder.build(resolved)
    resolved.operator.call(*inputs.args, **inputs.kwargs)
    wide = inputs.args[0][0].float() * inputs.args[0][1]
    torch.testing.assert_close(inputs.args[2], wide @ wide.T)
    assert [parameter.name for parameter in resolved.operator.schema.arguments if parameter.alias_info] == ["d"]


@pytest.mark.parametrize(
    ("schema", "registered"),
    [
        ("(Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor(d!) d) -> ()", False),  # as newer releases register it
        ("(Tensor[] a, Tensor[] b, Tensor(d!) d, Tensor? c=None) -> ()", True),
    ],
)
def test_an_operator_of_its_name_stands_for_it_only_if_it_takes_the_same(schema: str, registered: bool) -> None:
    library = torch.library.Library("deep_gemm", "FRAGMENT")
    try:
        library.define(f"fp8_gemm_nt{schema}")
        operators.resolve_operator.cache_clear()
        resolved = operators.resolve_function(call("deep_gemm::fp8_gemm_nt", a=[], b=[], d=None))
        assert isinstance(resolved.schema, operators.Parameters) != registered
    finally:
        library._destroy()
        operators.resolve_operator.cache_clear()


def test_a_state_decays_in_replay_as_in_a_model() -> None:
    given: dict[str, torch.Tensor] = {}
    vars(sys.modules["flashinfer"])["chunk_gated_delta_rule"] = lambda **values: given.update(values)
    rows = {name: TensorSpec((5, 2, 8), "bfloat16", storage=number) for number, name in enumerate("qkv")}
    gates = {name: TensorSpec((5, 2), "float32", storage=3 + number) for number, name in enumerate(("g", "beta"))}
    rebuilder = Rebuilder("cpu", "cpu", None)
    resolved = rebuilder.resolve(call("flashinfer::chunk_gated_delta_rule", **rows, **gates), None)
    inputs = rebuilder.build(resolved)
    resolved.operator.call(*inputs.args, **inputs.kwargs)
    torch.testing.assert_close(given["k"].float().norm(dim=-1), torch.ones(5, 2), rtol=2e-2, atol=0)
    assert all(given[name].min() >= 0 and given[name].max() <= 1 for name in gates)


def test_flashinfers_experts_are_there_and_its_output_is_written() -> None:
    given: dict[str, torch.Tensor] = {}
    vars(sys.modules["flashinfer"])["cutlass_fused_moe"] = lambda **values: given.update(values)
    tensors = {
        "input": TensorSpec((500, 8), "bfloat16", storage=0),
        "token_selected_experts": TensorSpec((500, 2), "int32", storage=1),
        "token_final_scales": TensorSpec((500, 2), "float32", storage=2),
        "fc1_expert_weights": TensorSpec((3, 32, 8), "bfloat16", storage=3),
        "fc2_expert_weights": TensorSpec((3, 8, 16), "bfloat16", storage=4),
        "output": TensorSpec((500, 8), "bfloat16", storage=5),
    }
    for ranks in (1, 8):
        recorded = call("flashinfer::cutlass_fused_moe", **tensors, ep_size=ranks, ep_rank=0)
        rebuilder = Rebuilder("cpu", "cpu", None)
        resolved = rebuilder.resolve(recorded, None)
        inputs = rebuilder.build(resolved)
        resolved.operator.call(*inputs.args, **inputs.kwargs)
        ids = given["token_selected_experts"]
        assert ids.min() >= 0 and 3 * (ranks - 1) <= ids.max() < 3 * ranks
        assert [one.name for one in resolved.operator.schema.arguments if one.alias_info] == ["output"]


def test_a_function_may_be_a_modules_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer.gemm")
    vars(module)["fp8_blockscale_gemm_sm90"] = lambda input, weight: torch.zeros(2)
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", module)
    resolved = operators.resolve_function(call("flashinfer::fp8_blockscale_gemm_sm90", input=None, weight=None))
    assert resolved.call(1, 2).shape == (2,)


WRAPPERS = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
)


@pytest.mark.parametrize("name", ["download", "norm.rmsnorm", "BatchDecodeWithPagedKVCacheWrapper.run", *WRAPPERS])
def test_nothing_else_can_be_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper compiles what it is made with."""

    class Wrapper:
        def __init__(self, **arguments: object) -> None:
            raise AssertionError("it was made")

    vars(sys.modules["flashinfer"])[name] = Wrapper
    with pytest.raises(Skip):
        Rebuilder("cpu", "cpu", None).resolve(call(f"flashinfer::{name}", x=1), None)


def test_a_class_in_place_of_a_function_is_none() -> None:
    vars(sys.modules["flashinfer"])["rmsnorm"] = dict
    with pytest.raises(Skip, match="has no function rmsnorm"):
        operators.resolve_function(call("flashinfer::rmsnorm", x=1))


@pytest.mark.parametrize(
    "operator, written",
    [("flashinfer::fused_add_rmsnorm_quant", ["out", "residual"]), ("flashinfer::silu_and_mul", ["out"])],
)
def test_what_it_writes_is_known(operator: str, written: list[str]) -> None:
    name = operator.removeprefix("flashinfer::")
    vars(sys.modules["flashinfer"])[name] = lambda **_: None
    resolved = operators.resolve_function(call(operator, out=None, input=None, residual=None, weight=None))
    declared = [parameter.name for parameter in resolved.schema.arguments if parameter.alias_info]
    assert declared == [name for name in ("out", "residual") if name in written]


def test_a_function_of_another_release_that_takes_less_is_named() -> None:
    vars(sys.modules["flashinfer"])["silu_and_mul"] = lambda input, out=None: None
    with pytest.raises(Skip, match="the library's silu_and_mul here does not take enable_pdl, order"):
        operators.resolve_function(call("flashinfer::silu_and_mul", input=None, enable_pdl=False, out=None, order=1))


def test_without_the_library_it_is_said_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(Skip, match="needs deep-gemm"):
        operators.resolve_function(call("deep_gemm::fp8_gemm_nt", x=1))
