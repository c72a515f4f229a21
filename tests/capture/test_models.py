from __future__ import annotations

import json

import pytest

from kcap.capture.controller.models import ROOT, find_config, model_names

# hidden, intermediate, layers, heads, kv heads, vocabulary
SIZES = {
    "meta-llama/Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256),
    "meta-llama/Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128256),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, 151936),
    "Qwen/Qwen3-30B-A3B": (2048, 6144, 48, 32, 4, 151936),
    "kcap/tiny-llama": (128, 256, 2, 4, 2, 512),
}
KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


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
    assert tuple(config[key] for key in KEYS) == SIZES[name]


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
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta} | (config.rope_scaling or {})
    assert rope["rope_theta"] == raw["rope_theta"]
    assert rope.get("factor") == (raw["rope_scaling"] or {}).get("factor")


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(SIZES))
def test_vllm_accepts_it_offline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from vllm.config import ModelConfig

    config = ModelConfig(model=str(find_config(name)), skip_tokenizer_init=True)
    assert config.get_hidden_size() == SIZES[name][0]
