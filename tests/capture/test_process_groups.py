"""The process groups that collectives are given: their size, and this process's rank in them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

import kcap
from kcap.capture.window.hooking import Groups
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.values import Group, Value, decode, encode

Record = Callable[..., Recording]
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
PROGRAM = """
import sys
import torch, kcap
import torch.distributed as dist
import torch.distributed._functional_collectives
rank, size, port, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
alone = [dist.new_group([r]) for r in range(size)][rank]
named = dist.new_group(list(range(size)), group_desc="mesh_tp")
x, parts = torch.full((4,), float(rank + 1)), [torch.zeros(4) for _ in range(size)]
with torch.no_grad(), kcap.record(f"{out}/{rank}") as recorder, recorder.step("decode"):
    dist.all_reduce(x)
    dist.all_reduce(x, group=alone)
    dist.all_gather(parts, x)
    dist.barrier()
    torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", named.group_name)
assert x.tolist() == [sum(range(1, size + 1))] * 4, x
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=[1, 2])
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    """The Recordings of all ranks of a gloo group of this size."""
    directory = tmp_path_factory.mktemp(f"world{request.param}")
    (directory / "program.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = [sys.executable, str(directory / "program.py")]
    ranks = [
        subprocess.Popen([*words, str(rank), str(request.param), str(port), str(directory)], stderr=subprocess.PIPE)
        for rank in range(request.param)
    ]
    try:
        for process in ranks:
            _, error = process.communicate(timeout=120)
            assert process.returncode == 0, error.decode()
    finally:
        for process in ranks:
            process.kill()
    return [kcap.load(directory / str(rank)) for rank in range(request.param)]


def groups(recording: Recording, operator: str) -> list[Group]:
    """The groups that calls of `operator` were given."""
    found = [call for call in recording.calls if call.operator.split(".")[0] == operator]
    return [arg.value for call in found for arg in call.args if isinstance(arg.value, Group)]


def test_a_collective_tells_the_size_of_its_group_and_the_rank_in_it(worlds: list[Recording]) -> None:
    for rank, recording in enumerate(worlds):
        assert groups(recording, "c10d::allgather_") == [Group(len(worlds), rank, "world")]
        assert groups(recording, "c10d::barrier") == [Group(len(worlds), rank, "world")]


def test_a_functional_collective_tells_its_group_and_what_the_program_calls_it(worlds: list[Recording]) -> None:
    for rank, recording in enumerate(worlds):
        assert groups(recording, "_c10d_functional::all_reduce") == [Group(len(worlds), rank, "mesh_tp")]


def test_a_program_under_torchrun_is_recorded_under_its_rank(worlds: list[Recording]) -> None:
    for rank, recording in enumerate(worlds):
        assert recording.metadata.world_size == len(worlds)
        assert {count.rank for call in recording.calls for count in call.counts} == {rank}
        assert [(one.rank, one.steps, one.ended) for one in recording.metadata.ranks] == [(rank, {"decode": 1}, True)]


def test_collectives_over_groups_that_differ_are_different_calls_and_others_one(worlds: list[Recording]) -> None:
    for rank, recording in enumerate(worlds):
        reduces = [call.total for call in recording.calls if call.operator == "c10d::allreduce_"]
        found = list(zip(groups(recording, "c10d::allreduce_"), reduces, strict=True))
        by_functional = Group(len(worlds), rank, "mesh_tp")
        assert found == [(Group(len(worlds), rank, "world"), 1), (Group(1, 0), 1), (by_functional, 1)]


def test_a_program_with_collectives_is_whole(worlds: list[Recording]) -> None:
    assert all(recording.metadata.complete and recording.metadata.steps == {"decode": 1} for recording in worlds)


HANDLE = 0x7F00_1234_5678


def test_a_group_by_its_name_or_handle_reads_as_the_group(record: Record) -> None:
    """As vLLM's operators are given theirs."""

    def body(session: Any) -> None:
        recorder = session._window.recorder
        recorder.group("tp:0", 0, 4, 3, "tp")
        recorder.group("", HANDLE, 8, 5)
        recorder.group("handle/1", 0, 2, 1, "pp")
        externals = session._window.taps.externals
        with session.step("decode"):
            torch.ops.kcgroups.reduce(torch.ones(2), "tp:0", HANDLE)
            torch.ops.kcgroups.reduce(torch.ones(2), "ep:0", HANDLE + 1)
            torch.ops.kcgroups.reduce(torch.ones(2), "c10d/1", 1)
            externals.enter("lib::reduce", (("group", "handle", "groups"), ("tp:0", HANDLE, ["tp:0", 1])))
            externals.leave()

    with torch.library._scoped_library("kcgroups", "DEF") as lib:
        lib.define("reduce(Tensor x, str group_name, int handle) -> Tensor")
        lib.impl("reduce", lambda x, name, handle: x.clone(), "CPU")
        recording = record(body)
    found = [[arg.value for arg in call.args] for call in recording.calls if "reduce" in call.operator]
    by_name, unknown, small = (values[1:] for values in found[:3])
    tensor_parallel = Group(4, 3, "tp")
    assert (by_name, unknown) == ([tensor_parallel, Group(8, 5)], ["ep:0", HANDLE + 1])
    assert small == ["c10d/1", Group(2, 1, "pp")], "a small number is a group only where it is called a handle"
    assert found[3:] == [[tensor_parallel, Group(8, 5), [tensor_parallel, 1]]]


@pytest.mark.parametrize("group", [Group(1, 0), Group(64, 63, "tp")])
def test_a_group_reads_back_from_its_words(group: Group) -> None:
    words: Any = {"group": {"size": group.size, "rank": group.rank} | ({"name": group.name} if group.name else {})}
    assert encode(group) == words and decode(words) == group and decode([words]) == [group]


BROKEN: list[Any] = [
    {"group": "tp"},
    {"group": {"size": 2}},
    {"group": {"size": 2, "rank": 2}},
    {"group": {"size": 2, "rank": -1}},
    {"group": {"size": 2.0, "rank": 0}},
    {"group": {"size": True, "rank": False}},
    {"group": {"size": 2, "rank": 0, "name": 7}},
    {"group": {"size": 1, "rank": 0}, "more": 1},
]


@pytest.mark.parametrize("words", BROKEN, ids=str)
def test_words_that_are_no_group_are_refused(words: Value) -> None:
    with pytest.raises(ValueError):
        decode(words)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An engine's rank 1 of 2; `heard`: what its recorder was told."""
    shared = SimpleNamespace(ca_comm=None, dist_module=SimpleNamespace(handle=0))
    group = SimpleNamespace(
        world_size=2, rank_in_group=1, ranks=[4, 5], device_communicator=shared, device_group=None,
        cpu_group=SimpleNamespace(group_name="7"),
    )  # fmt: skip
    state = SimpleNamespace(_groups={"tp:0": lambda: group, "gone:0": lambda: None})
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    return SimpleNamespace(group=group, state=state, window=SimpleNamespace(recorder=None), heard=[], lines=[])


def record_in(engine: SimpleNamespace) -> None:
    line = lambda text: engine.lines.append(orjson.loads(text))  # noqa: E731
    engine.window.recorder = SimpleNamespace(group=lambda *known: engine.heard.append(known), line=line)


def test_an_engines_groups_are_told_before_its_first_graph(engine: SimpleNamespace) -> None:
    """An all-reduce in a graph names its group by a handle, which has to be known when the graph is captured."""
    groups = Groups(engine.window)
    groups.tell()
    record_in(engine)
    groups.tell()
    engine.group.device_communicator.ca_comm = SimpleNamespace(_ptr=77)
    engine.state._groups["pp:0"] = lambda: engine.group
    groups.tell()
    assert [known for known in engine.heard if "/" not in known[0]] == [
        ("tp:0", 0, 2, 1, "tp"),
        ("pp:0", 77, 2, 1, "pp"),
    ]


def test_an_engines_group_is_known_by_c10ds_name_and_by_its_shared_memorys_number(engine: SimpleNamespace) -> None:
    record_in(engine)
    Groups(engine.window).tell()
    assert engine.heard[1:] == [("handle/0", 0, 2, 1, "tp"), ("c10d/7", 0, 2, 1, "tp")]


class Unready:
    @property
    def group_name(self) -> str:
        raise RuntimeError("no backend")


def test_a_group_that_c10d_cannot_name_yet_is_told_all_the_same(engine: SimpleNamespace) -> None:
    record_in(engine)
    engine.group.device_group, engine.group.cpu_group = Unready(), None
    Groups(engine.window).tell()
    assert engine.heard == [("tp:0", 0, 2, 1, "tp"), ("handle/0", 0, 2, 1, "tp")]


def test_the_ranks_of_groups_of_more_than_one_are_written_down_and_not_those_of_the_world(
    engine: SimpleNamespace,
) -> None:
    record_in(engine)
    alone = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[5])
    engine.state._groups |= {"world:0": lambda: engine.group, "pp:0": lambda: alone}
    Groups(engine.window).tell()
    assert engine.lines == [{"t": "group", "name": "tp", "rank": 1, "ranks": [4, 5]}]
