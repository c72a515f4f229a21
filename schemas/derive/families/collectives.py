"""all_reduce and all_gather: what a group makes of its ranks' tensors, as one process that had them all would compute.

One rank's call holds its own tensor alone. A Definition's input stacks those of all ranks [world_size, num_tokens,
hidden_size], because a reference computes only from what it is passed; of the other ranks only the shape is known, so
their values are random. Calls whose group's size was not recorded are declined, and so is `c10d::allreduce_`, whose
operation (a sum, a maximum) is an object that no Recording holds.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, LazyValue, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.recording.values import Group

SUM = """import torch


@torch.no_grad()
def run(inputs):
    assert inputs.shape[::2] == ({ranks}, {h})
    return inputs.to(torch.float32).sum(dim=0).to(inputs.dtype)
"""

STACK = """import torch


@torch.no_grad()
def run(inputs):
    assert inputs.shape[::2] == ({ranks}, {h})
    return inputs.clone()
"""


@family("all_reduce", "_C_custom_ar::all_reduce", "sgl_kernel::all_reduce")
def custom_all_reduce(call: Invocation) -> KernelInstance:
    return all_reduce(call, call.tensor("inp"), lambda: call.tensor("out"))


@family("all_reduce", "vllm::all_reduce", "sglang::outplace_all_reduce")
def all_reduce_returned(call: Invocation) -> KernelInstance:
    return all_reduce(call, call.tensor("tensor"), lambda: call.result)


@family("all_reduce", "sglang::inplace_all_reduce")
def all_reduce_in_place(call: Invocation) -> KernelInstance:
    return all_reduce(call, call.tensor("tensor"), lambda: call.tensor("tensor"))


@family("all_reduce", "_C::shm_allreduce")
def all_reduce_over_shared_memory(call: Invocation) -> KernelInstance:
    """As vLLM's ranks on a CPU do it."""
    return all_reduce(call, call.tensor("data"), lambda: call.tensor("data"))


@family("all_reduce", "_c10d_functional::all_reduce", "_c10d_functional::all_reduce_")
def all_reduce_functional(call: Invocation) -> KernelInstance:
    if call["reduce_op"] != "sum":
        raise Unrecognized("no sum")
    return all_reduce(call, call.tensor("input"), lambda: call.result)


def all_reduce(call: Invocation, x: torch.Tensor, output: LazyValue) -> KernelInstance:
    """`x`: [..., hidden_size] of this rank, leading dimensions joined."""
    group = group_of(call)
    h, flat = x.shape[-1], x.reshape(-1, x.shape[-1])
    return KernelInstance(
        name=f"all_reduce{abbreviate(x.dtype, torch.bfloat16)}_ws{group.size}_h{h}",
        op_type="comm",
        axes={"world_size": group.size, "num_tokens": None, "hidden_size": h},
        inputs={"inputs": tensor_arg(flat.expand(group.size, *flat.shape), "world_size", "num_tokens", "hidden_size")},
        outputs={"output": lazy_arg(x.dtype, ("num_tokens", "hidden_size"), lambda: output().reshape(-1, h))},
        reference=SUM.format(ranks=group.size, h=h),
        description=f"The sum of the tensors of {group.size} ranks; each of them gets it.",
        flops=(group.size - 1) * x.numel(),
        touched=lambda: total_bytes(x, x),
    )


@family("all_gather", "_C::shm_all_gather")
def all_gather_over_shared_memory(call: Invocation) -> KernelInstance:
    return all_gather(call, call.tensor("data"), lambda: call.tensor("output"))


@family("all_gather", "c10d::_allgather_base_")
def all_gather_into_tensor(call: Invocation) -> KernelInstance:
    return all_gather(call, call.tensor("input_tensor"), lambda: call.tensor("output_tensor"))


@family("all_gather", "_c10d_functional::all_gather_into_tensor")
def all_gather_functional(call: Invocation) -> KernelInstance:
    return all_gather(call, call.tensor("input"), lambda: call.result)


@family("all_gather", "vllm::all_gather")
def all_gather_along_dim(call: Invocation) -> KernelInstance:
    x = call.tensor("tensor")
    if call["dim"] not in (0, -1, x.dim() - 1):
        raise Unrecognized("along neither the first nor the last dimension")
    return all_gather(call, x, lambda: call.result, along_rows=x.dim() == 1 or call["dim"] in (-1, x.dim() - 1))


def all_gather(call: Invocation, x: torch.Tensor, output: LazyValue, along_rows: bool = False) -> KernelInstance:
    """`x`: [..., hidden_size] of this rank; `output`: the ranks' one after the other, `along_rows` within each row."""
    group = group_of(call)
    h, flat = x.shape[-1], x.reshape(-1, x.shape[-1])
    gathered = (len(flat), group.size, h) if along_rows else (group.size, len(flat), h)

    def stacked() -> torch.Tensor:
        parts = output().reshape(gathered)
        return parts.transpose(0, 1) if along_rows else parts

    return KernelInstance(
        name=f"all_gather{abbreviate(x.dtype, torch.bfloat16)}_ws{group.size}_h{h}",
        op_type="comm",
        axes={"world_size": group.size, "num_tokens": None, "hidden_size": h},
        inputs={"inputs": tensor_arg(flat.expand(group.size, *flat.shape), "world_size", "num_tokens", "hidden_size")},
        outputs={"output": lazy_arg(x.dtype, ("world_size", "num_tokens", "hidden_size"), stacked)},
        reference=STACK.format(ranks=group.size, h=h),
        description=f"The tensors of {group.size} ranks, one after the other; each of them gets all.",
        touched=lambda: (1 + group.size) * total_bytes(x),
    )


def group_of(call: Invocation) -> Group:
    """The group that it was given."""
    group = next((value for value in call.arguments.values() if isinstance(value, Group)), None)
    if group is None:
        raise Unrecognized("the size of its group is not known")
    return group


cost_function("comm")(CostInputs.whole)  # FLOPs are few, and not counted
