"""Graphs of SGLang's decodes with a plan, by stand-ins for its runners: a graph gives what it gave when captured."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kcap.bench.apply.graphs import ENGINE
from kcap.bench.apply.process import PlanWindow
from kcap.bench.apply.quality import read_checks
from kcap.capture.engines.sglang import operators, reruns
from kcap.capture.window.step import StepShape

X = torch.randn(4, 8)
DECODE = StepShape("decode", [1] * 4, [9] * 4)
CUSTOM_OP = """
import torch
_profiling = torch._C._autograd._profiler_enabled
def _call_directly_in_eager(op_func, op):
    return lambda *args: op(*args) if _profiling() else op_func(*args)
"""
WRONG = "def run(x):\n    return x.clamp(min=0) + 0.5\n"


class DecodeCudaGraphRunner:
    """Keeps its graphs as SGLang's backends do; `named`: where, which is elsewhere in another release."""

    def __init__(self, model_runner: Any, named: str = "_outputs") -> None:
        self.model_runner = model_runner
        self.kept: dict[int, torch.Tensor] = {}
        self.backend = SimpleNamespace(**{named: self.kept})
        self.capture()

    def capture(self) -> None:
        self.model_runner.captures += 1
        self.kept[4] = self.model_runner.run_model()


class ModelRunner:
    """Stands for SGLang's: a decode is one ReLU."""

    is_draft_worker = False
    server_args = SimpleNamespace(speculative_algorithm=None)

    def __init__(self, graphs: Callable[[ModelRunner], Any], attention: str = "TritonAttnBackend") -> None:
        self.attn_backend = type(attention, (), {})()
        self.captures = self.eager = 0
        self.decode_cuda_graph_runner: Any = None
        self.decode_cuda_graph_runner = graphs(self)

    def run_model(self) -> torch.Tensor:
        return torch.relu(X)

    def forward(self, forward_batch: Any) -> Any:
        graphs = self.decode_cuda_graph_runner
        if graphs is None:
            self.eager += 1
            logits = self.run_model()
        else:
            logits = graphs.kept[4]
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))


@pytest.fixture
def graph_runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    module, state = ModuleType(reruns.GRAPHS), ModuleType(reruns.STATE)
    module.DecodeCudaGraphRunner = type("DecodeCudaGraphRunner", (), dict(vars(DecodeCudaGraphRunner)))  # type: ignore
    state.get_tp_group = lambda: SimpleNamespace(world_size=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, reruns.GRAPHS, module)
    monkeypatch.setitem(sys.modules, reruns.STATE, state)
    return module.DecodeCudaGraphRunner


def decode(window: PlanWindow, runner: ModelRunner) -> torch.Tensor:
    window.begin(DECODE)
    with torch.no_grad():
        run = functools.partial(runner.forward, object())
        made = window.forward(reruns.forward(runner, run)) if reruns.may_run_again(runner) else run()
    window.end()
    logits: torch.Tensor = made.logits_output.next_token_logits
    return logits


def test_graphs_are_captured_with_each_kernel_and_one_that_is_wrong_goes(
    started: Callable[..., PlanWindow], graph_runner: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    window = started(WRONG)
    reruns.hook_captures(window)
    with torch.no_grad():
        runner = ModelRunner(graph_runner)
    assert runner.captures == 2
    assert torch.equal(decode(window, runner), torch.relu(X))
    assert runner.eager == 1, "with the Solution, without graphs, where it is compared by itself"
    (check,) = read_checks(tmp_path)
    assert check.arms[0].rms and check.arms[0].rms > 0.1
    assert window.arm == ENGINE and "was taken out" in capfd.readouterr().err
    assert torch.equal(decode(window, runner), torch.relu(X))


def test_one_that_is_right_runs_in_its_graphs(
    started: Callable[..., PlanWindow], graph_runner: Any, tmp_path: Path
) -> None:
    window = started("def run(x):\n    return x.clamp(min=0)\n")
    reruns.hook_captures(window)
    with torch.no_grad():
        runner = ModelRunner(graph_runner)
    own = window.arm
    assert torch.equal(decode(window, runner), torch.relu(X)) and window.arm == own == 0
    assert next(read_checks(tmp_path)).arms[0].rms == 0


def test_nothing_is_compared_where_graphs_cannot_be_exchanged(
    started: Callable[..., PlanWindow], graph_runner: Any, tmp_path: Path
) -> None:
    window = started(WRONG)
    reruns.hook_captures(window)
    with torch.no_grad():
        runner = ModelRunner(functools.partial(graph_runner, named="made"))
        planned = ModelRunner(graph_runner, attention="FlashInferAttnBackend")
    for one in (runner, planned):
        assert one.captures == 1 and not reruns.may_run_again(one)
        decode(window, one)
    assert not list(read_checks(tmp_path))


def test_a_solution_is_found_where_sglang_would_call_past_the_dispatcher(started: Callable[..., PlanWindow]) -> None:
    """Nothing is recorded here."""
    module: Any = ModuleType(operators.MODULE)
    exec(CUSTOM_OP, vars(module))
    window = started("def run(x):\n    return x.clamp(min=0)\n")
    operators.hook_operators(module, window)
    (placed,) = window.replacements.placed
    relu = module._call_directly_in_eager(lambda x: "directly", torch.relu)
    with torch.no_grad():
        assert torch.equal(relu(X), torch.relu(X)) and placed.eager == 2
        window.show(ENGINE)
        assert relu(X) == "directly" and placed.eager == 2


def test_a_decode_that_is_planned_ahead_runs_once(graph_runner: Any) -> None:
    runner = ModelRunner(graph_runner)
    assert reruns.may_run_again(runner)
    runner.server_args = SimpleNamespace(speculative_algorithm="EAGLE")
    assert not reruns.may_run_again(runner)


def test_graphs_of_an_older_release_are_none_that_are_exchanged(graph_runner: Any) -> None:
    older = ModelRunner(lambda runner: None)
    assert reruns.may_run_again(older)
    older.graph_runner = object()  # type: ignore[attr-defined]
    assert not reruns.may_run_again(older)


def test_a_drafts_graphs_are_captured_once(started: Callable[..., PlanWindow], graph_runner: Any) -> None:
    reruns.hook_captures(started(WRONG))
    drafts = type("Drafts", (ModelRunner,), {"is_draft_worker": True})
    with torch.no_grad():
        assert drafts(graph_runner).captures == 1
