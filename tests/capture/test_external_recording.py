"""Calls that Python tells the recorder of: what drifts, what is sampled, what is inside what, and what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import Engine, X, captured, graph_class, operators

from kcap.capture.fold.coverage import read_trace
from kcap.capture.recorder.native_recorder import NativeRecorder
from kcap.capture.shards.counts import OFF_STEP, Counts
from kcap.capture.taps import external
from kcap.capture.taps.external import Externals
from kcap.capture.window.step import StepShape
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.values import Drift, TensorSpec

Record = Callable[..., Recording]
pytestmark = pytest.mark.usefixtures("no_gradients")
both = pytest.mark.parametrize("recorder", ["native", "python"])
IDS = torch.arange(5, dtype=torch.int32)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("kcx", "DEF") as lib:
        lib.define("leaf(Tensor x) -> Tensor")
        lib.impl("leaf", lambda x: x * 2, "CPU")
        yield lib


def told(recorder: Any) -> Externals:
    found: Externals = recorder._window.taps.externals
    return found


def call(externals: Externals, body: Callable[[], object] = lambda: None, name: str = "lib::call", **more: Any) -> bool:
    """A library's function that takes X and runs `body`."""
    began = externals.enter(name, (("x",), (X,)), **more)
    body()
    if began:
        externals.leave()
    return began


def shape(recording: Recording) -> set[tuple[str, str, str | None, int]]:
    return {(call.operator, call.kind, call.parent, call.total) for call in recording.calls if call.work}


@both
def test_a_librarys_call_may_have_a_launch_whose_library_is_kept(recorder: str, record: Record) -> None:
    def body(session: Any) -> None:
        externals = told(session)
        launches = [
            externals.launch({"language": "tvm", "function": "run", "kernel": externals.library(content)})
            for content in (b"first", b"second", b"first")
        ]
        for launch in launches:
            assert launch is not None
            call(externals, launch=launch)
        call(externals)

    recording = record(body, recorder)
    totals = {call.launch and recording.library(call.launch).read_bytes(): call.total for call in recording.calls}
    assert totals == {b"first": 2, b"second": 1, None: 1}


@pytest.mark.parametrize("scalar", [lambda n: n, lambda n: n / 7, lambda n: [n, 3]], ids=["int", "float", "list"])
@both
def test_a_scalar_that_drifts_is_one_call_after_sixteen(recorder: str, scalar: Any, record: Record) -> None:
    def body(session: Any) -> None:
        for n in range(200):
            externals = told(session)
            externals.enter("lib::call", (("x", "n", "k"), (X, scalar(n), 128)))
            externals.leave()

    recording = record(body, recorder)
    (found,) = (one for one in recording.calls if one.operator == "lib::call")
    assert [arg.value for arg in found.args] == [TensorSpec((4, 4), "float32"), Drift("number"), 128]
    assert found.total == 200
    held = [sample.scalars["1"] for sample in recording.samples]
    assert len(held) == 4 and all(value in [scalar(n) for n in range(200)] for value in held)


def test_a_graph_keeps_the_scalars_of_a_librarys_call_while_they_drift_eagerly(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind := graph_class())

    def body(session: Any) -> None:
        def attend(n: int) -> None:
            told(session).enter("lib::attend", (("x", "n"), (X, n)))
            told(session).leave()

        graph = captured(kind, lambda: attend(4096))
        for n in range(40):
            with session.step("decode"):
                attend(n)
                graph.replay()

    found = [(call.args[1].value, call.counts[0].mode, call.total) for call in record(body).calls]
    assert sorted(found, key=str) == [(4096, "graph", 40), (Drift("number"), "eager", 40)]


def test_offsets_that_drift_are_one_call_at_once(record: Record) -> None:
    cache = torch.zeros(8, 4, 4)

    def body(session: Any) -> None:
        for layer in cache:
            told(session).enter("lib::call", (("cache",), (layer,)))
            told(session).leave()

    recording = record(body)
    ((found,),) = ([arg.value for arg in one.args] for one in recording.calls if one.operator == "lib::call")
    assert found == TensorSpec((4, 4), "float32", offset=None)


SAMPLED = ["block_table", "block_table_ptr", "plan.block_table", "self.plan.kv_indptr", "kv_indptr_ptr"]
PRIVATE = ["input_ids", "token_ids", "token_ids_ptr", "block_table_of_tokens", "ptr", "_ptr", "plan.ids", "positions2"]


