"""`kcap export PATH --to FORM`: turns in another tool's form, with their losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from kcap.schemas.flashinfer.agents import turns_in

LOAD = [{"timestamp": at, "input_length": 9, "output_length": 3, "session_id": "a"} for at in (0, 40)]


@pytest.fixture
def load(tmp_path: Path) -> Path:
    path = tmp_path / "load.jsonl"
    path.write_bytes(b"".join(orjson.dumps({**line, "note": 1}) + b"\n" for line in LOAD))
    return path


def test_a_load_is_written_in_another_form(load: Path, tmp_path: Path, kcap: Callable[..., Any]) -> None:
    ran = kcap("export", load, "--to", "opentelemetry", "-o", tmp_path / "out")
    assert ran.code == 0
    (written,) = set((tmp_path / "out").iterdir()) - {tmp_path / "out" / "loss.json"}
    assert turns_in(written)[0].turns == turns_in(load)[0].turns
    assert orjson.loads((tmp_path / "out" / "loss.json").read_bytes())["exported"] == 2
    assert "2 of 2 turns (100.0%) exported to opentelemetry" in ran.out
    assert "not read: 2 × note: no Turn has it" in ran.out


def test_a_form_that_can_hold_none_of_them_is_told(load: Path, tmp_path: Path, kcap: Callable[..., Any]) -> None:
    ran = kcap("export", load, "--to", "atif", "-o", tmp_path / "out")
    assert ran.code == 3 and "0 of 2 turns" in ran.out


def test_a_file_without_turns_and_an_output_of_another_kind_are_refused(
    load: Path, tmp_path: Path, kcap: Callable[..., Any]
) -> None:
    (tmp_path / "none.json").write_text("{}")
    assert kcap("export", tmp_path / "none.json", "--to", "atif", "-o", tmp_path / "out").code == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    assert kcap("export", load, "--to", "atif", "-o", tmp_path / "full", "--force").code == 2
    ran = kcap("export", load, "--to", "atif", "-o", tmp_path / "out", "--no-check", "--trust")
    assert ran.code == 2 and "--check, --trust: --to atif is made of turns alone" in ran.err
