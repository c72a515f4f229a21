"""Recording changes nothing: the same tokens with it and without, compiled while recorded or not, failed or well."""

from __future__ import annotations

from typing import Any

import pytest

import kcap
from kcap.schemas.recording.recording import Recording

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

Tokens = list[list[int]]
Run = tuple[Tokens, Recording]


def test_the_tokens_are_the_same_with_and_without(compiled: Run, unrecorded: Tokens) -> None:
    assert compiled[0] == unrecorded
    assert len({tuple(tokens) for tokens in compiled[0]}) > 1


def test_a_recorder_that_fails_changes_no_token_and_says_so(batches: Any, unrecorded: Tokens) -> None:
    outputs, path = batches(True, fail="1000")
    assert outputs == unrecorded
    recording = kcap.load(path)
    (tap,) = (tap for tap in recording.metadata.taps if tap.status not in ("ok", "absent"))
    assert (tap.status, tap.detail) == ("failed", "made to fail")
    assert not recording.metadata.complete
    assert sum(recording.metadata.steps.values()) > 0
