"""`kcap recover` of shards that anybody may have made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_lines import MATRIX, call, step_lines, write_shard

from kcap.capture.session import Session
from kcap.capture.shards.counts import KERNELS
from kcap.schemas.recording.recording import load

TEXT = b"raise SystemExit('this ran')\n"
NAME = hashlib.sha256(TEXT).hexdigest() + ".py"
NOTE = "its kernel sources are not sealed: look at them in kernels/, then pass --trust to replay"


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as an interrupted recording leaves it, with one kernel launched from a source."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    session = Session(str(tmp_path / "left" / "shards"))
    session.write()
    launch = {"kernel": NAME, "function": "k", "grid": [1]}
    write_shard(session, 0, [call(0, "triton::k", MATRIX, launch=launch), *step_lines([0])], [5])
    sources = Path(session.directory) / KERNELS
    sources.mkdir(exist_ok=True)
    (sources / NAME).write_bytes(TEXT)
    return tmp_path / "left"


def test_recover_does_not_seal_sources_that_it_did_not_record(
    left: Path, kcap: Callable[..., Any], tmp_path: Path
) -> None:
    ran = kcap("recover", left, "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    recording = load(tmp_path / "out")
    assert recording.metadata.seal is None
    assert NOTE in recording.metadata.notes
    assert not (tmp_path / "data").exists(), "no key is needed"


def test_what_was_recovered_is_replayed_with_trust_only(left: Path, kcap: Callable[..., Any], tmp_path: Path) -> None:
    kcap("recover", left, "-o", tmp_path / "out")
    ran = kcap("replay", tmp_path / "out", "-o", tmp_path / "m.jsonl")
    assert "--trust" in ran.out + ran.err


def test_recover_of_a_session_without_sources_says_nothing_of_them(
    left: Path, kcap: Callable[..., Any], tmp_path: Path
) -> None:
    (left / "shards" / KERNELS / NAME).unlink()
    kcap("recover", left, "-o", tmp_path / "out")
    assert NOTE not in load(tmp_path / "out").metadata.notes
