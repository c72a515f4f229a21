"""`kcap show --by family`, and the engine's own GPU time beside the counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcap.schemas.derive.derive import derive
from kcap.schemas.recording.recording import Argument, Call, Count, load, write_recording
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage

Kcap = Callable[..., Any]
MATRIX_PRODUCTS = 17  # of the Recording in the fixture


@pytest.fixture
def profiled(recording: Path) -> Path:
    """A linear and an operator that no family knows, with the GPU time of one profiled step."""
    known = load(recording)
    count = [Count(phase="decode", count=8)]
    arguments = {"input": TensorSpec((4, 64), "bfloat16"), "weight": TensorSpec((32, 64), "bfloat16", storage=1)}
    linear = Call(
        id=len(known.calls),
        operator="aten::linear",
        args=[Argument(name=name, value=value) for name, value in arguments.items()],
        counts=count,
    )
    other = Call(id=len(known.calls) + 1, operator="other::op", args=[Argument(value=1.5)], counts=count)
    metadata = known.metadata.model_copy(update={"coverage": {"share": 1.0}})
    write_recording(recording, metadata, [*known.calls, linear, other])
    kernels = [KernelTime(name="a", us=30.0, call=linear.id), KernelTime(name="b", us=10.0, call=other.id)]
    step = StepCoverage(index=0, phase="decode", kernels=[*kernels, KernelTime(name="c", us=5.0, reason="unknown")])
    coverage.write(recording / coverage.FILE, [step])
    return recording


def rows(kcap: Kcap, *words: object) -> dict[str, Any]:
    document = json.loads(kcap("show", *words, "--json").out)
    return {row["name"]: row for row in document["rows"]} | {"total": document}


def test_matrix_products_are_of_the_family_gemm_and_an_unknown_operator_of_none(kcap: Kcap, profiled: Path) -> None:
    found = rows(kcap, profiled, "--by", "family")
    assert found["gemm"]["count"] == 8 + MATRIX_PRODUCTS
    assert found["(none)"]["count"] >= 8
    assert sum(row["count"] for name, row in found.items() if name != "total") == found["total"]["total"]
    assert found["gemm"]["gpu_us"] == 30.0 and found["(none)"]["gpu_us"] == 10.0


def test_gpu_time_is_a_share_of_all_rows_shown_or_not(kcap: Kcap, profiled: Path) -> None:
    out = kcap("show", profiled, "--by", "operator").out
    assert "GPU time" in out and "75.0%" in out and "25.0%" in out
    assert "75.0%" in kcap("show", profiled, "--by", "operator", "--top", 3).out


def test_without_profiled_steps_no_gpu_time_is_shown(kcap: Kcap, recording: Path) -> None:
    assert "GPU time" not in kcap("show", recording, "--by", "operator").out


def test_a_call_whose_arguments_no_solution_could_take_has_no_seam(
    kcap: Kcap, profiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows(kcap, profiled, "--by", "family")["gemm"]["seams"] == ["operator"]
    derived = derive(load(profiled))
    derived.why_no_form.update(dict.fromkeys(derived.family_of(), "its cache may lie in tiles"))
    monkeypatch.setattr("kcap.schemas.derive.derive.derive", lambda recording: derived)
    assert rows(kcap, profiled, "--by", "family")["gemm"]["seams"] == [None]
