"""`kcap gain`: shares, floors, seams and the most that could be saved, of times that are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcap.schemas.recording.recording import Argument, load, write_recording
from kcap.schemas.recording.records import Call, Count, Launch, Metadata
from kcap.schemas.recording.seam import seam_of
from kcap.schemas.recording.signature import call_key
from kcap.schemas.recording.values import Group, TensorSpec
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage
from kcap.schemas.results.measurement import Measurement, Roofline, write_measurements
from kcap.show.gain import CallTime, gains

Kcap = Callable[..., Any]


def call(number: int, operator: str, launch: Launch | None = None, **counts: int) -> Call:
    tensor = Argument(name="x", value=TensorSpec((4, 64 + number), "bfloat16"))
    of_phases = [Count(phase=phase, count=count) for phase, count in counts.items()]
    return Call(id=number, operator=operator, args=[tensor], counts=of_phases, launch=launch)


CALLS = [
    call(0, "other::norm", decode=100, prefill=2),
    call(1, "other::norm", decode=50),
    call(2, "flashinfer::decode", decode=10),
    call(3, "cpp::fused.s01234567", decode=10),
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "r.kcap"
    write_recording(path, Metadata(steps={"decode": 10, "prefill": 2}), CALLS)
    return path


def measurement(of: Call, us: float, floor: float | None, least: float | None = None) -> Measurement:
    roofline = None if floor is None else Roofline(us=floor, times=us / floor, gb_s=1, tflop_s=1)
    return Measurement(
        call=of.id,
        key=call_key(of),
        operator=of.operator,
        median_us=us,
        roofline=roofline,
        floor_us=least,
        method="graph",
    )


def test_what_could_be_saved_is_the_share_over_the_floor(kcap: Kcap, recorded: Path, tmp_path: Path) -> None:
    times = tmp_path / "m.jsonl"
    lines = [
        (CALLS[0], 4.0, 1.0, None),
        (CALLS[1], 8.0, 1.0, 2.0),
        (CALLS[2], 10.0, None, None),
        (CALLS[3], 10.0, 5.0, None),
    ]
    write_measurements(times, [measurement(*line) for line in lines])
    found = json.loads(kcap("gain", recorded, "--measurements", times, "--json").out)
    rows = {row["name"]: row for row in found["rows"]}
    assert found["total_us"]["decode"] == 100 * 4 + 50 * 8 + 100 + 100
    norm = next(row for name, row in rows.items() if row["seams"] == ["operator"])
    decode = norm["phases"]["decode"]
    assert decode["engine_us"] == 800 and decode["floor_us"] == 100 * 1 + 50 * 2, "no less than an empty kernel takes"
    assert decode["share"] == pytest.approx(0.8) and decode["most"] == pytest.approx(0.6)
    assert decode["most_us_a_step"] == pytest.approx(60)
    assert norm["phases"]["prefill"]["most"] == pytest.approx(0.75)
    unknown = rows["flashinfer::decode"]
    assert unknown["seams"] == ["function"] and unknown["unknown_us"] == 100 and unknown["times_floor"] is None
    assert unknown["phases"]["decode"]["most"] == 0, "whose floor nobody knows"
    closed = next(row for row in rows.values() if not row["seams"])
    assert closed["phases"]["decode"]["most"] == 0 and closed["times_floor"] == 2, "nobody can put a kernel there"
    assert found["rows"][-1] == closed


def test_profiled_steps_do_where_nothing_was_measured(kcap: Kcap, recorded: Path) -> None:
    known = load(recorded)
    write_recording(recorded, known.metadata.model_copy(update={"coverage": {"share": 1.0}}), known.calls)
    kernels = [
        KernelTime(name="a", us=30.0, call=0),
        KernelTime(name="b", us=0.5, call=2),
        KernelTime(name="c", us=9.0),
    ]
    coverage.write(recorded / coverage.FILE, [StepCoverage(index=i, phase="decode", kernels=kernels) for i in range(2)])
    found = json.loads(kcap("gain", recorded, "--json").out)
    assert found["total_us"]["decode"] == pytest.approx(10 * 30.5), "of ten steps, as the two profiled are"
    assert found["untimed"] == 2 + 50 + 10
    (norm,) = [row for row in found["rows"] if row["phases"].get("prefill")] or [found["rows"][0]]
    assert norm["phases"]["decode"]["floor_us"] == pytest.approx(100 * 0.5), "the shortest kernel of these steps"
    assert "typical" in found["source"]


def test_the_table_names_the_seam_and_the_whole(kcap: Kcap, recorded: Path, tmp_path: Path) -> None:
    times = tmp_path / "m.jsonl"
    write_measurements(times, [measurement(CALLS[0], 4.0, 1.0), measurement(CALLS[3], 10.0, 5.0)])
    said = kcap("gain", recorded, "--measurements", times)
    assert "60 invocations have no time" in said.out
    assert "of decode, 75.0% of prefill" in said.out or "75.0% of prefill, 60.0% of decode" in said.out
    assert "none" in said.out and "operator" in said.out
    assert "  4.0  " in said.out
    write_measurements(times, [measurement(CALLS[0], 4.0, 0.001)])
    assert "  …  " in kcap("gain", recorded, "--measurements", times).out, "as in kcap replay, over 999"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "has no times: kcap replay"),
        (["--measurements", "nowhere.jsonl"], "nowhere.jsonl: no such file (kcap replay PATH -o nowhere.jsonl"),
    ],
)
def test_without_times_it_says_how_to_get_them(kcap: Kcap, recorded: Path, words: list[str], reason: str) -> None:
    said = kcap("gain", recorded, *words)
    assert said.code == 2 and reason in said.err


def test_times_of_another_recording_are_refused(kcap: Kcap, recorded: Path, tmp_path: Path) -> None:
    times = tmp_path / "m.jsonl"
    write_measurements(times, [measurement(call(9, "other::norm", decode=1), 1.0, None)])
    said = kcap("gain", recorded, "--measurements", times)
    assert said.code == 2 and "of no call of" in said.err


@pytest.mark.parametrize(
    ("operator", "launch", "seam"),
    [
        ("aten::mm.out", None, "operator"),
        ("_vllm_fa3_C::fwd", None, "operator"),
        ("triton::fused.s01234567", Launch(kernel="a.py", function="f"), "launch"),
        ("triton::fused.unread", Launch(function="f"), None),
        ("deep_gemm::fp8_gemm_nt", None, "function"),
        ("cpp::fused.s01234567", Launch(language="cpp", kernel="a.cpp", function="f"), None),
        ("tvm::NT_matmul5.01234567", None, None),
        ("_c10d_functional::all_reduce", None, None),
        ("pynccl::all_gather", None, None),
    ],
)
def test_a_seam_is_where_a_kernel_can_be_put_in(operator: str, launch: Launch | None, seam: str | None) -> None:
    kernel = call(0, operator, launch, decode=1)
    assert seam_of(kernel) == seam
    in_group = [*kernel.args, Argument(name="group", value=Group(2, 0))]
    assert seam_of(kernel.model_copy(update={"args": in_group})) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(times=st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.01, 200)), min_size=4, max_size=4))
def test_no_share_is_more_than_the_whole(recorded: Path, times: list[tuple[float, float]]) -> None:
    of_calls = {number: CallTime({"decode": us, "prefill": us}, floor) for number, (us, floor) in enumerate(times)}
    found = gains(load(recorded), of_calls, "")
    for phase in found.phases:
        assert sum(found.share(row, phase) for row in found.rows) == pytest.approx(1)
        assert all(0 <= found.most(row, phase) <= found.share(row, phase) for row in found.rows)


def test_attention_that_cannot_be_replaced_says_why(
    kcap: Kcap, llama_on_h100: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    words = ("gain", llama_on_h100 / "model.kcap", "--measurements", llama_on_h100 / "measurements.jsonl")
    rows = {row["name"]: row for row in json.loads(kcap(*words, "--json").out)["rows"] if "gqa" in row["name"]}
    decode, prefill = rows["gqa_table_decode_h32_kv8_d128_ps16"], rows["gqa_paged_prefill_causal_h32_kv8_d128_ps16"]
    assert (decode["seams"], decode["why_no_seam"], decode["definition"]) == (["operator"], "", True)
    assert (prefill["seams"], prefill["why_no_seam"]) == ([], "prefill: hardly a batch has the sizes of another")
    assert all(phase["most"] == 0.0 for phase in prefill["phases"].values())
    assert f"{prefill['name']} ({prefill['why_no_seam']})" in kcap(*words, "--top", 99).out
