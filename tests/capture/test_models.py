from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kcap.capture.controller.models import ROOT, find_config, model_names

DENSE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
DENSE += ("vocab_size",)
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts")
LATENT += ("num_experts_per_tok",)
SCAN = ("hidden_size", "num_hidden_layers", "state_size", "conv_kernel", "vocab_size")
SIZES: dict[str, dict[str, int]] = {
    "meta-llama/Llama-3.1-8B": dict(zip(DENSE, (4096, 14336, 32, 32, 8, 128256), strict=True)),
    "meta-llama/Llama-3.1-70B": dict(zip(DENSE, (8192, 28672, 80, 64, 8, 128256), strict=True)),
    "Qwen/Qwen3-8B": dict(zip(DENSE, (4096, 12288, 36, 32, 8, 151936), strict=True)),
    "Qwen/Qwen3-8B-FP8": dict(zip(DENSE, (4096, 12288, 36, 32, 8, 151936), strict=True)),
    "Qwen/Qwen3-30B-A3B": dict(zip(DENSE, (2048, 6144, 48, 32, 4, 151936), strict=True)),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": dict(zip(DENSE, (2048, 5120, 48, 16, 2, 151936), strict=True))
    | {"num_experts": 512, "num_experts_per_tok": 10, "linear_num_value_heads": 32, "full_attention_interval": 4},
    "Qwen/Qwen2.5-7B-Instruct-AWQ": dict(zip(DENSE, (3584, 18944, 28, 28, 4, 152064), strict=True)),
    "Qwen/Qwen2.5-VL-7B-Instruct": dict(zip(DENSE, (3584, 18944, 28, 28, 4, 152064), strict=True)),
    "google/gemma-2-9b": dict(zip(DENSE, (3584, 14336, 42, 16, 8, 256000), strict=True))
    | {"head_dim": 256, "sliding_window": 4096},
    "deepseek-ai/DeepSeek-V2-Lite": dict(zip(DENSE, (2048, 10944, 27, 16, 16, 102400), strict=True))
    | dict(zip(LATENT, (512, 128, 64, 128, 64, 6), strict=True)),
    "deepseek-ai/DeepSeek-V3": dict(zip(DENSE, (7168, 18432, 61, 128, 128, 129280), strict=True))
    | dict(zip(LATENT, (512, 128, 64, 128, 256, 8), strict=True))
    | {"q_lora_rank": 1536},
    "openai/gpt-oss-20b": dict(zip(DENSE, (2880, 2880, 24, 64, 8, 201088), strict=True))
    | {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    "mistralai/Mamba-Codestral-7B-v0.1": dict(zip(SCAN, (4096, 64, 128, 4, 32768), strict=True)) | {"n_groups": 8},
    "state-spaces/mamba-2.8b-hf": dict(zip(SCAN, (2560, 64, 16, 4, 50280), strict=True)) | {"time_step_rank": 160},
    "tiiuae/Falcon-H1-7B-Base": dict(zip(DENSE, (3072, 12288, 44, 12, 2, 130048), strict=True))
    | {"mamba_d_state": 256, "mamba_n_heads": 24, "mamba_n_groups": 1},
    "facebook/opt-6.7b": {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32},
    "BAAI/bge-large-en-v1.5": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    "openai/whisper-large-v3": {"d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "num_mel_bins": 128},
    "kcap/tiny-llama": dict(zip(DENSE, (128, 256, 2, 4, 2, 512), strict=True)),
}  # fmt: skip


def test_every_model_is_found_by_its_hub_id() -> None:
    assert set(model_names()) == set(SIZES)
    for name in model_names():
        found = find_config(name)
        assert found is not None
        assert (found / "config.json").is_file()


def test_case_does_not_matter() -> None:
    assert find_config("meta-llama/llama-3.1-8b") == find_config("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("name", ["", "nobody/nothing", "../models/Qwen/Qwen3-8B", "Qwen", "/etc"])
def test_an_unknown_model_is_none(name: str) -> None:
    assert find_config(name) is None


@pytest.mark.parametrize("name", sorted(SIZES))
def test_sizes_are_the_published_ones(name: str) -> None:
    config = json.loads((ROOT / name / "config.json").read_text())
    assert {key: config[key] for key in SIZES[name]} == SIZES[name]


@pytest.mark.parametrize("name", sorted(SIZES))
def test_the_readme_says_where_the_values_are_from(name: str) -> None:
    assert f"| {name} |" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(SIZES))
def test_transformers_reads_it_offline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    raw = json.loads((ROOT / name / "config.json").read_text())
    config = transformers.AutoConfig.from_pretrained(find_config(name))
    assert config.architectures == raw["architectures"]
    if theta := raw.get("rope_theta"):
        text = config.get_text_config()
        rope = getattr(text, "rope_parameters", None)
        rope = rope or {"rope_theta": text.rope_theta} | (text.rope_scaling or {})
        assert rope["rope_theta"] == theta
        assert rope.get("factor") == (raw.get("rope_scaling") or {}).get("factor")


# vLLM looks at the class of each model in a process of its own, which takes ten seconds
HIDDEN_SIZES = """
import json, sys
from vllm.config import ModelConfig
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda look: look()
told = {}
for name, path in json.loads(sys.argv[1]).items():
    try:
        told[name] = ModelConfig(model=path, skip_tokenizer_init=True).get_hidden_size()
    except Exception as error:
        told[name] = str(error)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def hidden_sizes() -> dict[str, Any]:
    """As vLLM reads them, or why it does not accept the model."""
    pytest.importorskip("vllm")
    paths = {name: str(find_config(name)) for name in model_names()}
    command = [sys.executable, "-c", HIDDEN_SIZES, json.dumps(paths)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(SIZES))
def test_vllm_accepts_it_offline(name: str, hidden_sizes: dict[str, Any]) -> None:
    if "VL" in name:
        pytest.importorskip("torchvision", reason="vLLM's image processors need torchvision")
    assert hidden_sizes[name] == next(iter(SIZES[name].values()))
