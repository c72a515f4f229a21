"""What `kcap apply`, `run` and `ab` say of what they cannot do, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from applied_plans import plan_of, python_solution

from kcap.commands import run
from kcap.schemas.derive.derive import derive
from kcap.schemas.recording.recording import Recording
from kcap.schemas.results.applied import Engagement
from kcap.schemas.results.plan import plan_bytes, read_plan

Kcap = Callable[..., Any]
X = torch.randn(4, 8)


@pytest.fixture
def places(recording: Recording, tmp_path: Path) -> dict[str, Path]:
    """A plan, one that replaces nothing, the Recording and a folder that is nothing."""
    name = derive(recording).kernels[0].definition.name
    solution = python_solution(name, "def run(x):\n    return x.clamp(min=0)\n")
    plans = {"plan": plan_of(recording, solution), "empty": plan_of(recording, solution, us=10.0)}
    for file, plan in plans.items():
        (tmp_path / f"{file}.json").write_bytes(plan_bytes(plan))
    (tmp_path / "folder").mkdir()
    files = {file: tmp_path / f"{file}.json" for file in plans}
    return {**files, "recording": recording.path, "folder": tmp_path / "folder", "new": tmp_path / "new.json"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("apply {recording} --solutions {folder} -o {new}", "has no times"),
        ("apply {plan} --solutions {folder} -o {new}", "is no Recording"),
        ("apply {recording} --solutions {folder} -o {plan}", "exists: pass --force"),
        ("apply {recording} --solutions {folder} --measurements {plan}x -o {new}", "no such file"),
        ("run --plan {empty} --model kcap/tiny-llama", "replaces nothing"),
        ("ab --plan {empty} --model kcap/tiny-llama", "replaces nothing"),
        ("record --plan {empty} --model kcap/tiny-llama -o {new}", "replaces nothing"),
        ("run --plan {new} --model kcap/tiny-llama", "no such plan"),
        ("run --plan {plan}", "give either --model MODEL or -- COMMAND"),
        ("run --plan {plan} --model kcap/tiny-llama -- vllm serve x", "give either --model MODEL or -- COMMAND"),
        ("run --plan {plan} --bisect -- vllm serve x", "of --model or a --client only"),
        ("run --plan {plan} --eager -- vllm serve x", "--eager: of --model only"),
        ("run --plan {plan} --model kcap/tiny-llama --client true", "--client needs a server"),
        ("ab --plan {plan} --plan {plan} --pairs 3 --model kcap/tiny-llama", "give one --plan"),
    ],
)
def test_what_cannot_be_done_is_said(kcap: Kcap, places: dict[str, Path], words: str, reason: str) -> None:
    done = kcap(*[word.format(**places) for word in words.split()])
    assert done.code == 2 and reason in done.err, done.err
    assert not places["new"].exists()


@pytest.mark.alone
def test_times_of_another_machine_are_refused(kcap: Kcap, recording: Recording, tmp_path: Path) -> None:
    """Of the engine's kernels, or of the Solutions."""
    judged, measured = tmp_path / "judged", tmp_path / "measured.jsonl"
    name = next(one for one in derive(recording).kernels if one.uses[0].call.operator == "aten::relu").definition.name
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/relu.py").write_text(f"# definition: {name}\ndef run(x):\n    return x.clamp(min=0)\n")
    assert not kcap("replay", recording.path, "--threads", 1, "-o", measured).code
    assert not kcap("bench", recording.path, "--solutions", tmp_path / "mine", "--threads", 1, "-o", judged).code
    apply = ("apply", recording.path, "--solutions", judged, "--measurements", measured, "--slower")
    assert kcap(*apply, "-o", tmp_path / "plan.json").code in (0, 1)
    lines = [orjson.loads(line) for line in measured.read_bytes().splitlines()]
    measured.write_bytes(b"\n".join(orjson.dumps(line | {"device_name": "Another"}) for line in lines))
    done = kcap(*apply, "-o", tmp_path / "other.json")
    assert done.code == 2 and "measured on Another" in done.err and not (tmp_path / "other.json").exists()


@pytest.mark.parametrize(("given", "heeded"), [((), None), (("--framework", "SGLang"), "SGLang")])
def test_the_engine_that_a_command_is_said_to_start_is_heeded(
    given: tuple[str, ...], heeded: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(run, "record_command", lambda words, framework, *_: seen.append((words, framework)))
    words = ["--plan", "plan.json", *given, "--", "python", "serve.py"]
    with run.command.make_context("run", words) as context:
        run.start_engine({}, tmp_path, {"model": None}, context.params["command_line"], None, None)
    assert seen == [(["python", "serve.py"], heeded)]


def test_a_plan_that_no_rank_put_in_is_said_in_one_line(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a program without an engine, whose processes are watched all the same."""
    plan = read_plan(places["plan"])
    watched = [Engagement(pid=1, world_size=2), Engagement(pid=2, rank=1, world_size=2)]
    run.print_engagements([plan], watched)
    assert capsys.readouterr().out.strip() == "no process of the engine put the plan in: it ran as it is"
    refused = [watched[0].model_copy(update={"refused": "its torch is another"}), watched[1]]
    assert run.problems([plan], refused) == ["rank 0 (process 1): its torch is another"]
