"""vLLM's hooks on stand-ins of its runner and scheduler: phases, dummy runs, and a vLLM that kcap does not know."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kcap.capture.engines.vllm.adapter import HALVES, PROCESSES, RUNNERS, Steps, hook
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.window.window import Window
from kcap.schemas.recording.recording import Recording, Tap

A = torch.eye(2)


def scheduled(
    tokens: dict[str, int],
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
) -> Any:
    """A scheduler's output. new: request -> (prompt's tokens, computed before); cached: request -> computed before."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[0] * length, num_computed_tokens=computed)
            for name, (length, computed) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached or {}), num_computed_tokens=list((cached or {}).values())
        ),
        finished_req_ids=set(finished),
    )


class Runner:
    """Stands for vLLM's model runner: a forward makes one product, the sampling one sum."""

    def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> Any:
        if scheduler_output is None:
            raise RuntimeError("of the engine")
        torch.mm(A, A)
        return None if scheduler_output.total_num_scheduled_tokens else "nothing"

    def sample_tokens(self, grammar: Any) -> str:
        torch.argmax(A)
        return "sampled"


@pytest.fixture
def runner(window: Window, monkeypatch: pytest.MonkeyPatch) -> Runner:
    module: Any = ModuleType(RUNNERS[0])
    module.GPUModelRunner = type("GPUModelRunner", (Runner,), dict(vars(Runner)))
    monkeypatch.setitem(sys.modules, RUNNERS[0], module)
    hook(window)
    return module.GPUModelRunner()


def step(runner: Any, output: Any) -> None:
    with torch.no_grad():
        assert runner.execute_model(output) is None
        torch.add(A, A)  # between the two, another's work
        assert runner.sample_tokens(None) == "sampled"


def finished(window: Window, tmp_path: Path) -> Recording:
    window.close()
    return fold_session(window.session, tmp_path / "out")


def phases(window: Window, *outputs: Any) -> list[str | None]:
    steps = Steps(window)
    shapes = [steps._shape(output) for output in outputs]
    return [shape and shape.phase for shape in shapes]


def test_a_request_is_in_prefill_until_its_whole_prompt_is_computed(window: Window) -> None:
    assert phases(
        window,
        scheduled({"a": 64}, new={"a": (129, 0)}),
        scheduled({"a": 64}, cached={"a": 64}),
        scheduled({"a": 1}, cached={"a": 128}),  # the last chunk is one token
        scheduled({"a": 1}, cached={"a": 129}),
    ) == ["prefill", "prefill", "prefill", "decode"]


def test_a_prefix_hit_that_leaves_one_token_is_prefill(window: Window) -> None:
    assert phases(window, scheduled({"a": 1}, new={"a": (129, 128)})) == ["prefill"]


def test_a_resumed_request_is_in_prefill_again(window: Window) -> None:
    """Preempted after 20 tokens; its prompt and what it had generated are computed anew."""
    assert phases(
        window,
        scheduled({"a": 10}, new={"a": (10, 0)}),
        scheduled({"a": 1}, cached={"a": 19}),
        scheduled({"a": 20}, cached={"a": 0}),
    ) == ["prefill", "decode", "prefill"]


def test_speculated_tokens_are_decode(window: Window) -> None:
    outputs = scheduled({"a": 10}, new={"a": (10, 0)}), scheduled({"a": 4}, cached={"a": 10})
    assert phases(window, *outputs) == ["prefill", "decode"]


def test_both_at_once_is_mixed(window: Window) -> None:
    first = scheduled({"a": 4}, new={"a": (4, 0)})
    both = scheduled({"a": 1, "b": 3}, new={"b": (3, 0)}, cached={"a": 4})
    assert phases(window, first, both) == ["prefill", "mixed"]


def test_a_name_used_again_is_another_request(window: Window) -> None:
    assert phases(
        window,
        scheduled({"a": 4}, new={"a": (4, 0)}),
        scheduled({"a": 2}, new={"a": (50, 0)}, finished=("a",)),
        scheduled({"a": 1}, cached={"a": 2}),
    ) == ["prefill", "prefill", "prefill"]


def test_a_step_without_tokens_is_none_but_its_requests_are_known(window: Window) -> None:
    outputs = scheduled({}, new={"a": (9, 0)}), scheduled({"a": 1}, cached={"a": 8})
    assert phases(window, *outputs) == [None, "prefill"]


def test_the_forward_and_the_sampling_make_one_step(window: Window, runner: Any, tmp_path: Path) -> None:
    window.start()
    step(runner, scheduled({"a": 4}, new={"a": (4, 0)}))
    step(runner, scheduled({"a": 1}, cached={"a": 4}))
    recording = finished(window, tmp_path)
    assert recording.metadata.steps == {"decode": 1, "prefill": 1}
    assert {call.operator: call.total for call in recording.calls} == {"aten::mm": 2, "aten::argmax": 2}
    assert [(step.tokens, step.lengths) for step in recording.steps] == [(4, [4]), (1, [5])]


