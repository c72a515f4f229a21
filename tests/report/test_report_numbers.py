"""What a report's data hold: the counts of `kcap show`, the times and floors of `kcap gain`, and no more."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from reported import Texts, unpack, write_applied, write_fidelity, write_judged, write_reported

from kcap.report.agents import MOST_TEXT
from kcap.report.calls import _sample_text as sample_text
from kcap.schemas.recording.recording import (
    Argument,
    Call,
    Count,
    Metadata,
    Sample,
    SampledTensor,
    load,
    write_recording,
)
from kcap.schemas.recording.signature import call_key
from kcap.schemas.recording.turns import Turn, TurnMessage, write_turns
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results.applied import read_applied
from kcap.schemas.results.measurement import LeastWork, Measurement, Roofline, write_measurements
from kcap.schemas.results.outcome import REFERENCE_CHECKS_FILE, ReferenceCheck, write_reference_checks

DATASET = Path(__file__).parent.parent / "bench" / "judged_dataset"
Kcap = Callable[..., Any]
Report = Callable[..., dict[str, Any]]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write_reported(tmp_path / "r.kcap", Texts())


@pytest.fixture
def report(kcap: Kcap, tmp_path: Path) -> Report:
    """The data of the report on a path, made with these options."""

    def make(path: Path, *options: object) -> dict[str, Any]:
        page = tmp_path / "report.html"
        done = kcap("report", path, "-o", page, "--force", *options)
        assert done.code == 0, done.err
        return unpack(page)

    return make


def measured(recording: Path, file: Path) -> Path:
    """Times of the first three Calls, of which the second has no floor."""
    lines = [
        Measurement(
            call=call.id,
            key=call_key(call),
            operator=call.operator,
            median_us=4.0 + call.id,
            method="graph",
            roofline=None if call.id == 1 else Roofline(us=2.0, times=2, gb_s=1, tflop_s=1),
            work=LeastWork(moved=1000, flops=4000),
        )
        for call in load(recording).calls[:3]
    ]
    write_measurements(file, lines)
    return file


def sums(calls: dict[str, Any], name: str, column: str) -> dict[str, float]:
    """A column by the text in another that is a place in `names`."""
    found: dict[str, float] = defaultdict(float)
    for place, value in zip(calls[name], calls[column], strict=True):
        found[calls["names"][place]] += value
    return found


@pytest.mark.parametrize("profiled", [True, False])
def test_counts_and_times_are_those_of_show(kcap: Kcap, report: Report, tmp_path: Path, profiled: bool) -> None:
    recorded = write_reported(tmp_path / "r.kcap", Texts(), profiled)
    shown = json.loads(kcap("show", recorded, "--by", "operator", "--json").out)
    data = report(recorded)
    assert (data["total"], data["gpu_us"]) == (shown["total"], shown["gpu_us"])
    assert data["estimated_us"] == pytest.approx(shown["estimated_us"])
    for ours, theirs in {
        "count": "count",
        "graph": "graph",
        "gpu_us": "gpu_us",
        "estimated_us": "estimated_us",
    }.items():
        found = sums(data["calls"], "operator", ours)
        assert found == pytest.approx({row["name"]: row[theirs] for row in shown["rows"]}, abs=1e-3)
    phases = Counter[str]()
    for row in shown["rows"]:
        phases.update(row["phases"])
    assert {name: sum(column["count"]) for name, column in data["calls"]["phases"].items()} == dict(phases)


@pytest.mark.parametrize("timed_by_replay", [True, False])
def test_times_and_floors_are_those_of_gain(
    kcap: Kcap, report: Report, recorded: Path, tmp_path: Path, timed_by_replay: bool
) -> None:
    options = ("--measurements", measured(recorded, tmp_path / "m.jsonl")) if timed_by_replay else ()
    gain = json.loads(kcap("gain", recorded, *options, "--json").out)
    data = report(recorded, *options)
    calls = data["calls"]
    assert data["mix_unit"] == "us" and data["mix_measured"] and data["mix_source"] == gain["source"]
    assert [words for words in data["words"] if f"{gain['untimed']:,} invocations have no time" in str(words)]
    for phase, column in calls["phases"].items():
        us, floor, unknown = Counter[str](), Counter[str](), Counter[str]()
        for place, of, least in zip(calls["kernel"], column["us"], column["floor_us"], strict=True):
            name = calls["kernels"][place]["name"]
            us[name] += of or 0.0
            floor[name] += (of or 0.0) if least is None else least
            unknown[name] += (of or 0.0) if least is None else 0.0
        rows = {row["name"]: row["phases"][phase] for row in gain["rows"] if phase in row["phases"]}
        assert {name: us[name] for name in rows} == pytest.approx(
            {n: row["engine_us"] for n, row in rows.items()}, abs=1e-2
        )
        assert {name: floor[name] for name in rows} == pytest.approx(
            {n: row["floor_us"] for n, row in rows.items()}, abs=1e-2
        )
        assert sum(us.values()) == pytest.approx(gain["total_us"][phase])
    names = {(kernel["name"], kernel["definition"]) for kernel in calls["kernels"]}
    assert names == {(row["name"], row["definition"]) for row in gain["rows"]}


def test_families_are_those_of_show(kcap: Kcap, report: Report, recorded: Path) -> None:
    shown = json.loads(kcap("show", recorded, "--by", "family", "--json").out)
    calls = report(recorded)["calls"]
    found = Counter[str]()
    for place, count in zip(calls["kernel"], calls["count"], strict=True):
        found[calls["kernels"][place]["family"]] += count
    assert dict(found) == {row["name"]: row["count"] for row in shown["rows"]}


def test_no_profile_and_no_torch_leave_counts(
    kcap: Kcap, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    data = report(write_reported(tmp_path / "r.kcap", Texts(), profiled=False))
    assert data["mix_unit"] == "invocations" and not data["strips"]
    assert {kernel["name"] for kernel in data["calls"]["kernels"]} >= {"aten::mm", "operator"}
    assert data["calls"]["phases"]["decode"]["us"] == data["calls"]["phases"]["decode"]["count"]
    assert "need PyTorch" in str(data["words"])


def test_one_step_of_a_kind_is_a_strip_with_its_busy_time(report: Report, recorded: Path) -> None:
    (strip,) = report(recorded)["strips"]
    assert (strip["phase"], strip["steps"], strip["padded"]) == ("decode", 2, 16)
    assert (strip["span_us"], strip["busy_us"], strip["gpu_us"]) == (46.0, 21.0, 21.0)
    assert strip["call"] == [0, 2, 4, 1, -1]


def test_histograms_count_steps_and_contexts(report: Report, recorded: Path) -> None:
    found = {histogram["title"]: histogram["values"] for histogram in report(recorded)["histograms"]}
    assert found["Sequences in a step"] == {"prefill": [[1, 2]], "decode": [[1, 5], [4, 5], [9, 5], [16, 5]]}
    assert found["New tokens in a step"]["prefill"] == [[512, 2]]
    assert found["Context of a sequence"]["decode"] == [[100 + i, 4] for i in range(20)]


def test_what_is_lost_is_said(report: Report, recorded: Path) -> None:
    words = str(report(recorded)["words"])
    for text in (
        "PARTIAL",
        "TAP FAILED: broken",
        "tap tap was switched off: detail",
        "3 invocations came after",
        "note: note",
        "unexplained: 2.0 µs, 2 times: reason",
        "1 launched kernels have no source: unread",
    ):
        assert text in words


def test_details_of_a_call_are_apart(kcap: Kcap, recorded: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert kcap("report", recorded, "-o", page).code == 0
    data, details = unpack(page), unpack(page, "details")
    assert "XBLOCK" not in json.dumps(data)
    place = data["calls"]["id"].index(4)
    texts = [details["texts"][number] for number in details["args"][place][:3]]
    assert texts == ["q", "bf16[16, 4, 64]", "cuda:0, strides 256, 64, 1, offset 0, storage 0"]
    first, *rest = details["samples"]["4"]
    assert first["holds"] == ["scale = 0.125", "argument 9 = 'sample'", "argument: 3 to 511"]
    assert len(rest) == 3 and details["more_samples"]["4"] == 2
    launch = details["launches"][details["launch"][data["calls"]["id"].index(2)]]
    assert launch["options"] == "XBLOCK=1024, WHAT='constexpr', num_warps=4"
    assert "source" in details["sources"][launch["source"]] and details["sources"][launch["fragment"]] == "fragment"


def test_a_source_that_was_changed_is_not_shown(kcap: Kcap, recorded: Path, tmp_path: Path) -> None:
    (source,) = (recorded / "kernels").glob("*.py")
    source.write_text("changed")
    assert kcap("report", recorded, "-o", tmp_path / "r.html").code == 0
    assert "not shown: its content is not what its name says" in str(unpack(tmp_path / "r.html", "details")["sources"])


def test_judged_solutions_have_their_scores(report: Report, recorded: Path, tmp_path: Path) -> None:
    judged = report(recorded, "--judged", write_judged(tmp_path / "judged", Texts()))["judged"]
    good, bad = judged["solutions"]
    assert (good["name"], good["passed"], good["weighted"], good["geometric_mean"]) == ("author/good", 2, 2.0, 2.0)
    assert bad["weighted"] is None and bad["workloads"][1]["status"] == "INCORRECT_NUMERICAL"
    assert bad["workloads"][1]["reason"].startswith("verdict; output[3] is 2, expected 1")
    assert judged["refused"] == ["refused: no run"] and judged["machine"] == "machine"


def test_references_are_verified_where_every_check_agrees(report: Report, recorded: Path, tmp_path: Path) -> None:
    judged = write_judged(tmp_path / "judged", Texts())
    statuses = {"a": ["agrees", "skipped"], "b": ["agrees", "differs"], "c": ["failed"], "d": ["skipped"]}
    checks = [
        ReferenceCheck(definition=name, operator="aten::mm", call=0, status=status)
        for name, of_definition in statuses.items()
        for status in of_definition
    ]
    write_reference_checks(judged / "dataset" / REFERENCE_CHECKS_FILE, checks)
    references = report(recorded, "--judged", judged)["judged"]["references"]
    assert references == {"a": "verified", "b": "differs", "c": "unverified"}


def test_another_recording_is_compared_as_diff_does(kcap: Kcap, report: Report, recorded: Path, tmp_path: Path) -> None:
    other = write_reported(tmp_path / "o.kcap", Texts(), profiled=False)
    diff = json.loads(kcap("diff", recorded, other, "--by", "family", "--json").out)
    against = report(recorded, "--against", other)["against"]
    assert {**diff, "a": "r.kcap", "b": "o.kcap"} == {"by": "family", **against}


def test_times_of_both_recordings_are_compared_where_both_have_them(
    report: Report, recorded: Path, tmp_path: Path
) -> None:
    other = write_reported(tmp_path / "o.kcap", Texts())
    (decode,) = [
        phase for phase in report(recorded, "--against", other)["against"]["phases"] if phase["phase"] == "decode"
    ]
    assert decode["a"]["us_per_step"] == decode["b"]["us_per_step"] > 0


def test_what_solutions_gained_is_as_kcap_ab_wrote_it(report: Report, recorded: Path, tmp_path: Path) -> None:
    file = write_applied(tmp_path / "applied.json", Texts())
    assert report(recorded, "--ab", file)["applied"] == read_applied(file).model_dump(mode="json")


def test_fidelity_is_read_from_its_folder(report: Report, recorded: Path, tmp_path: Path) -> None:
    folder = write_fidelity(tmp_path / "fidelity", Texts())
    assert report(recorded, "--fidelity", folder)["fidelity"]["kinds"][0]["outside"] == ["outside"]


def test_a_trace_file_has_its_counts(report: Report, tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("Operator: aten.mm.default\ncnt: 7, ((T([4, 8], bf16), T([8, 2], bf16)), {})\n")
    data = report(trace)
    assert (data["kind"], data["total"], data["mix_unit"]) == ("trace", 7, "invocations")


def test_sums_are_those_of_the_parquet_export(kcap: Kcap, report: Report, recorded: Path, tmp_path: Path) -> None:
    assert kcap("export", recorded, "--to", "parquet", "-o", tmp_path / "parquet").code == 0
    rows = pyarrow.parquet.read_table(tmp_path / "parquet" / "calls.parquet").to_pylist()
    theirs = Counter[tuple[str, str]]()
    for row in rows:
        if row["role"] == "kernel":
            theirs[row["operator"], row["phase"]] += row["count"]
    calls = report(recorded)["calls"]
    ours = {(calls["names"][operator], phase): 0 for phase in calls["phases"] for operator in calls["operator"]}
    for phase, column in calls["phases"].items():
        for operator, count in zip(calls["operator"], column["count"], strict=True):
            ours[calls["names"][operator], phase] += count
    assert {key: count for key, count in ours.items() if count} == theirs


def test_tensors_that_no_device_holds_and_a_name_that_is_no_text(kcap: Kcap, tmp_path: Path) -> None:
    huge = [Argument(name=name, value=TensorSpec((1 << 27, 1 << 27), "bfloat16")) for name in ("self", "mat2")]
    call = Call(id=0, operator="aten::mm", args=huge, counts=[Count(phase="decode", count=1 << 48)])
    recorded = tmp_path / os.fsdecode(b"\xff.kcap")
    write_recording(recorded, Metadata(steps={"decode": 1}), [call])
    page = tmp_path / "r.html"
    assert kcap("report", recorded, "-o", page).code == 0
    assert unpack(page)["source"] == "\\udcff.kcap" and unpack(page)["total"] == 1 << 48


def test_the_output_is_named_after_the_recording(
    kcap: Kcap, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    monkeypatch.setattr("click.launch", launched.append)
    monkeypatch.chdir(tmp_path)
    assert kcap("report", recorded, "--open").code == 0
    assert launched == [(tmp_path / "r.html").as_uri()] and unpack(tmp_path / "r.html")


def test_a_dataset_has_its_definitions(kcap: Kcap, report: Report) -> None:
    shown = json.loads(kcap("show", DATASET, "--json").out)["definitions"]
    data = report(DATASET)
    ours = [{name: row[name] for name in shown[0]} for row in data["definitions"]]
    assert ours == shown and data["distinct"] == sum(row["workloads"] for row in shown)
    rows = {row["name"]: row for row in data["definitions"]}
    assert rows["mean_rows"]["sizes"]["T"] == [[32, 1], [128, 1], [1024, 1]]


def test_two_datasets_are_compared(report: Report) -> None:
    assert report(DATASET, "--against", DATASET)["against"]["equal"]


def test_the_same_recording_gives_the_same_file(
    kcap: Kcap, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [tmp_path / "1.html", tmp_path / "2.html"]
    for second, page in enumerate(pages):
        monkeypatch.setattr("time.time", lambda second=second: 1e9 + second)
        assert kcap("report", recorded, "-o", page).code == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{there}"], "already exists: pass --force"),
        (["{folder}"], "is a directory"),
        (["{new}", "--judged", "{folder}"], "no output of kcap bench"),
        (["{new}", "--ab", DATASET / "definitions"], "no such file (kcap ab -o writes one)"),
        (["{new}", "--fidelity", "{folder}"], "no output of kcap replay --compare-engine"),
        (["{new}", "--measurements", "{new}.jsonl"], "no such file"),
        (["{new}", "--against", DATASET], "a dataset is compared with a dataset only"),
    ],
)
def test_a_wrong_call_says_why(kcap: Kcap, recorded: Path, tmp_path: Path, words: list[object], reason: str) -> None:
    (tmp_path / "there.html").write_text("")
    (tmp_path / "folder").mkdir()
    places = {"there": tmp_path / "there.html", "folder": tmp_path / "folder", "new": tmp_path / "new.html"}
    done = kcap("report", recorded, "-o", *[str(word).format(**places) for word in words])
    assert done.code == 2 and reason in done.err
    assert not (tmp_path / "new.html").exists()


@pytest.mark.parametrize("measure", [False, True])
def test_turns_and_sessions_are_those_of_show(
    kcap: Kcap, report: Report, recorded: Path, tmp_path: Path, measure: bool
) -> None:
    options = ["--measurements", measured(recorded, tmp_path / "m.jsonl")] if measure else []
    turns, sessions = (
        json.loads(kcap("show", recorded, "--by", by, "--json", *options).out) for by in ("turn", "session")
    )
    agents = report(recorded, *options)["agents"]
    assert [session["row"] for session in agents["sessions"]] == sessions["rows"]
    assert [turn["row"] for session in agents["sessions"] for turn in session["turns"]] == turns["rows"]
    assert agents["total"] == turns["total"] and agents["total"]["gpu_us"] > 0
    assert turns["rule"] in agents["notes"] and turns["source"] in agents["notes"]
    assert turns["unnamed_tokens"] and any("name no requests" in note for note in agents["notes"])


def test_turns_of_an_engine_that_names_no_requests_say_so(report: Report, recorded: Path) -> None:
    (recorded / "requests.jsonl").unlink()
    agents = report(recorded)["agents"]
    assert [len(session["turns"]) for session in agents["sessions"]] == [2, 1]
    assert "name no requests" in agents["notes"][0] and not agents["timed"]
    (recorded / "turns.jsonl").unlink()
    assert report(recorded)["agents"] is None


def test_long_texts_of_turns_are_cut(kcap: Kcap, recorded: Path, tmp_path: Path) -> None:
    turn = Turn(number=0, messages=[TurnMessage(role="user", content="x" * (MOST_TEXT + 5))])
    write_turns(recorded, [turn])
    assert kcap("report", recorded, "-o", tmp_path / "r.html").code == 0
    details = unpack(tmp_path / "r.html", "details")["agents"]["turns"]["0"]
    assert details["messages"][0]["texts"] == [["content", "x" * MOST_TEXT + "\n… 5 more characters"]]


def test_half_of_a_samples_range_is_not_shown() -> None:
    call = Call(id=0, operator="aten::embedding", args=[Argument(name="indices", value=TensorSpec((4,), "int64"))])
    sample = Sample(call=0, phase="decode", tensors={"0": SampledTensor(low=3)})
    assert sample_text(sample, call).holds == ["indices: no values (range only)"]
