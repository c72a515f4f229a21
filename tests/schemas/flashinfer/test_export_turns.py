"""`kcap export PATH --to FORM`: turns in another tool's form, with their losses."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from kcap.cli import main
from kcap.schemas.flashinfer.agents import turns_in

LOAD = [{"timestamp": at, "input_length": 9, "output_length": 3, "session_id": "a"} for at in (0, 40)]


def export(path: Path, form: str, output: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", str(path), "--to", form, "-o", str(output), *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def load(tmp_path: Path) -> Path:
    path = tmp_path / "load.jsonl"
    path.write_bytes(b"".join(orjson.dumps({**line, "note": 1}) + b"\n" for line in LOAD))
    return path


def test_a_load_is_written_in_another_form(load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(load, "opentelemetry", tmp_path / "out") == 0
    (written,) = set((tmp_path / "out").iterdir()) - {tmp_path / "out" / "loss.json"}
    assert turns_in(written)[0].turns == turns_in(load)[0].turns
    assert orjson.loads((tmp_path / "out" / "loss.json").read_bytes())["exported"] == 2
    said = capsys.readouterr().out
    assert "2 of 2 turns (100.0%) exported to opentelemetry" in said and "not read: 2 × note: no Turn has it" in said


def test_a_form_that_can_hold_none_of_them_is_told(
    load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(load, "atif", tmp_path / "out") == 3
    assert "0 of 2 turns" in capsys.readouterr().out


def test_a_file_without_turns_and_an_output_of_another_kind_are_refused(load: Path, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}")
    assert export(tmp_path / "none.json", "atif", tmp_path / "out") == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    assert export(load, "atif", tmp_path / "full", "--force") == 2
