"""What `scripts/gpu/parallel.py` says of engines of several ranks, and that it goes on whatever becomes of a part."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kcap.schemas.recording.recording import Recording, load, write_recording
from kcap.schemas.recording.records import Argument, Call, Count, Metadata, Rank
from kcap.schemas.recording.values import Group, TensorSpec
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import StepCoverage
from kcap.schemas.results.measurement import Measurement, ProgramMeasurement

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"
DAY = "2026-01-01T00:00:"
STEPS, LAYERS = {"prefill": 1, "decode": 3, "other": 2}, 2
X = Argument(name="x", value=TensorSpec((4, 8), "bfloat16"))
EACH = {"linears": ("aten::mm", 4 * LAYERS + 1), "all-reduces": ("vllm::all_reduce", 2 * LAYERS + 1)}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("parallel", "ranks", "check", "counts", "apply"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("parallel")


def two_ranks(path: Path, lacks: int = 0, group: int = 2, **more: Any) -> Recording:
    """`lacks`: how many all-reduces rank 1 has too few; `group`: their group's size."""
    calls = []
    for rank in (0, 1):
        for operator, each in EACH.values():
            args = [X, Argument(name="group", value=Group(group, rank, "tp"))] if "reduce" in operator else [X]
            number = each * 3 - (lacks if rank and "reduce" in operator else 0)
            counts = [Count(phase="prefill", rank=rank, count=each), Count(phase="decode", rank=rank, count=number)]
            counts += [Count(phase="other", rank=rank, count=7)]  # of a dummy batch
            calls.append(Call(id=len(calls), operator=operator, args=args, counts=counts))
    ranks = [Rank(rank=rank, steps=STEPS, ended=True, **more) for rank in (0, 1)]
    write_recording(path, Metadata(ranks=ranks, world_size=2, complete=True), calls)
    return load(path)


def setup(script: Any, **more: Any) -> Any:
    return script.Setup("tiny", LAYERS, 2, {kind: each for kind, (_, each) in EACH.items()}, **more)


def failed(rows: Sequence[Any]) -> list[str]:
    return [row.what for row in rows if not row.passed]


def test_each_rank_has_the_kernels_of_its_layers(script: Any, tmp_path: Path) -> None:
    rows = script.check_ranks(two_ranks(tmp_path / "r"), setup(script))
    assert not failed(rows)
    texts = {row.what: row.found for row in rows}
    assert texts["rank 1"] == "36 linears = 9 x 4, 20 all-reduces = 5 x 4"
    assert texts["vllm::all_reduce"] == "54 in tp of 2, 64 to 64 bytes"


@pytest.mark.parametrize(
    ("lacks", "group", "expected"),
    [(1, 2, ["rank 1"]), (0, 4, ["vllm::all_reduce"])],
)
def test_what_a_rank_lacks_and_another_group_fail(
    lacks: int, group: int, expected: list[str], script: Any, tmp_path: Path
) -> None:
    assert failed(script.check_ranks(two_ranks(tmp_path / "r", lacks, group), setup(script))) == expected


def test_another_number_of_ranks_and_steps_of_none_fail(script: Any, tmp_path: Path) -> None:
    recording = two_ranks(tmp_path / "r")
    assert "ranks" in failed(script.check_ranks(recording, replace(setup(script), ranks=4)))
    idle = [place.model_copy(update={"steps": {"other": 3}}) for place in recording.metadata.ranks]
    write_recording(tmp_path / "idle", Metadata(ranks=idle, complete=True), [])
    assert failed(script.check_ranks(load(tmp_path / "idle"), setup(script))) == ["rank 0", "rank 1", "collectives"]


def test_the_last_stage_has_the_logits_beside_its_layers(script: Any, tmp_path: Path) -> None:
    stages = setup(script, last={"linears": 1})
    assert failed(script.check_ranks(two_ranks(tmp_path / "r"), stages)) == ["rank 1"]


