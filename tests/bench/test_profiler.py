"""`--profile`: what Nsight Compute prints, read; and what is said where it is not there, or may not count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from bench_datasets import SCALE, workload

from kcap.bench.tasks import profiler
from kcap.bench.tasks.profiler import kernels_of, with_profile
from kcap.schemas.flashinfer.definition import ScalarInput
from kcap.schemas.results.verdict import Verdict

TABLE = """\
==PROF== Connected to process 41
a library greets
==PROF== Profiling "norm" - 0: 0%....100% - 1 pass
"ID","Kernel Name","dram__bytes.sum","gpu__time_duration.sum","launch__grid_size",WARPS
"","","Mbyte","us","","%"
"0","norm(float*, int)","1.5","12.25","1,024","71.5"
"1","copy","n/a","3","1","8"
""".replace("WARPS", '"sm__warps_active.avg.pct_of_peak_sustained_active"')


def test_each_kernel_has_its_counters_in_one_unit():
    assert list(kernels_of(TABLE)) == [
        {
            "kernel": "norm(float*, int)",
            "dram_bytes": 1.5e6,
            "duration_ns": 12250.0,
            "blocks": 1024.0,
            "occupancy_percent": 71.5,
        },
        {"kernel": "copy", "duration_ns": 3000.0, "blocks": 1.0, "occupancy_percent": 8.0},
    ]


@pytest.mark.parametrize("text", ["", "==PROF== Connected\n==ERROR== no kernels were profiled\n"])
def test_without_a_table_there_are_none(text):
    assert list(kernels_of(text)) == []


def profiled(monkeypatch, tmp_path, ncu: str | None, device="cuda:0"):
    """The verdict with a profile by `ncu`, a shell script (None: not there)."""
    if ncu is not None:
        (tmp_path / "ncu").write_text(f"#!/bin/sh\n{ncu}\n")
        (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setattr(profiler.shutil, "which", lambda _: str(tmp_path / "ncu") if ncu is not None else None)
    solution = SimpleNamespace(model_dump=lambda mode: {})
    dataset = SimpleNamespace(root=tmp_path)
    one = workload(SCALE, "s1", eps=ScalarInput(value=0.5))
    opened = SimpleNamespace(workloads=[one], definition=SCALE, dataset=dataset)
    verdict = Verdict(definition="scale", solution="mine", status="PASSED", device=device)
    return with_profile(verdict, opened, SimpleNamespace(solution=solution))


def test_the_counters_stand_beside_the_verdict(monkeypatch, tmp_path):
    (tmp_path / "table").write_text(TABLE)
    verdict = profiled(monkeypatch, tmp_path, f"cat {tmp_path}/table")
    assert (verdict.profile["workload"], len(verdict.profile["kernels"]), verdict.notes) == ("s1", 2, [])


@pytest.mark.parametrize(
    ("ncu", "device", "words"),
    [
        (None, "cuda:0", "put it on PATH"),
        ("true", "cpu", "counters are a GPU's"),
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1", "cuda:0", "run as root"),
        ("echo boom >&2; exit 3", "cuda:0", "saw no kernel: boom"),
    ],
    ids=["absent", "cpu", "no right", "fails"],
)
def test_why_there_are_no_counters_is_a_note_that_names_the_fix(monkeypatch, tmp_path, ncu, device, words):
    verdict = profiled(monkeypatch, tmp_path, ncu, device)
    assert (verdict.profile, verdict.status) == (None, "PASSED")
    assert words in verdict.notes[0]
