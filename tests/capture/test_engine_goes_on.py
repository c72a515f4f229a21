"""What fails on the way leaves no profiler running, no capture open, and no Sample of a step that did not count."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graphs import Engine, captured, counts, health

from kcap.capture.engines.vllm.adapter import Steps, _hook_graphs
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.taps import cuda_graphs
from kcap.capture.window.window import StepShape, Window

X = torch.ones(4, 4)
LENGTHS = torch.zeros(2, dtype=torch.int32)


@torch.library.custom_op("kcap_goes_on::attention", mutates_args=())
def attention(x: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    return x + 1


def mm() -> None:
    torch.mm(X, X)


def attend() -> None:
    attention(X, LENGTHS)


def test_no_profiler_runs_on_after_a_failure_in_the_profiled_steps(tmp_path: Path) -> None:
    engine = Engine(tmp_path, check_coverage=True)
    engine.open()
    engine.step("decode", mm)
    assert torch.autograd.profiler._is_profiler_enabled
    engine.window.failed(RuntimeError("of kcap's own"))
    assert not torch.autograd.profiler._is_profiler_enabled
    engine.close()


def test_no_profiler_runs_on_after_another_thread_closed_the_window(tmp_path: Path) -> None:
    engine = Engine(tmp_path, check_coverage=True)
    engine.open()
    engine.step("decode", mm)
    closing = threading.Thread(target=engine.window.close)
    closing.start()
    closing.join()
    assert torch.autograd.profiler._is_profiler_enabled
    Steps(engine.window).execute_model(lambda scheduled: None, None, None)
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_capture_is_let_go_where_the_tap_fails_in_it(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.open()
    graph = kind()
    graph.capture_begin()
    mm()
    engine.window.taps.graphs.on = False
    graph.capture_end()
    for _ in range(5):
        engine.step("decode", mm)
    assert counts(engine.close())["aten::mm", "decode", "eager"] == 5


def test_a_description_that_is_no_json_leaves_no_capture_open(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.window.taps.graphs.describe = lambda: {"size": object()}
    engine.open()
    captured(kind, mm)
    engine.step("decode", mm)
    recording = engine.close()
    assert health(recording).status == "failed"
    assert counts(recording) == {("aten::mm", "decode", "eager"): 1}


def test_an_allocator_that_tells_nothing_costs_samples_and_no_counts(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> list[tuple[int, int]]:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(cuda_graphs, "memory_of_graphs", refuse)
    engine = Engine(tmp_path)
    graph = captured(kind, attend)
    engine.open()
    for _ in range(5):
        engine.step("decode", graph.replay)
    recording = engine.close()
    assert counts(recording) == {("kcap_goes_on::attention", "decode", "graph"): 5}
    assert health(recording).status == "ok" and "no Samples at replays" in health(recording).detail
    assert recording.metadata.complete and not recording.samples


def test_a_graph_manager_that_kcap_does_not_know_is_used_all_the_same(tmp_path: Path) -> None:
    class CudaGraphManager:
        def capture(self) -> str:
            return "captured"

    engine = Engine(tmp_path)
    module: Any = SimpleNamespace(CudaGraphManager=CudaGraphManager)
    _hook_graphs(module, engine.window)
    assert CudaGraphManager().capture() == "captured"
    engine.close()


def test_a_library_module_that_is_imported_late_is_seen_in_the_next_graph(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    seen: list[int] = []
    for tap in engine.window.taps._libraries:
        monkeypatch.setattr(tap, "refresh", lambda: seen.append(len(sys.modules)))
    captured(kind, mm)
    before = len(seen)
    captured(kind, mm)
    assert len(seen) == before, "nothing new was imported"
    monkeypatch.setitem(sys.modules, "kcap_test_late", ModuleType("kcap_test_late"))
    captured(kind, mm)
    assert len(seen) == before + len(engine.window.taps._libraries)
    engine.close()


def test_a_step_that_does_not_count_leaves_no_sample(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.open()
    LENGTHS.fill_(99)
    engine.window.begin(StepShape("decode", [1], [1]))
    attend()
    engine.window.discard()
    for length in (0, 1):
        LENGTHS.fill_(length)
        engine.step("decode", attend)
    LENGTHS.fill_(77)
    engine.window.begin(StepShape("decode", [1], [1]))
    attend()
    recording = engine.close()
    highs = [(sample.step, tensor.high) for sample in recording.samples for tensor in sample.tensors.values()]
    assert sorted(highs) == [(0, 0), (1, 1)]


def test_layers_that_walk_the_same_pages_are_sampled_once_in_a_step(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.open()
    others = [torch.full_like(LENGTHS, 50 + number) for number in range(3)]
    for length in range(2):
        LENGTHS.fill_(length)
        engine.step("decode", *[attend] * 6)
    engine.step("prefill", *(partial(attention, X, lengths) for lengths in others for _ in range(2)))
    samples = engine.close().samples
    highs = sorted((sample.step, tensor.high) for sample in samples for tensor in sample.tensors.values())
    assert highs == [(0, 0), (1, 1), (2, 50), (2, 51), (2, 52)]


def test_samples_of_a_call_in_many_graphs_spread_over_the_run(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    graphs = [captured(kind, attend) for _ in range(16)]
    engine.open()
    for step in range(1200):
        LENGTHS.fill_(step)
        engine.step("decode", *(graph.replay for graph in graphs))
    steps = [sample.step or 0 for sample in engine.close().samples]
    assert len(steps) == 4 and min(steps) < 900


@pytest.mark.parametrize("recorder", ["native", "python"])
@pytest.mark.parametrize("tap", ["window", "triton"])
def test_a_failure_that_a_full_disk_kept_from_the_notes_is_in_the_shard(
    recorder: str, tap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(str(tmp_path / "shards"), recorder=recorder)
    session.write()
    window = Window(session)
    window.start()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "note", full)
        error = RuntimeError("CUDA error: an illegal memory access\nFor debugging consider passing …\n")
        window.failed(error) if tap == "window" else window.tap_failed(tap, error)
    window.close()
    metadata = fold_session(session, tmp_path / "out").metadata
    detail = "RuntimeError: CUDA error: an illegal memory access For debugging consider passing …"
    assert [(t.name, t.detail) for t in metadata.taps if t.status == "failed"] == [(tap, detail)]
    assert not metadata.complete


def test_a_window_that_never_opened_gives_everything_back(kind: Any, tmp_path: Path) -> None:
    original = kind.replay
    engine = Engine(tmp_path)
    assert kind.replay is not original
    engine.window.close()
    assert kind.replay is original
