"""gemm and bmm: C = A @ B.T, as linear layers call it, and C[b] = A[b] @ B[b].

Operators of aten, vLLM (with oneDNN on a CPU), SGLang, DeepGEMM and TensorRT-LLM. oneDNN's handles, behind which
vLLM's CPU build hides the weight, were read in vllm/_custom_ops.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, fill_random
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule
from kcap.schemas.derive.invocation import (
    FLOATS,
    OUTPUTS,
    Invocation,
    Unrecognized,
    result_dtype,
    torch_dtype,
    written_or_returned,
)
from kcap.schemas.derive.kernel import (
    KernelInstance,
    OperatorFacts,
    TensorArg,
    abbreviate,
    dtype_name,
    lazy_arg,
    tensor_arg,
)

REFERENCE = """import torch


@torch.no_grad()
def run(A, B):
    assert B.shape == ({n}, {k})
    return torch.matmul(A, B.T)
"""

IN_FLOAT32 = """import torch


@torch.no_grad()
def run({inputs}):
    assert B.shape == ({n}, {k})
    C = torch.matmul(A.to(torch.float32), B.to(torch.float32).T)
    return {result}.to(torch.{dtype})
"""


@family("gemm", "aten::linear")
def linear(call: Invocation) -> KernelInstance:
    return gemm_instance(call, call.tensor("input"), call.tensor("weight"), call.optional("bias"))


@family("gemm", "aten::mm", "aten::matmul")
def mm(call: Invocation) -> KernelInstance:
    return gemm_instance(call, call.tensor("self"), call.tensor("mat2", "other").transpose(0, 1))


@family("gemm", "aten::addmm")
def addmm(call: Invocation) -> KernelInstance:
    bias = call.tensor("self")
    if call["alpha"] not in (None, 1) or call["beta"] not in (None, 1) or bias.dim() != 1:
        raise Unrecognized("not a bias added once")
    return gemm_instance(call, call.tensor("mat1"), call.tensor("mat2").transpose(0, 1), bias)


@family("gemm", "_C::onednn_mm")
def onednn_mm(call: Invocation) -> KernelInstance:
    a, c = call.tensor("a"), call.tensor("c")
    weight = call.weight("weight", (c.shape[-1], a.shape[-1]), a.dtype)
    return gemm_instance(call, a, weight, call.optional("bias"))


@family("gemm", "_C::weight_packed_linear")
def weight_packed_linear(call: Invocation) -> KernelInstance:
    """A weight in the layout of AMX is no matrix that a reference could read."""
    call.refuse("is_vnni")
    return gemm_instance(call, call.tensor("mat1"), call.tensor("mat2"), call.optional("bias"))


@family("gemm", "_moe_C::dsv3_router_gemm", "sgl_kernel::dsv3_router_gemm", "sglang::dsv3_router_gemm")
def router_gemm(call: Invocation) -> KernelInstance:
    weight = call.tensor("mat_b", "router_weight", "router_weights")
    return gemm_instance(call, call.tensor("mat_a", "hidden_states"), weight)


@family("gemm", "_C::dsv3_fused_a_gemm", "sgl_kernel::dsv3_fused_a_gemm")
def fused_a_gemm(call: Invocation) -> KernelInstance:
    return gemm_instance(call, call.tensor("mat_a"), call.tensor("mat_b").transpose(0, 1))


@family("gemm", "trtllm::cublas_mm", "trtllm::dsv3_router_gemm_op", "trtllm::dsv3_fused_a_gemm_op")
def gemm_of_trtllm(call: Invocation) -> KernelInstance:
    """`mat_b`: [K, N], column by column. None of them takes a bias yet."""
    call.refuse("bias")
    return gemm_instance(call, call.tensor("mat_a"), call.tensor("mat_b").transpose(0, 1))


@family("gemm", "sglang::tiny_gemm_bf16")
def tiny_gemm_bf16(call: Invocation) -> KernelInstance:
    """`x`: [M, K] of few rows, `w`: [N, K], which may be float32; `n_split` says how threads share the columns."""
    kernel = gemm_instance(call, call.tensor("x"), call.tensor("w"))
    return replace(kernel, operator=OperatorFacts(hints=("max_m", "n_split")))


@family("gemm", "deep_gemm::bf16_gemm_nt")
def bf16_gemm_nt(call: Invocation) -> KernelInstance:
    call.refuse("c")
    return gemm_instance(call, call.tensor("a"), call.tensor("b"))


@family("gemm", "flashinfer::mm_bf16")
def mm_bf16(call: Invocation) -> KernelInstance:
    return gemm_instance(call, call.tensor("a"), call.tensor("b").transpose(0, 1), call.optional("bias"))


@family("gemm", "flashinfer::tinygemm_bf16")
def tinygemm_bf16(call: Invocation) -> KernelInstance:
    """`input`: [M, K] of few rows, `weight`: [N, K]."""
    kernel = gemm_instance(call, call.tensor("input"), call.tensor("weight"), call.optional("bias"))
    return replace(kernel, operator=OperatorFacts(hints=("use_pdl",)))


def gemm_instance(
    call: Invocation, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> KernelInstance:
    """`a`: [..., K], leading dimensions joined; `b`: [N, K], of the dtype of `a` or float32; `bias`: [N]."""
    if b.dim() != 2 or b.dtype not in (a.dtype, torch.float32) or a.dtype not in FLOATS:
        raise Unrecognized("not a product of two matrices of floats")
    a = a.reshape(-1, a.shape[-1])
    (m, k), n = a.shape, b.shape[0]
    inputs: dict[str, TensorArg] = {"A": tensor_arg(a, "M", "K"), "B": tensor_arg(b, "N", "K")}
    if bias is not None:
        inputs["bias"] = tensor_arg(bias, "N")
    out = result_dtype(call, a.dtype)
    word = f"{'_bias' if bias is not None else ''}{abbreviate(a.dtype, torch.float16)}"
    word += "" if a.dtype == b.dtype else f"_b{abbreviate(b.dtype, a.dtype)}"
    plain = bias is None and a.dtype == b.dtype == out
    return KernelInstance(
        name=f"gemm{word}{'_to' + abbreviate(out, a.dtype) if out != a.dtype else ''}_n{n}_k{k}",
        op_type="gemm",
        axes={"M": None, "N": n, "K": k},
        inputs=inputs,
        outputs={"C": lazy_arg(out, ("M", "N"), lambda: written_or_returned(call, *OUTPUTS).reshape(-1, n))},
        reference=_reference(list(inputs), n, k, None if plain else out),
        description=f"General matrix multiply, C = A @ B.T{' + bias' if bias is not None else ''}.",
        flops=2 * m * n * k,
    )


def _reference(inputs: list[str], n: int, k: int, out: torch.dtype | None) -> str:
    if out is None:
        return REFERENCE.format(n=n, k=k)
    result = "(C + bias.to(torch.float32))" if "bias" in inputs else "C"
    return IN_FLOAT32.format(inputs=", ".join(inputs), n=n, k=k, result=result, dtype=dtype_name(out))


BMM_REFERENCE = """import torch


