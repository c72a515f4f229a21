"""`kcap replay --program` as its user sees it: for real on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from handmade import Values, call, tensor
from programs import CALLS, program

from kcap.schemas.recording.recording import Metadata, Sample, Step, write_recording
from kcap.schemas.results.measurement import ProgramMeasurement, read_program_measurements

Write = Callable[..., Path]
BAD = call("aten::mm", tensor(4, 4), tensor(5, 5, storage=1), id=5)
PROGRAMS = [
    program(0, [0, 1, 2], {"decode": 3}, graphs=[(3, 1)]),
    program(1, [0, 0, 1], kind="graph", size=8),
    program(2, [0, 3, 3], {"prefill": 1}),
    program(3, [3], {"mixed": 1}),
    program(4, [0, 5, 1], {"other": 1}),
]


def kcap_replay(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kcap", "replay", *map(str, args), "--program", "--seconds", "0.01"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Replayed:
    """Of one run of the command: its exit code, its table, and by phase what it wrote."""

    code: int
    table: str
    by_phase: dict[str, ProgramMeasurement]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    folder = tmp_path_factory.mktemp("programs")
    write_recording(folder / "rec.kcap", Metadata(), [*CALLS, BAD], PROGRAMS)
    done = kcap_replay(folder / "rec.kcap", "-o", folder / "p.jsonl")
    assert done.stdout, done.stderr
    return Replayed(
        done.returncode, done.stdout, {one.phase: one for one in read_program_measurements(folder / "p.jsonl")}
    )


def said(one: ProgramMeasurement) -> list[tuple[int, int, int, str]]:
    return [(c.call, c.count, c.sets, c.status) for c in one.calls]


def test_a_step_with_its_graph_is_replayed_as_a_whole(replayed: Replayed) -> None:
    one = replayed.by_phase["decode"]
    assert "decode, full graphs of 8 tokens: program 0, 3 times, 5 kernels" in replayed.table
    assert (one.status, one.invocations, one.replayed, one.partial, one.method) == ("ok", 5, 5, False, "host")
    assert said(one) == [(0, 3, 3, "ok"), (1, 2, 1, "ok")]
    assert (one.mode, one.padded, one.count, one.cache) == ("full", 8, 3, "serving")
    assert one.q1_us <= one.median_us <= one.q3_us  # type: ignore[operator]
    assert one.threads and one.torch


def test_each_calls_own_time_is_told(replayed: Replayed) -> None:
    one = replayed.by_phase["decode"]
    assert all(c.us for c in one.calls)
    assert 0 < sum(c.count * (c.us or 0) for c in one.calls) < 100 * (one.median_us or 0)


def test_what_cannot_be_rebuilt_is_left_out_by_name_and_count(replayed: Replayed) -> None:
    one = replayed.by_phase["prefill"]
    assert (one.status, one.invocations, one.replayed, one.partial) == ("ok", 3, 1, True)
    assert said(one) == [(0, 1, 1, "ok"), (3, 2, 0, "skipped")]
    assert (one.calls[1].operator, one.calls[1].us) == ("nobody::kernel", None)
    assert "no library is known" in (one.calls[1].reason or "")
    assert "partial: 2 of 3 kernels (66.7%) are not in it" in replayed.table
    assert "skipped: nobody::kernel, 2 times" in replayed.table
    assert replayed.code == 3


def test_a_program_of_which_nothing_runs_is_skipped(replayed: Replayed) -> None:
    one = replayed.by_phase["mixed"]
    assert (one.status, one.median_us) == ("skipped", None)


def test_a_call_that_fails_costs_the_program_that_call_alone(replayed: Replayed) -> None:
    one = replayed.by_phase["other"]
    assert said(one) == [(0, 1, 1, "ok"), (5, 1, 0, "failed"), (1, 1, 1, "ok")]
    assert (one.status, one.replayed) == ("ok", 2)


def test_the_step_asked_for_runs_on_its_own_sample_and_others_on_one_that_was_drawn(
    recorded: Write, values: Values
) -> None:
    lookup = call("aten::embedding", tensor(9, 2), tensor(2, dtype="int64", storage=1), id=5)
    held = {n: {"1": values([n, n])} for n in (2, 3, 4)}
    samples = [Sample(call=5, phase="decode", step=n, tensors=held[n], compared=n != 3) for n in held]
    steps = [Step(index=n, phase="decode", program=0) for n in held]
    path = recorded([*CALLS, lookup], samples, [program(0, [5, 1], {"decode": 3})], steps)
    for options, expected in ((["--step", 4], (4, [2, None])), (["--program"], (None, [1, None]))):
        done = kcap_replay(path, *options, "--json")
        assert done.returncode == 0, done.stderr
        (one,) = orjson.loads(done.stdout)["programs"]
        assert (one["step"], [c["sample"] for c in one["calls"]]) == expected


@pytest.mark.parametrize("options", [["--program"], ["--device", "cuda:77"]])
def test_a_replay_that_does_not_start_leaves_the_output_as_it_was(
    recorded: Write, tmp_path: Path, kcap: Callable[..., Any], options: list[str]
) -> None:
    path, output = recorded(CALLS), tmp_path / "before.jsonl"
    assert kcap("replay", path, *options, "-o", output).code in (1, 2)
    assert not output.exists()
    output.write_text("before")
    assert kcap("replay", path, *options, "-o", output, "--force").code in (1, 2)
    assert output.read_text() == "before"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["REC", "--program"], "holds no Programs"),
        (["REC", "--step", "1"], "--step 1"),
        (["REC", "--program", "--op", "x*"], "leave out --op"),
        (["REC", "--fidelity", "--program"], "leave out --program"),
        (["REC", "--program", "--cache", "cold"], "leave out --cache"),
        (["REC", "--fidelity", "--threads", "1"], "leave out --threads"),
        (
            ["REC", "--step", "1", "--phase", "decode", "--top", "2"],
            "--step chooses what to replay: leave out --phase, --top",
        ),
        (["TRACE", "--program"], "takes a Recording"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    recorded: Write, tmp_path: Path, kcap: Callable[..., Any], args: list[str], words: str
) -> None:
    path, trace = recorded(CALLS), tmp_path / "t.txt"
    trace.write_text("Operator: aten.relu.default\ncnt: 1, ((T([4], f32),), {})\n")
    done = kcap("replay", *[{"REC": path, "TRACE": trace}.get(arg, arg) for arg in args])
    assert done.code == 2, done.err
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1
