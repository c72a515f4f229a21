"""An engine's operator class runs alone, on an object made of what was recorded; nothing else can be named."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kcap.replay.rebuild import operators
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.recording.recording import Argument, Call
from kcap.schemas.recording.values import TensorSpec, Value


class CustomOp(torch.nn.Module):
    """A stand-in of vLLM's."""


class Scale(CustomOp):
    name = "scale"

    def __init__(self) -> None:
        raise RuntimeError("it asks for an engine that runs")

    def forward_native(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return x * self.weight * by + self.shift


class Deeper(Scale):
    name = "deeper"

    @staticmethod
    def forward_native(x: torch.Tensor) -> torch.Tensor:
        return -x


class Anything(CustomOp):
    def forward_native(self, *args: Any) -> None: ...


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.model_executor.custom_op")
    module.CustomOp = CustomOp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(operators, "load_library", lambda namespace: [])


def call(name: str, **values: Value) -> Call:
    arguments = [Argument(name=key, value=value) for key, value in values.items()]
    return Call(id=0, operator=f"vllm_custom_op::{name}", kind="region", args=arguments)


def test_an_object_gets_what_the_recorded_one_held() -> None:
    scale = call("scale", x=None, by=None, weight=None, shift=None)
    x, weight = torch.randn(4, 8), torch.randn(8)
    for _ in range(2):
        assert torch.equal(operators.resolve_class(scale).call(x, 2.0, weight, 0.5), x * weight * 2 + 0.5)


def test_a_forward_that_knows_no_object_is_called_without_one() -> None:
    x = torch.randn(4)
    assert torch.equal(operators.resolve_class(call("deeper", x=None, unused=None)).call(x, 1), -x)


def test_its_arguments_are_rebuilt_as_any_others() -> None:
    spec = TensorSpec((4, 8), "bfloat16")
    scale = call("Scale", x=spec, by=2.0, weight=TensorSpec((8,), "bfloat16", storage=1), shift=0.0)
    rebuilder = Rebuilder("cpu", "cpu", None)
    resolved = rebuilder.resolve(scale, None)
    inputs = rebuilder.build(resolved)
    x, _, weight, _ = inputs.args
    assert torch.equal(resolved.operator.call(*inputs.args), x * weight * 2)


@pytest.mark.parametrize("name", ["Linear", "CustomOp", "nothing", "scale.forward", "Module"])
def test_no_other_class_can_be_named(name: str) -> None:
    with pytest.raises(Skip, match="no operator class"):
        operators.resolve_class(call(name))


def test_a_class_that_does_not_say_what_it_takes_is_skipped() -> None:
    with pytest.raises(Skip, match="what it takes"):
        operators.resolve_class(call("Anything"))


def test_an_engine_that_is_not_here_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.model_executor.custom_op")
    with pytest.raises(Skip, match="no operator class"):
        operators.resolve_class(call("scale"))
