"""Products, norms, gated activations, lookups and transposes that TVM's compiler makes: outputs come last.

A name says what was fused (`fused_NT_matmul_add`, NT: the second matrix is [N, K]), and shapes have to agree with it.
The epsilon of a norm is compiled in, and nothing tells it: 1e-5, TVM's own default, is taken.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import ReplayRule, family, replay_rule
from kcap.schemas.derive.families.elementwise.activation import gated_instance
from kcap.schemas.derive.families.gemm.gemm import gemm_instance
from kcap.schemas.derive.families.norm.rmsnorm import norm_instance
from kcap.schemas.derive.index_arguments import set_indices_below
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, distinct_rows, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.recording.values import TensorSpec

EPSILON = 1e-5


def tensors_of(call: Invocation, count: int) -> list[torch.Tensor]:
    """Its arguments; Unrecognized unless they are `count` tensors."""
    if call[f"arg{count}"] is not None:
        raise Unrecognized(f"{call.operator} has more than {count} arguments")
    return [call.tensor(f"arg{index}") for index in range(count)]


@family("gemm", "tvm::matmul", "tvm::NT_matmul")
def matmul(call: Invocation) -> KernelInstance:
    a, b, out = tensors_of(call, 3)
    return gemm_instance(Invocation(call.operator, {"out": out}), a, second_matrix(call, a, b, out))


ADD_REFERENCE = """import torch


@torch.no_grad()
def run(A, B, residual):
    assert B.shape == ({n}, {k})
    C = torch.matmul(A.to(torch.float32), B.to(torch.float32).T)
    return (C.to(A.dtype) + residual).to(A.dtype)
"""


@family("gemm", "tvm::fused_matmul_add", "tvm::fused_NT_matmul_add")
def matmul_add(call: Invocation) -> KernelInstance:
    """The third tensor is a bias [N], or of the product's shape: the residual."""
    a, b, added, out = tensors_of(call, 4)
    b = second_matrix(call, a, b, out)
    if added.dim() == 1:
        return gemm_instance(Invocation(call.operator, {"out": out}), a, b, added)
    if added.shape != out.shape or {a.dtype, b.dtype, added.dtype} != {out.dtype} or out.dtype not in FLOATS:
        raise Unrecognized("what it adds is neither a bias nor of the product's shape and type")
    (n, k), m = b.shape, a.numel() // a.shape[-1]
    return KernelInstance(
        name=f"gemm_add{abbreviate(a.dtype, torch.float16)}_n{n}_k{k}",
        op_type="gemm",
        axes={"M": None, "N": n, "K": k},
        inputs={
            "A": tensor_arg(a.reshape(-1, k), "M", "K"),
            "B": tensor_arg(b, "N", "K"),
            "residual": tensor_arg(added.reshape(-1, n), "M", "N"),
        },
        outputs={"C": lazy_arg(out.dtype, ("M", "N"), lambda: out.reshape(-1, n))},
        reference=ADD_REFERENCE.format(n=n, k=k),
        description="General matrix multiply with a residual, C = A @ B.T + residual.",
        tags=("fused",),
        flops=2 * m * n * k,
    )


