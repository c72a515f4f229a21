"""SGLang's operators on stand-ins: those called past the dispatcher, and those fused by name."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
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
    def call(*args, **kwargs):
        return op(*args, **kwargs) if _profiling() else op_func(*args, **kwargs)
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


class Direct:
    """An operator that is called past the dispatcher, once it is `hooked`."""

    def __init__(self, window: Window, schema: str, function: Callable[..., Any]) -> None:
        self.library = torch.library.Library("kcap_direct", "FRAGMENT")
        name = schema.partition("(")[0]
        self.library.define(schema)
        self.library.impl(name, lambda *args, **kwargs: function(*args, **kwargs), "CPU")
        module = module_of(operators.MODULE, CUSTOM_OP)
        operators.hook_operators(module, window)
        self.operator = getattr(torch.ops.kcap_direct, name)
        self.directly: list[int] = []

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.directly.append(1)
            return function(*args, **kwargs)

        self.call = module._call_directly_in_eager(counted, self.operator)


def calls_of(recording: Recording, name: str) -> list[tuple[int, str]]:
    """Count and kind of each Call of the operator."""
    return [(call.total, call.kind) for call in recording.calls if call.operator == f"kcap_direct::{name}"]


STORE = "(Tensor x, Tensor? mask, int rows, *, float eps=0.5, bool last=False) -> Tensor"


def test_a_call_past_the_dispatcher_is_told_of_as_one_through_it(window: Window, tmp_path: Path) -> None:
    direct = Direct(window, f"store{STORE}", lambda x, mask, rows, *, eps=0.5, last=False: x * 2)

    def run() -> None:
        assert torch.equal(direct.call(A, None, 3, last=True), A * 2)
        assert torch.equal(direct.call(A, mask=None, rows=3, eps=0.5, last=True), A * 2)
        direct.operator(A, None, 3, last=True)
        assert len(direct.directly) == 3

    direct.call(A, None, 3)
    step(window, run)
    recording = finished(window, tmp_path)
    direct.call(A, None, 3)
    assert len(direct.directly) == 4, "before the window opens, and after it has closed"
    assert calls_of(recording, "store") == [(3, "kernel")]
    assert "aten::mul" not in {call.operator for call in recording.kernels() if call.total}


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("float_of_an_int", (A, None, 3), {"eps": 1}),
        ("int_of_a_bool", (A, None, True), {}),
        ("bool_of_an_int", (A, None), {"rows": 3, "last": 1}),
        ("no_tensor", ("A", None, 3), {}),
        ("unknown_name", (A, None, 3), {"first": True}),
        ("too_few", (A,), {"eps": 0.5}),
        ("too_many", (A, None, 3, 0.5), {}),
        ("twice", (A, None, 3), {"rows": 3}),
    ],
)
def test_what_the_dispatcher_converts_or_refuses_comes_through_it(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], window: Window, tmp_path: Path
) -> None:
    direct = Direct(window, f"{name}{STORE}", lambda x, mask, rows, *, eps=0.5, last=False: x * 2)
    fails = name in ("no_tensor", "unknown_name", "too_few", "too_many", "twice")

    def run() -> None:
        with pytest.raises((RuntimeError, TypeError)) if fails else contextlib.nullcontext():
            direct.call(*args, **kwargs)

    step(window, run)
    assert not direct.directly
    assert calls_of(finished(window, tmp_path), name) == ([] if fails else [(1, "kernel")])


def test_an_operator_with_lists_comes_through_the_dispatcher_while_kcap_listens(window: Window, tmp_path: Path) -> None:
    direct = Direct(window, "scale(Tensor x, int[] sizes) -> Tensor", lambda x, sizes: x * 2)
    direct.call(A, [1])
    step(window, lambda: direct.call(A, [1]))
    recording = finished(window, tmp_path)
    direct.call(A, [1])
    assert len(direct.directly) == 2, "before the window opens, and after it has closed, it is direct"
    assert calls_of(recording, "scale") == [(1, "kernel")]


@pytest.mark.parametrize(("inside", "kind"), [(1, "kernel"), (2, "region")])
def test_one_kernel_in_it_is_its_detail_and_several_make_it_a_region(
    inside: int, kind: str, window: Window, tmp_path: Path
) -> None:
    """As in one that comes through the dispatcher."""

    def launch(x: torch.Tensor) -> torch.Tensor:
        for _ in range(inside):
            assert window.taps.externals.enter("tvm::kernel", [("x", x)], detail=True)
            window.taps.externals.leave()
        return x * 2

    direct = Direct(window, f"launch{inside}(Tensor x) -> Tensor", launch)
    step(window, lambda: (direct.call(A), direct.operator(A)))
    recording = finished(window, tmp_path)
    assert calls_of(recording, f"launch{inside}") == [(2, kind)]
    assert sum(call.total for call in recording.kernels() if call.operator == "tvm::kernel") == (4 if inside > 1 else 0)


def test_an_error_in_it_is_its_callers_and_the_next_call_is_recorded(window: Window, tmp_path: Path) -> None:
    def fail(x: torch.Tensor, rows: int) -> torch.Tensor:
        if rows == 0:
            raise ValueError("no rows")
        return x * 2

    direct = Direct(window, "checked(Tensor x, int rows) -> Tensor", fail)

    def run() -> None:
        with pytest.raises(ValueError, match="no rows"):
            direct.call(A, 0)
        direct.call(A, 1)

    step(window, run)
    assert calls_of(finished(window, tmp_path), "checked") == [(1, "kernel"), (1, "kernel")]


def test_where_a_solution_may_stand_in_its_place_it_always_comes_through_the_dispatcher(window: Window) -> None:
    window.session = replace(window.session, plan={"sha256": "0" * 64})
    direct = Direct(window, "planned(Tensor x) -> Tensor", lambda x: x * 2)
    direct.call(A)
    assert not direct.directly


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
