"""CUDA graphs: what is called while one is captured is its Program, and counts once for each replay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import Engine, X, captured, capturing, counts, health, operators

from kcap.schemas.recording.recording import Recording

Record = Callable[..., Recording]
pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    """`kcg::call(x, body)` runs the body of that number inside a custom operator; `kcg::scaled` takes a scalar."""
    with torch.library._scoped_library("kcg", "DEF") as lib:
        lib.define("call(Tensor x) -> Tensor")
        lib.impl("call", lambda x: (INSIDE[0](), x + 1)[1], "CPU")
        lib.define("leaf(Tensor x) -> Tensor")
        lib.impl("leaf", lambda x: x * 2, "CPU")
        lib.define("scaled(Tensor x, int n) -> Tensor")
        lib.impl("scaled", lambda x, n: x * n, "CPU")
        yield lib


INSIDE: list[Callable[[], object]] = [lambda: None]


def inside(body: Callable[[], object]) -> None:
    """Run `body` inside a custom operator."""
    INSIDE[0] = body
    torch.ops.kcg.call(X)


def relu() -> None:
    torch.relu(X)


def mm() -> None:
    torch.mm(X, X)


def scaled(n: int) -> None:
    torch.ops.kcg.scaled(X, n)


def test_a_graphs_calls_count_by_its_replays_in_their_phase_and_never_by_its_capture(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    mm()  # a warm-up before the capture
    one, other = captured(kind, relu, mm, mm), captured(kind, relu)
    engine.open()
    mm()  # outside any step
    for _ in range(3):
        engine.step("decode", one.replay, mm)
    engine.step("prefill", one.replay, one.replay, other.replay)
    recording = engine.close()
    assert counts(recording) == {
        ("aten::relu", "decode", "graph"): 3,
        ("aten::relu", "prefill", "graph"): 3,
        ("aten::mm", "decode", "graph"): 6,
        ("aten::mm", "prefill", "graph"): 4,
        ("aten::mm", "decode", "eager"): 3,
    }
    assert one.log == ["capture_begin", "capture_end"] + 5 * ["replay"]
    assert health(recording) == ("ok", "2 graphs captured, 6 replays")
    assert recording.metadata.complete


def test_a_call_that_ran_both_ways_is_one_call_with_both_modes(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    graph = captured(kind, mm)
    engine.open()
    engine.step("decode", graph.replay, mm)
    (call,) = engine.close().kernels()
    assert {count.mode: count.count for count in call.counts} == {"graph": 1, "eager": 1}


def test_a_step_of_pieces_tells_where_each_graph_ran_between_its_own_calls(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        first, second = captured(kind, relu, relu), captured(kind, mm)
        with recorder.step("prefill"):
            first.replay()
            torch.exp(X)
            second.replay()
            first.replay()
            torch.sin(X)
        with recorder.step("decode"):
            torch.sin(X)

    recording = record(body)
    pieces, eager = (program for program in recording.programs if program.kind == "step")
    graphs = [recording.programs[number] for _, number in pieces.graphs]
    assert [position for position, _ in pieces.graphs] == [0, 1, 1]
    assert [operators([recording.calls[call] for call in graph.calls]) for graph in graphs] == [
        ["aten::relu", "aten::relu"],
        ["aten::mm"],
        ["aten::relu", "aten::relu"],
    ]
    ran = ["relu", "relu", "exp", "mm", "relu", "relu", "sin"]
    assert operators(list(recording.ran(pieces))) == [f"aten::{name}" for name in ran]
    assert operators(list(recording.ran(eager))) == ["aten::sin"] and not eager.graphs
    assert [step.mode for step in recording.steps] == ["piecewise", "eager"]
    assert [graph.counts[0].count for graph in graphs] == [2, 1, 2]


def test_equal_graphs_are_one_program_and_those_of_another_size_or_scope_are_not(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    known = [(8, "full"), (8, "full"), (16, "full"), (8, "piecewise")]
    graphs = []
    for size, scope in known:
        engine.window.taps.graphs.describe = lambda size=size, scope=scope: {"size": size, "scope": scope}
        graphs.append(captured(kind, mm))
    graphs.append(captured(kind, relu))  # never replayed
    engine.open()
    for graph in graphs[:4]:
        engine.step("decode", graph.replay)
    recording = engine.close()
    found = {(p.size, p.scope): (p.captured, p.counts[0].count) for p in recording.programs if p.kind == "graph"}
    assert found == {(8, "full"): (2, 2), (16, "full"): (1, 1), (8, "piecewise"): (1, 1)}
    steps = [(step.mode, step.padded) for step in recording.steps]
    assert steps == [("full", 8), ("full", 8), ("full", 16), ("piecewise", 8)]
    assert operators(recording.calls) == ["aten::mm"]  # nothing of the graph that never ran


def test_what_an_engine_says_after_the_capture_is_the_graphs(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    graph = captured(kind, mm)
    engine.window.taps.graphs.annotate(graph, {"size": 32, "scope": "full"})
    engine.window.taps.graphs.annotate(kind(), {"size": 64})  # of a graph that was never captured
    engine.open()
    engine.step("decode", graph.replay)
    (program,) = [program for program in engine.close().programs if program.kind == "graph"]
    assert (program.size, program.scope) == (32, "full")


def test_capturing_an_object_again_counts_what_it_holds_now(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        graph = captured(kind, relu)
        with recorder.step("decode"):
            graph.replay()
        with capturing(graph):
            mm()
        with recorder.step("prefill"):
            graph.replay()

    assert counts(record(body)) == {("aten::relu", "decode", "graph"): 1, ("aten::mm", "prefill", "graph"): 1}


def test_a_capture_inside_a_step_leaves_the_steps_program_alone(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        with recorder.step("decode"):
            torch.exp(X)
            graph = captured(kind, relu, mm)
            torch.sin(X)
            graph.replay()

    recording = record(body)
    (step,) = [program for program in recording.programs if program.kind == "step"]
    assert operators(list(recording.ran(step))) == ["aten::exp", "aten::sin", "aten::relu", "aten::mm"]


def test_a_capture_inside_a_custom_operator_is_none_of_its_calls(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        with recorder.step("decode"):
            torch.exp(X)
            inside(lambda: captured(kind, lambda: torch.ops.kcg.leaf(X)))
            torch.sin(X)

    recording = record(body)
    assert operators(recording.calls) == ["aten::exp", "kcg::call", "aten::sin"]
    assert {call.kind for call in recording.calls} == {"kernel"}


def test_a_replay_inside_a_custom_operator_makes_it_a_region(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        graph = captured(kind, lambda: torch.ops.kcg.leaf(X))
        with recorder.step("decode"):
            inside(graph.replay)

    recording = record(body)
    assert {call.operator: call.kind for call in recording.calls if call.work} == {
        "kcg::call": "region",
        "kcg::leaf": "kernel",
        "aten::add.Tensor": "kernel",
    }


def test_a_capture_that_ends_inside_an_operator_that_it_saw_begin_cuts_nothing_off_the_step(
    kind: Any, record: Record
) -> None:
    """As a breakable graph does, which goes on eagerly."""

    def body(recorder: Any) -> None:
        graph = kind()
        with recorder.step("decode"):
            for function in (torch.exp, torch.sin, torch.tan):
                function(X)
            graph.capture_begin()
            inside(lambda: (torch.ops.kcg.leaf(X), graph.capture_end(), torch.cos(X)))
            graph.replay()

    recording = record(body)
    (step,) = [program for program in recording.programs if program.kind == "step"]
    assert operators([recording.calls[number] for number in step.calls])[:4] == [
        f"aten::{name}" for name in ("exp", "sin", "tan", "cos")
    ]
    (graph,) = [program for program in recording.programs if program.kind == "graph"]
    assert operators([recording.calls[number] for number in graph.calls]) == ["kcg::call", "kcg::leaf"]


def test_a_capture_that_outlives_the_operator_it_began_in_leaves_no_operator_open(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        graph = kind()
        inside(graph.capture_begin)
        relu()
        graph.capture_end()
        for _ in range(3):
            mm()
        torch.ops.kcg.leaf(X)
        graph.replay()

    recording = record(body)
    assert {call.operator: (call.kind, call.parent, call.total) for call in recording.calls if call.work} == {
        "aten::relu": ("kernel", None, 1),
        "aten::add.Tensor": ("kernel", None, 1),
        "kcg::call": ("kernel", None, 1),
        "aten::mm": ("kernel", None, 3),
        "kcg::leaf": ("kernel", None, 1),
    }


def test_two_threads_that_capture_at_once_keep_apart(kind: Any, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    meet = threading.Barrier(2, timeout=30)
    graphs: dict[str, Any] = {}

    def capture(name: str, body: Callable[[], None]) -> None:
        with torch.no_grad(), capturing(graphs.setdefault(name, kind())):
            meet.wait()
            for _ in range(50):
                body()
            meet.wait()
            body()

    threads = [threading.Thread(target=capture, args=pair) for pair in (("relu", relu), ("mm", mm))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.open()
    engine.step("decode", graphs["relu"].replay)
    engine.step("prefill", graphs["mm"].replay)
    expected = {("aten::relu", "decode", "graph"): 51, ("aten::mm", "prefill", "graph"): 51}
    assert counts(engine.close()) == expected


def test_a_graph_keeps_its_scalars_while_the_same_operator_drifts_eagerly(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        graphs = [captured(kind, lambda n=n: scaled(n)) for n in (2048, 4096)]
        for n in range(40):
            with recorder.step("decode"):
                scaled(n)
                graphs[n % 2].replay()

    recording = record(body)
    found = {str(call.args[1].value): call.counts for call in recording.kernels() if call.operator == "kcg::scaled"}
    assert {value: [(c.mode, c.count) for c in counts] for value, counts in found.items()} == {
        "2048": [("graph", 20)],
        "4096": [("graph", 20)],
        "Drift(type='number')": [("eager", 40)],
    }
