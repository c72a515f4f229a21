"""Traces that are damaged, too large or anything at all."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.capture.fold.coverage import (
    ProfiledStep,
    Ran,
    Replayed,
    attribute,
    coverage_lines,
    covered,
    read_trace,
    summarize,
)
from kcap.capture.fold.coverage import trace as trace_module
from kcap.errors import FormatError
from kcap.schemas.recording.recording import Step


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 5000, b"3", b'{"traceEvents":{}}', b"null"])
def test_a_damaged_trace_is_refused(content: bytes, compressed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("trace.json.gz" if compressed else "trace.json")
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(FormatError, match=r"trace\.json"):
        read_trace(path)


@pytest.mark.parametrize("cut", [5, 30, -4])
def test_a_truncated_archive_is_refused(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(orjson.dumps({"traceEvents": list(range(500))}))[:cut])
    with pytest.raises(FormatError, match="damaged"):
        read_trace(path)


def test_a_missing_trace_and_a_plain_file_named_gz_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not readable"):
        read_trace(tmp_path / "none.json")
    (tmp_path / "plain.json.gz").write_bytes(b"[]")
    with pytest.raises(FormatError, match="damaged"):
        read_trace(tmp_path / "plain.json.gz")


def test_a_trace_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_BYTES", 1 << 20)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * (2 << 20)))
    with pytest.raises(FormatError, match="profile fewer steps"):
        read_trace(path)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
names = st.sampled_from(
    ["kcap:step:0", "kcap:step:1", "aten::mm", "_C::a", "k", "cudaGraphLaunch", "kcap:call:a::b", "kcap:ignored"]
)
cats = st.sampled_from(["cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "ac2g"])
small = st.integers(0, 6)
args = st.fixed_dictionaries(
    {}, optional={"correlation": small | scalars, "External id": small, "stream": anything, "graph node id": anything}
)
events = st.fixed_dictionaries(
    {"ph": st.just("X"), "cat": cats | anything, "name": names | anything},
    optional={
        "ts": small | scalars,
        "dur": small | scalars,
        "pid": small | anything,
        "tid": small,
        "args": args | anything,
    },
)
ranges = st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6)), max_size=4)
RANS = [Ran(0, "aten::mm"), Ran(1, "_C::a", region=True), Ran(2, "triton::k.ab", "k"), Ran(3, "a::b")]


@settings(max_examples=300, deadline=None)
@given(st.lists(events | anything, max_size=25) | anything, st.builds(Replayed, st.just(RANS), small, ranges))
def test_no_json_breaks_the_analysis(document: Any, graph: Replayed) -> None:
    steps = [ProfiledStep(0, [*RANS, graph]), ProfiledStep(1, [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(orjson.dumps(document if isinstance(document, dict) else {"traceEvents": document}))
        try:
            trace = read_trace(path)
        except FormatError:
            return
    attributed = attribute(trace, steps)
    for found in attributed:
        assert all((kernel.call is None) == (kernel.reason is not None) for kernel in found.kernels)
        assert len(found.kernels) <= len(trace.gpu)
    assert coverage_lines(summarize(covered(found, Step(index=0, phase="other")) for found in attributed))


@pytest.mark.parametrize("time", ["1e308", "-1", "true", '"7"'])
def test_times_that_no_clock_gives_are_left_out(time: str, tmp_path: Path) -> None:
    event = '{"ph":"X","cat":"kernel","name":"k","ts":5,"dur":%s,"args":{}}'
    span = '{"ph":"X","cat":"cpu_op","name":"kcap:step:0","ts":0,"dur":9}'
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents":[{span},{event % time},{event % time},{event % 3}]}}')
    (found,) = attribute(read_trace(path), [ProfiledStep(0, [])])
    assert covered(found, Step(index=0, phase="other")).gpu_us == 3
