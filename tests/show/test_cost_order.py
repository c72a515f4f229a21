"""What is costly comes first: by GPU time where it was measured, else by an estimate that says that it is one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcap.replay.roofline import ceilings
from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, load, write_recording
from kcap.schemas.recording.values import TensorSpec, TorchConstant
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage
from kcap.show.estimate import Rates, estimated_times, moved_bytes

Kcap = Callable[..., Any]
NORM, ATTENTION = "vllm_ir::rms_norm", "vllm::attention"


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine on which nothing was replayed."""
    monkeypatch.setattr(ceilings, "cache_folder", lambda: tmp_path / "cache")


def tensor(*shape: int, storage: int = 0, dtype: str = "bfloat16") -> Argument:
    return Argument(value=TensorSpec(shape, dtype, device="cpu", storage=storage))


def call(number: int, operator: str, count: int, *args: Argument, **more: Any) -> Call:
    return Call(id=number, operator=operator, args=list(args), counts=[Count(phase="decode", count=count)], **more)


CALLS = [
    call(0, "aten::add.Tensor", 900, tensor(4, 64), tensor(4, 64, storage=1)),
    call(1, "aten::mm", 20, tensor(4, 4096), tensor(4096, 4096, storage=1)),
    call(2, NORM, 10, tensor(4, 4096), tensor(4096, storage=1), kind="region"),
    call(3, NORM, 30, tensor(8, 4096), tensor(4096, storage=1), kind="region"),
    call(4, "aten::pow.Tensor_Scalar", 40, tensor(8, 4096), parent=NORM),
    call(5, "aten::rsqrt", 40, tensor(8, 1), parent=NORM),
    call(6, ATTENTION, 5, tensor(4, 64), kind="region"),
    call(7, "_C::flash", 5, tensor(4, 64), parent=ATTENTION),
    call(8, "aten::exp", 5, tensor(4, 64), parent=ATTENTION),
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    write_recording(tmp_path / "r.kcap", Metadata(device="A CPU"), CALLS)
    return tmp_path / "r.kcap"


def names(kcap: Kcap, *args: object) -> list[str]:
    return [row["name"] for row in json.loads(kcap("show", *args, "--json").out)["rows"]]


def test_without_measured_times_the_estimate_orders_and_says_that_it_is_one(kcap: Kcap, recorded: Path) -> None:
    assert names(kcap, recorded)[:2] == ["aten::mm", "aten::pow.Tensor_Scalar"], "most called, yet small: add is third"
    out = kcap("show", recorded).out
    assert "cost: an estimate" in out and "typical of a CPU; kcap replay measures" in out
    document = json.loads(kcap("show", recorded, "--json").out)
    assert document["estimated_by"].endswith("typical of a CPU")
    assert document["estimated_us"] == pytest.approx(sum(row["estimated_us"] for row in document["rows"]))


def test_measured_gpu_time_orders_where_it_is_known(kcap: Kcap, recorded: Path) -> None:
    known = load(recorded)
    write_recording(recorded, known.metadata.model_copy(update={"coverage": {"share": 1.0}}), known.calls)
    kernels = [KernelTime(name="a", us=9.0, call=5), KernelTime(name="b", us=3.0, call=0)]
    coverage.write(recorded / coverage.FILE, [StepCoverage(index=0, phase="decode", kernels=kernels)])
    assert names(kcap, recorded)[:2] == ["aten::rsqrt", "aten::add.Tensor"]
    assert "cost: an estimate" not in kcap("show", recorded).out


def test_rates_measured_on_this_machine_are_used_and_named(kcap: Kcap, recorded: Path, tmp_path: Path) -> None:
    kept = ceilings.Ceilings(
        device_name="A CPU", levels=ceilings.descending_levels([(0, 77.0)]), tflop_s={"float32": 2.0}
    )
    ceilings.write_ceilings({"device": "cpu", "device_name": "A CPU"}, kept)
    assert "77 GB/s and 2 TFLOP/s, measured here" in kcap("show", recorded).out


def test_the_slower_of_memory_and_arithmetic_decides(recorded: Path) -> None:
    recording = load(recorded)
    moved = (4 * 4096 + 4096 * 4096 + 4 * 4096) * 2  # what the product reads and writes
    by_memory = estimated_times(recording, Rates(1.0, 1e9, ""))
    by_arithmetic = estimated_times(recording, Rates(1e9, 1.0, ""))
    assert by_memory is not None and by_arithmetic is not None
    assert by_memory[1] == pytest.approx(20 * moved / 1e3)
    assert by_arithmetic[1] == pytest.approx(20 * 2 * 4 * 4096 * 4096 / 1e6)


def test_a_cache_that_an_index_points_into_is_not_taken_for_read(recorded: Path) -> None:
    table, indices = tensor(1 << 20, 64), tensor(8, storage=1, dtype="int64")
    assert moved_bytes(call(0, "x::lookup", 1, table, indices)) == 2 * 8 * 8
    assert moved_bytes(call(0, "x::whole", 1, table)) == (1 << 20) * 64 * 2
    assert moved_bytes(call(0, "x::in_place", 1, table, table)) == (1 << 20) * 64 * 2, "one storage counts once"


def test_an_operator_that_ran_as_several_of_atens_is_one_row_with_its_parts(kcap: Kcap, recorded: Path) -> None:
    out = kcap("show", recorded, "--by", "operator").out
    assert f"{NORM} (composite)" in out and "--parts" in out
    assert "aten::pow" not in out
    assert "_C::flash" in out and "aten::exp" in out, "a region around a kernel of its own is no composite"
    unfolded = kcap("show", recorded, "--by", "operator", "--parts").out
    below = unfolded.split(f"{NORM} (composite)")[1].splitlines()[1:3]
    assert [line.split()[0] for line in below] == ["aten::pow.Tensor_Scalar", "aten::rsqrt"]
    assert names(kcap, recorded, "--by", "operator").count(NORM) == 0, "JSON lists kernels"


def test_by_kernel_the_parts_time_is_shared_out_and_shares_add_up(kcap: Kcap, recorded: Path) -> None:
    rows = [line for line in kcap("show", recorded).out.splitlines() if "%" in line]
    assert sum(line.startswith(NORM) for line in rows) == 2
    for column in (-1, -2):  # cost, and share of the invocations
        shares = [float(line.split()[column].rstrip("%")) for line in rows if line.split()[column].endswith("%")]
        assert sum(shares) == pytest.approx(100, abs=0.5)


def test_a_composites_count_says_as_how_many_operators_it_ran(kcap: Kcap, recorded: Path) -> None:
    out = kcap("show", recorded, "--by", "operator").out
    (row,) = [line for line in out.splitlines() if line.startswith(NORM)]
    assert "40 × 2 " in row, "both Calls of the composite, and two operators in each"
    assert f"{80 / 1010:.1%}" in row
    by_kernel = [line for line in kcap("show", recorded).out.splitlines() if line.startswith(NORM)]
    assert sorted(line.split(" × ")[0].split()[-1] for line in by_kernel) == ["10", "30"]
    assert {line.split(" × ")[1].split()[0] for line in by_kernel} == {"2"}, "by calls, whatever their sizes"


def test_phases_share_out_the_cost(kcap: Kcap, tmp_path: Path) -> None:
    counts = [Count(phase="prefill", count=1), Count(phase="decode", count=3)]
    write_recording(tmp_path / "r", Metadata(), [CALLS[1].model_copy(update={"id": 0, "counts": counts})])
    out = kcap("show", tmp_path / "r", "--by", "phase").out
    assert [line.split()[-1] for line in out.splitlines() if "%" in line] == ["75.0%", "25.0%"]
    assert "cost: an estimate" in out


def test_what_fills_a_result_of_its_own_costs_what_it_writes() -> None:
    half = Argument(name="dtype", value=TorchConstant("dtype", "float16"))
    assert moved_bytes(call(0, "aten::ones", 1, Argument(value=[3, 500]), half)) == 3 * 500 * 2
    assert moved_bytes(call(0, "aten::zeros", 1, Argument(value=[3, 500]))) == 3 * 500 * 4


LONG = "cpp::to_copy_add_embedding_mean_mul_pow_rsqrt_and_much_more.s0123456789abcdef"


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("by", ["kernel", "operator", "phase"])
def test_a_table_fits_the_width_and_cuts_names_never_numbers(
    width: int, by: str, kcap: Kcap, recorded: Path, recording: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    phases = [Count(phase=phase, count=123_456) for phase in ("prefill", "decode", "mixed", "other")]
    long_name = Call(id=0, operator=LONG, args=[tensor(4, 64)], counts=phases)
    write_recording(tmp_path / "long.kcap", Metadata(), [long_name])
    out = kcap("show", tmp_path / "long.kcap", "--by", by).out
    if by != "phase":
        assert "493,824" in out and LONG[-9:] in out, "the id that tells two fused kernels apart stays"
    assert ("not shown in 80 columns: " in out) == (width == 80 and by != "phase")
    for path in (recorded, recording, tmp_path / "long.kcap"):
        lines = kcap("show", path, "--by", by).out.splitlines()
        assert max(map(len, lines)) <= width
        table = [line for line in lines if "%" in line]
        assert table and all(line.rstrip().endswith(("%", "·")) for line in table if line[0] != "c"), (
            "no row is wrapped"
        )


def test_without_torch_rows_are_ordered_by_count(kcap: Kcap, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert names(kcap, recorded)[0] == "aten::add.Tensor"
    assert "cost" not in kcap("show", recorded).out


@pytest.mark.parametrize("reason", ["off_step", "traced"])
def test_what_is_left_out_by_design_is_said_in_words(reason: str, kcap: Kcap, tmp_path: Path) -> None:
    write_recording(tmp_path / "r", Metadata(dropped={reason: 6}), CALLS)
    out = kcap("show", tmp_path / "r").out
    assert "not counted: 6 invocations" in out and "as usual" in out
    assert "dropped" not in out
