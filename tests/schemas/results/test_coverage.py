"""coverage.jsonl: what is written is read again, and a damaged line is named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.recording.recording import PHASES
from kcap.schemas.results.coverage import (
    CoverageSummary,
    Disagreement,
    KernelTime,
    Share,
    StepCoverage,
    Unexplained,
    read,
    write,
)

counts = st.integers(0, 2**53)
times = st.floats(0, 1e18)
texts = st.text(max_size=30)
kernels = st.builds(
    KernelTime,
    name=texts,
    us=times,
    call=st.none() | counts,
    reason=st.none() | texts,
    graph=st.booleans(),
    start_us=st.none() | times,
    launched_us=st.none() | st.floats(-1e18, 1e18),
)
disagreements = st.builds(Disagreement, operator=texts, profiled=counts, recorded=counts)
steps = st.builds(
    StepCoverage,
    index=counts,
    rank=counts,
    phase=st.sampled_from(PHASES),
    tokens=counts,
    sequences=counts,
    lengths=st.lists(counts, max_size=3),
    queries=st.lists(counts, max_size=3),
    mode=st.sampled_from(["eager", "piecewise", "full"]),
    padded=st.none() | counts,
    program=st.none() | counts,
    gpu_us=times,
    explained_us=times,
    sm_mhz=st.none() | counts,
    kernels=st.lists(kernels, max_size=4),
    disagreements=st.lists(disagreements, max_size=3),
)
shares = st.builds(
    Share, steps=counts, kernels=counts, gpu_us=times, explained_us=times, share=st.none() | st.floats(0, 1)
)
unexplained = st.builds(Unexplained, name=texts, reason=texts, count=counts, us=times)
summaries = st.builds(
    CoverageSummary,
    steps=counts,
    share=st.none() | st.floats(0, 1),
    by_mode=st.dictionaries(texts, shares, max_size=3),
    unexplained=st.lists(unexplained, max_size=3),
    disagreements=st.lists(disagreements, max_size=3),
    disagreeing_steps=counts,
)


@given(st.lists(steps, max_size=5))
def test_a_step_reads_back_as_it_was_written(written: list[StepCoverage]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.jsonl"
        write(path, written)
        assert list(read(path)) == written
        assert path.read_bytes().count(b"\n") == len(written)


@given(summaries)
def test_a_summary_survives_the_metadata_that_holds_it(summary: CoverageSummary) -> None:
    stored = orjson.loads(orjson.dumps(summary.model_dump(mode="json")))
    assert CoverageSummary.model_validate(stored) == summary


def test_a_kernels_whole_name_is_kept(tmp_path: Path) -> None:
    name = "void at::native::kernel<" + "int, " * 2000 + "float>(float*)"
    step = StepCoverage(index=0, phase="decode", kernels=[KernelTime(name=name, us=1.5, call=3)])
    write(tmp_path / "coverage.jsonl", [step])
    assert next(read(tmp_path / "coverage.jsonl")).kernels[0].name == name


def test_a_newer_kcaps_line_is_read_without_what_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "coverage.jsonl"
    path.write_bytes(b'{"index":1,"phase":"decode","later":{"a":1},"kernels":[{"name":"k","us":2,"sm":90}]}\n')
    (step,) = read(path)
    assert (step.index, step.kernels[0].us, step.kernels[0].call) == (1, 2.0, None)


def test_a_line_from_before_starts_were_kept_has_none(tmp_path: Path) -> None:
    path = tmp_path / "coverage.jsonl"
    path.write_bytes(b'{"index":1,"phase":"decode","kernels":[{"name":"k","us":2}]}\n')
    (step,) = read(path)
    assert (step.kernels[0].start_us, step.kernels[0].launched_us, step.lengths) == (None, None, [])


@pytest.mark.parametrize(
    ("line", "place", "reason"),
    [
        (b"{", ":2:", "unexpected end"),
        (b'{"index":1,"phase":"idle"}', ":2", "phase"),
        (b'{"index":-1,"phase":"decode"}', ":2", "index"),
        (b'{"index":1,"phase":"decode","gpu_us":-1}', ":2", "gpu_us"),
        (b'{"index":1,"phase":"decode","kernels":[{"name":"k"}]}', ":2", "kernels.0.us"),
        (b"\xff", ":2:", "UTF-8"),
    ],
)
def test_a_damaged_line_is_named(line: bytes, place: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "coverage.jsonl"
    path.write_bytes(b'{"index":0,"phase":"decode"}\n' + line + b"\n")
    with pytest.raises(FormatError) as error:
        list(read(path))
    assert error.value.place.startswith(f"{path}{place}")
    assert reason in error.value.reason


def test_a_recording_without_coverage_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="--check-coverage"):
        list(read(tmp_path / "coverage.jsonl"))