def test_integers_are_sampled_by_their_names_and_token_ids_never(record: Record) -> None:
    def body(session: Any) -> None:
        told(session).enter("lib::call", ((*SAMPLED, *PRIVATE), [IDS] * len(SAMPLED + PRIVATE)))
        told(session).leave()

    recording = record(body)
    (sample,) = recording.samples
    assert {path: recording.value(tensor).tolist() for path, tensor in sample.tensors.items()} == {
        str(place): [0, 1, 2, 3, 4] for place in range(len(SAMPLED))
    }


def test_tensors_that_are_not_integers_are_not_sampled(record: Record) -> None:
    def body(session: Any) -> None:
        told(session).enter("lib::call", (("block_table", "kv_indptr"), (X, X > 0)))
        told(session).leave()

    assert record(body).samples == []


@both
def test_atens_calls_inside_a_librarys_call_are_its_detail(recorder: str, record: Record) -> None:
    def body(session: Any) -> None:
        call(told(session), lambda: torch.mm(X, X))
        torch.relu(X)

    assert shape(record(body, recorder)) == {("lib::call", "kernel", None, 1), ("aten::relu", "kernel", None, 1)}


@both
def test_a_custom_operator_inside_a_librarys_call_makes_it_a_region(recorder: str, record: Record) -> None:
    def body(session: Any) -> None:
        with session.step("decode"):
            call(told(session), lambda: torch.ops.kcx.leaf(X))
            call(told(session))

    assert shape(record(body, recorder)) == {
        ("lib::call", "region", None, 1),
        ("lib::call", "kernel", None, 1),
        ("kcx::leaf", "kernel", "lib::call", 1),
    }


@both
def test_what_is_heard_is_known_before_a_call_is_described(recorder: str, record: Record) -> None:
    """As `enter` answers: whatever it is told of, and a detail outside other calls alone."""
    heard: list[tuple[bool, bool]] = []

    def ask(externals: Externals, within: Callable[..., object]) -> None:
        for detail in (False, True):
            within(lambda detail=detail: heard.append((externals.may_record(detail), call(externals, detail=detail))))

    def body(session: Any) -> None:
        externals = told(session)
        for within in (lambda body: body(), lambda body: call(externals, body, "lib::outer")):
            ask(externals, within)
        with externals.ignoring():
            ask(externals, lambda body: body())

    record(body, recorder)
    assert heard == [(answer, answer) for answer in (True, True, True, False, False, False)]


class Profiling:
    recorder, capturing, open, profiling = None, 0, False, True


def test_a_profiler_sees_what_is_not_recorded_as_such(tmp_path: Path) -> None:
    with torch.profiler.profile() as profile, Externals(Profiling(), tmp_path).ignoring():
        torch.relu(X)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "kcap:ignored" in (tmp_path / "trace.json").read_text()
    assert not any(read_trace(tmp_path / "trace.json").ops.values())


def test_a_call_outside_steps_is_counted_once(tmp_path: Path) -> None:
    """Whether it is asked first if it may be recorded, or not."""
    recorder = NativeRecorder(tmp_path / "shard")
    library = recorder.operator("lib::call", ["x"], True)
    recorder.start(False)
    for _ in range(3):
        recorder.may_record(False) and recorder.call(library, -1, [X], False, False)
    recorder.call(library, -1, [X], False, False)
    recorder.step_begin(0)
    assert recorder.may_record(False) and recorder.call(library, -1, [X], False, False)
    recorder.step_end(1, 1, b"")
    recorder.close()
    assert Counts(tmp_path / "shard.counts").cells[OFF_STEP] == 4


@both
def test_detail_is_left_out_inside_a_librarys_call_and_kept_outside(recorder: str, record: Record) -> None:
    def body(session: Any) -> None:
        externals = told(session)
        call(externals, lambda: call(externals, name="lib::helper", detail=True), "lib::outer")
        call(externals, lambda: call(externals, name="lib::helper"), "lib::wide")
        call(externals, name="lib::helper", detail=True)

    assert shape(record(body, recorder)) == {
        ("lib::outer", "kernel", None, 1),
        ("lib::wide", "region", None, 1),
        ("lib::helper", "kernel", "lib::wide", 1),
        ("lib::helper", "kernel", None, 1),
    }