def second_matrix(call: Invocation, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`b` as [N, K]; Unrecognized where the shapes are not those of the product that the name says."""
    if b.dim() != 2:
        raise Unrecognized("its second matrix has no two dimensions")
    b = b if "NT_matmul" in call.operator else b.transpose(0, 1)
    if a.shape[:-1] != out.shape[:-1] or b.shape != (out.shape[-1], a.shape[-1]):
        raise Unrecognized("its shapes are not of such a product")
    return b


@family("rmsnorm", "tvm::rms_norm")
def rms_norm(call: Invocation) -> KernelInstance:
    x, weight, out = tensors_of(call, 3)
    if x.shape != out.shape or weight.shape != x.shape[-1:] or x.dtype != out.dtype:
        raise Unrecognized("its shapes are not of a norm over the last dimension")
    named = Invocation(call.operator, {"input": x, "weight": weight, "eps": EPSILON})
    kernel = norm_instance(named, x, lambda: out)
    return replace(kernel, description=f"Root mean square norm; epsilon is compiled in: {EPSILON:g} is assumed.")


@family("activation", "tvm::fused_split_silu_multiply")
def silu_and_mul(call: Invocation) -> KernelInstance:
    return gated(call, "silu")


@family("activation", "tvm::fused_split_gelu_multiply")
def gelu_and_mul(call: Invocation) -> KernelInstance:
    return gated(call, "gelu")


@family("activation", "tvm::fused_split_gelu_tanh_multiply")
def gelu_tanh_and_mul(call: Invocation) -> KernelInstance:
    return gated(call, "gelu_tanh")


def gated(call: Invocation, activation: str) -> KernelInstance:
    x, out = tensors_of(call, 2)
    if out.shape != (*x.shape[:-1], x.shape[-1] // 2):
        raise Unrecognized("what it writes is not half as wide")
    return gated_instance(Invocation(call.operator, {"input": x, "out": out}), activation)


TAKE_REFERENCE = """import torch


@torch.no_grad()
def run({table}, {index}):
    assert {table}.shape[1:] == ({hidden},)
    return {table}[{index}.to(torch.int64)]
"""


@family("embedding", "tvm::take")
def take(call: Invocation) -> KernelInstance:
    """Rows of a matrix, dimensions of one before them left out: of the vocabulary's, or of the hidden states."""
    table, index, out = tensors_of(call, 3)
    if index.dim() != 1 or any(size != 1 for size in table.shape[:-2]) or out.numel() != len(index) * table.shape[-1]:
        raise Unrecognized("it takes no rows of a matrix")
    rows, hidden = table.reshape(table.shape[-2:]), table.shape[-1]
    of_vocabulary = table.dim() == 2
    names = ("weight", "input_ids") if of_vocabulary else ("self", "index")
    word = abbreviate(table.dtype, torch.bfloat16) + abbreviate(index.dtype, torch.int64)
    size = table.shape[0] if of_vocabulary else None
    row = hidden * table.element_size()
    return KernelInstance(
        name=f"embedding{word}_v{size}_h{hidden}" if of_vocabulary else f"index_select{word}_h{hidden}",
        op_type="embedding" if of_vocabulary else "index_select",
        axes={"num_tokens": None, "vocab_size" if of_vocabulary else "num_rows": size, "hidden_size": hidden},
        inputs={
            names[0]: tensor_arg(rows, "vocab_size" if of_vocabulary else "num_rows", "hidden_size"),
            names[1]: tensor_arg(index, "num_tokens"),
        },
        outputs={"output": lazy_arg(out.dtype, ("num_tokens", "hidden_size"), lambda: out.reshape(-1, hidden))},
        reference=TAKE_REFERENCE.format(table=names[0], index=names[1], hidden=hidden),
        description="Rows of a matrix.",
        touched=lambda: (index.numel() + distinct_rows(index)) * row + total_bytes(index),
    )


@replay_rule("tvm::take")
class Take(ReplayRule):
    """Its indices were not sampled: they may be token ids."""

    def prepare(self, bound: BoundCall) -> None:
        table, index, out = (bound[f"arg{position}"] for position in range(3))
        if isinstance(table, TensorSpec) and isinstance(index, TensorSpec) and isinstance(out, TensorSpec):
            set_indices_below(bound, "arg1", taken_from(table.shape, index.shape, out.shape))


def taken_from(table: tuple[int, ...], index: tuple[int, ...], out: tuple[int, ...]) -> int:
    """The size of the dimension that is indexed, the smallest where several may be: any of them is safe then."""
    sizes = [n for axis, n in enumerate(table) if out == (*table[:axis], *index, *table[axis + 1 :])]
    return min(sizes, default=min(table, default=1))


TRANSPOSE_REFERENCE = """import torch


@torch.no_grad()
def run(input):
    return input.transpose(0, 1).contiguous()
"""


@family("copy", "tvm::transpose")
def transpose(call: Invocation) -> KernelInstance:
    x, out = tensors_of(call, 2)
    if x.dim() != 2 or out.shape != (x.shape[1], x.shape[0]):
        raise Unrecognized("no transpose of a matrix")
    rows, columns = x.shape
    return KernelInstance(
        name=f"transpose{abbreviate(x.dtype, torch.bfloat16)}_r{rows}_c{columns}",
        op_type="transpose",
        axes={"rows": rows, "columns": columns},
        inputs={"input": tensor_arg(x, "rows", "columns")},
        outputs={"output": lazy_arg(out.dtype, ("columns", "rows"), lambda: out)},
        reference=TRANSPOSE_REFERENCE,
        description="A matrix, transposed in memory.",
    )
