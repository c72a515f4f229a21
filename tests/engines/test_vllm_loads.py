"""Two loads in one real engine: one after another, in the profiled steps and in the counted ones."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from mixed_batches import LAYERS, LINEAR, plain

import kcap
from kcap.schemas.recording.recording import Recording
from kcap.schemas.results import coverage

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

BATCHES, LENGTHS, OUTPUT, PROFILED = (1, 3), (260, 140), 12, 8  # each prompt is more than a cache page of 128 tokens
ATTENTION = "_C::cpu_attention_with_kv_cache"


@pytest.fixture(scope="module")
def recording(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    kcap_record: Callable[..., subprocess.CompletedProcess[str]],
) -> Recording:
    output = tmp_path_factory.mktemp("loads") / "out"
    arguments = ("dtype=bfloat16", "max_model_len=512", "enable_prefix_caching=true")
    start = ("--model", model, "--load-format", "dummy", "--num-layers", LAYERS, "--eager", "--check-coverage")
    loads = ("--num-prompts", "1,3", "--input-len", "260,140", "--output-len", OUTPUT)
    more = [word for argument in arguments for word in ("--engine-arg", argument)]
    ran = kcap_record(output, *start, *loads, *more)
    assert ran.returncode == 0, ran.stderr
    return kcap.load(output)


def steps_of(tokens: int) -> list[tuple[str, list[int], list[int]]]:
    """What the loads run where each request generates `tokens`: the phase, each sequence's new tokens and context."""
    expected = []
    for batch, length in zip(BATCHES, LENGTHS, strict=True):
        expected.append(("prefill", [length] * batch, [length] * batch))
        expected += [("decode", [1] * batch, [length + step] * batch) for step in range(1, tokens)]
    return expected


def test_the_loads_run_one_after_another(recording: Recording) -> None:
    assert [(step.phase, step.queries, step.lengths) for step in recording.steps] == steps_of(OUTPUT)
    assert recording.metadata.complete


def test_each_load_has_its_share_of_the_profiled_steps(recording: Recording) -> None:
    profiled = coverage.read(recording.path / coverage.FILE)
    assert [(step.phase, step.tokens, step.sequences) for step in profiled] == [
        (phase, sum(queries), len(queries)) for phase, queries, _ in steps_of(PROFILED)
    ]


def test_every_step_of_both_loads_has_the_kernels_of_its_layers(recording: Recording) -> None:
    for step in recording.steps:
        ran = Counter(plain(call.operator) for call in recording.ran(recording.program(step.program)))
        assert (ran[LINEAR], ran[ATTENTION]) == (4 * LAYERS + 1, LAYERS)
    totals = Counter[str]()
    for call in recording.calls:
        totals[plain(call.operator)] += call.total
    assert totals[LINEAR] == (4 * LAYERS + 1) * len(BATCHES) * OUTPUT
    assert totals[ATTENTION] == LAYERS * len(BATCHES) * OUTPUT
