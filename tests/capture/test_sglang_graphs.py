"""SGLang's graphs and plans on stand-ins: what is told of a capture, and a plan that is known by identity."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kcap.capture.engines.sglang import adapter, graphs, operators
from kcap.capture.window.window import Window


@pytest.fixture
def window(window: Window) -> Window:
    """With its taps."""
    window.register()
    return window


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
    (kind, _) = graphs.BACKENDS[module]
    monkeypatch.setitem(sys.modules, f"{graphs.PACKAGE}.{module}", SimpleNamespace(**{kind: Backend}))
    adapter.hook(window)
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
    module: Any = ModuleType(operators.PLANNING)
    exec(PLANS, module.__dict__)
    monkeypatch.setitem(sys.modules, operators.PLANNING, module)
    adapter.hook(window)
    plan = module.partial(module.fast_decode_plan)
    plan(said)
    assert (said, module.plans_fast(plan)) == (["recorded"], True)
    library.fast_decode_plan = fast_decode_plan  # as the tap leaves it
    if module.fast_decode_plan is recorded:
        module.fast_decode_plan = fast_decode_plan
    assert (plan("its own"), module.plans_fast(plan)) == ("its own", True)
