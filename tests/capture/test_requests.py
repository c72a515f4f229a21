"""Requests' totals: what every counted step computed for each, however a scheduler cuts and interrupts them."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_vllm_hooks import scheduled

import kcap
from kcap.capture.engines.vllm.adapter import Steps
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.shards.lines import PromptLine
from kcap.capture.shards.reader import read_shards
from kcap.capture.turns.blocks import BlockHashes
from kcap.capture.window import requests as requests_module
from kcap.capture.window import window as window_module
from kcap.capture.window.window import Window
from kcap.schemas.recording.recording import Recording, Request
from kcap.schemas.validation.recording import check_recording
from kcap.schemas.validation.report import Report

A = torch.eye(2)


def step(window: Window, steps: Steps, output: Any) -> None:
    """One of the engine: recorded if the window is open."""
    shape = steps._shape(output)
    if shape is not None and window.begin(shape):
        with torch.no_grad():
            torch.mm(A, A)
        window.end()


def finished(window: Window, output: Path) -> Recording:
    window.close()
    recording = fold_session(window.session, output)
    report = Report()
    check_recording(report, output)
    assert report.problems == []
    return recording


def by_id(recording: Recording) -> dict[str, Request]:
    return {request.id: request for request in recording.requests}


def test_a_request_has_its_prompt_hits_and_tokens(window: Window, tmp_path: Path) -> None:
    """129 tokens of which 64 were found, in two chunks, then two decode steps beside another request's prefill."""
    window.start()
    steps = Steps(window)
    step(window, steps, scheduled({"a": 60}, new={"a": (129, 64)}))
    step(window, steps, scheduled({"a": 5}, cached={"a": 124}))
    step(window, steps, scheduled({"a": 1, "b": 7}, new={"b": (7, 0)}, cached={"a": 129}))
    step(window, steps, scheduled({"a": 1, "b": 1}, cached={"a": 130, "b": 7}))
    step(window, steps, scheduled({"b": 1}, cached={"b": 8}, finished=("a",)))
    recording = finished(window, tmp_path / "out")
    a, b = recording.requests
    assert (a.id, a.prompt, a.cached, a.computed, a.decoded, a.generated) == ("a", 129, 64, 65, 2, 3)
    assert (a.prefills, a.decodes, a.first, a.again) == (2, 2, 0, 0)
    assert (b.id, b.prompt, b.cached, b.computed, b.decoded, b.generated, b.first) == ("b", 7, 0, 7, 2, 3, 2)
    assert [step.requests for step in recording.steps] == [[0], [0], [0, 1], [0, 1], [1]]


def test_what_is_computed_again_after_an_interruption_is_told(window: Window, tmp_path: Path) -> None:
    window.start()
    steps = Steps(window)
    step(window, steps, scheduled({"a": 10}, new={"a": (10, 0)}))
    for computed in (10, 11):
        step(window, steps, scheduled({"a": 1}, cached={"a": computed}))
    step(window, steps, scheduled({"a": 6}, cached={"a": 0}))  # of 13 known tokens, 12 had been computed
    step(window, steps, scheduled({"a": 7}, cached={"a": 6}))
    (a,) = finished(window, tmp_path / "out").requests
    assert (a.computed, a.decoded, a.again, a.generated) == (20, 5, 12, 4)


def test_accepted_drafts_are_generated_and_rejected_ones_are_not(window: Window, tmp_path: Path) -> None:
    """Three drafts a step: none accepted, all, one beside a step without any; of the last step nobody can tell."""
    window.start()
    steps = Steps(window)
    step(window, steps, scheduled({"a": 10}, new={"a": (10, 0)}))
    for computed, tokens in ((10, 4), (11, 4), (15, 1), (16, 4), (18, 4)):
        step(window, steps, scheduled({"a": tokens}, cached={"a": computed}))
    (a,) = finished(window, tmp_path / "out").requests
    assert (a.computed, a.decoded, a.again) == (10, 17, 0)
    assert a.generated == 18 + 1 - 10 + 1, "what is known before the last step, and its one"


def test_a_request_that_vllm_names_as_new_again_goes_on(window: Window, tmp_path: Path) -> None:
    """So does its second runner with those that it had interrupted."""
    window.start()
    steps = Steps(window)
    step(window, steps, scheduled({"a": 10}, new={"a": (10, 0)}))
    step(window, steps, scheduled({"a": 11}, new={"a": (10, 0)}))
    (a,) = finished(window, tmp_path / "out").requests
    assert (a.requests, a.again, a.generated) == (1, 10, 2)


