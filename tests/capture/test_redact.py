from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.system.redact import HIDDEN, redact_arguments, redact_command

SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", SECRET],
        [f"--api-key={SECRET}"],
        ["--api_key", SECRET],
        ["--api-key", SECRET, SECRET + "2"],  # vLLM takes several
        ["--hf-token", SECRET],
        ["--token", SECRET],
        ["--password", SECRET],
        ["--ssl.client-secret", SECRET],
        ["--API-KEY", SECRET],
        ["-api-key", SECRET],
        [f"HF_TOKEN={SECRET}"],
        [f"VLLM_API_KEY={SECRET}"],
        ["env", f"OPENAI_API_KEY={SECRET}", "vllm"],
        ["hf_" + SECRET.replace("-", "x") * 2],
        ["sk-" + SECRET * 2],
        [f"Authorization: Bearer {SECRET}"],
        [f'{{"api_key": "{SECRET}"}}'],
        ["--kv-transfer-config", f'{{"auth": {{"token": "{SECRET}"}}, "role": "both"}}'],
        ["--config.api_key", SECRET],
        ["sh", "-c", f"HF_TOKEN={SECRET} exec vllm serve m --api-key {SECRET}"],
        ["sh", "-c", f"vllm serve m --api-key '{SECRET}' --port 1"],
        [f"https://user:{SECRET}@host/v1"],
    ],
)
def test_a_secret_is_nowhere_in_the_command(words: list[str]) -> None:
    said = " ".join(redact_command(["vllm", "serve", "m", *words, "--port", "8000"]))
    assert SECRET not in said
    assert SECRET.replace("-", "x") not in said
    assert HIDDEN in said
    assert said.startswith("vllm serve m")
    assert said.endswith("--port 8000")


@pytest.mark.parametrize(
    "words",
    [
        ["--max-num-batched-tokens", "8192"],
        ["--max-num-batched-tokens=8192"],
        ["--tokenizer", "meta-llama/Llama-3.1-8B"],
        ["--tokenizer-mode", "auto"],
        ["--model", "m", "--monkey", "x"],
        ["--skip-tokenizer-init", "--enforce-eager"],
        ["sh", "-c", "vllm serve m --max-model-len 4096"],
        ["--hf-overrides", '{"num_hidden_layers": 2}'],
    ],
)
def test_what_is_no_secret_stays(words: list[str]) -> None:
    assert redact_command(["vllm", *words]) == ["vllm", *words]


def test_engine_arguments_hide_secrets_however_deep() -> None:
    arguments = {
        "model": "m",
        "hf_token": SECRET,
        "api_key": [SECRET, SECRET],
        "kv_transfer_config": {"extra": {"password": SECRET, "port": 1}, "hosts": [{"token": SECRET}]},
        "served_model_name": "hf_" + "a" * 20,
        "tokenizer": "t",
        "max_num_batched_tokens": 64,
    }
    said = redact_arguments(arguments)
    assert SECRET not in str(said)
    assert "a" * 20 not in str(said)
    assert (said["model"], said["tokenizer"], said["max_num_batched_tokens"]) == ("m", "t", 64)
    assert said["kv_transfer_config"]["extra"]["port"] == 1
    assert arguments["hf_token"] == SECRET


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_command_keeps_its_length_and_redacts_once(words: list[str]) -> None:
    said = redact_command(words)
    assert len(said) == len(words)
    assert redact_command(said) == said
