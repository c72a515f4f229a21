"""What `kcap apply` puts into a plan, and what it leaves out; plans that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest
import torch
from applied_plans import plan_of, python_solution
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.apply import choice
from kcap.bench.apply.choice import guilty_part
from kcap.bench.apply.process import PlanRefused, check_engine
from kcap.bench.apply.trial import open_recording, try_alone
from kcap.bench.contents import Contents
from kcap.bench.problems import Problems
from kcap.errors import CallError, FormatError
from kcap.schemas.derive.derive import derive
from kcap.schemas.recording.recording import Recording
from kcap.schemas.results.plan import Plan, plan_bytes, read_plan

X = torch.randn(4, 8)
RELU = "def run(x):\n    return x.clamp(min=0)\n"


@pytest.fixture(scope="module")
def name(recording: Recording) -> str:
    (kernel,) = [kernel for kernel in derive(recording).kernels if kernel.uses[0].call.operator == "aten::relu"]
    return kernel.definition.name


def test_one_that_is_slower_than_the_engines_kernel_is_left_out(recording: Recording, name: str) -> None:
    """Not than a reference."""
    made = plan_of(recording, python_solution(name, RELU), us=10.0, engine_us=10.0)
    assert not made.replacements and not made.solutions
    assert [left.reason for left in made.left_out] == ["takes 10.00 us, and the engine's kernel 10.00 us"]


def test_of_several_the_fastest_goes_in(recording: Recording, name: str) -> None:
    made = plan_of(recording, python_solution(name, RELU, "first"), python_solution(name, RELU + "\n", "second"))
    assert len(made.replacements) == 1
    assert [left.reason for left in made.left_out] == ["another is faster"]


@pytest.mark.parametrize(("axes", "goes_in"), [({}, True), ({"num_pages": 5}, True), ({"n0": 5}, False)])
def test_it_must_have_been_judged_for_all_axes_of_the_call(
    recording: Recording, name: str, monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], goes_in: bool
) -> None:
    """But not for all values, nor sizes of a cache: a second Workload was not judged, and has these axes, or others."""
    honest = choice.problems_of

    def with_another(contents: Contents, engine_forms: bool) -> Problems:
        problems = honest(contents, engine_forms)
        for problem in problems.problems:
            if problem.definition.name == name:
                ((_, workload),) = problem.workloads.items()
                another = workload.model_copy(update={"uuid": "another", "axes": {**workload.axes, **axes}})
                problem.workloads["another"] = another
                problem.counts.append(problem.counts[0].model_copy(update={"workload": "another"}))
        return problems

    monkeypatch.setattr(choice, "problems_of", with_another)
    made = plan_of(recording, python_solution(name, RELU))
    assert bool(made.replacements) == goes_in
    if not goes_in:
        assert made.left_out[0].reason == "was not judged on its Workload another"


def test_a_plan_reads_as_it_was_written(recording: Recording, name: str, tmp_path: Path) -> None:
    made = plan_of(recording, python_solution(name, RELU))
    (tmp_path / "plan.json").write_bytes(plan_bytes(made))
    assert read_plan(tmp_path / "plan.json") == made


def written(plan: Plan, tmp_path: Path, **changed: object) -> Path:
    file = tmp_path / "plan.json"
    file.write_bytes(orjson.dumps({**orjson.loads(plan_bytes(plan)), **changed}))
    return file


def test_a_solution_that_was_changed_since_is_refused(recording: Recording, name: str, tmp_path: Path) -> None:
    made = plan_of(recording, python_solution(name, RELU))
    (sha256,) = made.solutions
    other = python_solution(name, RELU + "# faster\n").model_dump(mode="json")
    with pytest.raises(FormatError, match="is not the Solution that was judged"):
        read_plan(written(made, tmp_path, solutions={sha256: other}))
    with pytest.raises(CallError, match="no such plan"):
        read_plan(tmp_path / "nowhere.json")


@given(st.binary(max_size=200))
def test_no_content_but_a_plan_is_one(content: bytes) -> None:
    file = Path("/dev/shm") / "kcap-no-plan.json"
    file.write_bytes(content)
    try:
        with pytest.raises(FormatError):
            read_plan(file)
    finally:
        file.unlink()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"framework": "SGLang"}, "framework SGLang, and this is vLLM"),
        ({"framework_version": "0.1"}, "framework version 0.1, and this is 0.32.0"),
        ({"machine": {"device": "cuda", "device_name": "NVIDIA B200"}}, "device NVIDIA B200, and this is"),
    ],
)
def test_a_plan_of_another_engine_or_gpu_is_refused(
    recording: Recording, name: str, tmp_path: Path, changed: dict[str, object], reason: str
) -> None:
    made = read_plan(written(plan_of(recording, python_solution(name, RELU)), tmp_path, **changed))
    with pytest.raises(PlanRefused, match=reason):
        check_engine(made, {"framework": "vLLM", "framework_version": "0.32.0"})
    check_engine(plan_of(recording, python_solution(name, RELU)), {"framework": "vLLM", "framework_version": "0.32.0"})


@pytest.mark.parametrize(
    ("made_for", "found", "same"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", True),
        ("meta-llama/Llama-3.1-8B", "/models/llama-3.1-8b/", True),
        ("meta-llama/Llama-3.1-8B", "/cache/hub/models--meta-llama--Llama-3.1-8B/snapshots/0a1b", True),
        ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", False),
        ("meta-llama/Llama-3.1-8B", None, True),
    ],
)
def test_a_model_has_one_name_wherever_it_lies(
    recording: Recording, name: str, made_for: str, found: str | None, same: bool
) -> None:
    made = plan_of(recording, python_solution(name, RELU)).model_copy(update={"model": made_for})
    if same:
        check_engine(made, {"model": found})
        return
    with pytest.raises(PlanRefused, match=f"made for the model {made_for}, and this is {found}"):
        check_engine(made, {"model": found})


def test_a_recording_that_is_gone_or_another_is_told(recording: Recording, name: str) -> None:
    made = plan_of(recording, python_solution(name, RELU))
    assert open_recording(made).calls == recording.calls
    with pytest.raises(CallError, match="is not there"):
        open_recording(made.model_copy(update={"recording": "/nowhere"}))
    with pytest.raises(CallError, match="another Recording"):
        open_recording(made.model_copy(update={"recording_sha256": "0" * 64}))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import torch\n\ndef run(x):\n    return torch.relu(x)\n", ""),
        ("def run(x):\n    return x.clamp(min=0.5)\n", "is off by .* from the engine's own kernel"),
        ("def run(x):\n    raise ValueError('no')\n", "ValueError: no"),
        ("import ctypes\n\ndef run(x):\n    ctypes.string_at(0)\n", "crashed: SIGSEGV"),
        (
            "import time\n\ndef run(x):\n    time.sleep(0.01)\n    return x.clamp(min=0)\n",
            "takes .* us, and the engine",
        ),
        ("no python at all", "SyntaxError"),
    ],
)
def test_each_is_tried_alone_before_an_engine_is_started(
    recording: Recording, name: str, source: str, reason: str
) -> None:
    us = 5.0 if reason else 20.0  # one that is known to be slower need not be faster
    tried = try_alone(plan_of(recording, python_solution(name, source), us=us))
    assert bool(tried.replacements) == (not reason)
    if reason:
        (left,) = tried.left_out
        assert re.match(f"tried alone: .*{reason}", left.reason), left.reason


def test_the_part_that_fails_is_found_by_halves(recording: Recording, name: str) -> None:
    (one,) = plan_of(recording, python_solution(name, RELU)).replacements
    many = [one.model_copy(update={"definition": str(number)}) for number in range(9)]
    assert [r.definition for r in guilty_part(many, lambda part: any(r.definition == "5" for r in part))] == ["5"]
    together = {"1", "7"}
    found = guilty_part(many, lambda part: together <= {r.definition for r in part})
    assert together <= {r.definition for r in found}
