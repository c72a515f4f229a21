"""Recording changes nothing: the same tokens with it and without, compiled while recorded or not, failed or well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kcap
from kcap.schemas.recording import Recording

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

LAYERS, OUTPUT = 2, 12
PROMPTS = [[(seed * 7919 + i * 104_729) % 50_000 for i in range(48)] for seed in range(8)]
# More prompts than a step takes: some decode while others prefill.
ARGUMENTS = {"enforce_eager": False, "max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": False}
Generate = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, generate: Generate) -> Callable[..., tuple[list[list[int]], Path]]:
    def once(recorded: bool, **more: Any) -> tuple[list[list[int]], Path]:
        directory = tmp_path_factory.mktemp("run")
        return generate(directory, PROMPTS, OUTPUT, recorded, **(ARGUMENTS | more)), directory / "out"

    return once


@pytest.fixture(scope="module")
def recorded(run: Any) -> tuple[list[list[int]], Recording]:
    """Compiled by the engine while the recorder was in its processes: nothing is in the compile cache yet."""
    outputs, path = run(True)
    return outputs, kcap.load(path)


@pytest.fixture(scope="module")
def unrecorded(
    run: Any, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> list[list[list[int]]]:
    """The A/A control, compiled on its own."""
    environment["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("another-cache"))
    return [run(False)[0] for _ in range(2)]


def test_the_tokens_are_the_same_with_and_without(
    recorded: tuple[list[list[int]], Recording], unrecorded: list[list[list[int]]]
) -> None:
    assert unrecorded[0] == unrecorded[1], "the control: without recording the tokens repeat"
    assert recorded[0] == unrecorded[0]
    assert [len(tokens) for tokens in recorded[0]] == [OUTPUT] * len(PROMPTS)
    assert len({tuple(tokens) for tokens in recorded[0]}) > 1


def test_a_compiled_engine_has_the_same_linears_and_attention(recorded: tuple[list[list[int]], Recording]) -> None:
    recording = recorded[1]
    assert recording.metadata.complete
    assert {"prefill", "mixed", "decode"} <= set(recording.metadata.steps)
    operators = {call.id: call.operator for call in recording.kernels(hidden=True)}
    for program in recording.programs:
        ran = [operators.get(number) for number in program.calls]
        assert ran.count("_C::onednn_mm") == 4 * LAYERS + 1
        assert ran.count("_C::cpu_attention_with_kv_cache") == LAYERS
        assert ran.count("_C::cpu_attn_reshape_and_cache") == LAYERS


def test_compiled_steps_account_for_every_token(recorded: tuple[list[list[int]], Recording]) -> None:
    scheduled = sum(batch["tokens"] * batch["steps"] for batch in recorded[1].metadata.batches)
    assert scheduled == sum(map(len, PROMPTS)) + len(PROMPTS) * (OUTPUT - 1)


def test_a_recorder_that_fails_changes_no_token_and_says_so(run: Any, unrecorded: list[list[list[int]]]) -> None:
    outputs, path = run(True, fail="1000")
    assert outputs == unrecorded[0]
    recording = kcap.load(path)
    (tap,) = recording.metadata.taps
    assert (tap.status, tap.detail) == ("failed", "made to fail")
    assert not recording.metadata.complete
    assert sum(recording.metadata.steps.values()) > 0
