"""all_reduce: the sum of the tensors of a group's ranks, as one process that had them all would compute it.

One rank's call holds its own tensor alone. The Definition's input stacks all ranks' [world_size, num_tokens,
hidden_size], because a reference sums only what it is passed; of the other ranks only the shape is known, so their
values are random. Calls whose group's size was not recorded are declined, and so is `c10d::allreduce_`, whose
operation (a sum, a maximum) is an object that no Recording holds.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, LazyValue, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.recording.values import Group

REFERENCE = """import torch


@torch.no_grad()
def run(inputs):
    assert inputs.shape[::2] == ({ranks}, {h})
    return inputs.to(torch.float32).sum(dim=0).to(inputs.dtype)
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
    group = next((value for value in call.arguments.values() if isinstance(value, Group)), None)
    if group is None:
        raise Unrecognized("the size of its group is not known")
    h, flat = x.shape[-1], x.reshape(-1, x.shape[-1])
    return KernelInstance(
        name=f"all_reduce{abbreviate(x.dtype, torch.bfloat16)}_ws{group.size}_h{h}",
        op_type="comm",
        axes={"world_size": group.size, "num_tokens": None, "hidden_size": h},
        inputs={"inputs": tensor_arg(flat.expand(group.size, *flat.shape), "world_size", "num_tokens", "hidden_size")},
        outputs={"output": lazy_arg(x.dtype, ("num_tokens", "hidden_size"), lambda: output().reshape(-1, h))},
        reference=REFERENCE.format(ranks=group.size, h=h),
        description=f"The sum of the tensors of {group.size} ranks; each of them gets it.",
        flops=(group.size - 1) * x.numel(),
        touched=lambda: total_bytes(x, x),
    )


cost_function("comm")(CostInputs.whole)  # FLOPs are few, and not counted
