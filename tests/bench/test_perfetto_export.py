"""`kcap export --to perfetto`: profiled steps as Chrome's trace events."""

import orjson
import pytest
from bench_calls import ADD, METADATA, MM

from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage

KERNELS = [
    KernelTime(name="gemm", us=10.0, call=0, start_us=0.0, launched_us=-30.0),
    KernelTime(name="beside", us=4.0, call=0, start_us=2.0, graph=True, launched_us=-30.0),
    KernelTime(name="memset", us=1.0, start_us=40.0, reason="no launch"),
]


@pytest.fixture
def profiled(recorded):
    path = recorded([MM, ADD], METADATA.model_copy(update={"coverage": {"share": 0.9}}))
    steps = [
        StepCoverage(index=i, phase="decode", mode="full", padded=8, sequences=4, kernels=KERNELS) for i in range(2)
    ]
    coverage.write(path / coverage.FILE, steps)
    return path


def events_of(output):
    events = orjson.loads((output / "trace.json").read_bytes())["traceEvents"]
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [(rows[event["pid"], event["tid"]], event) for event in events if event["ph"] == "X"]


def test_steps_lie_one_after_another_with_their_kernels_in_rows(profiled, exported):
    output, _ = exported(profiled, "perfetto")
    events = [(row, event["name"], event["ts"], event["dur"]) for row, event in events_of(output)]
    first = [
        ("steps", "decode, 4 × full", 30.0, 41.0),
        ("GPU 0", "aten::mm", 30.0, 10.0),
        ("launches", "aten::mm", 0.0, 1.0),
        ("GPU 1", "aten::mm", 32.0, 4.0),
        ("GPU 0", "memset", 70.0, 1.0),
    ]
    later = 71.0 + 100.0
    assert events == [*first, *((row, name, at + later, us) for row, name, at, us in first)]


def test_a_kernel_names_its_call(profiled, exported):
    output, _ = exported(profiled, "perfetto")
    kernels = [event["args"] for row, event in events_of(output) if row.startswith("GPU")]
    assert kernels[0] == {
        "kernel": "gemm",
        "graph": False,
        "call": 0,
        "operator": "aten::mm",
        "arguments": "bf16[8, 64] x bf16[64, 32]{1, 64}",
    }
    assert kernels[2] == {"kernel": "memset", "graph": False, "reason": "no launch"}


def test_what_ran_in_no_profiled_step_is_lost(profiled, exported):
    _, loss = exported(profiled, "perfetto")
    assert (loss["exported"], loss["total"]) == (100, 110)
    assert [(lost["operator"], lost["reason"]) for lost in loss["lost"]] == [
        ("aten::add.Tensor", "it ran in no profiled step")
    ]


@pytest.mark.parametrize("kind", ["unprofiled", "dataset"])
def test_what_has_no_profiled_steps_is_refused(kind, recorded, kcap, tmp_path):
    (tmp_path / "dataset" / "definitions").mkdir(parents=True)
    path = recorded([MM]) if kind == "unprofiled" else tmp_path / "dataset"
    done = kcap("export", path, "--to", "perfetto", "-o", tmp_path / "out")
    assert done.code == 2 and ("--check-coverage" if kind == "unprofiled" else "no steps for perfetto") in done.err
    assert not (tmp_path / "out").exists()
