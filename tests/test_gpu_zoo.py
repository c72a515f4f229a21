"""What `scripts/gpu/zoo.py` says of each model, and that it goes on whatever becomes of one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcap.capture.controller.models import find_config
from kcap.schemas.recording.recording import Recording, write_recording
from kcap.schemas.recording.records import Argument, Call, Count, Metadata
from kcap.schemas.recording.values import TensorSpec

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"
REACHED = {"covered": 0.99, "families": 0.96, "replayed": 1.0, "verified": 0.95}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("zoo", "zoo_programs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("zoo")


def test_each_model_is_one_that_kcap_has(script: Any) -> None:
    programs = importlib.import_module("zoo_programs")
    for model in script.ZOO.values():
        assert find_config(model.id) is not None, model.id
        assert model.program is None or callable(getattr(programs, model.program))


@pytest.mark.parametrize(
    ("figures", "kinds", "within", "passed"),
    [
        (REACHED, None, 0, True),
        (REACHED, 3, 3, True),
        (REACHED, 3, 2, False),
        (REACHED, 0, 0, False),
        ({**REACHED, "covered": 0.96}, None, 0, False),
        ({**REACHED, "verified": None}, None, 0, False),
    ],
)
def test_a_model_passes_with_all_its_figures(
    script: Any, figures: dict[str, float | None], kinds: int | None, within: int, passed: bool
) -> None:
    findings = script.Findings("gemma-2", figures, kinds=kinds, kinds_within=within, worst_error=0.021)
    assert findings.passed == passed
    row = findings.row()
    assert "99.0%" in row or "96.0%" in row
    assert kinds is None or f"{within} of {kinds}, 2.1%" in row


class Answers:
    """In the place of kcap: what each of its commands does."""

    def __init__(self, script: Any, monkeypatch: pytest.MonkeyPatch, output: Path, recorded: bool = True) -> None:
        self.commands: list[list[str]] = []
        self.recorded = recorded
        self.zoo = script.Zoo(output, time.monotonic() + 60, 60.0, gpus=0)
        monkeypatch.setattr(self.zoo, "_kcap", self.run)

    def stages(self, findings: Any, *stages: str) -> Any:
        for stage in stages:
            self.zoo.run([findings], stage, jobs=1)
        self.zoo.shares(findings)
        return findings

    def run(self, findings: Any, *words: str) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(words))
        return subprocess.CompletedProcess(words, *getattr(self, words[0])(words))

    def record(self, words: tuple[str, ...]) -> tuple[int, str, str]:
        if self.recorded:
            tensors = {name: TensorSpec((4, 4), "float32", storage=i) for i, name in enumerate(("self", "mat2"))}
            call = Call(
                id=0,
                operator="aten::mm",
                args=[Argument(name=name, value=spec) for name, spec in tensors.items()],
                counts=[Count(phase="decode", count=3)],
            )
            only_profiled = call.model_copy(update={"id": 1, "operator": "aten::mm.out", "counts": []})
            write_recording(Path(words[words.index("-o") + 1]), Metadata(), [call, only_profiled])
        return 0 if self.recorded else 1, "", "kcap: the model's own last line\n"

    def replay(self, words: tuple[str, ...]) -> tuple[int, str, str]:
        part = {"reasons": [{"reason": "because", "calls": 1, "count": 1}]}
        return 3, json.dumps({"replayed": {"share": 0.75}, "skipped": part, "failed": {"reasons": []}}), ""

    def export(self, words: tuple[str, ...]) -> tuple[int, str, str]:
        folder = Path(words[words.index("-o") + 1])
        folder.mkdir(exist_ok=True)
        lines = [
            {"status": status, "definition": status} for status in ("agrees", "agrees", "agrees", "differs", "skipped")
        ]
        (folder / "checks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 0, "", ""


def test_the_stages_fill_the_row_of_a_model(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = Answers(script, monkeypatch, tmp_path)
    findings = answers.stages(script.Findings("opt"), "record", "fidelity", "replay", "export")
    assert not findings.failure
    assert findings.figures == {"families": 1.0, "replayed": 0.75, "verified": 0.75} and findings.kinds is None
    assert [words[0] for words in answers.commands] == ["record", "replay", "export"]
    assert any("because" in note for note in findings.notes) and any(
        note.startswith("differs") for note in findings.notes
    )
    assert not any("in no family" in note for note in findings.notes), "what was not counted has none"
    assert isinstance(script.kcap.load(tmp_path / "opt.kcap"), Recording)


def test_the_second_time_there_are_other_pictures(script: Any) -> None:
    """Whose encoder runs in counted steps, too: vLLM keeps what it made of a picture."""
    programs, draw = importlib.import_module("zoo_programs"), np.random.default_rng(0)
    first, second = programs.pictures(draw), programs.pictures(draw)
    assert [picture.shape for picture in first] == [picture.shape for picture in second]
    assert not any((one == other).all() for one, other in zip(first, second, strict=True))


def test_a_model_that_the_engine_cannot_run_says_why(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = Answers(script, monkeypatch, tmp_path, recorded=False)
    findings = answers.stages(script.Findings("opt"), "record", "replay")
    assert "the model's own last line" in findings.row() and not findings.passed
    assert [words[0] for words in answers.commands] == ["record"]


@pytest.mark.parametrize("framework", ["vLLM", "SGLang"])
def test_what_a_program_runs_is_recorded_as_a_command(
    framework: str, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = Answers(script, monkeypatch, tmp_path)
    answers.zoo.framework, answers.zoo.given = framework, ["device=cpu"]
    answers.stages(script.Findings("lora"), "record")
    (words,) = answers.commands
    said = ["lora", "meta-llama/Llama-3.1-8B", "2", "--framework", framework, "--engine-arg", "device=cpu"]
    assert words[words.index("--") + 2 :][1:] == said


def test_where_time_is_measured_each_model_has_a_gpu_to_itself(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    zoo, at_once, most = script.Zoo(tmp_path, time.monotonic() + 60, 60.0, gpus=2), Counter[str](), Counter[str]()

    def stage(findings: Any) -> None:
        at_once[findings.gpu] += 1
        most[findings.gpu] = max(most[findings.gpu], at_once[findings.gpu])
        time.sleep(0.05)
        at_once[findings.gpu] -= 1

    monkeypatch.setattr(zoo, "replay", stage)
    for jobs in (1, 3):
        most.clear()
        zoo.run([script.Findings(str(number)) for number in range(8)], "replay", jobs)
        assert most == {"0": jobs, "1": jobs}


def test_what_takes_too_long_is_ended_with_all_that_it_started(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    zoo, file = script.Zoo(tmp_path, time.monotonic() + 60, 2.0, gpus=0), tmp_path / "alive"
    program = f"import time\nwhile True: open({str(file)!r}, 'a').write('.'); time.sleep(0.05)"
    script_file = tmp_path / "spawns"
    script_file.write_text(f'{sys.orig_argv[0]} -c "{program}" & wait\n')
    monkeypatch.setattr(script.subprocess, "Popen", partial(_popen, script.subprocess.Popen, str(script_file)))
    done = zoo._kcap(script.Findings("opt"), "record")
    assert done.returncode == 124 and "not done after 2 s" in done.stderr
    written = file.stat().st_size
    time.sleep(0.3)
    assert written and file.stat().st_size == written


def _popen(started: Any, program: str, command: list[str], **options: Any) -> Any:
    return started(["/bin/sh", program], **options)


def test_an_unknown_name_is_told_with_those_that_there_are() -> None:
    done = subprocess.run([sys.executable, str(SCRIPTS / "zoo.py"), "dodo"], capture_output=True, text=True)
    assert done.returncode == 2 and "no such model: dodo; there are" in done.stderr
