"""The process group of a worker that replays collectives: it joins one of the recorded size, on this machine.

An engine's operators find their group in a table of the engine's by its name, or by a handle: for those the engine's
own coordinator is made over the same processes.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kcap.replay.jobs import GroupPlace
from kcap.schemas.derive.bound_call import Skip

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # all processes are on this machine
DEFAULT_NAME = "tp"  # of an engine's group: only for tensor parallelism do engines make their own kernels
LEAST_TOKENS = 2048  # that FlashInfer's memory is made for, so that most Calls share one
STATES = {"vllm": "vllm.distributed.parallel_state", "sglang": "sglang.srt.distributed.parallel_state"}


class Alone:
    """A process without peers, as a group of one."""

    rank, size = 0, 1

    def __init__(self, device: str) -> None:
        self.device = device

    def barrier(self) -> None:
        """Wait for the others, on the host."""

    def gather(self, row: Sequence[float]) -> torch.Tensor:
        """Every rank's `row`, the same everywhere: float64, [size, len(row)]."""
        return torch.tensor([row], dtype=torch.float64)

    def end_capture(self) -> None:
        """What is to be done in all ranks between the capture of a graph and its first replay."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in any rank."""
        return bool(self.gather([flag]).any())


@dataclass
class Workspaces:
    """FlashInfer's memory for sums of one hidden size and dtype, by the tokens that it has room for."""

    by_tokens: dict[int, Any] = field(default_factory=dict)
    refused_from: float = math.inf  # tokens
    why: str = ""


class Peers(Alone):
    """This process and the others of its group. `host`: the same over gloo, for what is agreed between two samples."""

    def __init__(self, place: GroupPlace, device: str) -> None:
        super().__init__(device)
        self.rank, self.size = place["rank"], place["size"]
        os.environ.update({name: value for name, value in LOOPBACK.items() if name not in os.environ})
        os.environ.setdefault("VLLM_DIST_IDENT", Path(place["store"]).parent.name)  # of vLLM's shared memory
        gpu = device.startswith("cuda")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            init_method=f"file://{place['store']}",
            rank=self.rank,
            world_size=self.size,
        )
        self.backend = "nccl" if gpu else "gloo"
        self.world = dist.group.WORLD
        self.host = dist.new_group(backend="gloo")
        self.coordinator = cache(self._coordinator)
        self.coordinators: list[Any] = []
        self._workspaces: dict[tuple[int, torch.dtype], Workspaces] = {}

    def barrier(self) -> None:
        dist.barrier(self.host)

    def gather(self, row: Sequence[float]) -> torch.Tensor:
        own = torch.tensor(row, dtype=torch.float64)
        table = torch.empty(self.size * len(row), dtype=torch.float64)
        dist.all_gather_into_tensor(table, own, group=self.host)
        return table.view(self.size, len(row))

    def _coordinator(self, engine: str, name: str) -> Any:
        """The group as `engine` has it, called `name`, with the engine's own collectives where they run here."""
        with ExitStack() as stack:
            if engine == "vllm":
                config = importlib.import_module("vllm.config")
                stack.enter_context(config.set_current_vllm_config(config.VllmConfig()))
            state = importlib.import_module(STATES[engine])
            ranks = [list(range(self.size))]
            made = state.init_model_parallel_group(ranks, self.rank, self.backend, group_name=name or DEFAULT_NAME)
            self.coordinators.append(made)
            return made

    def fused_workspace(self, tokens: int, hidden_size: int, dtype: torch.dtype) -> Any:
        """FlashInfer's memory for sums of [tokens, hidden_size]; Skip says why there is none.

        What graphs were captured with stays: one that is too small is not given back. A CUDA error is raised as it is,
        since nothing that this process runs next would be right.
        """
        workspaces = self._workspaces.setdefault((hidden_size, dtype), Workspaces())
        large_enough = [most for most in workspaces.by_tokens if most >= tokens]
        if large_enough:
            return workspaces.by_tokens[min(large_enough)]
        most = 1 << (max(tokens, LEAST_TOKENS) - 1).bit_length()
        if most >= workspaces.refused_from:
            raise Skip(workspaces.why)
        made, why = None, "FlashInfer has no all-reduce in another rank"
        try:
            comm, backends = map(importlib.import_module, ("flashinfer.comm", "flashinfer.comm.mnnvl"))
            made = comm.create_allreduce_fusion_workspace(
                backend="trtllm",
                world_size=self.size,
                rank=self.rank,
                max_token_num=most,
                hidden_dim=hidden_size,
                dtype=dtype,
                comm_backend=backends.TorchDistBackend(group=self.world),
            )
        except Exception as error:  # what a driver cannot share may end as anything
            if "CUDA error" in str(error):
                raise
            why = _reason("FlashInfer has no all-reduce here", error)
        if self.any(made is None):  # the next one is made by all ranks together
            workspaces.refused_from, workspaces.why = most, why
            raise Skip(why)
        workspaces.by_tokens[most] = made
        return made

    def end_capture(self) -> None:
        """Tell each other the addresses that vLLM's custom all-reduces were captured with."""
        for custom in filter(None, map(self.custom_all_reduce, self.coordinators)):
            custom.register_graph_buffers()

    @staticmethod
    def custom_all_reduce(group: Any) -> Any:
        """That of vLLM's coordinator of a group; None where it has none."""
        custom = getattr(getattr(group, "device_communicator", None), "ca_comm", None)
        return None if custom is None or custom.disabled else custom

    def engine_group(self, engine: str, name: str) -> Any:
        """The `engine`'s coordinator of the group; Skip says why there is none."""
        try:
            return self.coordinator(engine, name)
        except Exception as error:  # an engine that has no server may raise anything
            raise Skip(_reason(f"{engine} makes no group here", error)) from None


def _reason(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
