"""all_reduce, all_gather and reduce_scatter: what a group makes of its ranks' tensors, as one process would.

One rank's call holds its own tensor alone. A Definition's input stacks those of all ranks [world_size, num_tokens,
hidden_size], because a reference computes only from what it is passed; of the other ranks only the shape is known, so
their values are random. A gather moves nothing in one process: its input may be returned, and that takes no time.
Calls whose group's size was not recorded are declined, and so are `c10d::allreduce_` and `c10d::_reduce_scatter_base_`,
whose operation (a sum, a maximum) is an object that no Recording holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.families.norm.rmsnorm import SCALES
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import (
    KernelInstance,
    LazyValue,
    TensorArg,
    abbreviate,
    lazy_arg,
    scalar_arg,
    tensor_arg,
)
from kcap.schemas.recording.values import Group

REDUCED = """import torch


@torch.no_grad()
def run(inputs):
    assert inputs.shape[::2] == ({ranks}, {h})
    return {reduced}
"""

SUM_AND_NORM = """import torch


@torch.no_grad()
def run(inputs, residual, weight):
    assert inputs.shape[::2] == ({ranks}, {h})
    x = inputs.to(torch.float32).sum(dim=0) + residual.to(torch.float32)
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + {eps!r})
    return (y * {scale}).to(inputs.dtype), x.to(residual.dtype)
"""

STACK = """import torch


@torch.no_grad()
def run(inputs):
    assert inputs.shape[::2] == ({ranks}, {h})
    return inputs.clone()
"""

STACKS = """import torch


@torch.no_grad()
def run({stacks}):
    return {clones}
"""

PART = """import torch


@torch.no_grad()
def run(inputs, rank):
    assert inputs.shape[:2] == ({ranks}, {ranks}) and inputs.shape[3] == {h}
    inputs = inputs[:, rank]
    return {reduced}
"""
REDUCTIONS = {  # c10d's, by their names: a tensor's method, and what it makes of the ranks' tensors
    "sum": ("sum", "sum"),
    "avg": ("mean", "mean"),
    "product": ("prod", "product"),
    "max": ("amax", "maximum"),
    "min": ("amin", "minimum"),
}
OF_RANK = ("num_tokens", "hidden_size")
OF_ALL = ("world_size", *OF_RANK)


@family("all_reduce", "_C_custom_ar::all_reduce", "sgl_kernel::all_reduce")
def custom_all_reduce(call: Invocation) -> KernelInstance:
    return all_reduce(call, call.tensor("inp"), lambda: call.tensor("out"))


@family("all_reduce", "vllm::all_reduce", "sglang::outplace_all_reduce")
def all_reduce_returned(call: Invocation) -> KernelInstance:
    return all_reduce(call, call.tensor("tensor"), lambda: call.result)


@family("all_reduce", "sglang::inplace_all_reduce")
def all_reduce_in_place(call: Invocation) -> KernelInstance:
    return all_reduce(call, call.tensor("tensor"), lambda: call.tensor("tensor"))


@family("all_reduce", "flashinfer::allreduce_fusion")
def all_reduce_by_flashinfer(call: Invocation) -> KernelInstance:
    """Alone, or with the residual that is added and the norm after it (its AllReduceFusionPattern, 0.6.11).

    Newer ones have a `weight_bias` (0.7.4), which is 1 for Gemma.
    """
    if call["pattern"] == 0:
        return all_reduce(call, call.tensor("input"), lambda: call.result)
    kind = {0.0: "", 1.0: "gemma_"}.get(call["weight_bias"] or 0.0)
    if call["pattern"] != 1 or kind is None:
        raise Unrecognized("it quantizes, or does more than a norm")
    x, residual, weight = call.tensor("input"), call.tensor("residual_in"), call.tensor("rms_gamma")
    normed, added = call.tensor("norm_out"), call.tensor("residual_out")
    ranks, h, eps = group_of(call).size, x.shape[-1], call.number("rms_eps")
    return KernelInstance(
        name=f"all_reduce_{kind}fused_add_rmsnorm{abbreviate(x.dtype, torch.bfloat16)}_ws{ranks}_h{h}",
        op_type="comm",
        axes={"world_size": ranks, "num_tokens": None, "hidden_size": h},
        inputs={
            "inputs": tensor_arg(x.expand(ranks, *x.shape), *OF_ALL),
            "residual": tensor_arg(residual, *OF_RANK),
            "weight": tensor_arg(weight, "hidden_size"),
        },
        outputs={
            "output": lazy_arg(x.dtype, OF_RANK, lambda: normed),
            "residual_out": lazy_arg(residual.dtype, OF_RANK, lambda: added),
        },
        reference=SUM_AND_NORM.format(ranks=ranks, h=h, eps=eps, scale=SCALES[kind]),
        description=f"The sum over {ranks} ranks and a residual, and its root mean square norm, epsilon {eps:g}.",
        tags=("fused",),
        flops=(ranks + 5) * x.numel(),
        touched=lambda: 2 * total_bytes(x) + 2 * total_bytes(residual) + total_bytes(weight),
    )


@family("all_reduce", "_C::shm_allreduce")
def all_reduce_over_shared_memory(call: Invocation) -> KernelInstance:
    """As vLLM's ranks on a CPU do it."""
    return all_reduce(call, call.tensor("data"), lambda: call.tensor("data"))


