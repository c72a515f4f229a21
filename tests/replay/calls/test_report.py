"""What the table says, at the width that people have."""

from __future__ import annotations

import io
from typing import Any

import pytest
from handmade import call, tensor
from rich.console import Console

from kcap.replay.calls import report
from kcap.replay.calls.results import Results, Row
from kcap.replay.jobs import CallJob, SampleGroup
from kcap.schemas.results.measurement import AT_FLOOR, NOTHING, SLOWED, Measurement, Roofline
from kcap.show.console import console


def row(number: int, count: int, time_us: float, method: str, *notes: str) -> Row:
    made = call("_C_cache_ops::reshape_and_cache_flash", *[tensor(1024, 4096, storage=n) for n in range(9)], id=number)
    job = CallJob({"decode": count - 1, "mixed": 1}, made, [SampleGroup(None, None)])
    fields = {"call": number, "operator": made.operator, "median_us": time_us, "method": method, "cache": "cold"}
    return Row(job, [Measurement.model_validate({**fields, "notes": list(notes), "floor_us": 0.9})])


def text(*rows: Row, limit: int = 40) -> list[str]:
    out = io.StringIO()
    report.print_tables(Console(file=out, width=120), Results(list(rows)), {"device_name": "GPU"}, limit)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_every_row_is_one_line_of_at_most_120_columns_and_the_longest_total_is_first() -> None:
    lines = text(row(0, 1000, 3.0, "graph"), row(1, 63, 252.78, "graph"), row(2, 10, 1.5, "events"))
    assert max(map(len, lines)) <= 120
    cells = [line.split() for line in lines if "::" in line]
    assert [c[0] for c in cells] == ["15.93", "3.00", "15.00"]  # ms, ms, µs
    assert "63  all     graph, cold   _C_cache_ops::reshape_and_cache_flash  f32[1024, 4096] x" in lines[4]


def test_host_time_is_a_table_of_its_own_and_no_share_of_the_gpus() -> None:
    lines = text(row(0, 10, 100.0, "graph"), row(1, 10, 300.0, "graph"), row(2, 10, 5000.0, "host"))
    assert [line for line in lines if " time" in line and ":" in line and "::" not in line][:2] == [
        "GPU time: 4.00 ms",
        "host time (not part of the GPU time): 50.00 ms",
    ]
    assert [line.split()[2] for line in lines if "::" in line] == ["75.0%", "25.0%", "100.0%"]
    assert "replayed 30 of 30 invocations (100.0%), 3 of 3 distinct calls: 4.00 ms GPU, 50.00 ms host" in lines


def partial(*samples: tuple[str, float | None]) -> Row:
    """A Call of 100 invocations in prefill and 300 in decode, on Samples of these phases and times (None: skipped)."""
    made = call("aten::mm", tensor(8, 8), tensor(8, 8, storage=1))
    state = {True: {"status": "skipped", "reason": "took too long"}, False: {"status": "ok", "method": "graph"}}
    lines = [
        Measurement.model_validate(
            {"call": 0, "operator": made.operator, "phases": [phase], "median_us": us, **state[us is None]}
        )
        for phase, us in samples
    ]
    return Row(CallJob({"prefill": 100, "decode": 300}, made, [SampleGroup(None, None)]), lines)


def test_a_phase_whose_samples_were_skipped_takes_no_other_phases_time() -> None:
    row = partial(("prefill", None), ("decode", 2.0))
    assert (row.status, row.total_us, row.time_us, row.reason) == ("ok", 600.0, 2.0, "took too long")
    lines = text(row)
    assert "replayed 300 of 400 invocations (75.0%), 1 of 1 distinct calls: 600.00 µs GPU" in lines
    assert "skipped: took too long: 1 distinct call, 100 invocations (25.0%)" in lines


def test_a_sample_that_was_skipped_beside_others_is_said() -> None:
    row = partial(("prefill", None), ("prefill", 5.0), ("decode", 2.0))
    assert row.total_us == 1100.0
    lines = text(row)
    assert "replayed 400 of 400 invocations (100.0%), 1 of 1 distinct calls: 1.10 ms GPU" in lines
    assert "skipped: took too long: 1 distinct call, timed on others of their Samples" in lines


def test_a_phase_without_samples_takes_the_time_of_all() -> None:
    assert partial(("decode", 2.0), ("decode", 4.0)).total_us == 1200.0


def test_rows_that_are_left_out_are_counted_with_their_share() -> None:
    lines = text(row(0, 10, 75.0, "graph"), row(1, 10, 25.0, "graph"), limit=1)
    assert "1 more rows, 25.0%: --json has all" in lines


def test_a_factor_that_says_nothing_is_explained_in_words() -> None:
    rows = row(0, 65, 5000.0, "host"), row(1, 63, 27.0, "host")
    for measured in rows:
        roofline = Roofline(us=1.0, times=measured.measurements[0].median_us, gb_s=1.0, tflop_s=0.0)
        measured.measurements[:] = [one.model_copy(update={"roofline": roofline}) for one in measured.measurements]
    lines = text(*rows)
    assert [line.split()[5] for line in lines if "::" in line] == ["…", "27"]
    assert any("× floor says nothing (…) of 1 distinct call that took over 999 times" in line for line in lines)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_heeds_columns_and_is_not_padded(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    report.print_tables(console(), Results([row(0, 1000, 3.0, "graph")]), {"device_name": "GPU"}, 40)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "::" in line]
    assert len(line) <= width and line == line.rstrip() and ("…" in line)


def test_the_summary_says_what_not_to_believe() -> None:
    rows = row(0, 65, 0.0, "none", NOTHING), row(1, 63, 1.1, "graph", AT_FLOOR), row(2, 32, 90.0, "graph", SLOWED)
    lines = text(*rows)
    assert f"{NOTHING}: 1 distinct call, 65 invocations (no elements, or no work)" in lines
    assert any(line.startswith(AT_FLOOR) and "0.90 µs" in line for line in lines)
    assert any(line.startswith(SLOWED) and "2.88 ms" in line for line in lines)