def test_each_rank_must_be_explained_by_itself(script: Any, tmp_path: Path) -> None:
    recording = two_ranks(tmp_path / "r")
    assert failed(script.check_coverage(recording)) == ["GPU time"]

    def profiled(*shares: float) -> list[str]:
        steps = [
            StepCoverage(index=0, rank=rank, phase="decode", gpu_us=100, explained_us=100 * share)
            for rank, share in enumerate(shares)
        ]
        coverage.write(recording.path / coverage.FILE, steps)
        return failed(script.check_coverage(recording))

    assert profiled(1.0, 0.98) == []
    assert profiled(1.0, 0.95) == ["GPU time of rank 1"]
    assert profiled(1.0) == ["GPU time of rank 1"]


def test_a_collective_counts_as_replayed_by_its_whole_group_alone(script: Any, tmp_path: Path) -> None:
    args = [X, Argument(name="group", value=Group(2, 0, "tp"))]

    def rows(*lines: Measurement) -> list[Any]:
        (tmp_path / "m.jsonl").write_bytes(b"".join(line.line() for line in lines))
        found: list[Any] = script.check_collectives(tmp_path / "m.jsonl", 2)
        return found

    whole = Measurement(
        call=0, operator="c10d::a", args=args, median_us=5, ranks=2, waited_us=1, method="host", bytes=64
    )
    (row,) = rows(whole, Measurement(call=0, operator="aten::all", args=[X], median_us=1))
    assert row.passed and row.found == "5.0 us by 2 ranks, host, waited 1.0 us"
    alone = whole.model_copy(update={"ranks": 1})
    skipped = Measurement(call=0, operator="c10d::a", args=args, status="skipped", reason="no group")
    assert [row.passed for row in rows(alone, skipped)] == [False, False]
    assert [row.passed for row in rows()] == [False]


def test_a_program_counts_by_its_ranks(script: Any, tmp_path: Path) -> None:
    program = ProgramMeasurement(program=3, phases={"decode": 1}, median_us=50, ranks=2, waited_us=4)
    for ranks, passed in ((2, True), (1, False)):
        (tmp_path / "p.jsonl").write_bytes(program.model_copy(update={"ranks": ranks}).line())
        (row,) = script.check_programs(tmp_path / "p.jsonl", 2)
        assert (row.passed, row.what) == (passed, "Program 3")


@pytest.mark.parametrize("kind", ["kernel", "region"])
def test_a_plan_must_run_in_each_rank_as_often(script: Any, tmp_path: Path, kind: str) -> None:
    """Of a Solution that launches a kernel that is recorded, too, the Call is a region."""

    def applied(*counts: int) -> bool:
        calls = [
            Call(
                id=rank,
                operator="solution::a.1",
                kind=kind,
                args=[X],
                counts=[Count(phase="decode", rank=rank, count=count)],
            )
            for rank, count in enumerate(counts)
        ]
        write_recording(tmp_path / "a", Metadata(), calls)
        (row,) = script.check_applied(load(tmp_path / "a"), 2)
        return bool(row.passed)

    assert applied(3, 3) and not applied(3, 2) and not applied(3)


def test_the_rate_is_that_of_all_devices_at_work_and_pairs_are_to_be_judged_once(script: Any) -> None:
    judged = [("cuda:0", 10, 9.0), ("cuda:0", 19, 2.0), ("cuda:0", 21, 3.0), ("cuda:1", 11, 9.0), ("cuda:1", 20, 2.0)]
    outcomes = [
        SimpleNamespace(
            solution="s",
            workload=f"w{second}",
            device=device,
            timestamp=f"2026-01-01T00:00:{second}+00:00",
            seconds=took,
        )
        for device, second, took in judged
    ]
    assert script.rate(outcomes) == pytest.approx((1 / 2 + 1 / 3 + 1) / (22 - 20))
    assert script.rate(outcomes[:1]) == 0
    assert script.once(outcomes) and not script.once([*outcomes, outcomes[0]]) and not script.once([])


@pytest.mark.parametrize(("ranks", "gpu"), [(2, True), (4, True), (2, False)])
def test_every_setup_is_one_that_the_machine_can_have(ranks: int, gpu: bool, script: Any) -> None:
    setups = script.setups(ranks, gpu)
    assert setups["tensor"].size == ranks and setups["data"].size == 2
    assert ("nccl" in setups, "data-experts" in setups, "sglang-data-attention" in setups) == (gpu, gpu, gpu)
    assert setups["sglang-tensor"].size == ranks
    assert setups["pipeline"].each["linears"] * 2 + setups["pipeline"].last["linears"] == setups["data"].each["linears"]


