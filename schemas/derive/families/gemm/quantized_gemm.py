"""quantized_gemm: C = (A * A_scale) @ (B * B_scale).T of float8 or int8, with the Definition document's names.

FlashInfer's `fp8_blockscale_gemm_sm90`, which vLLM calls on Hopper for fewer than 32 tokens, quantizes a bfloat16 A on
its way, with a scale for each 128 columns of a row. Where DeepGEMM takes float32 scales, vLLM has rounded them up to
powers of two, column by column with rows padded to four: that is nothing but their values and strides.

A scale is for the whole matrix ([]), for each of its rows (A's tokens [M], B's channels [N]), or for blocks of it
([M, K_group] and [N_group, K_group]: `N_group` and `K_group` count blocks, of 128 by 128 in DeepSeek's models).

vLLM's `_C::onednn_scaled_mm` is not here: its weight and that one's scales hide behind a handle, which does not say
whether there is one scale or one for each channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.derive.families import family
from kcap.schemas.derive.families.elementwise.quantize import trtllm_group_scales
from kcap.schemas.derive.invocation import OUTPUTS, Invocation, Unrecognized, result_dtype, written_or_returned
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, dtype_name, lazy_arg, tensor_arg

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert B.shape == ({n}, {k})
    a = A.to(torch.float32) * {a_scale}
    b = B.to(torch.float32) * {b_scale}
    return {result}.to(torch.{dtype})
"""
DYNAMIC_REFERENCE = """import torch


@torch.no_grad()
def run(A, B, B_scale):
    assert B.shape == ({n}, {k})
    groups = A.to(torch.float32).unflatten(-1, (-1, 128))
    A_scale = groups.abs().amax(dim=-1, keepdim=True) / 448.0
    q = (groups / A_scale.clamp(min=1e-30)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    a = (q.to(torch.float32) * A_scale).flatten(-2)
    b = B.to(torch.float32) * {b_scale}
    return torch.matmul(a, b.T).to(torch.{dtype})
"""
QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@family("quantized_gemm", "_C::cutlass_scaled_mm")
def cutlass_scaled_mm(call: Invocation) -> KernelInstance:
    return column_major(call, ("a", "b", "a_scales", "b_scales"))


@family("quantized_gemm", "aten::_scaled_mm")
def scaled_mm(call: Invocation) -> KernelInstance:
    call.refuse("scale_result")
    return column_major(call, ("self", "mat2", "scale_a", "scale_b"))


@family(
    "quantized_gemm", "sgl_kernel::fp8_scaled_mm", "sgl_kernel::int8_scaled_mm", "sgl_kernel::fp8_blockwise_scaled_mm"
)
def scaled_mm_of_sglang(call: Invocation) -> KernelInstance:
    return column_major(call, ("mat_a", "mat_b", "scales_a", "scales_b"))


@family("quantized_gemm", "trtllm::cublas_scaled_mm")
def scaled_mm_of_trtllm(call: Invocation) -> KernelInstance:
    call.refuse("bias")
    return column_major(call, ("mat_a", "mat_b", "scale_a", "scale_b"))


@family("quantized_gemm", "trtllm::fp8_block_scaling_gemm", "trtllm::fp8_block_scaling_gemm_impl")
def block_scaling_gemm_of_trtllm(call: Invocation) -> KernelInstance:
    """`a`: [M, K], `b`: [N, K] with a scale for each block of 128 by 128; `a_scale` as `quantize` has it."""
    a, b = call.tensor("a", "mat1"), call.tensor("b", "mat2")
    a_scale, b_scale = call.tensor("a_scale", "mat1Scale"), call.tensor("b_scale", "mat2Scale")
    return quantized_gemm_instance(call, a, b, trtllm_group_scales(a_scale, *a.shape), b_scale)


@family("quantized_gemm", "deep_gemm::fp8_gemm_nt", "deep_gemm::fp8_fp4_gemm_nt")  # one function by two names
def fp8_gemm_nt(call: Invocation) -> KernelInstance:
    """`a` and `b` are pairs of a matrix and its scales; where DeepGEMM is a library of operators these follow it."""
    call.refuse("c")
    (a, a_scale), (b, b_scale) = (matrix_and_scale(with_its_scale(call, name)) for name in ("a", "b"))
    return quantized_gemm_instance(call, a, b, a_scale, b_scale)


