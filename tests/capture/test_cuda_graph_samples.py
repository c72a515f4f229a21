"""Samples of what graphs read: their buffers as they are at a replay. And what many replays, or a kill, leave."""

from __future__ import annotations

import functools
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import X, captured, counts, operators
from torch.multiprocessing.reductions import StorageWeakRef

import kcap
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.taps import cuda_graphs
from kcap.schemas.recording.recording import Recording

Record = Callable[..., Recording]
pytestmark = pytest.mark.usefixtures("no_gradients")
Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("kcs", "DEF") as lib:
        lib.define("attend(Tensor q, Tensor seq_lens, Tensor[] block_tables, Tensor token_ids) -> Tensor")
        lib.impl("attend", lambda q, lens, tables, ids: q + 1, "CPU")
        lib.define("advance(Tensor(a!) seq_lens) -> ()")
        lib.impl("advance", lambda lens: None, "CPU")
        yield lib


def attend(lens: torch.Tensor, *tables: torch.Tensor) -> None:
    torch.ops.kcs.attend(X, lens, list(tables), torch.arange(4))


def seen(recording: Recording) -> list[tuple[str, dict[str, list[int]]]]:
    """Each Sample's phase and values, by the arguments' paths."""
    found = []
    for sample in recording.samples:
        values = {path: recording.value(tensor).tolist() for path, tensor in sample.tensors.items()}
        found.append((sample.phase, values))
    return found


