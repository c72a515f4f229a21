"""The process groups that collectives are given: their size, and this process's rank in them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kcap
from kcap.capture.engines.vllm import Groups
from kcap.schemas.recording import Recording
from kcap.schemas.values import Group, Value, decode, encode

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
x, parts = torch.full((4,), float(rank + 1)), [torch.zeros(4) for _ in range(size)]
with torch.no_grad(), kcap.record(f"{out}/{rank}") as recorder, recorder.step("decode"):
    dist.all_reduce(x)
    dist.all_reduce(x, group=alone)
    dist.all_gather(parts, x)
    dist.barrier()
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
        assert groups(recording, "c10d::allgather_") == [Group(len(worlds), rank)]
        assert groups(recording, "c10d::barrier") == [Group(len(worlds), rank)]


def test_collectives_over_groups_that_differ_are_different_calls_and_others_one(worlds: list[Recording]) -> None:
    for rank, recording in enumerate(worlds):
        reduces = [call.total for call in recording.calls if call.operator == "c10d::allreduce_"]
        found = list(zip(groups(recording, "c10d::allreduce_"), reduces, strict=True))
        assert found == ([(Group(1, 0), 2)] if len(worlds) == 1 else [(Group(2, rank), 1), (Group(1, 0), 1)])


def test_a_program_with_collectives_is_whole(worlds: list[Recording]) -> None:
    assert all(recording.metadata.complete and recording.metadata.steps == {"decode": 1} for recording in worlds)


HANDLE = 0x7F00_1234_5678


def test_a_group_by_its_name_or_handle_reads_as_the_group(record: Record) -> None:
    """As vLLM's operators are given theirs."""

    def body(session: Any) -> None:
        recorder = session._window.recorder
        recorder.group("tp:0", 0, 4, 3)
        recorder.group("", HANDLE, 8, 5)
        externals = session._window.taps.externals
        with session.step("decode"):
            torch.ops.kcgroups.reduce(torch.ones(2), "tp:0", HANDLE)
            torch.ops.kcgroups.reduce(torch.ones(2), "ep:0", HANDLE + 1)
            externals.enter("lib::reduce", [("group", "tp:0"), ("handle", HANDLE), ("groups", ["tp:0", 1])])
            externals.leave()

    with torch.library._scoped_library("kcgroups", "DEF") as lib:
        lib.define("reduce(Tensor x, str group_name, int handle) -> Tensor")
        lib.impl("reduce", lambda x, name, handle: x.clone(), "CPU")
        recording = record(body)
    found = [[arg.value for arg in call.args] for call in recording.calls if "reduce" in call.operator]
    assert [values[1:] for values in found[:2]] == [[Group(4, 3), Group(8, 5)], ["ep:0", HANDLE + 1]]
    assert found[2:] == [[Group(4, 3), Group(8, 5), [Group(4, 3), 1]]]


@pytest.mark.parametrize("group", [Group(1, 0), Group(64, 63)])
def test_a_group_reads_back_from_its_words(group: Group) -> None:
    words = {"group": {"size": group.size, "rank": group.rank}}
    assert encode(group) == words and decode(words) == group and decode([words]) == [group]


BROKEN: list[Any] = [
    {"group": "tp"},
    {"group": {"size": 2}},
    {"group": {"size": 2, "rank": 2}},
    {"group": {"size": 2, "rank": -1}},
    {"group": {"size": 2.0, "rank": 0}},
    {"group": {"size": True, "rank": False}},
    {"group": {"size": 1, "rank": 0}, "more": 1},
]


@pytest.mark.parametrize("words", BROKEN, ids=str)
def test_words_that_are_no_group_are_refused(words: Value) -> None:
    with pytest.raises(ValueError):
        decode(words)


def test_an_engines_groups_are_told_before_its_first_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce in a graph names its group by a handle, which has to be known when the graph is captured."""
    told: list[tuple[Any, ...]] = []
    group = SimpleNamespace(world_size=2, rank_in_group=1, device_communicator=SimpleNamespace(ca_comm=None))
    state = SimpleNamespace(_groups={"tp:0": lambda: group, "gone:0": lambda: None})
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    window = SimpleNamespace(recorder=None)
    groups = Groups(window)  # type: ignore[arg-type]
    groups.tell()
    assert told == []
    window.recorder = SimpleNamespace(group=lambda *known: told.append(known))
    groups.tell()
    group.device_communicator.ca_comm = SimpleNamespace(_ptr=77)
    state._groups["pp:0"] = lambda: group
    groups.tell()
    assert told == [("tp:0", 0, 2, 1), ("pp:0", 77, 2, 1)]