def test_before_the_window_opens_and_in_dummy_runs_nothing_counts(window: Window, runner: Any, tmp_path: Path) -> None:
    step(runner, scheduled({"_warmup_0_": 4}, new={"_warmup_0_": (4, 0)}))
    window.start()
    runner.execute_model(scheduled({"a": 4}, new={"a": (4, 0)}), dummy_run=True)
    assert finished(window, tmp_path).metadata.steps == {}


def test_a_forward_that_raises_is_no_step_and_raises_as_before(window: Window, runner: Any, tmp_path: Path) -> None:
    window.start()
    with pytest.raises(RuntimeError, match="of the engine"):
        runner.execute_model(None, dummy_run=True)
    step(runner, scheduled({"a": 4}, new={"a": (4, 0)}))
    assert finished(window, tmp_path).metadata.steps == {"prefill": 1}


def failures(recording: Recording) -> list[Tap]:
    return [tap for tap in recording.metadata.taps if tap.status not in ("ok", "absent")]


def test_a_scheduler_that_kcap_does_not_know_is_noted_and_the_engine_goes_on(
    window: Window, runner: Any, tmp_path: Path
) -> None:
    window.start()
    step(runner, scheduled({"a": 4}, new={"a": (4, 0)}))
    strange = SimpleNamespace(total_num_scheduled_tokens=3)
    for _ in range(3):
        assert runner.execute_model(strange) is None
        assert runner.sample_tokens(None) == "sampled"
    recording = finished(window, tmp_path)
    assert recording.metadata.steps == {"prefill": 1}
    assert not recording.metadata.complete
    (failure,) = failures(recording)
    assert failure.name == "window"
    assert "finished_req_ids" in failure.detail


def test_a_vllm_without_the_classes_that_are_hooked_is_noted(
    window: Window, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, RUNNERS[0], ModuleType(RUNNERS[0]))
    hook(window)
    recording = finished(window, tmp_path)
    (failure,) = failures(recording)
    assert "GPUModelRunner" in failure.detail
    assert not recording.metadata.complete


def test_a_recorder_that_raises_never_reaches_the_engine(
    window: Window, runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    window.start()

    def broken(*args: object) -> None:
        raise ValueError("of the recorder")

    monkeypatch.setattr(window.recorder, "step_end", broken)
    step(runner, scheduled({"a": 4}, new={"a": (4, 0)}))
    step(runner, scheduled({"a": 1}, cached={"a": 4}))
    assert not window.open
    (failure,) = failures(finished(window, tmp_path))
    assert "of the recorder" in failure.detail


def test_forwards_in_halves_on_other_threads_leave_a_recording_that_says_so(
    window: Window, runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module: Any = ModuleType(HALVES)
    module.UBatchWrapper = type("UBatchWrapper", (), {"_run_ubatches": lambda _, *args: args})
    monkeypatch.setitem(sys.modules, HALVES, module)
    hook(window)
    window.start()
    step(runner, scheduled({"a": 4}, new={"a": (4, 0)}))
    assert [module.UBatchWrapper()._run_ubatches(n) for n in range(2)] == [(0,), (1,)]
    recording = finished(window, tmp_path)
    (failure,) = failures(recording)
    assert "enable_dbo" in failure.detail
    assert not recording.metadata.complete


def test_a_workers_process_closes_its_shard_before_it_shuts_down(
    window: Window, runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine may kill it while it gives back its GPU."""
    closed = []
    module: Any = ModuleType(PROCESSES)
    module.WorkerProc = type("WorkerProc", (), {"shutdown": lambda _: closed.append(not window.following)})
    monkeypatch.setitem(sys.modules, PROCESSES, module)
    hook(window)
    window.start()
    step(runner, scheduled({"a": 4}, new={"a": (4, 0)}))
    module.WorkerProc().shutdown()
    assert closed == [True]
    (rank,) = fold_session(window.session, tmp_path / "out").metadata.ranks
    assert rank.ended


def test_a_host_whose_name_has_dots_keeps_its_processes_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node1.cluster.example")
    session = Session(str(tmp_path / "shards"))
    session.write()
    window = Window(session)
    window.register()
    window.start()
    window.failed(ValueError("noted"))
    window.close()
    recording = fold_session(session, tmp_path / "out")
    (failure,) = failures(recording)
    assert (failure.detail, failure.pid) == ("ValueError: noted", os.getpid())
