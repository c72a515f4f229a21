"""The engine that runs a batch; on a GPU it replays a graph for each size of a batch that only decodes."""

from __future__ import annotations

from typing import Any

import torch

from tensorrt_llm._torch.pyexecutor.scheduler import LlmRequest, ScheduledRequests

VOCABULARY, WIDTH = 512, 16


class ToyModel(torch.nn.Module):
    """Two products a forward."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.up = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, self.embedding) @ self.up @ self.embedding.T


class ModelEngine:
    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = ToyModel().to(self.device)

    def warmup(self, resource_manager: Any) -> None:
        return


class PyTorchModelEngine(ModelEngine):
    def __init__(self, llm_args: Any, is_draft_model: bool = False) -> None:
        super().__init__()
        self.is_warmup, self.is_draft_model = False, is_draft_model
        self.graphs: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] | None = None
        if self.device == "cuda" and getattr(llm_args, "cuda_graph_config", True) is not None:
            self.graphs = {}

    def warmup(self, resource_manager: Any) -> None:
        self.is_warmup = True
        for sequences in (2, 1):
            self.forward(ScheduledRequests([], [LlmRequest([1, 2]) for _ in range(sequences)]), resource_manager)
        self.is_warmup = False

    @torch.inference_mode()
    def forward(
        self, scheduled_requests: ScheduledRequests, resource_manager: Any, new_tensors_device: Any = None
    ) -> dict[str, torch.Tensor]:
        ids = batch_ids(scheduled_requests).to(self.device)
        if self.graphs is None or scheduled_requests.context_requests:
            return {"logits": self.model(ids)}
        if len(ids) not in self.graphs:
            self.graphs[len(ids)] = self._captured(ids)
        graph, static_ids, logits = self.graphs[len(ids)]
        static_ids.copy_(ids)
        graph.replay()
        return {"logits": logits}

    def _captured(self, ids: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
        static_ids, graph = ids.clone(), torch.cuda.CUDAGraph()
        self.model(static_ids)
        with torch.cuda.graph(graph):
            logits = self.model(static_ids)
        return graph, static_ids, logits


def batch_ids(scheduled: ScheduledRequests) -> torch.Tensor:
    """Each chunk of a prompt, then each last token with its drafts."""
    ids: list[int] = []
    for request in scheduled.context_requests:
        ids += request.tokens[request.context_current_position :][: request.context_chunk_size]
    for request in scheduled.generation_requests:
        ids += [request.tokens[-1], *request.py_draft_tokens]
    return torch.tensor(ids)
