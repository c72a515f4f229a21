"""The real vLLM with multi-head latent attention (DeepSeek-V2's): its wrapper, in which a prefill runs aten operators
alone and other steps kernels too, is a region in all of them."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable

import pytest
from mixed_batches import AMX, LINEAR, plain

import kcap
from kcap.schemas.recording.recording import Recording

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

LAYERS = 2
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16",
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, "hidden_act": "silu",
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 1000,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "moe_intermediate_size": 128, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "first_k_dense_replace": LAYERS, "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
# A layer's products: down to the latents of q and kv, up to q, out of attention, gate and up, down. Then the head.
PRODUCTS = 5 * LAYERS + 1
ATTENTION = "vllm::unified_mla_attention_with_output"
Kcap = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, kcap_record: Kcap) -> Recording:
    """Two prompts of 16 tokens, one after the other."""
    directory = tmp_path_factory.mktemp("mla")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    sizes = ("--num-prompts", 2, "--input-len", 16, "--output-len", 3)
    arguments = ("--engine-arg", "max_num_seqs=1", "--engine-arg", "max_model_len=64")
    model = ("--model", directory, "--load-format", "dummy", "--eager")
    ran = kcap_record(directory / "out", *model, *sizes, *arguments)
    assert ran.returncode == 0, ran.stderr
    return kcap.load(directory / "out")


@pytest.fixture(scope="module")
def per_step(recording: Recording) -> dict[str, Counter[str]]:
    """How often each operator ran in a step of a phase."""
    counts: dict[str, Counter[str]] = {phase: Counter() for phase in recording.metadata.steps}
    for call in recording.calls:
        for count in call.counts:
            if count.phase in counts:
                counts[count.phase][plain(call.operator)] += count.count
    assert recording.metadata.steps == {"prefill": 2, "decode": 4}
    return {
        phase: Counter({name: total // recording.metadata.steps[phase] for name, total in of_phase.items()})
        for phase, of_phase in counts.items()
    }


def products(counts: Counter[str]) -> Counter[str]:
    return Counter({name: count for name, count in counts.items() if name in (LINEAR, "aten::linear")})


def test_a_prefill_runs_the_products_of_its_attention_too(per_step: dict[str, Counter[str]]) -> None:
    """With AMX it multiplies with absorbed matrices, as a decode does; else it makes keys and values of the latents."""
    prefill = per_step["prefill"]
    if AMX:
        assert products(prefill) == {LINEAR: PRODUCTS}
        assert (prefill["_C::bmm_cpu"], prefill["_C::extend_attention_cpu"]) == (2 * LAYERS, LAYERS)
        return
    kv_b_proj = Counter({plain("aten::linear"): LAYERS})
    assert products(prefill) == Counter({LINEAR: PRODUCTS}) + kv_b_proj
    assert prefill["aten::softmax.int"] == LAYERS


def test_a_decode_multiplies_with_absorbed_matrices(per_step: dict[str, Counter[str]]) -> None:
    decode = per_step["decode"]
    assert products(decode) == {LINEAR: PRODUCTS}
    assert decode["_C::bmm_cpu" if AMX else "aten::bmm.out"] == 2 * LAYERS
    assert decode["_C::decode_attention_cpu" if AMX else "_C::mla_decode_kvcache"] == LAYERS


def test_the_wrapper_is_a_region_in_every_phase(recording: Recording, per_step: dict[str, Counter[str]]) -> None:
    assert {call.kind for call in recording.calls if call.operator == ATTENTION} == {"region"}
    assert {phase: counts[ATTENTION] for phase, counts in per_step.items()} == dict.fromkeys(per_step, LAYERS)
