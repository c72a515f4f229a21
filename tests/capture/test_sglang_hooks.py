"""SGLang's hooks on stand-ins of its scheduler and runner: phases, hits, late sampling, an SGLang that is unknown."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_stand_ins import Mode, batch, request, scheduled

from kcap.capture.engines.sglang import adapter
from kcap.capture.fold.recording import fold_session
from kcap.capture.window.window import Window
from kcap.schemas.recording.recording import Recording

A = torch.eye(2)


class Runner:
    """Stands for SGLang's `ModelRunner`: one product a forward, which rewrites a mixed batch as the real one does."""

    is_draft_worker = False

    def load_model(self) -> str:
        return "loaded"

    def forward(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> Any:
        if forward_batch.batch_size < 0:
            raise RuntimeError("of the engine")
        torch.mm(A, A)
        forward_batch.forward_mode.name = "EXTEND"
        return SimpleNamespace(logits_output=A)

    def sample(self, logits_output: Any, forward_batch: Any) -> str:
        torch.argmax(A)
        return "sampled"


class Scheduler:
    """Stands for SGLang's `Scheduler`. A batch's `late` leaves the sampling to the caller, `none` has none, nor has
    `elsewhere`, whose forward is not the runner's."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.model_config = SimpleNamespace(model_path="tiny", num_hidden_layers=2)
        self.server_args = SimpleNamespace(enable_dp_attention=False, dp_size=1)
        torch.mm(A, A)  # its warm-up
        runner.forward(batch("DECODE", [1], [1]))
        runner.sample(None, None)

    def run_batch(self, step: Any, forward: Any = None, sampling: str = "now") -> Any:
        if sampling != "elsewhere":
            self.runner.forward(forward)
        torch.add(A, A)  # between the two, another's work
        if sampling == "now":
            self.runner.sample(A, forward)
        late = (lambda: self.runner.sample(A, forward)) if sampling == "late" else None
        return SimpleNamespace(delay_sample_func=late)

    def process_batch_result(self, step: Any, result: Any) -> None:
        """A request is over when it has as many tokens as its name says; later ones are thrown away."""
        for one in step.reqs:
            if one.finished_reason is None:
                one.output_ids.append(1)
                one.finished_reason = "length" if one.rid == f"over after {len(one.output_ids)}" else None

    def process_disagg_prefill_inflight_queue(self, requests: list[Any]) -> list[Any]:
        """Of a server that only prefills: those whose cache has gone."""
        for one in requests:
            one.finished_reason = "length"
        return requests


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's modules, with classes that no other test hooks."""
    made: dict[str, Any] = {name: ModuleType(name) for name in ("sglang", adapter.SCHEDULER, adapter.RUNNER)}
    made["sglang"].__version__ = "0.0"
    made[adapter.SCHEDULER].Scheduler = type("Scheduler", (), dict(vars(Scheduler)))
    made[adapter.RUNNER].ModelRunner = type("ModelRunner", (), dict(vars(Runner)))
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture
def scheduler(window: Window, modules: dict[str, Any]) -> Any:
    adapter.hook(window)
    runner = modules[adapter.RUNNER].ModelRunner()
    with torch.no_grad():
        return modules[adapter.SCHEDULER].Scheduler(runner)


def run(scheduler: Any, step: Any, forward: Any, sampling: str = "now") -> Any:
    with torch.no_grad():
        return scheduler.run_batch(step, forward, sampling)


def finished(window: Window, tmp_path: Path) -> Recording:
    window.close()
    return fold_session(window.session, tmp_path / "out")


def counts(recording: Recording) -> dict[str, int]:
    return {call.operator: call.total for call in recording.calls}


def test_the_forward_and_the_sampling_make_one_step_and_the_warm_up_none(
    window: Window, scheduler: Any, tmp_path: Path
) -> None:
    run(scheduler, scheduled("EXTEND", request("a", 2)), batch("EXTEND", [4], [6]))
    run(scheduler, scheduled("DECODE", request("a", 2)), batch("DECODE", [1], [7]))
    recording = finished(window, tmp_path)
    assert recording.metadata.steps == {"decode": 1, "prefill": 1}
    assert counts(recording) == {"aten::mm": 2, "aten::argmax": 2}
    assert [(step.tokens, step.lengths, step.cached) for step in recording.steps] == [(4, [6], [2]), (1, [7], [])]
    assert (recording.metadata.framework, recording.metadata.framework_version) == ("SGLang", "0.0")
    assert (recording.metadata.model, recording.metadata.layers_recorded) == ("tiny", 2)


def test_a_request_that_finishes_while_the_next_step_runs_is_one(
    window: Window, scheduler: Any, tmp_path: Path
) -> None:
    """Its last token is thrown away; the step may end after what came before it has been processed."""
    over, other = request("over after 2", 2, prompt=6), request("b", prompt=3)
    steps = [scheduled("EXTEND", over, other), scheduled("DECODE", over, other), scheduled("DECODE", over, other)]
    run(scheduler, steps[0], batch("EXTEND", [4, 3], [6, 3]))
    run(scheduler, steps[1], batch("DECODE", [1, 1], [7, 4]))
    scheduler.process_batch_result(steps[0], None)
    late = run(scheduler, steps[2], batch("DECODE", [1, 1], [8, 5]), "late")
    scheduler.process_batch_result(steps[1], None)
    with torch.no_grad():
        late.delay_sample_func()
    run(scheduler, scheduled("DECODE", other), batch("DECODE", [1], [6]))
    assert list(window.requests._totals) == ["b"], "what is over is kept no longer"
    recording = finished(window, tmp_path)
    told = [(r.id, r.prompt, r.cached, r.computed, r.decoded, r.generated) for r in recording.requests]
    assert told == [("over after 2", 6, 2, 4, 2, 2), ("b", 3, 0, 3, 3, 4)]
    assert [step.requests for step in recording.steps] == [[0, 1], [0, 1], [0, 1], [1]]


def test_a_request_that_no_batch_follows_has_the_tokens_that_it_gave_back(
    window: Window, scheduler: Any, tmp_path: Path
) -> None:
    over = request("over after 2", prompt=6)
    steps = [scheduled("EXTEND", over), scheduled("DECODE", over), scheduled("DECODE", over)]
    run(scheduler, steps[0], batch("EXTEND", [6], [6]))
    run(scheduler, steps[1], batch("DECODE", [1], [7]))
    scheduler.process_batch_result(steps[0], None)
    run(scheduler, steps[2], batch("DECODE", [1], [8]))
    scheduler.process_batch_result(steps[1], None)
    (told,) = finished(window, tmp_path).requests
    assert (told.decoded, told.generated) == (2, 2)


def test_a_server_that_only_prefills_keeps_no_request_whose_cache_has_gone(window: Window, scheduler: Any) -> None:
    gone, other = request("a"), request("b")
    run(scheduler, scheduled("EXTEND", gone), batch("EXTEND", [32], [32]))
    assert scheduler.process_disagg_prefill_inflight_queue([gone]) == [gone]
    run(scheduler, scheduled("EXTEND", other), batch("EXTEND", [32], [32]))
    assert list(window.requests._totals) == ["b"]


def test_a_mixed_batch_that_the_runner_rewrites_is_still_mixed(window: Window, scheduler: Any, tmp_path: Path) -> None:
    step = scheduled("MIXED", request("a"), decoding=(request("b"),))
    run(scheduler, step, batch("MIXED", [4, 1], [4, 9]))
    assert finished(window, tmp_path).metadata.steps == {"mixed": 1}


def test_sampling_that_comes_after_the_batch_belongs_to_its_step(
    window: Window, scheduler: Any, tmp_path: Path
) -> None:
    result = run(scheduler, scheduled("DECODE", request("a")), batch("DECODE", [1], [7]), "late")
    torch.add(A, A)
    with torch.no_grad():
        assert result.delay_sample_func() == "sampled"
    assert counts(finished(window, tmp_path)) == {"aten::mm": 1, "aten::argmax": 1}


def test_a_forward_without_sampling_counts_when_its_batch_is_over(
    window: Window, scheduler: Any, tmp_path: Path
) -> None:
    run(scheduler, scheduled("EXTEND", request("a")), batch("EXTEND", [4], [4]), "none")
    recording = finished(window, tmp_path)
    assert recording.metadata.steps == {"prefill": 1}
    assert counts(recording) == {"aten::mm": 1}


def test_a_forward_that_raises_is_no_step_and_raises_as_before(window: Window, scheduler: Any, tmp_path: Path) -> None:
    broken = batch("DECODE", [1], [7])
    broken.batch_size = -1
    with pytest.raises(RuntimeError, match="of the engine"):
        run(scheduler, scheduled("DECODE", request("a")), broken)
    run(scheduler, scheduled("DECODE", request("a")), batch("DECODE", [1], [7]))
    assert finished(window, tmp_path).metadata.steps == {"decode": 1}


def test_a_batch_that_kcap_does_not_know_is_noted_and_the_engine_goes_on(
    window: Window, scheduler: Any, tmp_path: Path
) -> None:
    strange = SimpleNamespace(forward_mode=Mode(name="DECODE"), batch_size=1)
    step = scheduled("DECODE", request("a"))
    for _ in range(2):
        assert run(scheduler, step, strange).delay_sample_func is None
    recording = finished(window, tmp_path)
    assert not recording.metadata.complete
    (failure,) = (tap for tap in recording.metadata.taps if tap.status == "failed")
    assert (failure.name, "input_ids" in failure.detail) == ("window", True)


def test_batches_whose_forward_is_not_seen_are_noted_and_no_steps_are_claimed(
    window: Window, scheduler: Any, tmp_path: Path
) -> None:
    """Another plugin may run the model itself."""
    run(scheduler, scheduled("IDLE"), batch("IDLE", [], []), "elsewhere")
    run(scheduler, scheduled("DECODE", request("a")), batch("DECODE", [1], [7]))
    assert window.following, "a batch of no request need not run anything"
    for _ in range(2):
        run(scheduler, scheduled("DECODE", request("a")), batch("DECODE", [1], [8]), "elsewhere")
        run(scheduler, scheduled("DECODE", request("a")), batch("DECODE", [1], [9]))
    recording = finished(window, tmp_path)
    assert (recording.metadata.steps, recording.metadata.complete) == ({"decode": 1}, False)
    (failure,) = (tap for tap in recording.metadata.taps if tap.status == "failed")
    assert "no ModelRunner.forward was seen" in failure.detail


def test_methods_that_sglangs_classes_inherit_are_hooked(
    window: Window, modules: dict[str, Any], tmp_path: Path
) -> None:
    for module, name in ((adapter.SCHEDULER, "Scheduler"), (adapter.RUNNER, "ModelRunner")):
        setattr(modules[module], name, type(name, (getattr(modules[module], name),), {}))
    adapter.hook(window)
    with torch.no_grad():
        scheduler = modules[adapter.SCHEDULER].Scheduler(modules[adapter.RUNNER].ModelRunner())
    run(scheduler, scheduled("EXTEND", request("a", 2)), batch("EXTEND", [4], [6]))
    recording = finished(window, tmp_path)
    assert [(step.phase, step.cached) for step in recording.steps] == [("prefill", [2])]


@pytest.mark.parametrize(("module", "name"), [(adapter.SCHEDULER, "Scheduler"), (adapter.RUNNER, "ModelRunner")])
def test_an_sglang_without_what_is_hooked_is_noted(
    module: str, name: str, window: Window, modules: dict[str, Any], tmp_path: Path
) -> None:
    delattr(modules[module], name)
    adapter.hook(window)
    recording = finished(window, tmp_path)
    assert not recording.metadata.complete
    assert [name in tap.detail for tap in recording.metadata.taps if tap.status == "failed"] == [True]


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("place", ["scheduler", "ps", "context", "nowhere"])
def test_a_replica_knows_its_number_wherever_sglang_keeps_it(
    place: str, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = SimpleNamespace(dp_rank=rank)
    scheduler: Any = {"scheduler": holder, "ps": SimpleNamespace(ps=holder)}.get(place, SimpleNamespace())
    if place == "context":
        context = SimpleNamespace(get_parallel=lambda: holder)
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert adapter._replica(scheduler) == (0 if place == "nowhere" else rank or 0)


def test_a_servers_own_warm_up_pauses_the_windows(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[bool] = []
    server: Any = ModuleType(adapter.SERVER)
    server._wait_and_warmup = lambda args, fails=False: (
        paused.append(window.session.pause_file.exists()) or 1 // (not fails)
    )
    monkeypatch.setitem(sys.modules, adapter.SERVER, server)
    adapter.hook(window)
    server._wait_and_warmup("arguments")
    with pytest.raises(ZeroDivisionError):
        server._wait_and_warmup("arguments", fails=True)
    assert paused == [True, True]
    assert not window.session.pause_file.exists()
