"""Makes an executor to estimate the memory, which runs a dummy request in its loop, and then the one that serves."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor


def create_py_executor(llm_args: Any) -> PyExecutor:
    engine = PyTorchModelEngine(llm_args)
    draft = PyTorchModelEngine(llm_args, is_draft_model=True) if getattr(llm_args, "draft", False) else None
    estimation = PyExecutor(engine, distribution(), llm_args)
    estimation.start_worker()
    estimation.run([[1] * 8], 1)
    return PyExecutor(engine, distribution(), llm_args, draft)


def distribution() -> Any:
    """This process's rank; workers of MPI wait here for each other, so that each gets one job."""
    rank, size = 0, 1
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        MPI.COMM_WORLD.Barrier()
    mapping = SimpleNamespace(tp_rank=rank, tp_group=list(range(size)), enable_attention_dp=False)
    return SimpleNamespace(rank=rank, world_size=size, mapping=mapping)
