"""What TensorRT-LLM's `ScheduledRequests` say of a step: phase, chunks, drafts, contexts.

Names are those of tensorrt_llm/_torch/pyexecutor of 1.1 to 1.3: `scheduler.py`, `llm_request.py`, `model_engine.py`;
where past tokens are counted. An attribute that is not there is reported, and what it says left open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kcap.capture.window.window import StepShape

CONTEXT = (("context_requests",), ("context_requests_chunking", "context_requests_last_chunk"))  # 1.2, 1.3
GENERATION = (("generation_requests",),)
DUMMIES = ("is_dummy", "is_cuda_graph_dummy", "is_attention_dp_dummy")  # padding of a batch, no requests


class Missing(Exception):
    """An attribute of TensorRT-LLM's is not there; it has been reported."""


class Requests:
    """Reads batches. `absent` is told of each name that is not there, with what the Recording lacks for it."""

    def __init__(self, absent: Callable[[str, str], None]) -> None:
        self._absent = absent

    def shape(self, scheduled: Any, overlapped: bool, draft: bool) -> StepShape:
        """The step that runs `scheduled`, before it runs: the engine changes requests on its way.

        `overlapped`: tokens of the step before are still on the GPU, and not yet counted in the requests that it
        computed. `draft`: it is a draft model's, so of phase `other`, as are steps of dummy requests alone.
        """
        try:
            context, generation = self._listed(scheduled, CONTEXT), self._listed(scheduled, GENERATION)
        except Missing:
            return StepShape("other", [], [])
        if draft or not (context or generation):
            phase = "other"
        else:
            phase = "mixed" if context and generation else "prefill" if context else "decode"
        try:
            sequences = [*map(self._chunk, context), *(self._decoded(request, overlapped) for request in generation)]
        except Missing:
            return StepShape(phase, [], [])
        return StepShape(phase, [new for new, _ in sequences], [past + new for new, past in sequences])

    def _listed(self, scheduled: Any, names: tuple[tuple[str, ...], ...]) -> list[Any]:
        """The requests in the first of these sets of lists that is there, but for dummies."""
        present = next((group for group in names if all(hasattr(scheduled, name) for name in group)), None)
        if present is None:
            self._absent(f"ScheduledRequests.{names[0][0]}", "steps are of phase other, of unknown lengths")
            raise Missing
        return [request for name in present for request in getattr(scheduled, name) if not self._is_dummy(request)]

    def _is_dummy(self, request: Any) -> bool:
        present = [name for name in DUMMIES if hasattr(request, name)]
        if DUMMIES[0] not in present:
            self._absent(f"LlmRequest.{DUMMIES[0]}", f"requests that pad a batch are told by {present or 'nothing'}")
        return any(getattr(request, name) for name in present)

    def _chunk(self, request: Any) -> tuple[int, int]:
        """New and past tokens of a request in prefill."""
        return self._number(request, "context_chunk_size"), self._number(request, "context_current_position")

    def _decoded(self, request: Any, overlapped: bool) -> tuple[int, int]:
        """New and past tokens of a request in decode.

        Where drafts overlap, only the GPU knows how many of the last step's were accepted: all, as the engine assumes.
        """
        if not hasattr(request, "py_draft_tokens"):
            self._absent("LlmRequest.py_draft_tokens", "decoding sequences have one new token each")
        new = 1 + len(getattr(request, "py_draft_tokens", None) or ())
        late = new if overlapped and getattr(request, "py_batch_idx", None) is not None else 0
        return new, self._number(request, "max_beam_num_tokens") - 1 + late

    def _number(self, request: Any, name: str) -> int:
        if not hasattr(request, name):
            self._absent(f"LlmRequest.{name}", "steps have no lengths")
            raise Missing
        return int(getattr(request, name))
