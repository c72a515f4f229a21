"""The loop of a worker: schedule, forward, sample, update; with drafts, the draft model before."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch

from tensorrt_llm._torch.pyexecutor.scheduler import LlmRequest, ScheduledRequests


class PyExecutor:
    def __init__(self, model_engine: Any, dist: Any, llm_args: Any, draft_engine: Any = None) -> None:
        self.model_engine, self.dist, self.draft_engine = model_engine, dist, draft_engine
        self.chunk, self.padding = (getattr(llm_args, name, 0) for name in ("chunk", "padding"))
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.done: queue.Queue[Any] = queue.Queue()
        self.model_engine.warmup(None)

    def start_worker(self) -> None:
        threading.Thread(target=self._executor_loop, daemon=True).start()

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        self.inbox.put((prompts, max_tokens))
        done = self.done.get()
        if isinstance(done, Exception):
            raise done
        return done

    def _executor_loop(self) -> None:
        while True:
            try:
                self.done.put(self._serve(*self.inbox.get()))
            except Exception as error:
                self.done.put(error)

    def _serve(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """One prompt more joins at each step."""
        drafts = 2 if self.draft_engine is not None else 0
        requests = [LlmRequest(prompt, self.chunk, drafts) for prompt in prompts]
        waiting, running = list(requests), []
        while waiting or running:
            running += [waiting.pop(0)] if waiting else []
            context = [request for request in running if request.in_context]
            batch = ScheduledRequests(context, [request for request in running if not request.in_context])
            self._step(batch, running)
            running = [request for request in running if len(request.tokens) < request.py_prompt_len + max_tokens]
        return [request.tokens[request.py_prompt_len :] for request in requests]

    def _step(self, batch: ScheduledRequests, running: list[LlmRequest]) -> None:
        if self.draft_engine is not None and batch.generation_requests:
            self.draft_engine.forward(batch, None)
        if self.padding:
            dummy = LlmRequest([1, 2])
            dummy.is_dummy = dummy.is_cuda_graph_dummy = True
            dummy.context_current_position = 2
            batch.generation_requests = [*batch.generation_requests, dummy]
        outputs = self.model_engine.forward(batch, None)
        tokens = self._sample_async(batch, outputs).tolist()
        at = 0
        for request in [*batch.context_requests, *batch.generation_requests]:
            size = request.context_chunk_size if request.in_context else 1 + len(request.py_draft_tokens)
            last = at + (size if request.in_context else 1) - 1
            at += size
            request.advance(tokens[last])

    @torch.inference_mode()
    def _sample_async(self, scheduled_batch: ScheduledRequests, batch_outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch_outputs["logits"].argmax(dim=-1)
