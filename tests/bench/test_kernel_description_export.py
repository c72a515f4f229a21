"""The older schema set's Kernel Descriptions: what they can carry, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from derived_calls import METADATA, embedding, linear, ranged

from kcap.schemas.flashinfer.kernel_description import read
from kcap.schemas.recording.recording import write_recording


@pytest.fixture
def path(tmp_path: Path) -> Path:
    calls = [linear(0, 1), linear(1, 7), embedding(2, 5)]
    write_recording(tmp_path / "a.kcap", METADATA, calls, samples=[ranged(2, 0, 9)])
    return tmp_path / "a.kcap"


def test_a_gemm_is_written_and_an_embedding_by_integers_is_refused_with_its_counts(path: Path, exported) -> None:
    output, loss = exported(path, "kernel-description")
    assert [file.stem for file in output.glob("*.json") if file.stem != "loss"] == ["gemm_bf16_n16_k32"]
    (lost,) = loss["lost"]
    assert lost["operator"] == "aten::embedding" and "int64" in lost["reason"] and lost["count"] == 6


def test_workloads_are_said_to_be_left_out(path: Path, exported) -> None:
    _, loss = exported(path, "kernel-description")
    assert {reduced["count"] for reduced in loss["reduced"]} == {12}


def test_a_region_counts_as_the_kernels_in_it_alone(tmp_path: Path, exported) -> None:
    region = linear(0, 1, count=50).model_copy(update={"kind": "region"})
    inside = linear(1, 1).model_copy(update={"operator": "x::y", "parent": region.operator})
    write_recording(tmp_path / "a.kcap", METADATA, [region, inside])
    _, loss = exported(tmp_path / "a.kcap", "kernel-description")
    assert loss["total"] == 6 and all(reduced["count"] <= 6 for reduced in loss["reduced"])


def test_what_is_written_is_a_valid_kernel_description(kcap, path: Path, exported) -> None:
    output, _ = exported(path, "kernel-description")
    (file,) = output.glob("gemm*.json")
    assert read(file).axes.keys() == {"M", "N", "K"}
    assert kcap("validate", file).code == 0
