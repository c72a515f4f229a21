"""SGLang's operators on stand-ins: those called past the dispatcher, those fused by name, and what its graphs tell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kcap.capture.config import Session
from kcap.capture.engines import sglang, sglang_graphs, sglang_operators
from kcap.capture.merge import merge
from kcap.capture.window import StepShape, Window
from kcap.schemas.recording import Recording

A = torch.ones(2, 2)
FUSED_MODULE = sglang_operators.FUSED[0][0]
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
def window(tmp_path: Path) -> Iterator[Window]:
    session = Session(str(tmp_path / "shards"))
    session.write()
    window = Window(session)
    window.register()
    yield window
    window.close()


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
    return merge(window.session, tmp_path / "out")


def test_an_operator_called_directly_comes_through_the_dispatcher_while_kcap_listens(
    window: Window, tmp_path: Path
) -> None:
    library = torch.library.Library("kcap_direct", "DEF")
    library.define("scale(Tensor x) -> Tensor")
    library.impl("scale", lambda x: x * 2, "CPU")
    module = module_of(sglang_operators.MODULE, CUSTOM_OP)
    directly: list[int] = []
    call = module._call_directly_in_eager(lambda x: directly.append(1), torch.ops.kcap_direct.scale)
    sglang_operators.hook_operators(module, window)
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
    module = module_of(sglang_operators.MODULE)
    sglang_operators.hook_operators(module, window)
    assert not hasattr(module, sglang_operators.WATCHED)
    step(window, lambda: torch.mm(A, A))
    assert finished(window, tmp_path).metadata.complete


@pytest.mark.parametrize("source", [UNKNOWN, "_profiling = bool\n" + UNKNOWN])
def test_a_shortcut_that_kcap_does_not_know_makes_the_recording_partial(
    source: str, window: Window, tmp_path: Path
) -> None:
    sglang_operators.hook_operators(module_of(sglang_operators.MODULE, source), window)
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
    sglang_operators.name_fused(window)
    sglang_operators.name_fused(window)  # a draft model's, later
    step(window, lambda: norm(A))
    recording = finished(window, tmp_path)
    (region,) = (call for call in recording.calls if call.kind == "region")
    assert (region.operator, region.total) == ("sglang_op::RMSNorm", 1)
    assert [argument.name for argument in region.args] == ["x", "weight", "eps"]
    assert {call.parent for call in recording.kernels()} == {"sglang_op::RMSNorm"}


def test_a_fused_operator_that_runs_a_kernel_is_no_region(
    window: Window, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, FUSED_MODULE, SimpleNamespace(BaseFusedOp=BaseFusedOp))
    norm = RMSNorm()
    norm.chooses = "forward_cuda"
    sglang_operators.name_fused(window)
    step(window, lambda: norm(A))
    assert [(call.operator, call.kind) for call in finished(window, tmp_path).calls] == [("aten::mm", "kernel")]


class Runner(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("name", "runner", "known"),
    [
        ("full", Runner(captured_req_width=3), {"size": 24, "scope": "full"}),  # 0.5.23
        ("full", Runner(num_tokens_per_bs=4), {"size": 32, "scope": "full"}),  # 0.5.15, which keeps no runner
        ("breakable", Runner(), {"size": 8, "scope": "piecewise"}),
        ("tc_piecewise", None, {"size": 8, "scope": "piecewise"}),
    ],
)
def test_a_graph_is_told_its_padded_tokens_and_its_scope(
    name: str, runner: Any, known: dict[str, Any], window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    class Backend:
        def __init__(self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False) -> None:
            pass

        def capture_one(self, shape_key: Any, forward_fn: Callable[[], object]) -> object:
            return forward_fn()

    module = f"{name}_cuda_graph_backend"
    (kind, _) = sglang_graphs.BACKENDS[module]
    monkeypatch.setitem(sys.modules, f"{sglang_graphs.PACKAGE}.{module}", SimpleNamespace(**{kind: Backend}))
    sglang.hook(window)
    backend = Backend(runner, enable_memory_saver=True)
    backend.capture_one(SimpleNamespace(size=8), lambda: seen.append(window.taps.graphs.describe()))
    Backend(cuda_graph_runner=runner).capture_one(shape_key=SimpleNamespace(size=8), forward_fn=lambda: None)
    with pytest.raises(ZeroDivisionError):
        backend.capture_one(SimpleNamespace(size=8), lambda: 1 // 0)
    assert seen == [known]
    assert window.taps.graphs.describe() == {}


PLANS = """
from functools import partial
from flashinfer import fast_decode_plan
def plans_fast(plan):
    return plan.func == fast_decode_plan
"""


def test_sglang_knows_its_plan_by_identity_after_flashinfer_has_its_functions_back(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang plans slower where it does not."""
    said: list[str] = []

    def fast_decode_plan(said: str) -> str:
        return said

    def recorded(wrapper: list[str]) -> None:
        wrapper.append("recorded")

    library: Any = ModuleType("flashinfer")
    recorded.__module__ = fast_decode_plan.__module__ = "flashinfer"
    library.fast_decode_plan = recorded
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    module = module_of(sglang_operators.PLANNING, PLANS)
    monkeypatch.setitem(sys.modules, sglang_operators.PLANNING, module)
    sglang.hook(window)
    plan = module.partial(module.fast_decode_plan)
    plan(said)
    assert (said, module.plans_fast(plan)) == (["recorded"], True)
    library.fast_decode_plan = fast_decode_plan  # as the tap leaves it
    if module.fast_decode_plan is recorded:
        module.fast_decode_plan = fast_decode_plan
    assert (plan("its own"), module.plans_fast(plan)) == ("its own", True)
