"""Training over the ranks that torchrun starts: replicas, shards, and a tensor parallel block."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def train(module: nn.Module) -> None:
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        module(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp() -> None:
    train(DistributedDataParallel(model()))


def fsdp() -> None:
    module = model()
    for layer in module:
        fully_shard(layer)
    fully_shard(module)
    train(module)


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    train(parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


PROGRAMS: dict[str, Callable[[], None]] = {program.__name__: program for program in (ddp, fsdp, tensor_parallel)}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    PROGRAMS[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()