def test_samples_hold_what_the_buffers_hold_at_the_replay_not_at_the_capture(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        lens, table = torch.full((2,), 999), torch.full((2, 2), 999, dtype=torch.int32)
        graph = captured(kind, lambda: attend(lens, table[:, :1], table[0]))
        for n in (1, 2):
            lens.fill_(n)
            table.copy_(torch.tensor([[n, 2 * n], [3 * n, 4 * n]]))
            with recorder.step("decode"):
                graph.replay()
        lens.fill_(7)
        with recorder.step("prefill"):
            graph.replay()

    recording = record(body)
    assert seen(recording) == [
        ("prefill", {"1": [7, 7], "2.0": [[2], [6]], "2.1": [2, 4]}),
        ("decode", {"1": [1, 1], "2.0": [[1], [3]], "2.1": [1, 2]}),
        ("decode", {"1": [2, 2], "2.0": [[2], [6]], "2.1": [2, 4]}),
    ]
    assert [sample.step for sample in recording.samples] == [2, 0, 1]


def test_samples_hold_where_a_graphs_tensors_begin_whose_values_nobody_keeps(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        rows = torch.zeros(4, 4)
        one, other = rows[:2], rows[2:]  # from these on it is known that its offsets drift
        graph = captured(kind, lambda: (torch.relu(one), torch.relu(other), torch.relu(rows[3])))
        with recorder.step("decode"):
            graph.replay()

    recording = record(body)
    (alone,) = (call.id for call in recording.calls if getattr(call.args[0].value, "shape", ()) == (4,))
    assert [(one.step, one.offsets) for one in recording.samples if one.call == alone] == [(0, {"0": 12})]


def freed(buffer: torch.Tensor) -> list[torch.Tensor]:
    return []


def emptied(buffer: torch.Tensor) -> list[torch.Tensor]:
    buffer.untyped_storage().resize_(0)
    return [buffer]


@pytest.mark.parametrize("end", [freed, emptied])
def test_a_buffer_whose_memory_is_gone_at_the_replay_is_not_read(
    end: Callable[[torch.Tensor], list[torch.Tensor]], kind: Any, record: Record
) -> None:
    size = 1 << 20  # large enough that the allocator gives it back: to read it would be a crash

    def body(recorder: Any) -> None:
        lens, table = torch.ones(2, dtype=torch.int32), torch.ones(size, dtype=torch.int32)
        graph = captured(kind, functools.partial(attend, lens, table))
        kept = end(table)
        del table
        with recorder.step("decode"):
            graph.replay()
        del kept

    assert seen(record(body)) == [("decode", {"1": [1, 1]})]


def in_memory_of_graphs(monkeypatch: pytest.MonkeyPatch, *tensors: torch.Tensor) -> None:
    ranges = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors]
    monkeypatch.setattr(cuda_graphs, "memory_of_graphs", lambda: [(0, 8), *ranges])


def fills(kind: Any, *tensors: torch.Tensor) -> None:
    """A launch of a graph adds one to each."""
    launch = kind.replay

    def replay(graph: Any) -> Any:
        for tensor in tensors:
            tensor.add_(1)
        return launch(graph)

    kind.replay = replay


def test_what_a_graph_computes_itself_is_read_after_its_launch_and_all_else_before(
    kind: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens, table = torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    in_memory_of_graphs(monkeypatch, table)
    fills(kind, lens, table)

    def body(recorder: Any) -> None:
        graph = captured(kind, lambda: attend(lens, table))
        for _ in range(2):
            with recorder.step("decode"):
                graph.replay()

    found = [("decode", {"1": [1, 1], "2.0": [2, 2]}), ("decode", {"1": [2, 2], "2.0": [3, 3]})]
    recording = record(body)
    assert seen(recording) == found and [sample.step for sample in recording.samples] == [0, 1]


def test_a_capture_gives_memory_that_is_sampled_to_nothing_else_before_it_ends(kind: Any, record: Record) -> None:
    tables: list[StorageWeakRef] = []

    def layer() -> None:
        table = torch.ones(2, dtype=torch.int32)
        tables.append(StorageWeakRef(table.untyped_storage()))
        attend(torch.ones(2, dtype=torch.int32), table)

    def body(recorder: Any) -> None:
        gone: list[bool] = []
        captured(kind, layer, layer, layer, lambda: gone.extend(table.expired() for table in tables))
        assert gone == [False, True, True], "of a call its first invocation is sampled"
        assert all(table.expired() for table in tables)

    record(body)


def test_memory_that_a_tensor_only_points_to_may_be_anothers_and_is_not_read(
    kind: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens, held = torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    in_memory_of_graphs(monkeypatch, held)

    def body(recorder: Any) -> None:
        pointing = torch.frombuffer(held.numpy(), dtype=torch.int32)
        assert pointing.data_ptr() == held.data_ptr()
        graph = captured(kind, lambda: attend(lens, pointing))
        with recorder.step("decode"):
            graph.replay()

    assert seen(record(body)) == [("decode", {"1": [1, 1]})]


def test_what_is_written_again_later_in_the_graph_is_not_read(
    kind: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens, table = torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    in_memory_of_graphs(monkeypatch, lens, table)

    def body(recorder: Any) -> None:
        graph = captured(kind, lambda: (torch.ops.kcs.advance(table), attend(lens, table), torch.ops.kcs.advance(lens)))
        with recorder.step("decode"):
            graph.replay()

    assert seen(record(body)) == [("decode", {"2.0": [1, 1]})]


def test_of_more_than_a_launch_may_copy_the_smallest_are_kept(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        large = [torch.ones(7 << 18, dtype=torch.int32) for _ in range(2)]
        small = torch.ones(2, dtype=torch.int32)
        graph = captured(kind, lambda: attend(large[0], large[1]), lambda: attend(small, small))
        with recorder.step("decode"):
            graph.replay()

    kept = [sorted(values) for _, values in seen(record(body))]
    assert sorted(kept) == [["1"], ["1", "2.0"]], "7 MiB of 8 are left for one of two"


def test_the_memory_of_a_graph_is_known_at_its_first_launch_right_after_another_was_captured(
    kind: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [torch.zeros(n, dtype=torch.int32) for n in (1, 2, 3)]
    captured_so_far: list[torch.Tensor] = []
    memory = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in tables]
    monkeypatch.setattr(cuda_graphs, "memory_of_graphs", lambda: memory[: len(captured_so_far)])
    fills(kind, *tables)

    def body(recorder: Any) -> None:
        for table in tables:
            captured_so_far.append(table)
            graph = captured(kind, functools.partial(attend, torch.ones(2, dtype=torch.int32), table))
            with recorder.step("decode"):
                graph.replay()

    assert [values["2.0"] for _, values in seen(record(body))] == [[1], [2, 2], [3, 3, 3]]


def test_a_launch_that_fails_leaves_no_sample_of_what_it_would_have_computed(
    kind: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens, table = torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    in_memory_of_graphs(monkeypatch, table)

    def body(recorder: Any) -> None:
        graph = captured(kind, lambda: attend(lens, table))
        kind.fail = "replay"
        with recorder.step("decode"), pytest.raises(RuntimeError):
            graph.replay()
        kind.fail = ""
        table.fill_(5)
        with recorder.step("decode"):
            graph.replay()

    recording = record(body)
    assert seen(recording) == [("decode", {"1": [1, 1], "2.0": [5, 5]})]
    assert [sample.step for sample in recording.samples] == [1]


def test_where_tensors_begin_takes_no_place_of_values_that_a_graph_makes(
    kind: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a call whose integers are the graph's own, what was read of it eagerly is all that is known."""
    rows, lens = torch.zeros(4, 4), torch.ones(2, dtype=torch.int32)
    private: list[tuple[int, int]] = [(0, 8)]
    monkeypatch.setattr(cuda_graphs, "memory_of_graphs", lambda: private)

    def look(n: int) -> None:
        torch.ops.kcs.attend(rows[n], lens, [], torch.arange(4))

    def body(recorder: Any) -> None:
        for n in (1, 2, 3, 1):
            with recorder.step("decode"):
                look(n)
        private.append((lens.data_ptr(), lens.data_ptr() + 8))
        graph = captured(kind, lambda: (look(1), look(2), look(3)))
        for _ in range(60):
            with recorder.step("decode"):
                graph.replay()

    recording = record(body)
    attended = {call.id for call in recording.calls if call.operator == "kcs::attend"}
    samples = [one for one in recording.samples if one.call in attended]
    assert len(samples) == 4 and all(one.tensors for one in samples), samples


def test_samples_of_a_long_run_are_spread_and_few(kind: Any, record: Record) -> None:
    def body(recorder: Any) -> None:
        lens = torch.zeros(1, dtype=torch.int64)
        graph = captured(kind, lambda: attend(lens))
        for n in range(400):
            lens.fill_(n)
            with recorder.step("decode"):
                graph.replay()

    recording = record(body)
    values = [values["1"][0] for _, values in seen(recording) if values]
    assert len(values) == 4
    assert values == [sample.step for sample in recording.samples if sample.tensors]
    assert max(values) > 50


MANY = """
import collections, itertools, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from fake_graphs import X, captured, graph_class
torch.cuda.CUDAGraph = kind = graph_class()
kind.replay = lambda graph: None
import kcap

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

def shard():
    (path,) = Path(sys.argv[2]).rglob("*.jsonl")
    return path.stat().st_size

with torch.no_grad(), kcap.record(sys.argv[2] + "/out") as recorder:
    graphs = [captured(kind, lambda: torch.mm(X, X), lambda: torch.relu(X)) for _ in range(2)]

    def replay(times):
        for graph in graphs:
            collections.deque(map(lambda _: graph.replay(), itertools.repeat(None, times)), maxlen=0)

    def step(times):
        with recorder.step("decode"):
            replay(times)

    replay(1000), step(50_000), step(50_000)
    before, size = rss(), shard()
    replay(100_000), step(50_000), step(50_000)
    print(rss() - before, shard() - size)
"""


def test_many_replays_leave_memory_and_shard_as_they_were(python: Python, tmp_path: Path) -> None:
    ran = python(MANY, Path(__file__).parent, tmp_path)
    assert ran.returncode == 0, ran.stderr
    grown, written = map(float, ran.stdout.split())
    assert grown < 4
    assert written < 1000
    recording = kcap.load(tmp_path / "out")
    assert counts(recording) == {
        ("aten::mm", "decode", "graph"): 400_000,
        ("aten::relu", "decode", "graph"): 400_000,
        ("aten::mm", "other", "graph"): 202_000,
        ("aten::relu", "other", "graph"): 202_000,
    }
    (graph,) = [program for program in recording.programs if program.kind == "graph"]
    assert {count.phase: count.count for count in graph.counts} == {"decode": 400_000, "other": 202_000}
    assert graph.captured == 2


KILLED = """
import os, signal, sys
import torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fake_graphs import Engine, X, captured, graph_class
torch.cuda.CUDAGraph = kind = graph_class()
with torch.no_grad():
    engine = Engine(Path(sys.argv[2]))
    graph = captured(kind, lambda: torch.mm(X, X), lambda: torch.relu(X))
    engine.open()
    for _ in range(7):
        engine.step("decode", graph.replay, graph.replay)
    late = captured(kind, lambda: torch.exp(X))
    engine.step("decode", late.replay, graph.replay, lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_kill_leaves_the_replays_of_every_step_that_had_ended(python: Python, tmp_path: Path) -> None:
    assert python(KILLED, Path(__file__).parent, tmp_path).returncode == -signal.SIGKILL
    recording = fold_session(Session(str(tmp_path / "shards")), tmp_path / "out")
    assert counts(recording) == {("aten::mm", "decode", "graph"): 14, ("aten::relu", "decode", "graph"): 14}
    assert recording.metadata.steps == {"decode": 7}
    assert not recording.metadata.complete
    assert {program.kind for program in recording.programs} == {"graph", "step"}
    assert operators(recording.calls) == ["aten::mm", "aten::relu"]
