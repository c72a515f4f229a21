"""What a session's shards say of its ranks: numbers, places and groups, steps, and who has no end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from shard_lines import MATRIX, Line, call, step_lines, write_shard

from kcap.capture.controller.output import report_recording
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.window.process import rank_facts
from kcap.schemas.recording.recording import Recording


@pytest.fixture
def session(tmp_path: Path) -> Session:
    session = Session(str(tmp_path / "shards"), framework="vLLM")
    session.write()
    return session


def shard(
    session: Session, number: int, *more: Line, ran: list[int] | None = None, times: int = 5, **facts: Any
) -> None:
    """One process's: a step `times` times; `facts`: what its first line says besides."""
    headers = {"closed": facts.pop("closed", 1)}
    operators = [call(0, "x::a", MATRIX), call(1, "x::b", MATRIX)]
    stem = write_shard(session, number, [*operators, *more, *step_lines(ran or [0, 1])], [times], **headers)
    file = stem.with_suffix(".jsonl")
    first, *rest = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([orjson.dumps(orjson.loads(first) | facts) + b"\n", *rest]))


def group(name: str, rank: int, *ranks: int) -> Line:
    return {"t": "group", "name": name, "rank": rank, "ranks": list(ranks)}


def merged(session: Session, tmp_path: Path) -> Recording:
    return fold_session(session, tmp_path / "out")


def test_a_rank_stands_where_its_groups_have_it(session: Session, tmp_path: Path) -> None:
    shard(session, 3, group("tp", 1, 2, 3), group("pp", 1, 1, 3), world_size=4)
    (rank,) = merged(session, tmp_path).metadata.ranks
    assert (rank.places, rank.groups) == ({"tp": 1, "pp": 1}, {"tp": [2, 3], "pp": [1, 3]})
    assert (rank.steps, rank.ended) == ({"decode": 5}, True)


def test_replicas_that_are_worlds_of_their_own_have_the_ranks_of_one_world(session: Session, tmp_path: Path) -> None:
    """Their groups are numbered from 0 in each, as torch.distributed has them there."""
    for rank in range(4):
        replica, inner = divmod(rank, 2)
        shard(session, rank, group("tp", inner, 0, 1), world_size=2, places={"dp": replica})
    metadata = merged(session, tmp_path).metadata
    assert metadata.world_size == 4
    assert [(rank.rank, rank.places, rank.groups["tp"]) for rank in metadata.ranks] == [
        (0, {"dp": 0, "tp": 0}, [0, 1]),
        (1, {"dp": 0, "tp": 1}, [0, 1]),
        (2, {"dp": 1, "tp": 0}, [2, 3]),
        (3, {"dp": 1, "tp": 1}, [2, 3]),
    ]


