"""vLLM's pipeline and replicas on stand-ins: what a stage passes on is in its step, a dummy batch is `other`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kcap.capture.engines.vllm.adapter import RUNNERS, WORKERS, hook
from kcap.capture.fold.recording import fold_session
from kcap.capture.window.window import Window
from kcap.schemas.recording.recording import Recording

A = torch.eye(2)
MODULE, NAME = next(iter(WORKERS.items()))


class Runner:
    """Stands for vLLM's model runner: a stage that is not the last returns what it passes on."""

    last, broken = True, False

    def execute_model(self, scheduled: Any, received: Any = None) -> Any:
        if self.broken:
            raise RuntimeError("of the engine")
        if not scheduled.total_num_scheduled_tokens:
            return "nothing"
        torch.mm(A, A)
        return None if self.last else A

    def sample_tokens(self, grammar: Any) -> None:
        torch.argmax(A)


class Worker:
    """Stands for vLLM's worker, which receives (a sum) before the forward and sends (a product) after it."""

    def __init__(self, runner: Any, stages: int) -> None:
        self.runner = runner
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=stages))

    def execute_model(self, scheduled: Any) -> Any:
        torch.add(A, A)
        output = self.runner.execute_model(scheduled, A)
        torch.mul(A, A)
        return output if output == "nothing" else None

    def compile_or_warm_up_model(self) -> None: ...

    def execute_dummy_batch(self) -> None:
        torch.mm(A, A)


@pytest.fixture
def engine(window: Window, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The hooked classes, and the window that is open."""
    runners: Any = ModuleType(RUNNERS[0])
    runners.GPUModelRunner = type("GPUModelRunner", (Runner,), dict(vars(Runner)))
    workers: Any = ModuleType(MODULE)
    setattr(workers, NAME, type(NAME, (Worker,), dict(vars(Worker))))
    for module in (runners, workers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    hook(window)
    window.start()
    return SimpleNamespace(runner=runners.GPUModelRunner, worker=getattr(workers, NAME))


def batch(tokens: int = 1) -> Any:
    """One request that decodes."""
    return SimpleNamespace(
        num_scheduled_tokens={"a": tokens} if tokens else {},
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["a"], num_computed_tokens=[8]),
        finished_req_ids=set(),
    )


def finished(window: Window, tmp_path: Path) -> Recording:
    window.close()
    return fold_session(window.session, tmp_path / "out")


def ran(recording: Recording) -> list[str]:
    """What the one Program ran, in order."""
    (program,) = recording.programs
    return [recording.calls[number].operator.removeprefix("aten::") for number in program.calls]


@pytest.mark.parametrize("last", [True, False])
def test_what_a_stage_receives_and_sends_is_in_its_step(
    engine: SimpleNamespace, window: Window, tmp_path: Path, last: bool
) -> None:
    runner = engine.runner()
    runner.last = last
    worker = engine.worker(runner, stages=2)
    with torch.no_grad():
        for _ in range(3):
            worker.execute_model(batch())
            torch.add(A, 1)  # between the two, another's work
            runner.sample_tokens(None)
    recording = finished(window, tmp_path)
    assert ran(recording) == ["add.Tensor", "mm", "mul.Tensor", "argmax"]
    assert recording.metadata.steps == {"decode": 3}


def test_without_a_pipeline_a_step_is_the_runners(engine: SimpleNamespace, window: Window, tmp_path: Path) -> None:
    runner = engine.runner()
    with torch.no_grad():
        engine.worker(runner, stages=1).execute_model(batch())
        runner.sample_tokens(None)
    assert ran(finished(window, tmp_path)) == ["mm", "argmax"]


def test_a_stage_that_fails_makes_no_step_and_the_next_one_does(
    engine: SimpleNamespace, window: Window, tmp_path: Path
) -> None:
    runner = engine.runner()
    worker = engine.worker(runner, stages=2)
    with torch.no_grad():
        runner.broken = True
        with pytest.raises(RuntimeError, match="of the engine"):
            worker.execute_model(batch())
        runner.broken = False
        worker.execute_model(batch())
        runner.sample_tokens(None)
        assert worker.execute_model(batch(0)) == "nothing"
    recording = finished(window, tmp_path)
    assert recording.metadata.steps == {"decode": 1}


def test_a_dummy_batch_of_data_parallelism_is_a_step_of_phase_other(
    engine: SimpleNamespace, window: Window, tmp_path: Path
) -> None:
    with torch.no_grad():
        engine.worker(engine.runner(), stages=1).execute_dummy_batch()
    recording = finished(window, tmp_path)
    assert (recording.metadata.steps, ran(recording)) == ({"other": 1}, ["mm"])