@torch.no_grad()
def run(A, B):
    assert B.shape[1:] == ({k}, {n})
    return torch.bmm(A.to(torch.float32), B.to(torch.float32)).to(A.dtype)
"""


@family("bmm", "aten::bmm")
def bmm(call: Invocation) -> KernelInstance:
    """`self`: [batch_size, M, K], `mat2`: [batch_size, K, N]; the batch is often the heads."""
    a, b = call.tensor("self"), call.tensor("mat2")
    if a.dtype not in FLOATS or result_dtype(call, a.dtype) != a.dtype:
        raise Unrecognized("not a product of floats of one dtype")
    (batch, m, k), n = a.shape, b.shape[2]
    return KernelInstance(
        name=f"bmm{abbreviate(a.dtype, torch.bfloat16)}_n{n}_k{k}",
        op_type="bmm",
        axes={"batch_size": None, "M": None, "N": n, "K": k},
        inputs={"A": tensor_arg(a, "batch_size", "M", "K"), "B": tensor_arg(b, "batch_size", "K", "N")},
        outputs={"C": lazy_arg(a.dtype, ("batch_size", "M", "N"), lambda: written_or_returned(call, "out"))},
        reference=BMM_REFERENCE.format(n=n, k=k),
        description="Batched matrix multiply, C[b] = A[b] @ B[b].",
        flops=2 * batch * m * n * k,
    )


@cost_function("gemm", "bmm")
def gemm_cost(inputs: CostInputs) -> Cost:
    """The terms of each element of C are counted by the axes that A and B share and C lacks."""
    shapes = {**inputs.definition.inputs, **inputs.definition.outputs}
    a, b, c = (shapes[name].shape or [] for name in ("A", "B", "C"))
    summed = [axis for axis in a if axis in b and axis not in c]
    if len(summed) != 1:
        return inputs.whole()
    return inputs.whole(2 * math.prod(inputs.sizes[axis] for axis in [*c, *summed]))


PRIMITIVES = 32  # oneDNN primitives that vLLM keeps per weight


class OneDnnHandle:
    """A oneDNN matmul: its raw pointer lives as long as this object, and so does the weight."""

    def __init__(self, pointer: int, weight: torch.Tensor) -> None:
        self.tensor = torch.tensor(pointer, dtype=torch.int64)
        self.weight = weight

    def __del__(self) -> None:
        torch.ops._C.release_dnnl_matmul_handler(self.tensor.item())


@replay_rule("_C::onednn_mm")
class OneDnnMm(ReplayRule):
    """The weight hides behind the handler: K is the activation's last dimension, N the output's."""

    rebuilt_args = ("handler_tensor",)

    def _weight(self, bound: BoundCall) -> tuple[int, int]:
        return bound.spec("c").shape[-1], bound.spec("a").shape[-1]

    def extra_bytes(self, bound: BoundCall) -> int:
        n, k = self._weight(bound)
        return 2 * n * k * bound.spec("a").bits // 8  # the weight, and oneDNN's own packed copy of it

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        n, k = self._weight(bound)
        dtype = bound.spec("a").dtype
        flat = torch.empty(n * k, dtype=torch_dtype(dtype, Skip))
        fill_random(flat.view(torch.uint8), dtype)
        weight = flat.view(n, k)
        handle = OneDnnHandle(torch.ops._C.create_onednn_mm_handler(weight.t(), PRIMITIVES), weight)
        inputs.keep.append(handle)
        return {"handler_tensor": handle.tensor}


@replay_rule("_C::onednn_scaled_mm")
class OneDnnScaledMm(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        raise Skip("its oneDNN handler hides an int8 weight and its scales, which are no arguments")
