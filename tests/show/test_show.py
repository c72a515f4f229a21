from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, write_recording
from kcap.schemas.recording.values import TensorSpec
from kcap.show.summary import of_trace, varies

Kcap = Callable[..., Any]


def shown(kcap: Kcap, *args: object) -> dict[str, Any]:
    ran = kcap("show", *args, "--json")
    assert (ran.code, ran.err) == (0, "")
    document: dict[str, Any] = json.loads(ran.out)
    return document


def counts(document: dict[str, Any]) -> dict[str, int]:
    return {row["name"]: row["count"] for row in document["rows"]}


KERNELS = {"_C::rms_norm": 2804, "aten::mm": 17, "_vllm_fa3_C::fwd": 3}
REGION = {"vllm::unified_attention_with_output": 2}


def test_kernels_come_costliest_first(kcap: Kcap, recording: Path) -> None:
    document = shown(kcap, recording)
    assert list(counts(document).items()) == list(KERNELS.items())
    assert document["total"] == 2824


def test_regions_and_views_are_hidden_and_counted_unless_all(kcap: Kcap, recording: Path) -> None:
    assert shown(kcap, recording)["hidden"] == {"regions": 1, "views": 1}
    everything = shown(kcap, recording, "--all")
    assert everything["hidden"] == {"regions": 0, "views": 0}
    assert counts(everything) == KERNELS | {"aten::view": 6} | REGION


def test_regions_and_views_are_in_no_total(kcap: Kcap, recording: Path) -> None:
    assert shown(kcap, recording, "--all")["total"] == 2824
    assert sum(counts(shown(kcap, recording, "--all", "--by", "phase")).values()) == 2824
    assert [row["name"] for row in shown(kcap, recording, "--all")["rows"]][-1] == "aten::view", "no work comes last"


def test_by_phase_rank_and_operator(kcap: Kcap, recording: Path) -> None:
    assert counts(shown(kcap, recording, "--by", "phase")) == {"decode": 2815, "prefill": 8, "mixed": 1}
    assert counts(shown(kcap, recording, "--by", "rank")) == {"rank 0": 2822, "rank 1": 2}
    assert counts(shown(kcap, recording, "--by", "operator")) == KERNELS


def test_graph_replays_are_told_apart(kcap: Kcap, recording: Path) -> None:
    rows = {row["name"]: row for row in shown(kcap, recording)["rows"]}
    assert (rows["aten::mm"]["graph"], rows["_C::rms_norm"]["graph"]) == (14, 0)


def test_top_cuts_rows_and_says_how_many_more(kcap: Kcap, recording: Path) -> None:
    document = shown(kcap, recording, "--top", 1)
    assert (len(document["rows"]), document["more"]) == (1, 2)
    assert "2 more rows" in kcap("show", recording, "--top", 1).out


def test_table_says_who_ran_what_and_where(kcap: Kcap, recording: Path) -> None:
    ran = kcap("show", recording)
    for text in ("meta-llama/Llama-3.1-8B", "vLLM 0.32.0", "NVIDIA H200", "2 of 32 layers", "2 ranks", "dispatcher"):
        assert text in ran.out
    assert "1 prefill, 7 decode" in ran.out
    assert "complete" in ran.out
    assert "bf16[64, 4096] x bf16[4096, 6144]{1, 4096}" in ran.out
    assert "<[bold]>" in ran.out
    assert "hidden: 1 distinct regions, 1 distinct views and allocations (--all" in ran.out


def test_next_command_goes_to_standard_error(kcap: Kcap, recording: Path) -> None:
    ran = kcap("show", recording)
    assert f"kcap replay {recording}" in ran.err
    assert "Next:" not in ran.out


def test_partial_recording_failed_tap_and_losses_are_said(kcap: Kcap, troubled: Path) -> None:
    out = kcap("show", troubled).out
    assert "PARTIAL" in out
    assert "TAP FAILED: cuda_graphs (rank 1, process 77): no symbol [bold]" in out
    assert "3 invocations came after the most distinct calls that a process keeps: they are in no count" in out
    assert "graphs were replayed by another way" in out
    assert "complete" not in out


def test_empty_recording_says_so(kcap: Kcap, tmp_path: Path) -> None:
    write_recording(tmp_path / "empty", Metadata(), [])
    ran = kcap("show", tmp_path / "empty")
    assert (ran.code, "nothing was recorded" in ran.out) == (0, True)
    assert "cost" not in ran.out and ran.err == "", "there is nothing to estimate, nor to replay"


def test_no_such_path_and_no_recording_are_one_line_errors(kcap: Kcap, tmp_path: Path) -> None:
    for path, code, text in ((tmp_path / "none", 2, "no such Recording"), (tmp_path, 1, "not a Recording")):
        ran = kcap("show", path)
        assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
        assert text in ran.err


def test_damaged_recording_is_a_one_line_error(kcap: Kcap, recording: Path) -> None:
    (recording / "calls.jsonl").write_bytes(b"\xff\n")
    ran = kcap("show", recording)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "calls.jsonl:1" in ran.err


TRACE = """Operator: aten.mm.default
cnt: 3, ((T([8, 16], bf16), T([16, 4], bf16)), {})
cnt: 9, ((T([2, 2], f32), T([2, 2], f32)), {})
Operator: aten.sum.dim_IntList
cnt: 5, ((T([8, 16], f32), [1]), {'dtype': f64})
"""


def test_trace_file_is_shown_too(kcap: Kcap, tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text(TRACE)
    rows = shown(kcap, tmp_path / "trace.txt")["rows"]
    assert [(row["count"], row["signature"]) for row in rows] == [
        (9, "f32[2, 2] x f32[2, 2]"),
        (5, "f32[8, 16], [1], dtype=f64"),
        (3, "bf16[8, 16] x bf16[16, 4]"),
    ]
    by_operator = shown(kcap, tmp_path / "trace.txt", "--by", "operator")
    assert counts(by_operator) == {"aten::mm": 12, "aten::sum.dim_IntList": 5}


def test_trace_file_tells_no_phases(kcap: Kcap, tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text(TRACE)
    ran = kcap("show", tmp_path / "trace.txt", "--by", "phase")
    assert (ran.code, "--by kernel or operator" in ran.err) == (2, True)


def trace_lines(n: int) -> Iterator[Any]:
    return (SimpleNamespace(name=f"aten::op{i % 7}", count=i, args=[i], kwargs={}) for i in range(n))


@pytest.mark.parametrize(("by", "more"), [("kernel", 19_997), ("operator", 4)])
def test_long_trace_is_read_as_a_stream_in_bounded_memory(by: Any, more: int) -> None:
    tracemalloc.start()
    summary = of_trace(trace_lines(20_000), by, top=3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (summary.total, summary.more) == (sum(range(20_000)), more)
    assert peak < 1 << 20  # bytes


def test_an_operators_row_says_in_what_its_calls_differ() -> None:
    calls = [
        Call(
            id=number,
            operator="aten::mm",
            args=[
                Argument(name="self", value=TensorSpec((rows, 64), "bfloat16")),
                Argument(name="dim", value=number % 2),
            ],
            counts=[Count(phase="decode", count=1)],
            shapes=shapes,
        )
        for number, (rows, shapes) in enumerate([(1, 1), (2, 1), (300, 40)])
    ]
    assert varies(calls) == "self.shape[0] ×3, dim ×2"
    assert varies(calls[:1]) == ""
