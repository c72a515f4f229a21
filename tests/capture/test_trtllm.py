"""TensorRT-LLM's hooks on a stand-in of its names and its order of calls: their logic, no compatibility."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kcap as kcap_package
from kcap.schemas.recording.records import Metadata

STAND_IN = Path(__file__).parent / "trtllm_stand_in"
PROGRAM = """
from tensorrt_llm import LLM, SamplingParams
if __name__ == "__main__":  # workers import it, too
    llm = LLM("m", **{arguments})
    outputs = llm.generate([[1, 2, 3], [4, 5, 6, 7]], SamplingParams(max_tokens=3))
    print([output.outputs[0].token_ids for output in outputs])
    llm.shutdown()
"""
LIMIT_S = 60
STEPS = {"decode": 2, "mixed": 1, "prefill": 1}
OPEN_MPI = {  # that it starts processes as root, and more than there are cores
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.fixture
def record(kcap: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Metadata]:
    """Records a program with these arguments of `LLM`, which prints what it does alone; the Recording's metadata."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))

    def run(code: int = 0, first: str = "", **arguments: Any) -> Metadata:
        program, tokens = tmp_path / "program.py", tmp_path / "tokens"
        program.write_text(first + PROGRAM.format(arguments=arguments))
        alone = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, timeout=LIMIT_S)
        command = f'"{sys.executable}" "{program}" > "{tokens}"'
        ran = kcap("record", "-o", tmp_path / "out", "--", "sh", "-c", command)
        assert ran.code == code, ran.err
        assert tokens.read_text() == alone.stdout
        return kcap_package.load(tmp_path / "out").metadata

    return run


@pytest.mark.parametrize("arguments", [{}, {"backend": "_autodeploy"}])
def test_steps_count_without_estimation_and_warm_up_and_tokens_stay(
    arguments: dict[str, Any], record: Callable[..., Metadata], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    metadata = record(**arguments)
    assert (metadata.framework, metadata.steps) == ("TRT-LLM", STEPS)
    assert "TRT-LLM: not yet run with the real engine: hooks read in the source of 1.2.1" in metadata.notes


def test_each_rank_of_mpi_counts_its_own_steps(
    record: Callable[..., Metadata], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: no workers of MPI")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # where Open MPI's programs are
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    metadata = record(tensor_parallel_size=2)
    assert (metadata.framework, metadata.world_size, metadata.steps) == ("TRT-LLM", 2, STEPS)
    assert [(rank.rank, rank.steps, rank.groups) for rank in metadata.ranks] == [
        (number, STEPS, {"tp": [0, 1]}) for number in (0, 1)
    ]


def test_a_model_is_recorded_offline(kcap: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    monkeypatch.syspath_prepend(STAND_IN)
    words = ("--framework", "TRT-LLM", "--model", "kcap/tiny-llama", "--load-format", "dummy")
    load = ("--num-prompts", 2, "--input-len", 8, "--output-len", 4)
    ran = kcap("record", *words, *load, "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert (metadata.framework, metadata.model) == ("TRT-LLM", "kcap/tiny-llama")
    assert metadata.steps == {"decode": 3, "mixed": 1, "prefill": 1}


AUTODEPLOY = {"backend": "_autodeploy"}


@pytest.mark.parametrize(
    ("name", "arguments", "hook", "steps"),
    [
        ("create_py_executor", {}, "_torch.pyexecutor.py_executor_creator:create_py_executor", {}),
        (
            *("create_autodeploy_executor", AUTODEPLOY),
            *("_torch.auto_deploy.shim.ad_executor:create_autodeploy_executor", {}),
        ),
        ("PyTorchModelEngine", {}, "_torch.pyexecutor.model_engine:PyTorchModelEngine.forward", {}),
        ("ADEngine", AUTODEPLOY, "_torch.auto_deploy.shim.ad_executor:ADEngine.forward", {}),
        ("_sample_async", {}, "_torch.pyexecutor.py_executor:PyExecutor._sample_async", STEPS),
    ],
)
def test_a_name_that_is_not_there_is_an_absent_tap(
    name: str,
    arguments: dict[str, Any],
    hook: str,
    steps: dict[str, int],
    record: Callable[..., Metadata],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path / "other"
    shutil.copytree(STAND_IN, other, ignore=shutil.ignore_patterns("__pycache__"))
    for file in other.rglob("*.py"):
        file.write_text(file.read_text().replace(name, f"{name}_of_another_release"))
    monkeypatch.setenv("PYTHONPATH", str(other))
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    metadata = record(code=0 if steps else 1, **arguments)
    assert metadata.steps == steps
    assert [tap.status for tap in metadata.taps if tap.name == hook] == ["absent"]


BROKEN = """
from kcap.capture.engines.trtllm.requests import Requests
def broken(*_):
    raise RuntimeError("injected")
Requests.shape = broken
"""


def test_a_fault_in_a_hook_leaves_the_engine_running(
    record: Callable[..., Metadata], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    metadata = record(code=1, first=BROKEN)
    assert not metadata.complete and any("injected" in note for note in metadata.notes)