@family("quantized_gemm", "triton::_w8a8_triton_block_scaled_mm", "triton::_w8a8_block_fp8_matmul")
def block_scaled_mm(call: Invocation) -> KernelInstance:
    return quantized_gemm_instance(call, *(call.tensor(name) for name in ("A", "B", "As", "Bs")))


@family("quantized_gemm", "flashinfer::fp8_blockscale_gemm_sm90")
def fp8_blockscale_gemm(call: Invocation) -> KernelInstance:
    """`input`: [M, K] of bfloat16, `weight`: [N, K] of float8 with a scale for each block of 128 by 128."""
    call.refuse("input_scale")
    a, b, b_scale = call.tensor("input"), call.tensor("weight"), call.tensor("weight_scale")
    (m, k), n = a.shape, b.shape[0]
    if a.dtype != torch.bfloat16 or b.dtype != torch.float8_e4m3fn or k % 128:
        raise Unrecognized("not a product of bfloat16 and float8 by whole blocks")
    scale, out = Scale.of("B", b_scale, n, k), result_dtype(call, torch.bfloat16)
    if scale.per != "block":
        raise Unrecognized("its weight has no blocks")
    groups = b_scale.shape
    return KernelInstance(
        name=f"quantized_gemm_dynamic{abbreviate(out, torch.bfloat16)}_n{n}_k{k}_ng{groups[0]}_kg{groups[1]}",
        op_type="gemm",
        axes={"M": None, "N": n, "K": k, "N_group": groups[0], "K_group": groups[1]},
        inputs={"A": tensor_arg(a, "M", "K"), "B": tensor_arg(b, "N", "K"), "B_scale": scale.arg},
        outputs={"C": lazy_arg(out, ("M", "N"), lambda: written_or_returned(call, "out"))},
        reference=DYNAMIC_REFERENCE.format(n=n, k=k, b_scale=scale.text, dtype=dtype_name(out)),
        description="C = quantized(A) @ (B * B_scale).T; A gets a scale for each 128 columns of a row.",
        tags=(f"quantization:{dtype_name(b.dtype)}", "fused"),
        flops=2 * m * n * k,
    )


def column_major(call: Invocation, names: tuple[str, str, str, str]) -> KernelInstance:
    """The second matrix and its block scales are [K, N]."""
    a, b, a_scale, b_scale = (call.tensor(name) for name in names)
    n = b.shape[1]
    blocks = b_scale.dim() == 2 and b_scale.shape not in ((1, 1), (1, n), (n, 1))
    return quantized_gemm_instance(call, a, b.transpose(0, 1), a_scale, b_scale.transpose(0, 1) if blocks else b_scale)


def with_its_scale(call: Invocation, name: str) -> object:
    """DeepGEMM's argument `name`, in a pair with `name`_sf if the operator takes this one beside it."""
    scale = call.optional(f"{name}_sf")
    return call[name] if scale is None else (call[name], scale)


def matrix_and_scale(value: object) -> tuple[torch.Tensor, torch.Tensor]:
    match value:
        case (torch.Tensor() as matrix, torch.Tensor() as scale):
            return matrix, scale
    raise Unrecognized("no pair of a matrix and its scales")


