"""`kcap show --by request`: what of a step's time each request had, by which rule, and that nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.schemas.recording.recording import Argument, Recording, load, write_recording
from kcap.schemas.recording.records import Call, Count, Metadata, Program, Request, Step
from kcap.schemas.recording.signature import call_key
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results.measurement import Measurement, write_measurements
from kcap.show.gain import CallTime
from kcap.show.request_times import BY_CONTEXT, RequestTimes, request_times
from kcap.show.requests import time_notes

Kcap = Callable[..., Any]
PHASES = ("prefill", "decode", "mixed", "other")
FAMILIES = {0: "gemm", 1: BY_CONTEXT}
GEMM, ATTENTION = 10.0, 6.0
TIMES = {0: CallTime(dict.fromkeys(PHASES, GEMM), None), 1: CallTime(dict.fromkeys(PHASES, ATTENTION), None)}


def write(
    path: Path, requests: list[Request], ran: list[Step], listed: Callable[[Step], bool], loose: int = 0
) -> Recording:
    """Each step runs a product and an attention; `loose`: products that ran outside of steps."""
    counts = {phase: sum(step.phase == phase for step in ran) for phase in PHASES}
    tensor = Argument(name="x", value=TensorSpec((4, 64), "bfloat16"))
    of_phases = [Count(phase=phase, count=count) for phase, count in counts.items() if count]  # type: ignore[arg-type]
    calls = [
        Call(id=0, operator="aten::mm", args=[tensor], counts=[*of_phases, Count(phase="other", count=loose)]),
        Call(id=1, operator="vllm::attention", args=[tensor], counts=of_phases),
    ]
    batches = [{"phase": step.phase, "tokens": step.tokens, "sequences": step.sequences, "steps": 1} for step in ran]
    metadata = Metadata(steps={phase: count for phase, count in counts.items() if count}, batches=batches)
    program = Program(id=0, calls=[0, 1], counts=of_phases)
    write_recording(path, metadata, calls, [program], [step for step in ran if listed(step)], requests=requests)
    return load(path)


def step(index: int, phase: Any, *sequences: tuple[int, int, int]) -> Step:
    """`sequences`: of each its request, its new tokens and its length with them."""
    places, queries, lengths = zip(*sequences, strict=True) if sequences else ((), (), ())
    return Step(
        index=index,
        phase=phase,
        tokens=sum(queries),
        sequences=len(sequences),
        requests=list(places),
        queries=list(queries),
        lengths=list(lengths),
        program=0,
    )


REQUESTS = [
    Request(id="a", prompt=30, computed=30, decoded=2, generated=3, prefills=1, decodes=2, first=0),
    Request(id="b", prompt=9, computed=9, decoded=1, generated=2, prefills=1, decodes=1, first=1),
]
RAN = [
    step(0, "prefill", (0, 30, 30)),
    step(1, "mixed", (0, 1, 31), (1, 9, 9)),
    step(2, "decode", (0, 1, 32), (1, 1, 10)),
]


def sums(times: RequestTimes) -> float:
    return sum(sum(request.us.values()) for request in times.requests) + sum(times.none_us.values())


def test_products_go_by_tokens_and_attention_by_context(tmp_path: Path) -> None:
    recording = write(tmp_path / "r", REQUESTS, RAN, lambda step: True)
    times = request_times(recording, TIMES, FAMILIES)
    a, b = times.requests
    pairs = 31 / (31 + 9 * 10 / 2)  # of the mixed step: one new token that attends to 31, nine to each other
    assert a.us["gemm"] == pytest.approx(GEMM * (1 + 1 / 10 + 1 / 2))
    assert b.us["gemm"] == pytest.approx(GEMM * (9 / 10 + 1 / 2))
    assert a.us[BY_CONTEXT] == pytest.approx(ATTENTION * (1 + pairs + 32 / 42))
    assert (a.steps_us, b.steps_us) == (3 * (GEMM + ATTENTION), 2 * (GEMM + ATTENTION))
    assert sum(times.none_us.values()) == pytest.approx(0)
    assert sums(times) == pytest.approx(times.total_us) == pytest.approx(3 * (GEMM + ATTENTION))


def test_what_no_request_ran_is_no_requests(tmp_path: Path) -> None:
    """A step of phase `other`, one whose requests have no line, and calls outside of steps."""
    ran = [*RAN, step(3, "other"), step(4, "decode", (0, 1, 1)).model_copy(update={"requests": []})]
    times = request_times(write(tmp_path / "r", REQUESTS, ran, lambda step: True, loose=5), TIMES, FAMILIES)
    assert times.none_us["gemm"] == pytest.approx(GEMM * (2 + 5))
    assert times.none_us[BY_CONTEXT] == pytest.approx(ATTENTION * 2)
    assert sums(times) == pytest.approx(times.total_us)


SIZES = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, every=st.integers(1, 7), chunk=st.integers(1, 90))
def test_shares_add_up_to_all_however_few_steps_are_listed(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], every: int, chunk: int
) -> None:
    ran, requests = served(sizes, chunk)
    path = tmp_path_factory.mktemp("thin") / "r"
    times = request_times(write(path, requests, ran, lambda step: step.index % every == 0), TIMES, FAMILIES)
    assert sums(times) == pytest.approx(len(ran) * (GEMM + ATTENTION)) == pytest.approx(times.total_us)
    assert all(us >= 0 for request in times.requests for us in request.us.values())
    assert sum(times.none_us.values()) == pytest.approx(0, abs=1e-6)
    assert times.listed == sum(step.index % every == 0 for step in ran)
    exact = request_times(write(path.with_name("s"), requests, ran, lambda step: True), TIMES, FAMILIES)
    if every == 1:
        assert [request.us for request in times.requests] == [request.us for request in exact.requests]


def served(sizes: list[tuple[int, int]], chunk: int) -> tuple[list[Step], list[Request]]:
    """Requests of these prompts and answers, all at once, their prompts in chunks."""
    ran: list[Step] = []
    computed, steps = [0] * len(sizes), [[0, 0] for _ in sizes]
    while any(done < prompt + answer - 1 for done, (prompt, answer) in zip(computed, sizes, strict=True)):
        sequences, prefills = [], 0
        for place, (prompt, answer) in enumerate(sizes):
            if computed[place] < prompt + answer - 1:
                is_prefill = computed[place] < prompt
                new = min(chunk, prompt - computed[place]) if is_prefill else 1
                computed[place] += new
                prefills += is_prefill
                steps[place][not is_prefill] += 1
                sequences.append((place, new, computed[place]))
        phase = "decode" if not prefills else "prefill" if prefills == len(sequences) else "mixed"
        ran.append(step(len(ran), phase, *sequences))
    requests = [
        Request(id=str(n), prompt=p, computed=p, decoded=a - 1, generated=a, prefills=steps[n][0], decodes=steps[n][1])
        for n, (p, a) in enumerate(sizes)
    ]
    return ran, requests


def test_the_command_shows_tokens_shares_and_the_rule(kcap: Kcap, tmp_path: Path) -> None:
    recording = write(tmp_path / "r.kcap", REQUESTS, RAN, lambda step: True, loose=2)
    lines = [
        Measurement(call=call.id, key=call_key(call), operator=call.operator, median_us=us, method="graph")
        for call, us in zip(recording.calls, (GEMM, ATTENTION), strict=True)
    ]
    write_measurements(tmp_path / "m.jsonl", lines)
    found = json.loads(
        kcap("show", recording.path, "--by", "request", "--measurements", tmp_path / "m.jsonl", "--json").out
    )
    assert [row["name"] for row in found["rows"]] == ["a", "b"]
    assert found["no_request"]["us"] == pytest.approx(2 * GEMM)
    assert found["total_us"] == pytest.approx(sum(row["gpu_us"] for row in found["rows"]) + 2 * GEMM)
    assert "estimate" in found["rule"]
    text = kcap("show", recording.path, "--by", "request", "--measurements", tmp_path / "m.jsonl", "--top", 1).out
    assert "no request accounts for 29.4% of the time" in text
    assert "39 tokens of prompts (0 found in the prefix cache, 39 computed), 5 generated" in text
    assert "1 more rows" in text


def test_a_rest_below_zero_by_a_rounding_is_none() -> None:
    times = RequestTimes([], {"gemm": -1e-4}, 100.0, 1, 1, 0)
    summary: Any = SimpleNamespace(times=times, source="")
    assert next(time_notes(summary)) == "no request accounts for 0.0% of the time (0.000 of 0.100 ms)"


def test_tokens_of_steps_that_name_no_requests_are_said(kcap: Kcap, tmp_path: Path) -> None:
    unnamed = step(3, "decode", (0, 4, 36)).model_copy(update={"requests": []})
    recording = write(tmp_path / "r.kcap", REQUESTS, [*RAN, unnamed], lambda step: True)
    found = json.loads(kcap("show", recording.path, "--by", "request", "--json").out)
    assert (found["tokens"], found["unnamed_tokens"]) == (46, 4)
    said = "4 of 46 tokens are of steps that name no requests"
    assert said in kcap("show", recording.path, "--by", "request").out
    named = write(tmp_path / "s.kcap", REQUESTS, RAN, lambda step: True)
    assert "name no requests" not in kcap("show", named.path, "--by", "request").out


def test_a_recording_without_requests_says_so(kcap: Kcap, tmp_path: Path) -> None:
    write(tmp_path / "r.kcap", [], RAN, lambda step: True)
    ran = kcap("show", tmp_path / "r.kcap", "--by", "request")
    assert ran.code == 2
    assert "tells of no requests" in ran.err
