"""CUDA graphs that fail, that kcap saw no capture of, or that outlive the recording: the engine goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import Engine, X, captured, capturing, counts, health
from torch.multiprocessing.reductions import StorageWeakRef

from kcap.schemas.recording.recording import Recording

Record = Callable[..., Recording]
pytestmark = pytest.mark.usefixtures("no_gradients")
METHODS = ("capture_begin", "capture_end", "replay", "raw_cuda_graph", "raw_cuda_graph_exec")


def relu() -> None:
    torch.relu(X)


def mm() -> None:
    torch.mm(X, X)


def failing(graph: Any, method: str) -> Any:
    graph.fail = method
    return graph


def body_raises(kind: Any) -> None:
    with capturing(kind()):
        relu()
        raise RuntimeError("the body failed")


def never_ends(kind: Any) -> None:
    graph = kind()
    graph.capture_begin()
    relu()
    raise RuntimeError("nobody ended it")


def begin_raises(kind: Any) -> None:
    with capturing(failing(kind(), "capture_begin")):
        relu()


def end_raises(kind: Any) -> None:
    with capturing(failing(kind(), "capture_end")):
        relu()


@pytest.mark.parametrize("fault", [body_raises, never_ends, begin_raises, end_raises])
def test_a_capture_that_fails_counts_nothing_and_later_captures_are_fine(
    fault: Callable[[Any], None], kind: Any, tmp_path: Path
) -> None:
    engine = Engine(tmp_path)
    with pytest.raises(RuntimeError):
        fault(kind)
    graph = captured(kind, mm)
    engine.open()
    engine.step("decode", graph.replay, relu)
    recording = engine.close()
    assert counts(recording) == {("aten::mm", "decode", "graph"): 1, ("aten::relu", "decode", "eager"): 1}
    assert recording.metadata.complete
    captures = 2 if fault is body_raises else 1
    failed = ", 1 captures failed" if fault in (never_ends, end_raises) else ""
    assert health(recording) == ("ok", f"{captures} graphs captured, 1 replays{failed}")


def test_what_runs_after_a_failed_capture_counts_as_ever(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        with pytest.raises(RuntimeError):
            end_raises(kind)
        mm()
        with recorder.step("decode"):
            mm()

    assert counts(record(body)) == {("aten::mm", "decode", "eager"): 1, ("aten::mm", "other", "eager"): 1}


def test_a_replay_that_raises_raises_to_the_engine(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        graph = failing(captured(kind, mm), "replay")
        with pytest.raises(RuntimeError, match="replay failed"), recorder.step("decode"):
            graph.replay()
        graph.fail = ""
        with recorder.step("decode"):
            assert graph.replay() == "replay"

    recording = record(body)
    assert counts(recording) == {("aten::mm", "decode", "graph"): 2}, "a call that raises counts, as any operator's"
    assert recording.metadata.steps == {"decode": 2}


def test_replays_of_a_graph_captured_before_recording_are_told_as_unknown(kind: Any, record: Record) -> None:
    graph = captured(kind, mm)

    def body(recorder: Any) -> None:
        with recorder.step("decode"):
            relu()
            assert graph.replay() == "replay"
            graph.replay()

    recording = record(body)
    assert counts(recording) == {("aten::relu", "decode", "eager"): 1}
    reason = "2 replays of graphs captured before recording began: what ran in them is unknown"
    assert health(recording) == ("off", reason)
    assert not recording.metadata.complete
    assert recording.metadata.notes == [f"cuda_graphs: {reason}"]
    assert graph.log == ["capture_begin", "capture_end", "replay", "replay"]


@pytest.mark.parametrize("name", ["raw_cuda_graph", "raw_cuda_graph_exec"])
def test_a_graph_handed_out_as_a_raw_handle_is_noted(name: str, kind: Any, record: Record) -> None:
    recording = record(lambda recorder: getattr(captured(kind, mm), name)() == name or pytest.fail())
    assert health(recording) == (
        "off",
        "1 graphs were handed out as raw handles: launched from there, they are not seen",
    )
    assert not recording.metadata.complete


def test_the_methods_are_the_engines_own_again_after_the_window(kind: Any, record: Record) -> None:
    before = {name: kind.__dict__[name] for name in METHODS}
    during: dict[str, Any] = {}
    record(lambda recorder: during.update(kind.__dict__))
    assert all(during[name] is not before[name] for name in METHODS)
    assert {name: kind.__dict__[name] for name in METHODS} == before


def test_a_window_that_closes_in_a_capture_lets_go_of_it(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.open()
    graph = kind()
    graph.capture_begin()
    relu()
    recorder = engine.window.recorder
    assert recorder is not None
    assert engine.close().calls == []
    operator = recorder.operator("late::call", (), True)
    assert not recorder.call(operator, -1, (), False, False)  # nobody listens any more
    graph.capture_end()
    again = Engine(tmp_path / "again")
    later = captured(kind, mm)
    again.open()
    again.step("decode", later.replay, relu)
    expected = {("aten::mm", "decode", "graph"): 1, ("aten::relu", "decode", "eager"): 1}
    assert counts(again.close()) == expected


def test_a_window_that_closes_in_a_capture_keeps_no_memory_of_it(kind: Any, tmp_path: Path) -> None:
    before = {name: kind.__dict__[name] for name in METHODS}
    engine = Engine(tmp_path)
    graph = kind()
    with capturing(graph):
        repeats = torch.ones(2, dtype=torch.int64)
        memory = StorageWeakRef(repeats.untyped_storage())
        torch.repeat_interleave(repeats)
        engine.open()
        engine.close()
        del repeats
        assert not memory.expired(), "the tensor is sampled, so the capture gives its memory to nothing else"
    assert memory.expired()
    assert {name: kind.__dict__[name] for name in METHODS} == before


def test_a_describer_that_fails_switches_the_tap_off_and_nothing_else(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.window.taps.graphs.describe = lambda: {}["no such engine"]
    graph = captured(kind, mm)
    engine.open()
    engine.step("decode", graph.replay, relu)
    recording = engine.close()
    assert counts(recording) == {("aten::relu", "decode", "eager"): 1}
    assert health(recording) == ("failed", "KeyError: 'no such engine'")
    assert not recording.metadata.complete
    assert graph.log == ["capture_begin", "capture_end", "replay"]


def test_the_fallback_recorder_tells_how_many_replays_it_knows_nothing_of(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        graph = captured(kind, mm)
        with recorder.step("decode"):
            relu()
            graph.replay()
            graph.replay()

    recording = record(body, "python")
    status, detail = health(recording)
    assert status == "off" and detail.startswith("2 replays") and "not recorded" in detail
    assert recording.metadata.notes[0] == f"cuda_graphs: {detail}"
    assert not recording.metadata.complete
    assert ("aten::relu", "decode", "eager") in counts(recording)
    assert not [call for call in recording.calls if call.operator == "aten::mm"], "a capture runs nothing"


def test_the_fallback_recorder_goes_on_after_a_capture_that_fails(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        graph = kind()
        graph.capture_begin()
        mm()
        kind().capture_begin()
        captured(kind, mm)
        relu()

    assert [call.operator for call in record(body, "python").kernels()] == ["aten::relu"]


def test_the_fallback_recorder_is_whole_where_no_graph_was_replayed(kind: Any, record: Record) -> None:
    recording = record(lambda recorder: captured(kind), "python")
    assert health(recording) == ("absent", "no graph was replayed; TorchDispatchMode records no graph's calls")
    assert recording.metadata.complete