@dataclass(frozen=True)
class Scale:
    """A matrix's scale as an input; `text` spreads it over the matrix; `per`: what has one, for the name."""

    arg: TensorArg
    text: str
    per: str

    @classmethod
    def of(cls, matrix: str, tensor: torch.Tensor, rows: int, k: int) -> Scale:
        """`matrix`: A with `rows` of axis M, or B with `rows` of axis N; both have `k` columns."""
        axis, name = ("M" if matrix == "A" else "N"), f"{matrix}_scale"
        if tensor.dtype != torch.float32:
            raise Unrecognized(f"{name} is packed")
        if tensor.numel() == 1 and tensor.shape != (rows, 1):
            return cls(tensor_arg(tensor.reshape(())), name, "tensor")
        if tensor.shape in ((rows,), (rows, 1), (1, rows)):  # as many blocks as rows are blocks all the same
            return cls(
                tensor_arg(tensor.reshape(-1), axis), f"{name}[:, None]", "token" if matrix == "A" else "channel"
            )
        groups, columns = tensor.shape
        text = f"{name}.repeat_interleave({block_size_of(k, columns)}, dim=1)[:, :{k}]"
        if matrix == "A":
            return cls(tensor_arg(tensor, "M", "K_group"), text, "block")
        text = f"{text}.repeat_interleave({block_size_of(rows, groups)}, dim=0)[:{rows}]"
        return cls(tensor_arg(tensor, "N_group", "K_group"), text, "block")


def block_size_of(size: int, groups: int) -> int:
    """The size of `groups` blocks: 128, the last of which may be short, else all equal."""
    if -(-size // 128) == groups:
        return 128
    if size % groups == 0:
        return size // groups
    raise Unrecognized(f"{groups} scales for {size} rows or columns")


def quantized_gemm_instance(
    call: Invocation, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> KernelInstance:
    """`a`: [..., K], leading dimensions joined; `b`: [N, K]; the bias: [N]."""
    if b.dim() != 2 or a.dtype != b.dtype or a.dtype not in QUANTIZED_DTYPES:
        raise Unrecognized("not a product of two quantized matrices")
    (n, k), a = b.shape, a.reshape(-1, b.shape[1])
    scales = Scale.of("A", a_scale, len(a), k), Scale.of("B", b_scale, n, k)
    inputs = {
        "A": tensor_arg(a, "M", "K"),
        "B": tensor_arg(b, "N", "K"),
        "A_scale": scales[0].arg,
        "B_scale": scales[1].arg,
    }
    bias, out = call.optional("bias"), result_dtype(call, torch.bfloat16)
    if bias is not None:
        inputs["bias"] = tensor_arg(bias, "N")
    return KernelInstance(
        name=_name(scales, bias, a.dtype, out, n, k),
        op_type="gemm",
        axes={"M": None, "N": n, "K": k, **_groups(scales)},
        inputs=inputs,
        outputs={"C": lazy_arg(out, ("M", "N"), lambda: written_or_returned(call, *OUTPUTS).reshape(-1, n))},
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            n=n,
            k=k,
            a_scale=scales[0].text,
            b_scale=scales[1].text,
            result="torch.matmul(a, b.T)" if bias is None else "(torch.matmul(a, b.T) + bias.to(torch.float32))",
            dtype=dtype_name(out),
        ),
        description=f"C = (A * A_scale) @ (B * B_scale).T; scales per {scales[0].per} and per {scales[1].per}.",
        tags=(f"quantization:{dtype_name(a.dtype)}",),
        flops=2 * len(a) * n * k,
    )


def _groups(scales: tuple[Scale, Scale]) -> dict[str, int | None]:
    """The axes that count blocks, with their sizes."""
    axes = {}
    for scale in scales:
        axes.update(dict(zip(scale.arg.shape or (), scale.arg.value.shape, strict=True)))
    return {name: axes[name] for name in ("N_group", "K_group") if name in axes}


def _name(
    scales: tuple[Scale, Scale], bias: torch.Tensor | None, dtype: torch.dtype, out: torch.dtype, n: int, k: int
) -> str:
    """Blocks on both sides need no word, as in the Definition document."""
    groups = _groups(scales)
    per = "" if len(groups) == 2 and scales[0].per == "block" else f"_per_{scales[0].per}_per_{scales[1].per}"
    word = "_bias" if bias is not None else ""
    word += abbreviate(dtype, QUANTIZED_DTYPES[0]) + abbreviate(out, torch.bfloat16)
    counts = "".join(f"_{axis[0].lower()}g{size}" for axis, size in groups.items())
    return f"quantized_gemm{per}{word}_n{n}_k{k}{counts}"
