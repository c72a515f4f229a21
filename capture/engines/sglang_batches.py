"""What SGLang's batches say of a step: its phase, each sequence's lengths, and its hits in the radix cache."""

from __future__ import annotations

from typing import Any

from kcap.capture.window import StepShape

PHASES = {
    "EXTEND": "prefill",
    "SPLIT_PREFILL": "prefill",
    "DECODE": "decode",
    "TARGET_VERIFY": "decode",
    "MIXED": "mixed",
}


HEALTH_CHECK = "HEALTH_CHECK"  # how the names of a server's own probes begin


class Scheduled:
    """What the scheduler knows of the batch that runs: each request's hits in the radix cache, where it prefills.

    `hits`: in tokens. `probe`: the batch is a server's health check, and no request's.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}  # request -> its hits so far: a chunk's are those that came since
        self.hits: list[int] = []
        self.probe = False

    def look(self, batch: Any) -> str | None:
        """Read `ScheduleBatch`, before it runs: the phase of its forward, None where it need have none.

        A request that decodes in it has no hits.
        """
        phase = PHASES.get(batch.forward_mode.name)
        self.hits = []
        self.probe = bool(batch.reqs) and all(str(request.rid).startswith(HEALTH_CHECK) for request in batch.reqs)
        if phase not in ("prefill", "mixed"):
            return phase
        decoding = {id(request) for request in getattr(batch, "decoding_reqs", None) or ()}
        before, self._known = self._known, {}
        for request in batch.reqs:
            total = 0 if id(request) in decoding else int(request.cached_tokens)
            self._known[request.rid] = total
            self.hits.append(total - before.get(request.rid, 0) if total else 0)
        return phase


def shape(batch: Any, runner: Any, scheduled: Scheduled) -> StepShape:
    """The step that `ForwardBatch` is, before it runs: the runner may rewrite a mixed one.

    In phase `other` are forwards of no request (data parallel, health checks) and those of a draft model, each of which
    is a step of its own.
    """
    apart = scheduled.probe or getattr(runner, "is_draft_worker", False)
    phase = "other" if apart else PHASES.get(batch.forward_mode.name, "other")
    queries = _queries(batch)
    cached = scheduled.hits if len(scheduled.hits) == len(queries) and phase != "other" else []
    return StepShape(phase, queries, _lengths(batch), cached if any(cached) else [])


def _queries(batch: Any) -> list[int]:
    """Each sequence's new tokens; where they are not listed, all have as many."""
    listed = getattr(batch, "extend_seq_lens_cpu", None)
    if listed is not None and not batch.forward_mode.is_decode():
        return [int(length) for length in listed]
    sequences, tokens = int(batch.batch_size), batch.input_ids
    every = 1 if tokens is None or batch.forward_mode.is_decode() else len(tokens) // max(sequences, 1)
    return [every] * sequences


def _lengths(batch: Any) -> list[int]:
    """Each sequence's context after the step; none where only the GPU knows them, which is not waited for."""
    lengths = getattr(batch, "seq_lens_cpu", None)
    if lengths is None or getattr(lengths, "is_cuda", False):
        return []
    return [int(length) for length in (lengths.tolist() if hasattr(lengths, "tolist") else lengths)]
