"""AutoDeploy's engine, in the same executor."""

from __future__ import annotations

from typing import Any

import torch

from tensorrt_llm._torch.pyexecutor.model_engine import ModelEngine, batch_ids
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.py_executor_creator import distribution
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests


class ADEngine(ModelEngine):
    @torch.inference_mode()
    def forward(
        self, scheduled_requests: ScheduledRequests, resource_manager: Any, new_tokens_device: Any = None
    ) -> dict[str, torch.Tensor]:
        return {"logits": self.model(batch_ids(scheduled_requests).to(self.device))}


def create_autodeploy_executor(llm_args: Any) -> PyExecutor:
    return PyExecutor(ADEngine(), distribution(), llm_args)