def test_a_name_used_again_is_a_request_of_its_own(window: Window, tmp_path: Path) -> None:
    window.start()
    steps = Steps(window)
    step(window, steps, scheduled({"a": 4}, new={"a": (4, 0)}))
    step(window, steps, scheduled({"a": 9}, new={"a": (9, 0)}, finished=("a",)))
    assert [request.prompt for request in finished(window, tmp_path / "out").requests] == [4, 9]


def test_what_runs_while_the_window_is_closed_is_in_no_total(window: Window, tmp_path: Path) -> None:
    window.start()
    steps = Steps(window)
    window._set_paused(True)
    step(window, steps, scheduled({"a": 10, "b": 3}, new={"a": (10, 2), "b": (3, 0)}))
    step(window, steps, scheduled({"a": 1}, cached={"a": 12}, finished=("b",)))
    window._set_paused(False)
    step(window, steps, scheduled({"a": 1}, cached={"a": 13}))
    recording = finished(window, tmp_path / "out")
    (a,) = recording.requests
    assert (a.id, a.prompt, a.cached, a.computed, a.decoded, a.generated, a.first) == ("a", 10, 2, 0, 1, 1, None)


def test_a_killed_process_leaves_the_totals_of_those_that_had_finished(window: Window, tmp_path: Path) -> None:
    if (process := os.fork()) == 0:
        child = Window(Session(str(tmp_path / "killed")))
        child.session.write()
        child.start()
        steps = Steps(child)
        step(child, steps, scheduled({"a": 4, "b": 5}, new={"a": (4, 0), "b": (5, 0)}))
        step(child, steps, scheduled({"b": 1}, cached={"b": 5}, finished=("a",)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    recording = fold_session(Session(str(tmp_path / "killed")), tmp_path / "out")
    requests = by_id(recording)
    assert requests["a"].computed == 4
    assert (requests["b"].prompt, requests["b"].computed) == (5, 0), "its name is known, and no total"
    assert [step.requests for step in recording.steps] == [[0, 1], [1]]


def test_past_the_most_requests_the_others_are_one_line(
    window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (requests_module, __import__("kcap.capture.fold.requests", fromlist=["x"])):
        monkeypatch.setattr(module, "MAX_REQUESTS", 3)
    monkeypatch.setattr(requests_module, "REST_EVERY", 4)
    window.start()
    steps = Steps(window)
    for number in range(12):
        earlier = (str(number - 1),) if number else ()
        step(window, steps, scheduled({str(number): 5}, new={str(number): (5, 0)}, finished=earlier))
    recording = finished(window, tmp_path / "out")
    assert [request.id for request in recording.requests] == ["0", "1", "2", ""]
    assert (recording.requests[-1].requests, recording.requests[-1].computed) == (9, 45)
    assert [step.requests for step in recording.steps][-2:] == [[3], [3]]


def test_only_recorded_requests_use_up_the_lines(
    window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four that run while the window is closed two go on in it: one in a step with a line, one in a decode step."""
    for module in (requests_module, __import__("kcap.capture.fold.requests", fromlist=["x"])):
        monkeypatch.setattr(module, "MAX_REQUESTS", 3)
    window.start()
    window.requests.blocks = BlockHashes("", 4)
    steps = Steps(window)
    window._set_paused(True)
    names = list("abcd")
    step(window, steps, scheduled(dict.fromkeys(names, 5), new=dict.fromkeys(names, (5, 0))))
    window._set_paused(False)
    step(window, steps, scheduled({"c": 1}, cached={"c": 5}, finished=("a", "b")))
    monkeypatch.setattr(window_module, "step_details", lambda *_: b"")
    step(window, steps, scheduled({"d": 1}, cached={"d": 5}))
    step(window, steps, scheduled({"e": 9}, new={"e": (9, 0)}))
    window.close()
    (shard,) = read_shards(Path(window.session.directory))
    assert [(line.number, len(line.blocks)) for line in shard.lines(PromptLine)] == [(0, 2), (1, 3), (2, 2)]
    recording = finished(window, tmp_path / "out")
    assert [(request.id, request.prompt, request.decoded) for request in recording.requests] == [
        ("c", 5, 1), ("e", 9, 0), ("d", 5, 1),
    ]  # fmt: skip


class Scheduler:
    """Cuts requests into steps as vLLM does: chunks, batches, interruptions; what it computed of each is known."""

    def __init__(self, seed: int, sizes: list[tuple[int, int, int]]) -> None:
        self.draw = random.Random(seed)
        self.waiting = {f"r{number}": size for number, size in enumerate(sizes)}  # prompt, found, to generate
        self.running: dict[str, list[int]] = {}  # prompt, computed, generated, to generate
        self.expected = {
            name: Counter(prompt=prompt, cached=found) for name, (prompt, found, _) in self.waiting.items()
        }
        self.ended: list[str] = []

    def next(self) -> Any:
        new, cached, tokens = {}, {}, {}
        ended, self.ended = tuple(self.ended), []
        if self.waiting and (not self.running or self.draw.random() < 0.5):
            name = next(iter(self.waiting))
            prompt, found, wanted = self.waiting.pop(name)
            self.running[name] = [prompt, found, 0, wanted]
            new[name] = (prompt, found)
        for name, state in self.running.items():
            prompt, computed, generated, _ = state
            if name not in new and self.draw.random() < 0.1:
                continue  # not in this step
            if name not in new and self.draw.random() < 0.1:
                computed = state[1] = 0  # it was interrupted
            left = prompt + generated - computed
            tokens[name] = left if left == 1 else self.draw.randint(2, left)
            if name not in new:
                cached[name] = computed
        output = scheduled(tokens, new=new, cached=cached, finished=ended)
        for name, count in tokens.items():
            self.compute(name, count)
        return output

    def compute(self, name: str, tokens: int) -> None:
        state = self.running[name]
        prompt, computed, generated, wanted = state
        of_prompt = max(0, min(computed + tokens, prompt) - computed)
        self.expected[name].update(computed=of_prompt, decoded=tokens - of_prompt)
        state[1] += tokens
        if state[1] == prompt + generated:
            state[2] += 1
            self.expected[name]["generated"] += 1
            if state[2] == wanted:
                del self.running[name]
                self.ended.append(name)


SIZES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(1, 6)).map(
        lambda s: (s[0], min(s[1], s[0] - 1), s[2])
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), sizes=SIZES)
def test_totals_are_exact_however_requests_are_cut(
    tmp_path_factory: pytest.TempPathFactory, seed: int, sizes: list[tuple[int, int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("cut")
    session = Session(str(directory / "shards"), recorder="python")
    session.write()
    window = Window(session)
    window.start()
    steps, scheduler = Steps(window), Scheduler(seed, sizes)
    while scheduler.waiting or scheduler.running:
        step(window, steps, scheduler.next())
    recording = finished(window, directory / "out")
    requests = by_id(recording)
    for name, expected in scheduler.expected.items():
        request = requests[name]
        assert {key: getattr(request, key) for key in ("prompt", "cached", "computed", "decoded", "generated")} == {
            **dict.fromkeys(("cached", "computed", "decoded", "generated"), 0),
            **expected,
        }
        assert request.prompt + request.generated - 1 == request.cached + request.tokens - request.again
        listed = [listed for listed in recording.steps if recording.requests.index(request) in listed.requests]
        assert request.prefills + request.decodes == len(listed)
    scheduled_tokens = sum(batch["tokens"] * batch["steps"] for batch in recording.metadata.batches)
    assert sum(request.tokens for request in recording.requests) == scheduled_tokens


def test_merged_runs_keep_their_requests_apart(window: Window, tmp_path: Path) -> None:
    from kcap.schemas.merge.recordings import merge_recordings

    window.start()
    steps = Steps(window)
    step(window, steps, scheduled({"a": 4}, new={"a": (4, 0)}))
    step(window, steps, scheduled({"a": 1, "b": 5}, new={"b": (5, 0)}, cached={"a": 4}))
    recording = finished(window, tmp_path / "out")
    merged = merge_recordings([recording, kcap.load(tmp_path / "out")])
    assert [(request.id, request.first) for request in merged.requests] == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    assert [step.requests for step in merged.steps] == [[0], [0, 1], [2], [2, 3]]
