"""What `scripts/gpu/sglang_counts.py` makes of the calls of a decode step, and `check.py` of SGLang's scripts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kcap.schemas.recording.records import Call

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"
LAYERS = 32
# What 0.5.15's source has a Llama's decode graph hold: FlashInfer's norms, kernels of tvm-ffi modules in operators.
NORMS = {"flashinfer::rmsnorm": 1, "flashinfer::fused_add_rmsnorm": 2 * LAYERS}
OWN = dict.fromkeys(("sglang::store_cache", "sglang::apply_rope_inplace", "sglang::_run_activation_inplace"), LAYERS)
STEP = {"aten::linear": 4 * LAYERS, "aten::matmul": 1, "aten::copy_": 3, **NORMS, **OWN}
TRITON = {"triton::_fwd_grouped_kernel_stage1.0a1b2c3d": LAYERS, "triton::_fwd_kernel_stage2.0a1b2c3d": LAYERS}
FLASHINFER = {"flashinfer::BatchDecodeWithPagedKVCacheWrapper.run": LAYERS}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("check", "counts", "outputs", "sglang_counts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def calls(step: dict[str, int], parent: str | None = None) -> list[Call]:
    return [call for name, times in step.items() for call in times * [Call(id=1, operator=name, parent=parent)]]


@pytest.mark.parametrize("attention", [TRITON, FLASHINFER], ids=["triton", "flashinfer"])
def test_the_calls_of_a_decode_step_are_what_is_wanted(attention: dict[str, int], scripts: Any) -> None:
    found = scripts("sglang_counts")
    assert found.ran(calls(STEP | attention)) == Counter(found.wanted(LAYERS))


def test_a_plan_is_no_attention(scripts: Any) -> None:
    plan = Call(id=1, operator="flashinfer::BatchDecodeWithPagedKVCacheWrapper.plan", work=False)
    assert not +scripts("sglang_counts").ran([plan])


@pytest.mark.parametrize("missing", [*STEP, *TRITON])
def test_a_call_that_is_missing_is_missed(missing: str, scripts: Any) -> None:
    found = scripts("sglang_counts")
    step = STEP | TRITON
    lacking = found.ran(calls(step | {missing: step[missing] - 1}))
    needed = not missing.startswith(("aten::copy_", "triton::_fwd_kernel_stage2"))
    assert (lacking != Counter(found.wanted(LAYERS))) == needed


def test_a_kernel_in_an_operator_of_its_purpose_is_counted_once(scripts: Any) -> None:
    """Whether or not what a module runs is recorded on its own."""
    inside = calls({"tvm::store_cache": LAYERS, "tvm::cast": 1}, "sglang::store_cache")
    found = scripts("sglang_counts")
    assert found.ran(calls(STEP | TRITON) + inside) == Counter(found.wanted(LAYERS))


def test_without_sglang_the_part_fails_only_where_it_was_asked_for(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = scripts("check")
    monkeypatch.setattr(check, "run", lambda *words, **more: subprocess.CompletedProcess([], 1, "", ""))
    for asked, passed in (((), True), (("sglang",), False)):
        (row,) = check.Parts(tmp_path, True, asked).sglang()
        assert (row.passed, "not tried" in row.found) == (passed, True)


def test_each_backend_is_recorded_checked_and_timed(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = scripts("check")
    ran: list[tuple[str, ...]] = []

    def run(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        ran.append(words)
        said = "ok   throughput lost, triton, batch 16: 0.12 %, A/A 0.03 %; 900 steps recorded\n"
        return subprocess.CompletedProcess([], 0, said if "sglang_overhead" in str(words) else "", "")

    monkeypatch.setattr(check, "run", run)
    monkeypatch.setenv("KCAP_SGLANG_PYTHON", "/of/sglang")
    rows = check.Parts(tmp_path, True).sglang()
    assert [row.what for row in rows] == [
        "record sglang-triton", "throughput lost, triton, batch 16",
        "record sglang-flashinfer", "throughput lost, triton, batch 16",
    ]  # fmt: skip
    assert all(words[0] == "/of/sglang" for words in ran)
    assert sum("attention_backend=flashinfer" in words for words in ran) == 1