def test_the_steps_of_replicas_add_and_those_of_one_replicas_ranks_are_the_same(
    session: Session, tmp_path: Path
) -> None:
    for rank in range(4):
        shard(session, rank, places={"dp": rank // 2}, times=[5, 5, 3, 3][rank])
    metadata = merged(session, tmp_path).metadata
    assert metadata.steps == {"decode": 8}
    assert sum(batch["steps"] for batch in metadata.batches) == 8


def test_where_there_is_one_replica_no_rank_says_which(session: Session, tmp_path: Path) -> None:
    for rank in (0, 1):
        shard(session, rank, group("tp", rank, 0, 1), places={"dp": 0})
    assert [rank.places for rank in merged(session, tmp_path).metadata.ranks] == [{"tp": 0}, {"tp": 1}]


@pytest.mark.parametrize("killed", [0, 1])
def test_processes_of_one_rank_are_one_rank(session: Session, tmp_path: Path, killed: int) -> None:
    for number, times in ((0, 5), (1, 2)):
        shard(session, number, times=times, rank=0, closed=int(number != killed))
    (rank,) = merged(session, tmp_path).metadata.ranks
    assert (rank.pid, rank.steps, rank.ended) == (100, {"decode": 7}, False)


def test_a_torn_group_is_left_out(session: Session, tmp_path: Path) -> None:
    shard(session, 0, group("tp", 2, 0, 1), {"t": "group", "name": "pp"})
    recording = merged(session, tmp_path)
    assert recording.metadata.ranks[0].groups == {}
    assert recording.metadata.notes == ["rank 0 (process 100): 2 torn lines left out"]


def test_ranks_that_ran_different_steps_are_reported(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, ran in ((0, [0, 1, 1]), (1, [0, 1])):
        shard(session, rank, group("tp", rank, 0, 1), ran=ran)
    recording = merged(session, tmp_path)
    (found,) = recording.metadata.disagreements
    assert [(one.operator, one.counts) for one in found.calls] == [("x::b", [10, 5])]
    assert recording.metadata.complete, "what ran is all here"
    report_recording(recording, tmp_path / "out")
    assert "kcap: ranks 0 and 1 must agree and did not in 5 and 5 decode steps: x::b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, (5, 8, 0)),  # replicas in one world: torch.distributed numbers them all
        ({"replica": 1}, (5, 8, 1)),
        ({"replica": 2, "apart": True}, (21, 24, 2)),
        ({"replica": 0, "apart": True, "replicas": 3}, (5, 24, 0)),
    ],
    ids=str,
)
def test_a_process_is_numbered_as_torchrun_counts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], told: tuple[int, int, int]
) -> None:
    world = {"is_available": lambda: True, "is_initialized": lambda: True}
    world |= {"get_rank": lambda: 5, "get_world_size": lambda: 8}
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(**world))
    monkeypatch.setattr("torch.distributed", SimpleNamespace(**world), raising=False)
    found = rank_facts(**given)
    assert (found["rank"], found["world_size"], found["places"]["dp"]) == told


def test_a_program_under_torchrun_has_its_rank_before_it_made_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert (rank_facts()["rank"], rank_facts()["world_size"]) == (0, 1), "these names alone may be anyone's"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (rank_facts()["rank"], rank_facts()["world_size"]) == (3, 4)


KILLED = """
import os, signal, sys, time
from pathlib import Path
import orjson, torch
from kcap.capture.session import read_session
from kcap.capture.window.process import rank_facts
from kcap.capture.window.window import StepShape, Window
session, rank = read_session(sys.argv[1]), int(os.environ["RANK"])
window = Window(session)
window.start(**rank_facts())
window.recorder.line(orjson.dumps({"t": "group", "name": "tp", "rank": rank, "ranks": [0, 1]}))
x = torch.ones(2, 2)
with torch.no_grad():
    for step in range(5):
        assert window.begin(StepShape("decode", [1], [10 + step]))
        torch.mm(x, x)
        torch.relu(x)
        if (rank, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        window.end()
window.close()
"""


def test_a_rank_that_is_killed_leaves_its_whole_steps_and_the_others_all_of_theirs(
    session: Session, tmp_path: Path
) -> None:
    def started(rank: int) -> subprocess.Popen[bytes]:
        known = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
        return subprocess.Popen([sys.executable, "-c", KILLED, str(session.file)], env={**os.environ, **known})

    processes = [started(rank) for rank in (0, 1)]
    assert [process.wait(timeout=120) for process in processes] == [0, -signal.SIGKILL]
    recording = merged(session, tmp_path)
    ranks = recording.metadata.ranks
    assert [(rank.rank, rank.steps, rank.ended) for rank in ranks] == [
        (0, {"decode": 5}, True),
        (1, {"decode": 3}, False),
    ]
    counted = {(call.operator, one.rank): one.count for call in recording.calls for one in call.counts}
    assert counted == {(name, rank): [5, 3][rank] for name in ("aten::mm", "aten::relu") for rank in (0, 1)}
    (note,) = recording.metadata.notes
    assert note.startswith(f"rank 1 (process {processes[1].pid}) ended without closing")
    assert not recording.metadata.complete
    assert recording.metadata.disagreements == [], "in the steps that both list they agree"
