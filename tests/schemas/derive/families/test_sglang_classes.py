"""SGLang's operator classes: the references against the classes themselves, run in an environment that has SGLang."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import ROOT, SGLANG_PYTHON

STUBS = ROOT / "tests/engines/sglang_cpu/stubs"
Held = dict[str, Any]
NAMES = {
    "sglang_op::RMSNorm": {"rmsnorm", "fused_add_rmsnorm"},
    "sglang_op::GemmaRMSNorm": {"gemma_rmsnorm", "gemma_fused_add_rmsnorm"},
    "sglang_op::Gemma3RMSNorm": {"gemma_rmsnorm", "gemma_fused_add_rmsnorm"},
    "sglang_op::SiluAndMul": {"silu_and_mul"},
    "sglang_op::GeluAndMul": {"gelu_and_mul", "gelu_tanh_and_mul"},
    "sglang_op::RotaryEmbedding": {"rope"},
    "sglang_op::LinearScalingRotaryEmbedding": {"rope"},
    "sglang_op::Llama3RotaryEmbedding": {"rope"},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Held, Any, Any]]:
    """Calls of the real classes: name, what a Recording holds of them, what they and what new objects returned."""
    file = tmp_path_factory.mktemp("sglang") / "cases.pt"
    set_here = {"PYTHONPATH": str(STUBS), "PYTHONSAFEPATH": "1", "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    command = [SGLANG_PYTHON, Path(__file__).with_name("sglang_run.py"), file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **set_here})
    assert file.exists(), done.stderr
    cases: list[tuple[str, Held, Any, Any]] = torch.load(file)
    return cases


needs_sglang = pytest.mark.skipif(
    not SGLANG_PYTHON.exists(), reason="no SGLang: scripts/environment-sglang, or KCAP_SGLANG_PYTHON"
)


@pytest.mark.engine
@needs_sglang
def test_references_are_sglangs_classes(ran: list[tuple[str, Held, Any, Any]]):
    found: dict[str, set[str]] = defaultdict(set)
    for name, held, result, _ in ran:
        kernel = agrees(name, lambda _result=result, **_: _result, **held)
        known = (kind for kind in NAMES[name] if kernel.name.startswith((f"{kind}_h", f"{kind}_eps", f"{kind}_fp32")))
        found[name].add("rope" if kernel.op_type == "rope" else next(known))
    assert found == NAMES


@pytest.mark.engine
@needs_sglang
def test_an_object_made_of_what_was_recorded_computes_the_same(ran: list[tuple[str, Held, Any, Any]]):
    for name, _, result, alone in ran:
        torch.testing.assert_close(alone, result, rtol=0, atol=0, msg=name)


def norm(**more: Any) -> Held:
    x = randn(4, 64)
    return {"x": x, "residual": None, "weight": randn(64), "variance_epsilon": 1e-5, **more}


def test_what_is_another_kernel_is_declined():
    """A residual that is kept in float32, a part of the row that decides, a sum of three, another type returned."""
    assert kernel_of("sglang_op::RMSNorm", **norm()).name == "rmsnorm_h64"
    residual = randn(4, 64)
    for more in (
        {"residual": residual, "fp32_residual": True},
        {"residual": residual, "post_residual_addition": residual},
        {"variance_size_override": 32},
        {"override_orig_dtype": torch.float32},
        {"cast_x_before_out_mul": True, "weight": randn(64).float()},
        {"weight": None},
    ):
        assert declined("sglang_op::RMSNorm", **norm(**more)), more
    assert not declined("sglang_op::RMSNorm", **norm(fp32_residual=True)), "without a residual it is the same"
    assert declined("sglang_op::GemmaRMSNorm", **norm(residual=residual, post_residual_addition=residual))


def rope(**more: Any) -> Held:
    table = randn(300, 64)
    tensors = {"query": randn(5, 256), "key": randn(5, 128), "cos_sin_cache": table, "positions": torch.arange(5)}
    return {**tensors, "head_size": 64, "rotary_dim": 64, "is_neox_style": True, "offsets": None, **more}


def test_names_and_cost_of_llama():
    kernel = kernel_of("sglang_op::Llama3RotaryEmbedding", **rope())
    definition = checked(kernel)
    assert definition.name == "rope_with_cos_sin_cache_neox_style_bf16cache_d64_rd64"
    assert list(definition.outputs) == ["q_out", "k_out"]
    assert kernel.touched is not None
    assert kernel.touched() == 5 * (2 * 6 * 64 * 2 + 8) + 5 * 64 * 2, "it copies what it does not rotate, too"
    gate = kernel_of("sglang_op::SiluAndMul", x=torch.empty(4, 28672, dtype=torch.bfloat16, device="meta"))
    assert gate.name == "silu_and_mul_h14336"


def test_a_rotation_that_is_no_lookup_of_its_table_is_declined():
    assert declined("sglang_op::RotaryEmbedding", **rope(offsets=torch.arange(5)))
    assert declined("sglang_op::RotaryEmbedding", **rope(rotary_dim=32))
    assert declined("sglang_op::RotaryEmbedding", **rope(positions=torch.zeros(3, 5, dtype=torch.int64)))
    assert declined("sglang_op::MRotaryEmbedding", **rope())
