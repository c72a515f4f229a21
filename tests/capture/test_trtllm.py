"""TensorRT-LLM's hooks on a stand-in of its names and its order of calls: their logic, no compatibility."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kcap as kcap_package

STAND_IN = Path(__file__).parent / "trtllm_stand_in"
PROGRAM = """
from tensorrt_llm import LLM, SamplingParams
outputs = LLM("m", **{arguments}).generate([[1, 2, 3], [4, 5, 6, 7]], SamplingParams(max_tokens=3))
print([output.outputs[0].token_ids for output in outputs])
"""


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, {"decode": 2, "mixed": 1, "prefill": 1}),
        ({"backend": "_autodeploy"}, {"decode": 2, "mixed": 1, "prefill": 1}),
    ],
)
def test_steps_count_without_estimation_and_warm_up_and_tokens_stay(
    arguments: dict[str, Any],
    steps: dict[str, int],
    kcap: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    program, tokens = tmp_path / "program.py", tmp_path / "tokens"
    program.write_text(PROGRAM.format(arguments=arguments))
    alone = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    command = f'"{sys.executable}" "{program}" > "{tokens}"'
    ran = kcap("record", "-o", tmp_path / "out", "--", "sh", "-c", command)
    assert ran.code == 0, ran.err
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert (metadata.framework, metadata.steps) == ("TRT-LLM", steps)
    assert "TRT-LLM: not yet run with the real engine: hooks read in the source of 1.2.1" in metadata.notes
    assert tokens.read_text() == alone.stdout