@both
def test_host_work_is_kept_apart_from_the_kernels(recorder: str, record: Record) -> None:
    recording = record(lambda session: call(told(session), name="lib::plan", work=False), recorder)
    assert [(one.operator, one.work) for one in recording.calls] == [("lib::plan", False)]
    assert recording.kernels() == []


@both
def test_a_call_that_raises_is_left_and_the_next_is_on_its_own(recorder: str, record: Record) -> None:
    def broken() -> None:
        raise ValueError("the library failed")

    def body(session: Any) -> None:
        for _ in range(100):  # deeper than is followed, were one not left
            assert told(session).enter("lib::call", (("x",), (X,)))
            try:
                with pytest.raises(ValueError):
                    broken()
            finally:
                told(session).leave()
        torch.ops.kcx.leaf(X)

    assert shape(record(body, recorder)) == {("lib::call", "kernel", None, 100), ("kcx::leaf", "kernel", None, 1)}


@both
def test_outside_a_step_nothing_counts_in_an_engine(recorder: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path, recorder=recorder)
    externals = engine.window.taps.externals
    assert not call(externals)  # before there is a recorder
    engine.open()
    assert not call(externals)
    engine.step("decode", lambda: call(externals))
    assert not call(externals)
    recording = engine.close()
    assert not call(externals)
    assert shape(recording) == {("lib::call", "kernel", None, 1)}


@both
def test_a_recorder_that_fails_raises_nothing_and_says_so(recorder: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path, recorder=recorder, fail="5")
    engine.open()
    for _ in range(20):
        engine.step("decode", lambda: call(engine.window.taps.externals, lambda: torch.ops.kcx.leaf(X)))
    recording = engine.close()
    assert not recording.metadata.complete
    assert [tap.detail for tap in recording.metadata.taps if tap.status == "failed"] in (
        ["made to fail"],
        ["RuntimeError: made to fail"],
    )
    assert 0 < sum(call.total for call in recording.calls) < 6


@both
def test_a_recorder_that_fails_counts_no_further_step_of_a_request(recorder: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path, recorder=recorder, fail="3")
    engine.open()
    for length in range(1, 9):
        engine.window.begin(StepShape("decode", [1], [length], requests=["a"]))
        torch.mm(X, X)
        engine.window.end()
    assert not engine.window.open
    recording = engine.close()
    (request,) = recording.requests
    assert 0 < request.decodes == recording.metadata.steps["decode"] < 8


def test_calls_of_other_threads_count(record: Record) -> None:
    def body(session: Any) -> None:
        def work() -> None:
            for _ in range(500):
                call(told(session), lambda: torch.mm(X, X), f"lib::{threading.current_thread().name}")

        threads = [threading.Thread(target=work, name=f"t{n}") for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert {operator: total for operator, _, _, total in shape(record(body))} == {f"lib::t{n}": 500 for n in range(4)}


def launches(externals: Externals, number: int) -> list[int | None]:
    return [externals.launch({"function": "f", "unread": "none", "grid": [n]}) for n in range(number)]


@both
def test_each_distinct_launch_is_a_call_of_its_own(recorder: str, record: Record) -> None:
    def body(session: Any) -> None:
        externals = told(session)
        operator = externals.operator("triton::f.unread", ["x"])
        for launch in 2 * launches(externals, 200):
            assert launch is not None and externals.launched(operator, launch, [X])

    recording = record(body, recorder)
    assert operators(recording.calls) == 200 * ["triton::f.unread"]
    assert [call.total for call in recording.calls] == 200 * [2]
    grids = [call.launch.grid for call in recording.calls if call.launch]
    assert sorted(grids) == [[n] for n in range(200)]


@both
def test_further_launches_are_counted_by_the_size_of_their_grids(recorder: str, record: Record) -> None:
    def body(session: Any) -> None:
        externals = told(session)
        operator = externals.operator("triton::f.unread", ["x", "n"])
        for size, launch in enumerate(launches(externals, 600)):
            assert launch is not None and externals.launched(operator, launch, [X, size])

    recording = record(body, recorder)
    assert sum(call.total for call in recording.calls) == 600
    assert {call.shapes: call.total for call in recording.calls if call.shapes > 1} == {256: 256, 87: 87}


def test_launches_past_the_limit_have_no_grid_of_their_own(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "MOST_LAUNCHES", 3)

    def body(session: Any) -> None:
        assert launches(told(session), 5) == [0, 1, 2, 3, 3]
        assert launches(told(session), 3) == [0, 1, 2]

    record(body)
