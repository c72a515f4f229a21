"""`kcap replay --compare-engine` as its user sees it; what replays is stood for, since that needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from handmade import call, tensor
from profiled import CALLS, in_a_row, step

from kcap.replay.fidelity import run
from kcap.replay.fidelity.engine import KindSteps
from kcap.replay.fidelity.replaying import ChosenSamples, NearestSample
from kcap.schemas.recording.recording import Call, Metadata, Program, write_recording
from kcap.schemas.results import coverage, measurement
from kcap.schemas.results.measurement import KernelDuration, Measurement, ProgramMeasurement

Kcap = Callable[..., Any]


class OnGpu:
    environment = {"device": "cuda:0", "device_name": "NVIDIA H200", "torch": "2.11"}
    us = {0: 50.0, 1: 30.0, 2: 10.0}

    def call(self, call: Call, chosen: NearestSample, kind: KindSteps) -> Measurement:
        us = self.us[call.id]
        kernels = [KernelDuration(name=call.operator.removeprefix("lib::"), us=us)]
        known = {"call": call.id, "operator": call.operator, **self.environment}
        return Measurement(median_us=us, kernel_us=us, kernels=kernels, **known)

    def program(self, number: int, chosen: ChosenSamples, kind: KindSteps) -> ProgramMeasurement:
        return ProgramMeasurement(program=number, median_us=145.0)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    """Replays like the engine, at first."""
    stands = OnGpu()

    @contextmanager
    def replayer(*options: object) -> Iterator[OnGpu]:
        yield stands

    monkeypatch.setattr(run, "open_replayer", replayer)
    return stands


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "llama.kcap"
    known = {"model": "a/model", "framework": "vLLM", "framework_version": "1.0", "device": "NVIDIA H200"}
    write_recording(path, Metadata(**known), CALLS.values(), [Program(id=0, calls=[0, 1, 0, 2])])
    coverage.write(path / coverage.FILE, [step(*in_a_row((0, 50), (1, 30), (0, 50), (2, 10)))] * 2)
    return path


def test_a_replay_within_the_bounds_is_done(kcap: Kcap, recorded: Path, on_gpu: OnGpu) -> None:
    done = kcap("replay", recorded, "--fidelity")
    assert done.code == 0, done.err
    assert "within the bounds, by serving: decode, 4 tokens of 4 sequences, eager" in done.out
    assert done.out.splitlines()[-1].endswith(f"kcap replay {recorded} --compare-engine -o llama.fidelity")


def test_a_replay_outside_the_bounds_is_partial_and_says_where(kcap: Kcap, recorded: Path, on_gpu: OnGpu) -> None:
    on_gpu.us = {**on_gpu.us, 1: 36.0}
    done = kcap("replay", recorded, "--fidelity")
    assert done.code == 3
    assert "serving: lib::flash (21.4% of the time) takes 120.0% of its time in the engine" in done.out


def test_json_is_one_document_with_what_was_replayed_where(kcap: Kcap, recorded: Path, on_gpu: OnGpu) -> None:
    done = kcap("replay", recorded, "--fidelity", "--json")
    found = orjson.loads(done.out)
    assert (found["holds"], found["recorded_on"], found["environment"]["torch"]) == (True, "NVIDIA H200", "2.11")
    assert found["kinds"][0]["span"] == {"us": 140.0, "waits_us": 0.0, "gap_us": 1.0, "peers_us": 0.0, "own_us": 140.0}


def test_a_folder_gets_the_figure_and_what_it_rests_on(
    kcap: Kcap, recorded: Path, on_gpu: OnGpu, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "fidelity"
    folder.mkdir(parents=True)
    refused = kcap("replay", recorded, "--fidelity", "-o", folder)
    assert (refused.code, "--force" in refused.err) == (2, True)
    assert kcap("replay", recorded, "--fidelity", "-o", folder, "--force").code == 0
    assert (folder / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    assert orjson.loads((folder / "fidelity.json").read_bytes())["engine_us"] == 280
    assert len(list(measurement.read_measurements(folder / "measurements.jsonl"))) == 3
    assert [one.program for one in measurement.read_program_measurements(folder / "programs.jsonl")] == [0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--device", "cpu"], "--compare-engine compares GPU time"),
        (["--op", "aten::*"], "--op"),
        (["--phase", "decode"], "--phase"),
        (["--top", "3"], "--top"),
        (["--include-views"], "--include-views"),
        (["--all"], "--include-views"),
        (["--keep-going"], "--keep-going"),
        (["--program"], "--program"),
        (["--step", "0"], "--step"),
        (["--cache", "cold"], "--cache"),
    ],
)
def test_options_that_would_choose_are_refused(
    kcap: Kcap, recorded: Path, on_gpu: OnGpu, more: list[str], words: str
) -> None:
    done = kcap("replay", recorded, "--fidelity", *more)
    assert (done.code, done.out, len(done.err.strip().splitlines())) == (2, "", 1)
    assert words in done.err


def test_a_recording_that_was_not_profiled_names_what_to_record_with(kcap: Kcap, recorded: Path, on_gpu: OnGpu) -> None:
    (recorded / coverage.FILE).unlink()
    done = kcap("replay", recorded, "--fidelity")
    assert done.code == 1
    assert "--check-coverage" in done.err


def test_a_trace_file_has_no_fidelity(kcap: Kcap, tmp_path: Path, on_gpu: OnGpu) -> None:
    trace = tmp_path / "t.txt"
    trace.write_text("Operator: aten.mm.default\ncnt: 2, ((T([4, 4], f32), T([4, 4], f32)), {})\n")
    done = kcap("replay", trace, "--fidelity")
    assert (done.code, "takes a Recording" in done.err) == (2, True)


def test_a_machine_without_a_gpu_is_told_and_no_cpu_offered(kcap: Kcap, recorded: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    write_recording(recorded, Metadata(), [call("aten::relu", tensor(8, device="cuda"))], [Program(id=0, calls=[0])])
    coverage.write(recorded / coverage.FILE, [step(*in_a_row((0, 50)))])
    done = kcap("replay", recorded, "--fidelity")
    assert done.code == 2
    assert done.err.startswith("kcap: --compare-engine replays on a GPU: recorded on cuda, and torch ")
    assert "--device cpu" not in done.err
    assert len(done.err.strip().splitlines()) == 1
