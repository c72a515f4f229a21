"""Inputs are what the Workload says, or what is said instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from definitions import definition, tensor, workload
from safetensors.torch import save_file

from kcap.errors import FormatError, KcapError
from kcap.replay.datasets.inputs import make_inputs
from kcap.replay.datasets.workloads import default_workload
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.derive.constraints import BrokenConstraint
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, DefinitionTensor, Workload

PAGED = definition(
    {
        "k_cache": tensor("bfloat16", "num_pages", "page_size", "D"),
        "kv_indptr": tensor("int32", "len_indptr"),
        "kv_indices": tensor("int32", "num_kv_indices"),
        "sm_scale": DefinitionTensor(shape=None, dtype="float32"),
    },
    {"num_pages": None, "page_size": 2, "D": 4, "len_indptr": None, "num_kv_indices": None},
    constraints=["num_kv_indices == kv_indptr[-1].item()"],
)
AXES = {"num_pages": 1000, "len_indptr": 3, "num_kv_indices": 4}


def stored(root: Path, **tensors: torch.Tensor) -> Workload:
    """A Workload of PAGED with these tensors in a blob."""
    save_file(tensors, root / "one.safetensors")
    return workload(PAGED, dict.fromkeys(tensors, "one.safetensors"), {"sm_scale": 0.5}, **AXES)


def paged(*pages: int) -> dict[str, torch.Tensor]:
    return {"kv_indptr": torch.tensor([0, 1, 4]).int(), "kv_indices": torch.tensor(pages).int()}


def test_a_blob_is_read_and_the_cache_cut_to_its_pages(tmp_path: Path) -> None:
    made = make_inputs(PAGED, stored(tmp_path, **paged(900, 7, 40, 7)), Dataset(tmp_path))
    cache, offsets, pages, scale = made.inputs
    assert offsets.tolist() == [0, 1, 4]
    assert pages.tolist() == [2, 0, 1, 0]
    assert pages.dtype == torch.int32
    assert cache.shape == (3, 2, 4)
    assert cache.dtype == torch.bfloat16
    assert scale == 0.5
    assert made.axes == AXES | {"num_pages": 3}
    assert made.notes == ["caches cut to the pages in use: num_pages is 3 of 1000"]


def test_a_missing_blob_is_said_and_valid_values_stand_in(tmp_path: Path) -> None:
    given = workload(PAGED, dict.fromkeys(("kv_indptr", "kv_indices"), "gone.safetensors"), {"sm_scale": 1.0}, **AXES)
    made = make_inputs(PAGED, given, Dataset(tmp_path))
    assert made.notes[0] == "made up for want of gone.safetensors: kv_indptr, kv_indices"
    assert made.inputs[1][-1] == 4
    assert sorted(made.inputs[2].tolist()) == [0, 1, 2, 3]


def test_a_damaged_blob_is_refused(tmp_path: Path) -> None:
    given = stored(tmp_path, **paged(1, 2, 3, 4))
    blob = tmp_path / "one.safetensors"
    blob.write_bytes(blob.read_bytes()[:-9])
    with pytest.raises(FormatError, match=r"one.safetensors: kv_indptr: not readable"):
        make_inputs(PAGED, given, Dataset(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.tensor([0, 1, 4]), r"kv_indptr: int64 \[3\], but kv_indptr is int32 \[3\]"),
        (torch.tensor([0, 4]).int(), r"kv_indptr: int32 \[2\], but kv_indptr is int32 \[3\]"),
    ],
)
def test_a_blob_of_another_shape_or_dtype_is_refused(tmp_path: Path, wrong: torch.Tensor, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        make_inputs(PAGED, stored(tmp_path, kv_indptr=wrong), Dataset(tmp_path))


def test_a_blob_outside_the_dataset_is_refused(tmp_path: Path) -> None:
    given = workload(PAGED, {"kv_indptr": "../one.safetensors"}, {"sm_scale": 1.0}, **AXES)
    with pytest.raises(FormatError, match=r"without \.\."):
        make_inputs(PAGED, given, Dataset(tmp_path))


def test_a_page_beyond_the_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KcapError, match="kv_indices: names page 1000, the cache has 1000"):
        make_inputs(PAGED, stored(tmp_path, **paged(1, 2, 3, 1000)), Dataset(tmp_path))


def test_offsets_that_break_a_constraint_are_refused_by_its_name(tmp_path: Path) -> None:
    blob = {**paged(1, 2, 3, 4), "kv_indptr": torch.tensor([0, 1, 3]).int()}
    with pytest.raises(
        BrokenConstraint, match=r"its constraint 'num_kv_indices == kv_indptr\[-1\].item\(\)' does not hold"
    ):
        make_inputs(PAGED, stored(tmp_path, **blob), Dataset(tmp_path))


def test_axes_that_break_a_constraint_are_refused_before_anything_is_made() -> None:
    of = definition({"x": tensor("float32", "M", "N")}, {"M": None, "N": None}, constraints=["M == N + 1"])
    with pytest.raises(BrokenConstraint, match=r"'M == N \+ 1' does not hold \(M=1048576, N=1048576\)"):
        make_inputs(of, workload(of, M=1 << 20, N=1 << 20), None)


def test_what_does_not_fit_is_skipped_with_its_size() -> None:
    of = definition({"x": tensor("float16", "M", "N")}, {"M": None, "N": 1 << 10})
    with pytest.raises(Skip, match="its tensors take 4 GiB, the limit is 1 GiB"):
        make_inputs(of, workload(of, M=1 << 20), None, limit=1 << 30)
    with pytest.raises(Skip, match="the limit is"):
        make_inputs(of, workload(of, M=1 << 40), None)


def test_a_rule_that_lacks_what_it_reads_is_said() -> None:
    ids = {"token_indices_sorted_by_lora_ids": tensor("int64", "M"), "lora_ids": tensor("int64", "N")}
    of = definition(ids, {"M": None, "N": 4}, op_type="lora_shrink")
    with pytest.raises(Skip, match=r"its rule knows another form of lora_shrink .*num_tokens_per_lora"):
        make_inputs(of, workload(of, M=8), None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_floats_are_standard_normal(dtype: str) -> None:
    of = definition({"x": tensor(dtype, "M", "N")}, {"M": None, "N": 64})
    (drawn,) = make_inputs(of, workload(of, M=300), None).inputs
    assert drawn.dtype == getattr(torch, dtype)
    values = drawn.float()
    assert abs(float(values.mean())) < 0.05
    assert 0.85 < float(values.std()) < 1.05
    assert len(values.unique()) > 30


def test_packed_numbers_and_bytes_take_every_value() -> None:
    of = definition({"x": tensor("int8", "M")}, {"M": None})
    assert len(make_inputs(of, workload(of, M=9000), None).inputs[0].unique()) == 256
    packed = definition({"x": tensor("float4_e2m1", "M")}, {"M": None})
    (drawn,) = make_inputs(packed, workload(packed, M=9000), None).inputs
    assert len(drawn.view(torch.uint8).unique()) == 256


def test_one_seed_gives_one_set_of_inputs() -> None:
    given = workload(PAGED, scalars={"sm_scale": 1.0}, **AXES)
    first, again, other = (make_inputs(PAGED, given, None, seed=seed).inputs for seed in (1, 1, 2))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[2], other[2])


def test_an_optional_input_that_is_left_out_is_none() -> None:
    state = DefinitionTensor(shape=["M"], dtype="float32", optional=True)
    of = definition({"x": tensor("float32", "M"), "state": state}, {"M": None}, constraints=["state.shape[0] == M"])
    given = Workload(uuid="one", axes={"M": 3}, inputs={"x": workload(of, M=3).inputs["x"]})
    assert make_inputs(of, given, None).inputs[1] is None


def test_a_workload_of_another_definition_is_refused() -> None:
    of = definition({"x": tensor("float32", "M")}, {"M": None})
    with pytest.raises(KcapError, match="some_kernel one: axes: M has no size"):
        make_inputs(of, workload(of), None)


def made_up_axes(constraints: list[str], **axes: int | None) -> dict[str, int]:
    of: Definition = definition({"x": tensor("float32", *axes)}, axes, constraints=constraints)
    return default_workload(of).axes


def test_made_up_axes_meet_the_constraints() -> None:
    assert made_up_axes(["len_indptr == batch_size + 1"], batch_size=None, len_indptr=None) == {
        "batch_size": 3,
        "len_indptr": 4,
    }
    assert made_up_axes(["a * 2 == b", "c == a + b"], a=None, b=None, c=None) == {"a": 3, "b": 6, "c": 9}
    with pytest.raises(BrokenConstraint, match="a > 100"):
        made_up_axes(["a > 100"], a=None)
