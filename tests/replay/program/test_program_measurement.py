"""Lines of measured Programs read back as they were written."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.recording.recording import PHASES
from kcap.schemas.results.measurement import KernelDuration, ProgramCall, ProgramMeasurement, read_program_measurements
from kcap.schemas.validation.formats import detect_format

times = st.floats(0, 1e9, allow_nan=False)
names = st.text(min_size=1, max_size=20)
calls = st.builds(
    ProgramCall,
    call=st.integers(0, 10**6),
    operator=names,
    sample=st.none() | st.integers(0, 99),
    count=st.integers(1, 10**6),
    sets=st.integers(0, 64),
    status=st.sampled_from(["ok", "host", "skipped", "failed"]),
    reason=st.none() | names,
    us=st.none() | times,
    kernels=st.lists(st.builds(KernelDuration, name=names, us=times), max_size=2),
)
programs = st.builds(
    ProgramMeasurement,
    program=st.integers(0, 10**6),
    kind=st.sampled_from(["step", "graph"]),
    phase=st.sampled_from(PHASES),
    mode=st.sampled_from(["eager", "piecewise", "full"]),
    padded=st.none() | st.integers(0, 10**6),
    step=st.none() | st.integers(0, 10**6),
    calls=st.lists(calls, max_size=3),
    samples_us=st.lists(times, max_size=3),
    kernel_us=st.none() | times,
    notes=st.lists(names, max_size=2),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(programs, max_size=3))
def test_read_gives_back_what_was_written(given: list[ProgramMeasurement]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "p.jsonl"
        path.write_bytes(b"".join(one.line() for one in given))
        assert list(read_program_measurements(path)) == given


def test_what_could_not_be_rebuilt_makes_it_partial_and_the_hosts_work_does_not() -> None:
    def one(status: str, count: int) -> ProgramCall:
        return ProgramCall.model_validate({"call": 0, "operator": "aten::mm", "count": count, "status": status})

    whole = ProgramMeasurement(program=0, calls=[one("ok", 9), one("host", 4)])
    cut = ProgramMeasurement(program=0, calls=[one("skipped", 2), one("failed", 3), one("ok", 1)])
    assert (whole.left_out, whole.partial) == (0, False)
    assert (cut.left_out, cut.partial) == (5, True)


@pytest.mark.parametrize("line", ['{"program": -1}', '{"program": 0, "calls": [{"call": 0}]}', "{", '{"kind": "step"}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"program": 0}\n' + line + "\n")
    with pytest.raises(FormatError, match=r"p\.jsonl:2"):
        list(read_program_measurements(path))


def test_its_lines_are_told_from_other_measurements(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(ProgramMeasurement(program=3, invocations=9, replayed=9, median_us=1.0, stretches=1).line())
    assert detect_format(path) == "program-measurement"
