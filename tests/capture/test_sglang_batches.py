"""What is read of SGLang's batches: phases, lengths and hits in the radix cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from sglang_stand_ins import batch, request, scheduled

from kcap.capture.engines.sglang.adapter import Scheduled, shape
from kcap.capture.window.requests import Requests

TARGET, DRAFT = SimpleNamespace(is_draft_worker=False), SimpleNamespace(is_draft_worker=True)


@pytest.mark.parametrize(
    ("mode", "queries", "lengths", "phase"),
    [
        ("EXTEND", [4, 9], [4, 25], "prefill"),
        ("SPLIT_PREFILL", [4], [4], "prefill"),
        ("MIXED", [5, 1], [5, 9], "mixed"),
        ("DECODE", [1, 1], [8, 9], "decode"),
        ("IDLE", [], [], "other"),
        ("DLLM_EXTEND", [4], [4], "other"),
    ],
)
def test_each_mode_has_its_phase_and_lengths(mode: str, queries: list[int], lengths: list[int], phase: str) -> None:
    step = shape(batch(mode, queries, lengths), TARGET, Scheduled())
    assert (step.phase, step.queries, step.lengths, step.cached) == (phase, queries, lengths, [])


def test_a_draft_models_forward_is_of_no_request() -> None:
    assert shape(batch("DECODE", [1], [5]), DRAFT, Scheduled()).phase == "other"


def test_lengths_that_only_the_gpu_knows_are_not_waited_for() -> None:
    forward = batch("DECODE", [1], [5])
    forward.seq_lens_cpu = SimpleNamespace(is_cuda=True)
    assert shape(forward, TARGET, Scheduled()).lengths == []
    forward.seq_lens_cpu = None
    assert shape(forward, TARGET, Scheduled()).lengths == []


def look(known: Scheduled, batch: Any, requests: Requests | None = None) -> None:
    known.look(batch, requests or Requests(lambda line: None), generates=True)


def test_a_chunk_that_continues_is_no_hit() -> None:
    known = Scheduled()
    look(known, scheduled("EXTEND", request("a", 16), request("b")))
    assert known.hits == [16, 0]
    look(known, scheduled("DECODE", request("c", 3)))
    assert known.hits == []
    look(known, scheduled("EXTEND", request("a", 16), request("c", 8)))
    assert known.hits == [0, 8]


def test_a_request_that_decodes_in_a_mixed_batch_has_no_hit() -> None:
    known = Scheduled()
    look(known, scheduled("MIXED", request("a", 4), decoding=(request("b", 18),)))
    step = shape(batch("MIXED", [2, 1], [6, 30]), TARGET, known)
    assert step.cached == [4, 0]


def test_a_health_check_is_of_no_request() -> None:
    known = Scheduled()
    look(known, scheduled("EXTEND", request("HEALTH_CHECK_17")))
    assert shape(batch("EXTEND", [1], [1]), TARGET, known).phase == "other"
    look(known, scheduled("EXTEND", request("HEALTH_CHECK_18"), request("a")))
    assert shape(batch("EXTEND", [1, 1], [1, 1]), TARGET, known).phase == "prefill"


def test_a_step_names_its_requests_and_those_that_prefill() -> None:
    known, lines = Scheduled(), list[bytes]()
    requests = Requests(lines.append)
    look(known, scheduled("EXTEND", request("a", prompt=6)), requests)
    steps = [shape(batch("EXTEND", [4], [4]), TARGET, known)]
    look(known, scheduled("MIXED", request("a", prompt=6), decoding=(request("b", prompt=8),)), requests)
    steps.append(shape(batch("MIXED", [2, 1], [6, 9]), TARGET, known))
    look(known, scheduled("DECODE", request("a"), request("b")), requests)
    steps.append(shape(batch("DECODE", [1, 1], [7, 10]), TARGET, known))
    assert [(step.requests, step.prefilling) for step in steps] == [(["a"], [0]), (["a", "b"], [0]), (["a", "b"], [])]
    for index, step in enumerate(steps):
        requests.add(step, index)
    requests.finish("a")
    last = orjson.loads(lines[-1])
    assert [last[name] for name in ("prompt", "computed", "decoded", "generated", "prefills")] == [6, 6, 1, 2, 2]


def test_a_step_that_verifies_drafts_has_them_in_its_lengths_and_names_no_request() -> None:
    known = Scheduled()
    look(known, scheduled("TARGET_VERIFY", request("a"), request("b")))
    forward = batch("TARGET_VERIFY", [3, 3], [8, 9])
    step = shape(forward, TARGET, known)
    assert (step.phase, step.queries, step.lengths, step.requests) == ("decode", [3, 3], [11, 12], [])
    forward.seq_lens_cpu = None
    step = shape(forward, TARGET, known)
    assert (step.lengths, step.requests) == ([], [])
