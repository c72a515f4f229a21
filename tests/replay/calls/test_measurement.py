"""Measurement lines read back as they were written."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.replay.timing.sampling import quartiles
from kcap.schemas.recording.recording import PHASES, Argument
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results.measurement import (
    CACHES,
    Clocks,
    KernelDuration,
    Measurement,
    read_measurements,
    write_measurements,
)

times = st.floats(0, 1e9, allow_nan=False)
optional_times = st.none() | times
texts = st.text(max_size=20)
clocks = st.builds(Clocks, sm_mhz=st.none() | st.integers(0, 3000), power_w=optional_times)
durations = st.builds(
    KernelDuration, name=st.text(min_size=1, max_size=20), us=times, count=st.floats(0.001, 99, allow_nan=False)
)
arguments = st.builds(
    Argument,
    name=st.none() | texts,
    value=st.none() | st.integers(-9, 9) | st.just(TensorSpec((2, 3), "bfloat16", (1, 2), 5, "cuda:0", 1)),
    keyword=st.booleans(),
)
of_calls = st.builds(
    Measurement,
    call=st.integers(0, 10**6),
    key=texts,
    operator=st.text(min_size=1, max_size=20),
    args=st.lists(arguments, max_size=3),
    sample=st.none() | st.integers(0, 99),
    phases=st.lists(st.sampled_from(PHASES), max_size=2),
    count=st.integers(0, 2**63 - 1),
    counts=st.dictionaries(st.sampled_from(PHASES), st.integers(0, 2**63 - 1), max_size=2),
    status=st.sampled_from(["ok", "skipped", "failed"]),
    reason=st.none() | texts,
    median_us=optional_times,
    q1_us=optional_times,
    q3_us=optional_times,
    samples_us=st.lists(times, max_size=5),
    floor_us=optional_times,
    n=st.integers(0, 10**6),
    slow_samples=st.lists(st.integers(0, 99), max_size=3),
    kernels=st.lists(durations, max_size=2),
    kernel_us=optional_times,
    stop=st.sampled_from([None, "converged", "stable", "limit"]),
    method=st.sampled_from([None, "graph", "events", "host", "none"]),
    cache=st.sampled_from([None, *CACHES]),
    notes=st.lists(texts, max_size=2),
    device=texts,
    clocks_before=st.none() | clocks,
    clocks=st.none() | clocks,
    driver=st.none() | texts,
    threads=st.none() | st.integers(1, 512),
)
named = st.fixed_dictionaries({"call": st.none(), "definition": texts, "workload": texts})
measurements = of_calls | st.builds(lambda one, names: one.model_copy(update=names), of_calls, named)


@settings(max_examples=100, deadline=None)
@given(st.lists(measurements, max_size=3))
def test_read_gives_back_what_was_written(given: list[Measurement]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "m.jsonl"
        write_measurements(path, given)
        assert list(read_measurements(path)) == given


@pytest.mark.parametrize(
    "names", [{}, {"definition": "d"}, {"workload": "w"}, {"call": 0, "definition": "d", "workload": "w"}]
)
def test_a_line_is_of_a_call_or_of_a_definition_and_a_workload(tmp_path: Path, names: dict[str, object]) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(orjson.dumps({"operator": "d", **names}))
    with pytest.raises(FormatError, match="of a call, or of a definition and a workload"):
        list(read_measurements(path))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_measurements(path, [Measurement(call=1, operator="aten::mm")])
    path.write_bytes(path.read_bytes() + b'{"call": -1, "operator": "aten::mm"}\n')
    with pytest.raises(FormatError, match=r"m\.jsonl:2: call"):
        list(read_measurements(path))


def test_quartiles_of_one_and_of_many() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