def started(script: Any, monkeypatch: pytest.MonkeyPatch, output: Path, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["parallel.py", "--output", str(output), *words])
    monkeypatch.setattr(script.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(SystemExit) as ended:
        script.main()
    return int(ended.value.code or 0)


def test_a_part_that_fails_costs_its_own_lines_and_each_is_kept_at_once(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "parallel.jsonl"

    def verify(parts: Any) -> list[Any]:
        assert len(kept.read_text().splitlines()) == 1  # the part before it
        return [script.Check("fine", "yes", True)]

    monkeypatch.setattr(script.Parts, "bench", lambda parts: 1 // 0)
    monkeypatch.setattr(script.Parts, "verify", verify)
    for part in (script.Parts.bench, script.Parts.verify):
        part.__name__ = "bench" if part is script.Parts.bench else "verify"
    assert started(script, monkeypatch, tmp_path, "--only", "bench", "--only", "verify") == 1
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["what"], line["passed"]) for line in lines] == [("bench: bench", False), ("verify: fine", True)]
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "BAD  bench: bench  ZeroDivisionError: integer division or modulo by zero",
        "ok   verify: fine  yes",
    ]


def test_when_the_limit_is_over_no_other_part_begins(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(script, monkeypatch, tmp_path, "--only", "bench", "--limit", "-1") == 1
    assert "bench: bench  not tried: the limit was over" in capsys.readouterr().out


def test_a_part_that_there_is_not_is_refused(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert started(script, monkeypatch, tmp_path, "--only", "everything") == 2


def test_sglangs_kernels_on_a_gpu_are_told_by_kind(script: Any, llama_in_two_engines: Path) -> None:
    """In a Recording of one rank, which has no collectives."""
    alone = sys.modules["ranks"].sglang_setups("llama", 32, 1, True)["sglang-tensor"]
    each = {kind: number for kind, number in alone.each.items() if kind != "collectives"}
    recording = load(llama_in_two_engines / "sglang.kcap")
    rows = {row.what: row for row in script.check_ranks(recording, replace(alone, each=each))}
    assert rows["rank 0"].found == "12771 linears = 129 x 99, 3168 attentions = 32 x 99, 3168 cache updates = 32 x 99"
    assert not failed(list(rows.values()))


@pytest.mark.parametrize(
    ("operator", "is_one"),
    [
        ("sglang::outplace_all_reduce", True),
        ("sglang::reg_reduce_scatter_tensor", True),
        ("c10d::_reduce_scatter_base_", True),
        ("c10d::_allgather_base_", True),
        ("c10d::broadcast_", False),
        ("sglang::store_cache", False),
    ],
)
def test_sglangs_collectives_are_told_by_their_operators(operator: str, is_one: bool, script: Any) -> None:
    kind = sys.modules["ranks"].kind_of(Call(id=0, operator=operator, args=[X], counts=[]), "SGLang")
    assert (kind == "collectives") == is_one


def test_an_engine_that_is_not_there_fails_where_it_was_asked_for(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(script.interpreter.__globals__, "sglang_python", lambda: sys.executable)
    monkeypatch.setattr(script, "LACKS", "raise SystemExit(1)")

    def passed(*asked: str) -> bool:
        (row,) = script.Parts(tmp_path, 2, 0, time.monotonic() + 60, 60, asked).recorded("sglang-tensor")
        assert row.found.endswith("has no SGLang")
        return bool(row.passed)

    assert passed() and not passed("sglang-tensor")


def test_what_takes_too_long_is_ended_with_all_that_it_started(script: Any, tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    body = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    done = script.run(sys.executable, "-c", body, timeout=3)
    assert done.returncode == 124 and time.monotonic() - began < 20
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(int(done.stdout), 0)
            time.sleep(0.1)


def test_judges_are_told_from_what_else_a_node_started(script: Any) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    running = [subprocess.Popen([*words, name]) for name in ("ray::JudgeActor.run", "ray::IDLE")]
    time.sleep(0.5)
    try:
        assert list(script.judges_of(os.getpid())) == [running[0].pid]
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
