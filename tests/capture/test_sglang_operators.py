"""SGLang's operators on stand-ins: those called past the dispatcher, and those fused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kcap.capture.engines.sglang import operators
from kcap.capture.fold.recording import fold_session
from kcap.capture.window.window import StepShape, Window
from kcap.schemas.recording.recording import Recording

A = torch.ones(2, 2)
FUSED_MODULE = operators.FUSED[0][0]
# As SGLang 0.5.23 has it, less what else it asks.
CUSTOM_OP = """
import torch
_profiling = torch._C._autograd._profiler_enabled
def _call_directly_in_eager(op_func, op):
    def call(*args):
        return op(*args) if _profiling() else op_func(*args)
    return call
"""
UNKNOWN = "def _call_directly_in_eager(op_func, op):\n    return op_func\n"


@pytest.fixture
def window(window: Window) -> Window:
    """With its taps."""
    window.register()
    return window


def module_of(name: str, source: str = "") -> Any:
    module: Any = ModuleType(name)
    exec(source, module.__dict__)
    return module


def step(window: Window, run: Callable[[], object]) -> None:
    window.start()
    with torch.no_grad():
        assert window.begin(StepShape("decode", [1], [1]))
        run()
        window.end()


def finished(window: Window, tmp_path: Path) -> Recording:
    window.close()
    return fold_session(window.session, tmp_path / "out")


def test_an_operator_called_directly_comes_through_the_dispatcher_while_kcap_listens(
    window: Window, tmp_path: Path
) -> None:
    library = torch.library.Library("kcap_direct", "DEF")
    library.define("scale(Tensor x) -> Tensor")
    library.impl("scale", lambda x: x * 2, "CPU")
    module = module_of(operators.MODULE, CUSTOM_OP)
    directly: list[int] = []
    call = module._call_directly_in_eager(lambda x: directly.append(1), torch.ops.kcap_direct.scale)
    operators.hook_operators(module, window)
    call(A)
    step(window, lambda: call(A))
    assert len(directly) == 1, "before the window opens it stays direct"
    recording = finished(window, tmp_path)
    call(A)
    assert len(directly) == 2, "and after it has closed"
    assert {call.operator: call.total for call in recording.calls}["kcap_direct::scale"] == 1


def test_an_sglang_whose_operators_always_come_through_the_dispatcher_is_left_alone(
    window: Window, tmp_path: Path
) -> None:
    module = module_of(operators.MODULE)
    operators.hook_operators(module, window)
    assert not hasattr(module, operators.WATCHED)
    step(window, lambda: torch.mm(A, A))
    assert finished(window, tmp_path).metadata.complete


@pytest.mark.parametrize("source", [UNKNOWN, "_profiling = bool\n" + UNKNOWN])
def test_a_shortcut_that_kcap_does_not_know_makes_the_recording_partial(
    source: str, window: Window, tmp_path: Path
) -> None:
    operators.hook_operators(module_of(operators.MODULE, source), window)
    step(window, lambda: torch.mm(A, A))
    recording = finished(window, tmp_path)
    assert not recording.metadata.complete
    (failure,) = (tap for tap in recording.metadata.taps if tap.status == "failed")
    assert (failure.name, "past the dispatcher" in failure.detail) == ("sglang_operators", True)
    assert recording.metadata.steps == {"decode": 1}, "the rest is recorded all the same"


class BaseFusedOp(nn.Module):
    """As SGLang's: it keeps the method that it chose, at its first call."""

    chooses = "forward_native"

    def __init__(self) -> None:
        super().__init__()
        self._forward_method: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._forward_method is None:
            self._forward_method = getattr(self, self.chooses)
        return self._forward_method(x)


class RMSNorm(BaseFusedOp):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.eps = 1e-6

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)


@pytest.mark.parametrize("called", [False, True])
def test_a_fused_operator_that_runs_as_pytorchs_is_a_region_with_its_weights(
    called: bool, window: Window, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether or not it had chosen its method before."""
    monkeypatch.setitem(sys.modules, FUSED_MODULE, SimpleNamespace(BaseFusedOp=BaseFusedOp))
    norm = RMSNorm()
    if called:
        norm(A)
    operators.name_fused(window)
    operators.name_fused(window)  # a draft model's, later
    step(window, lambda: norm(A))
    recording = finished(window, tmp_path)
    (region,) = (call for call in recording.calls if call.kind == "region")
    assert (region.operator, region.total) == ("sglang_op::RMSNorm", 1)
    assert [argument.name for argument in region.args] == ["x", "weight", "eps"]
    assert {call.parent for call in recording.kernels()} == {"sglang_op::RMSNorm"}


class MultiPlatformOp(nn.Module):
    """As 0.5.15's: it chooses as it is made, and `torch.compile` makes it choose again for a while."""

    def __init__(self, chooses: str) -> None:
        super().__init__()
        self._forward_method = getattr(self, chooses)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward_method(x)

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)


@pytest.mark.parametrize(
    ("chooses", "found"),
    [("forward_native", {("sglang_op::SiluAndMul", "region"), ("aten::relu", "kernel")}),
     ("forward_cuda", {("aten::mm", "kernel")})],
)  # fmt: skip
def test_an_operator_of_0_5_15_is_a_region_where_it_runs_as_pytorchs(
    chooses: str, found: set[tuple[str, str]], window: Window, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (module, name) = operators.FUSED[1]
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: MultiPlatformOp}))
    operator = type("SiluAndMul", (MultiPlatformOp,), {})(chooses)
    operators.name_fused(window)
    step(window, lambda: operator(A))
    assert {(call.operator, call.kind) for call in finished(window, tmp_path).calls} == found


def test_a_fused_operator_that_runs_a_kernel_is_no_region(
    window: Window, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, FUSED_MODULE, SimpleNamespace(BaseFusedOp=BaseFusedOp))
    norm = RMSNorm()
    norm.chooses = "forward_cuda"
    operators.name_fused(window)
    step(window, lambda: norm(A))
    assert [(call.operator, call.kind) for call in finished(window, tmp_path).calls] == [("aten::mm", "kernel")]
