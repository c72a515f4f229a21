"""The real vLLM with models that are no plain decoders of text: soft-capped and windowed, an encoder, sound to text."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from mixed_batches import LINEAR, plain

import kcap
from kcap.schemas.derive.derive import derive
from kcap.schemas.recording.recording import Recording

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

LAYERS = 2
ATTENTION, CACHE_UPDATE = "_C::cpu_attention_with_kv_cache", "_C::cpu_attn_reshape_and_cache"
PROGRAMS = Path(__file__).parents[2] / "scripts" / "gpu" / "zoo_programs.py"
Kcap = Callable[..., "subprocess.CompletedProcess[str]"]


def recorded(kcap_record: Kcap, output: Path, model: str, output_len: int) -> Recording:
    """A configuration that kcap brings, of LAYERS layers, on two prompts at once."""
    words = ("--model", model, "--load-format", "dummy", "--eager", "--num-layers", LAYERS)
    ran = kcap_record(output, *words, "--num-prompts", 2, "--input-len", 24, "--output-len", output_len)
    assert ran.returncode == 0, ran.stderr
    return kcap.load(output)


def in_a_step(recording: Recording, phase: str) -> Counter[str]:
    """How often each operator ran in a step of `phase`, regions too."""
    counts: Counter[str] = Counter()
    for call in recording.calls:
        for count in call.counts:
            if count.phase == phase:
                counts[plain(call.operator.split(".")[0])] += count.count
    steps = recording.metadata.steps[phase]
    assert all(count % steps == 0 for name, count in counts.items() if name in (LINEAR, ATTENTION, CACHE_UPDATE))
    return Counter({name: count // steps for name, count in counts.items()})


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory, kcap_record: Kcap) -> Recording:
    return recorded(kcap_record, tmp_path_factory.mktemp("gemma") / "out", "google/gemma-2-9b", output_len=3)


def test_gemma_runs_what_its_layers_have(gemma: Recording) -> None:
    """Four products and four norms a layer, the logits with a soft cap, a norm before them."""
    step = in_a_step(gemma, "decode")
    assert step[LINEAR] == 4 * LAYERS + 1
    assert step[ATTENTION] == step[CACHE_UPDATE] == LAYERS
    assert step["vllm_ir::rms_norm"] + step["vllm_ir::fused_add_rms_norm"] == 4 * LAYERS + 1
    assert step["vllm_custom_op::gelu_and_mul"] == LAYERS and step["aten::tanh"] == 1


def test_soft_caps_and_windows_of_attention_are_in_its_definitions(gemma: Recording) -> None:
    """Every second layer sees 4,096 tokens."""
    derived = derive(gemma)
    names = {kernel.definition.name for kernel in derived.kernels if kernel.family == "gqa_paged"}
    assert {("softcap50" in name, "window4095" in name) for name in names} == {(True, True), (True, False)}, names


@pytest.fixture(scope="module")
def bge(tmp_path_factory: pytest.TempPathFactory, kcap_record: Kcap) -> Recording:
    return recorded(kcap_record, tmp_path_factory.mktemp("bge") / "out", "BAAI/bge-large-en-v1.5", output_len=1)


def test_a_model_that_embeds_is_one_forward_a_request(bge: Recording) -> None:
    """Four products, two norms and a gelu a layer; a norm of the embeddings; no logits."""
    assert set(bge.metadata.steps) == {"prefill"}
    assert sum(sum(step.queries or []) for step in bge.steps) == 2 * 24
    step = in_a_step(bge, "prefill")
    assert step[LINEAR] == 4 * LAYERS
    assert step["aten::layer_norm"] == 2 * LAYERS + 1
    assert step[ATTENTION] == step["vllm_custom_op::gelu"] == LAYERS


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory, kcap_record: Kcap) -> Recording:
    output = tmp_path_factory.mktemp("whisper") / "out"
    program = (sys.executable, PROGRAMS, "speech", "openai/whisper-large-v3", LAYERS)
    ran = kcap_record(output, "--exit-code", "kcap", "--", *program)
    assert ran.returncode == 0, ran.stderr
    return kcap.load(output)


def test_a_decoder_of_speech_attends_to_itself_and_to_the_sound(whisper: Recording) -> None:
    """Of six products a layer two are of the attention to the sound, whose keys are cached since the prefill."""
    step = in_a_step(whisper, "decode")
    assert step[LINEAR] == 6 * LAYERS + 1
    assert step[ATTENTION] == 2 * LAYERS and step[CACHE_UPDATE] == LAYERS
    assert step["aten::layer_norm"] == 3 * LAYERS + 1


def test_its_encoder_is_recorded_with_the_prefill(whisper: Recording) -> None:
    prefill = in_a_step(whisper, "prefill")
    assert prefill["aten::conv1d"] >= 2 and prefill["vllm_custom_op::gelu"] > LAYERS
