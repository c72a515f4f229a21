"""Requests and batches. `draft_len`: the tokens that each decoding request drafts."""

from __future__ import annotations


class LlmRequest:
    is_dummy = is_cuda_graph_dummy = is_attention_dp_dummy = False

    def __init__(self, tokens: list[int], chunk: int = 0, draft_len: int = 0) -> None:
        self.tokens, self.py_prompt_len, self.draft_len = list(tokens), len(tokens), draft_len
        self.chunk = chunk or len(tokens)
        self.context_current_position, self.context_chunk_size = 0, min(self.chunk, len(tokens))
        self.py_draft_tokens: list[int] = []
        self.py_batch_idx: int | None = None

    @property
    def max_beam_num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def in_context(self) -> bool:
        return self.context_current_position < self.py_prompt_len

    def advance(self, token: int) -> None:
        """After a forward; the drafts are all wrong."""
        if self.in_context:
            self.context_current_position += self.context_chunk_size
            self.context_chunk_size = min(self.chunk, self.py_prompt_len - self.context_current_position)
        if not self.in_context:
            self.tokens.append(token)
            self.py_draft_tokens = [1] * self.draft_len


class ScheduledRequests:
    def __init__(self, context: list[LlmRequest], generation: list[LlmRequest]) -> None:
        self.context_requests, self.generation_requests = context, generation