@family("all_reduce", "pynccl::all_reduce", "pynccl::outplace_all_reduce")
def all_reduce_by_nccl(call: Invocation) -> KernelInstance:
    """As vLLM binds it (`in_tensor`, returned), and SGLang (`tensor`, in place)."""
    if call["op"] not in ("sum", None):
        raise Unrecognized("no sum")
    x = call.tensor("in_tensor", "tensor")
    return all_reduce(call, x, lambda: x if x is call["tensor"] else call.result)


@family("all_reduce", "_c10d_functional::all_reduce", "_c10d_functional::all_reduce_")
def all_reduce_functional(call: Invocation) -> KernelInstance:
    return all_reduce(call, call.tensor("input"), lambda: call.result, call["reduce_op"])


def all_reduce(call: Invocation, x: torch.Tensor, output: LazyValue, operation: str = "sum") -> KernelInstance:
    """`x`: [..., hidden_size] of this rank, leading dimensions joined; a number is one of one."""
    h = x.shape[-1] if x.dim() else 1
    reduced, of = reduction(operation, x.dtype)
    description = f"The {of} of the tensors of {{ranks}} ranks; each of them gets it."
    result = lazy_arg(x.dtype, OF_RANK, lambda: output().reshape(-1, h))
    kind = "all_reduce" if operation == "sum" else f"all_reduce_{operation}"
    return collective(call, kind, x.reshape(-1, h), OF_RANK, result, REDUCED, description, reduced=reduced)


def reduction(operation: str, dtype: torch.dtype) -> tuple[str, str]:
    """What makes one tensor of `inputs`, those of all ranks, as Python text; and what that is called."""
    if operation not in REDUCTIONS or dtype == torch.bool or (operation == "avg" and not dtype.is_floating_point):
        raise Unrecognized(f"it reduces {dtype} by {operation}")
    method, name = REDUCTIONS[operation]
    wide = "torch.float32" if dtype.is_floating_point else "torch.int64"
    return f"inputs.to({wide}).{method}(dim=0).to(inputs.dtype)", name


@family("all_gather", "_C::shm_all_gather")
def all_gather_over_shared_memory(call: Invocation) -> KernelInstance:
    return all_gather(call, call.tensor("data"), lambda: call.tensor("output"))


@family("all_gather", "c10d::_allgather_base_")
def all_gather_into_tensor(call: Invocation) -> KernelInstance:
    return all_gather(call, call.tensor("input_tensor"), lambda: call.tensor("output_tensor"))


@family("all_gather", "pynccl::all_gather")
def all_gather_by_nccl(call: Invocation) -> KernelInstance:
    """As the engines bind it; lists are tensors that NCCL gathers together."""
    own, whole, sizes = call["input_tensor"], call["output_tensor"], call["sizes"]
    if sizes is not None and sizes != [None] * len(sizes):
        raise Unrecognized("parts of different sizes")
    if isinstance(own, list) and isinstance(whole, list):
        return all_gather_together(call, own, whole)
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
    ranks, h, flat = group_of(call).size, x.shape[-1], x.reshape(-1, x.shape[-1])
    gathered = (len(flat), ranks, h) if along_rows else (ranks, len(flat), h)

    def stacked() -> torch.Tensor:
        parts = output().reshape(gathered)
        return parts.transpose(0, 1) if along_rows else parts

    description = "The tensors of {ranks} ranks, one after the other; each of them gets all."
    result = lazy_arg(x.dtype, OF_ALL, stacked)
    return collective(call, "all_gather", flat, OF_RANK, result, STACK, description)


def all_gather_together(call: Invocation, own: list[torch.Tensor], whole: list[torch.Tensor]) -> KernelInstance:
    """Several tensors of as many tokens, such as those of a layer of experts and what was chosen for them.

    `own`: each [num_tokens, hidden_size] of this rank; `whole`: the ranks' one after the other.
    """
    ranks, tokens = group_of(call).size, own[0].shape[0]
    name, axes = f"all_gather_ws{ranks}", {"world_size": ranks, "num_tokens": None}
    inputs, outputs = dict[str, TensorArg](), dict[str, TensorArg]()
    for number, (x, out) in enumerate(zip(own, whole, strict=True)):
        if x.dim() != 2 or out.shape != (ranks * tokens, x.shape[1]):
            raise Unrecognized("its tensors are not of as many tokens each")
        shape = ("world_size", "num_tokens", f"hidden_size_{number}")
        name += f"_h{x.shape[1]}{abbreviate(x.dtype, torch.bfloat16)}"
        axes[shape[-1]] = x.shape[1]
        inputs[f"inputs_{number}"] = tensor_arg(x.expand(ranks, *x.shape), *shape)
        parts = partial(torch.Tensor.reshape, out, (ranks, tokens, -1))
        outputs[f"output_{number}"] = lazy_arg(x.dtype, shape, parts)
    return KernelInstance(
        name=name,
        op_type="comm",
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=STACKS.format(stacks=", ".join(inputs), clones=", ".join(f"{stack}.clone()" for stack in inputs)),
        in_place=tuple(zip(inputs, outputs, strict=True)),
        description=f"Each tensor of {ranks} ranks, one rank after the other; each of them gets all.",
        flops=0,
        touched=lambda: sum((1 + ranks) * total_bytes(x) for x in own),
    )


