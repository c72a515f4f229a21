"""What `scripts/gpu/fidelity.py` makes of what `kcap replay --compare-engine` found, and `check.py` of that."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from kcap.schemas.recording.recording import Metadata, write_recording
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import StepCoverage

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("check", "counts", "outputs", "fidelity"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("fidelity"), importlib.import_module("check")


def kind(phase: str, tokens: int, sequences: int, *outside: str) -> dict[str, Any]:
    state = {"engine_us": 5000.0, "replayed_us": 4950.0, "error": 0.01}
    span = {"us": 5300.0, "waits_us": 100.0, "own_us": 5200.0}
    size = {"phase": phase, "tokens": tokens, "sequences": sequences, "mode": "full"}
    program = {"us": 5252.0, "over_span": 1.01}
    states = {"serving": state, "Program": state}
    return {**size, "states": states, "span": span, "program": program, "outside": list(outside)}


PREFILL, DECODE = kind("prefill", 4096, 1), kind("decode", 1, 1)


def printed(scripts: tuple[Any, Any], batch: int, kinds: list[dict[str, Any]]) -> list[Any]:
    return list(scripts[0].checks("eager-1", batch, {"kinds": kinds}))


def test_the_steps_asked_for_are_judged_and_no_others(scripts: tuple[Any, Any]) -> None:
    mixed = kind("mixed", 70, 9, "in total 80% off")
    decode, prefill = printed(scripts, 1, [PREFILL, mixed, DECODE])
    assert (decode.what, prefill.what) == ("eager-1, decode of 1, full steps", "eager-1, prefill of 4,096, full steps")
    assert decode.passed and prefill.passed
    both = "99.0% (1.0% off)"
    assert decode.found == f"5.000 ms; serving {both}; Program {both}; span 5.200 ms at 101.0%"


def test_a_kind_outside_the_bounds_fails(scripts: tuple[Any, Any]) -> None:
    rows = printed(scripts, 1, [PREFILL, kind("decode", 1, 1, "serving: lib::norm")])
    assert [row.passed for row in rows] == [False, True]


@pytest.mark.parametrize("kinds", [[], [kind("decode", 8, 8)]])
def test_a_step_that_was_not_profiled_fails(kinds: list[dict[str, Any]], scripts: tuple[Any, Any]) -> None:
    (row,) = printed(scripts, 16, kinds)
    assert (row.found, row.passed) == ("no such step was profiled", False)


def test_the_prefill_of_4096_is_that_of_one_sequence(scripts: tuple[Any, Any]) -> None:
    sixteen = kind("prefill", 4096, 16, "in total 80% off")
    rows = printed(scripts, 1, [sixteen, DECODE])
    assert [(row.what, row.passed) for row in rows] == [
        ("eager-1, decode of 1, full steps", True),
        ("eager-1, prefill of 4,096", False),
    ]


def test_every_batch_has_a_prompt_and_one_is_a_prefill_of_4096(scripts: tuple[Any, Any]) -> None:
    assert scripts[0].PROMPTS.keys() == {1, 16, 128}
    assert list(scripts[0].PROMPTS.values()).count(4096) == 1


def stand_in(scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, status: int = 0) -> list[tuple[str, ...]]:
    """What `kcap` is asked for; its replay ends with `status`."""
    asked: list[tuple[str, ...]] = []
    found = {"kinds": [PREFILL, DECODE, kind("decode", 16, 16), kind("decode", 128, 128)]}

    def run(*words: str, until: float) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        text = orjson.dumps(found).decode()
        return subprocess.CompletedProcess(words, status if words[0] == "replay" else 0, text)

    monkeypatch.setattr(scripts[0], "run", run)
    return asked


@pytest.mark.parametrize(("status", "passed"), [(0, True), (3, True), (1, False), (-11, False)])
def test_what_kcap_printed_is_read_also_where_it_is_outside(
    status: int, passed: bool, scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = stand_in(scripts, monkeypatch, status)
    rows = list(scripts[0].part("eager", [1], tmp_path, None, until=time.monotonic() + 60))
    assert [words[0] for words in asked] == ["record", "replay"]
    assert all(row.passed for row in rows) is passed


def after(words: tuple[str, ...], option: str) -> str:
    return words[words.index(option) + 1]


def test_one_engine_runs_every_batch_of_a_mode(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = stand_in(scripts, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--output", str(tmp_path), "--quick"])
    with pytest.raises(SystemExit) as ended:
        scripts[0].main()
    assert [words[0] for words in asked] == ["record", "replay"] * 2
    for words, mode in ((asked[0], "eager"), (asked[2], "compiled")):
        assert [after(words, f"--{name}") for name in ("num-prompts", "input-len")] == ["1,16,128", "4096,256,128"]
        assert ("--eager" in words) is (mode == "eager") and after(words, "--num-layers") == "4"
        assert after(words, "-o") == str(tmp_path / f"fidelity-{mode}.kcap")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ok ")]
    assert (len(rows), ended.value.code) == (8, 0), "of each mode three decodes and a prefill"


def test_chosen_batches_are_asked_for_once_and_in_order(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = stand_in(scripts, monkeypatch)
    chosen = ("--batch", "16", "--batch", "1", "--batch", "16", "--mode", "eager")
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--output", str(tmp_path), *chosen])
    with pytest.raises(SystemExit):
        scripts[0].main()
    assert [after(asked[0], f"--{name}") for name in ("num-prompts", "input-len")] == ["1,16", "4096,256"]
    assert [words[0] for words in asked] == ["record", "replay"]


def a_recording(path: Path, decodes: tuple[int, ...], prompt: int = 4096, profiled: bool = True, **more: Any) -> None:
    known = {"layers_recorded": 32, "layers_model": 32, **more}
    write_recording(path, Metadata.model_validate(known), [])
    sizes = [("prefill", 1, prompt), *(("decode", number, number) for number in decodes)]
    steps = [StepCoverage(index=0, phase=phase, sequences=one, tokens=all_) for phase, one, all_ in sizes]
    if profiled:
        coverage.write(path / coverage.FILE, steps)


def made_again(scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, folder: Path, layers: int | None) -> bool:
    """Whether the Recording that is there, perhaps, is not used."""
    asked = stand_in(scripts, monkeypatch)
    list(scripts[0].part("eager", [1, 16, 128], folder, layers, until=time.monotonic() + 60))
    assert asked[-1][0] == "replay"
    return asked[0][0] == "record"


def test_what_is_no_recording_is_recorded(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert made_again(scripts, monkeypatch, tmp_path, None)
    (tmp_path / "fidelity-eager.kcap").mkdir()
    assert made_again(scripts, monkeypatch, tmp_path, None)


@pytest.mark.parametrize(
    ("there", "again"),
    [
        ({"decodes": (1, 16, 128)}, False), ({"decodes": (1, 16)}, True), ({"decodes": (16, 128)}, True),
        ({"decodes": (1, 16, 128), "prompt": 256}, True), ({"decodes": (1, 16, 128), "complete": False}, True),
        ({"decodes": (1, 16, 128), "profiled": False}, True), ({"decodes": ()}, True),
    ],
)  # fmt: skip
def test_a_whole_recording_that_profiled_these_steps_is_used_again(
    there: dict[str, Any], again: bool, scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_recording(tmp_path / "fidelity-eager.kcap", **there)
    assert made_again(scripts, monkeypatch, tmp_path, None) is again


@pytest.mark.parametrize("recorded", [4, 32])
@pytest.mark.parametrize("layers", [4, None])
def test_a_recording_of_another_depth_is_not_used(
    layers: int | None, recorded: int, scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_recording(tmp_path / "fidelity-eager.kcap", (1, 16, 128), layers_recorded=recorded)
    assert made_again(scripts, monkeypatch, tmp_path, layers) is (recorded != (layers or 32))


def test_check_has_every_batch_recorded_by_one_engine(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, ...]] = []

    def run(*words: str, timeout: float) -> subprocess.CompletedProcess[str]:
        asked.append(words[2:])
        assert float(after(words, "--limit")) < timeout, "it has time to print its table"
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(scripts[1], "run", run)
    for quick in (True, False):
        scripts[1].Parts(tmp_path, quick).fidelity()
    end = ("--limit", "3600", "--output", str(tmp_path))
    assert asked == [("--quick", "--mode", "compiled", *end), end]


def test_check_reads_the_table_of_the_script(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = "noise\nok   eager-1, decode of 1  : 5 ms; span 5 ms at 101.0%\nBAD  compiled-1, decode of 1: none\n"
    monkeypatch.setattr(scripts[1], "run", lambda *words, **more: subprocess.CompletedProcess([], 1, lines, ""))
    rows = scripts[1].Parts(tmp_path, quick=True).fidelity()
    assert [(row.what.strip(), row.found, row.passed) for row in rows] == [
        ("eager-1, decode of 1", "5 ms; span 5 ms at 101.0%", True),
        ("compiled-1, decode of 1", "none", False),
    ]


def test_check_says_when_the_script_printed_nothing(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scripts[1], "run", lambda *words, **more: subprocess.CompletedProcess([], 2, "", ""))
    (row,) = scripts[1].Parts(tmp_path, quick=False).fidelity()
    assert (row.found, row.passed) == ("status 2", False)


def test_what_the_limit_leaves_no_time_for_is_told_and_not_tried(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    (row,) = scripts[0].part("compiled", [16], tmp_path, None, until=time.monotonic() - 1)
    assert (row.what, row.passed) == ("compiled", False)
    assert "not tried" in row.found and not list(tmp_path.iterdir())