@family("reduce_scatter", "_c10d_functional::reduce_scatter_tensor")
def reduce_scatter_functional(call: Invocation) -> KernelInstance:
    return reduce_scatter(call, call.tensor("input"), lambda: call.result, operation=call["reduce_op"])


@family("reduce_scatter", "pynccl::reduce_scatter")
def reduce_scatter_by_nccl(call: Invocation) -> KernelInstance:
    if call["op"] != "sum" or call["sizes"] is not None:
        raise Unrecognized("no sum, or parts of different sizes")
    return reduce_scatter(call, call.tensor("input_tensor"), lambda: call.tensor("output_tensor"))


@family("reduce_scatter", "sglang::reg_reduce_scatter_tensor")
def reduce_scatter_into_tensor(call: Invocation) -> KernelInstance:
    return reduce_scatter(call, call.tensor("input"), lambda: call.tensor("output"))


@family("reduce_scatter", "vllm::reduce_scatter")
def reduce_scatter_along_dim(call: Invocation) -> KernelInstance:
    x = call.tensor("tensor")
    last = x.dim() - 1
    if call["dim"] not in (0, -1, last):
        raise Unrecognized("along neither the first nor the last dimension")
    return reduce_scatter(call, x, lambda: call.result, along_rows=last == 0 or call["dim"] in (-1, last))


def reduce_scatter(
    call: Invocation, x: torch.Tensor, output: LazyValue, along_rows: bool = False, operation: str = "sum"
) -> KernelInstance:
    """`x`: what this rank adds to each rank's part, one part after the other, `along_rows` within each row."""
    group = group_of(call)
    reduced, of = reduction(operation, x.dtype)
    h = x.shape[-1] // group.size if along_rows else x.shape[-1]
    parts = x.reshape(-1, group.size, h).transpose(0, 1) if along_rows else x.reshape(group.size, -1, h)
    description = f"The {of} of the tensors of {{ranks}} ranks, of which each of them gets its own part."
    result = lazy_arg(x.dtype, OF_RANK, lambda: output().reshape(-1, h))
    rank = {"rank": scalar_arg(group.rank, "int32", "The rank whose part it is.")}
    kind = "reduce_scatter" if operation == "sum" else f"reduce_scatter_{operation}"
    return collective(call, kind, parts, OF_ALL, result, PART, description, rank, reduced)


def collective(
    call: Invocation,
    kind: str,
    x: torch.Tensor,
    axes: tuple[str, ...],
    output: TensorArg,
    reference: str,
    description: str,
    scalars: Mapping[str, TensorArg] | None = None,
    reduced: str = "",
) -> KernelInstance:
    """`x`: of this rank, [..., num_tokens, hidden_size], with `axes`. Each element of an output is what `reduced` makes
    of the ranks', but of a gather's."""
    ranks, (tokens, h) = group_of(call).size, x.shape[-2:]
    rows = tokens * (ranks if "world_size" in (output.shape or ()) else 1)
    return KernelInstance(
        name=f"{kind}{abbreviate(x.dtype, torch.bfloat16)}_ws{ranks}_h{h}",
        op_type="comm",
        axes={"world_size": ranks, "num_tokens": None, "hidden_size": h},
        inputs={"inputs": tensor_arg(x.expand(ranks, *x.shape), "world_size", *axes), **(scalars or {})},
        outputs={"output": output},
        reference=reference.format(ranks=ranks, h=h, reduced=reduced),
        description=description.format(ranks=ranks),
        flops=(ranks - 1) * rows * h if reduced else 0,
        in_place=() if reduced else (("inputs", "output"),),
        touched=lambda: total_bytes(x) + rows * h * x.itemsize,
    )


def group_of(call: Invocation) -> Group:
    """The group that it was given."""
    group = next((value for value in call.arguments.values() if isinstance(value, Group)), None)
    if group is None:
        raise Unrecognized("the size of its group is not known")
    return group


@cost_function("comm")
def comm_cost(given: CostInputs) -> Cost:
    """All of its tensors; nothing of a gather, whose input may be returned. FLOPs are few, and not counted."""
    return Cost() if given.definition.written_inputs else given.whole()
