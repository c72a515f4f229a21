"""grouped_gemm: C = A @ B[g] for the rows of each group g, of floats, or of float8 with block scales.

Rows are in one matrix, by `group_ends` (aten: where each group's rows end) or `group_ids` (DeepGEMM: each row's group,
-1 for padding), or padded to the longest group: `masked_m` rows of each count. Rows of no group are zero here; kernels
leave them as they were. A scale for each row and each channel is one of blocks of 1 by K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.gemm.quantized_gemm import (
    QUANTIZED_DTYPES,
    block_size_of,
    matrix_and_scale,
    with_its_scale,
)
from kcap.schemas.derive.invocation import (
    FLOATS,
    Invocation,
    Unrecognized,
    require_values,
    result_dtype,
    written_or_returned,
)
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, dtype_name, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert B.shape == ({g}, {n}, {k})
    C = torch.zeros((*A.shape[:-1], {n}), dtype=torch.{dtype}, device=A.device)
    for g in range({g}):
        {rows}
        a, b = A[rows].to(torch.float32), B[g].to(torch.float32)
{scales}        C[rows] = (a @ b.T).to(C.dtype)
    return C
"""
SCALES = """        a = a * A_scale[rows].repeat_interleave({kb}, dim=-1)[..., :{k}]
        b_scale = B_scale[g].repeat_interleave({nb}, dim=0)[:{n}]
        b = b * b_scale.repeat_interleave({kb}, dim=1)[:, :{k}]
"""
ROWS = {
    "group_ends": "rows = slice(int(group_ends[g - 1]) if g else 0, int(group_ends[g]))",
    "group_ids": "rows = group_ids == g",
    "masked_m": "rows = (g, slice(int(masked_m[g])))",
}


@dataclass(frozen=True)
class Groups:
    """Which group each row has: the input `name`, a key of ROWS, over `axis`. `mask` sets other rows of C to zero.

    `counts`: how many rows each group has that has any.
    """

    name: str
    tensor: torch.Tensor
    axis: str
    mask: Callable[[torch.Tensor], torch.Tensor]
    counts: Callable[[torch.Tensor], torch.Tensor]

    def used(self) -> tuple[int, int]:
        """Rows that are of a group, and groups that have rows; Unrecognized where they were not sampled."""
        counts = self.counts(require_values(self.tensor, "groups of its rows"))
        return int(counts.sum()), int((counts > 0).sum())


@family("grouped_gemm", "aten::_grouped_mm")
def grouped_mm(call: Invocation) -> KernelInstance:
    """`self`: [M, K], `mat2`: [groups, K, N], `offs`: [groups]."""
    call.refuse("bias")
    a, b, ends = call.tensor("self"), call.tensor("mat2"), call.tensor("offs")

    def mask(c: torch.Tensor) -> torch.Tensor:
        inside = torch.arange(len(c), device=c.device) < ends[-1]
        return c.where(inside[:, None], torch.zeros_like(c))

    return grouped_gemm_instance(
        call,
        (a, None),
        (b.transpose(1, 2), None),
        Groups("group_ends", ends, "G", mask, lambda e: e.diff(prepend=e.new_zeros(1))),
    )


@family(
    "grouped_gemm",
    "deep_gemm::m_grouped_fp8_gemm_nt_contiguous",
    "deep_gemm::m_grouped_fp8_fp4_gemm_nt_contiguous",
    "deep_gemm::m_grouped_bf16_gemm_nt_contiguous",
)
def contiguous(call: Invocation) -> KernelInstance:
    call.refuse("use_psum_layout")
    ids = call.tensor("m_indices", "grouped_layout")
    groups = Groups(
        "group_ids",
        ids,
        "M",
        lambda c: c.where((ids >= 0)[:, None], torch.zeros_like(c)),
        lambda i: i[i >= 0].bincount(),
    )
    return grouped_gemm_instance(call, operand_of(call, "a"), operand_of(call, "b"), groups)


@family(
    "grouped_gemm",
    "deep_gemm::m_grouped_fp8_gemm_nt_masked",
    "deep_gemm::m_grouped_fp8_fp4_gemm_nt_masked",
    "deep_gemm::m_grouped_bf16_gemm_nt_masked",
    "deep_gemm::fp8_m_grouped_gemm_nt_masked",  # as older versions call them
    "deep_gemm::bf16_m_grouped_gemm_nt_masked",
)
def masked(call: Invocation) -> KernelInstance:
    counts = call.tensor("masked_m")

    def mask(c: torch.Tensor) -> torch.Tensor:
        inside = torch.arange(c.shape[1], device=c.device) < counts[:, None]
        return c.where(inside[..., None], torch.zeros_like(c))

    return grouped_gemm_instance(
        call, operand_of(call, "a"), operand_of(call, "b"), Groups("masked_m", counts, "G", mask, lambda c: c)
    )


@family("grouped_gemm", "_C::cutlass_moe_mm")
def cutlass_moe_mm(call: Invocation) -> KernelInstance:
    """`a_tensors`: [M, K], `b_tensors`: [G, N, K] of float8; a scale for each row or for all, and for each channel or
    expert. `problem_sizes`: [G, 3], rows and N in either order; batched experts, whose rows have gaps, are declined.
    """
    a, b, c = (call.tensor(name) for name in ("a_tensors", "b_tensors", "out_tensors"))
    a_scale, b_scale = call.tensor("a_scales"), call.tensor("b_scales")
    (g, n, _), rows = b.shape, len(a)
    a_scale = a_scale.reshape(-1, 1).expand(rows, 1)
    b_scale = b_scale.reshape(g, -1, 1)
    if b_scale.shape[1] not in (1, n):
        raise Unrecognized("its scales are not of channels")
    ends = ends_of_problems(call.tensor("expert_offsets"), call.tensor("problem_sizes"), n)

    def mask(product: torch.Tensor) -> torch.Tensor:
        inside = torch.arange(len(product), device=product.device) < ends[-1]
        return product.where(inside[:, None], torch.zeros_like(product))

    named = Invocation(call.operator, {"out": c})
    groups = Groups("group_ends", ends, "G", mask, lambda e: e.diff(prepend=e.new_zeros(1)))
    return grouped_gemm_instance(named, (a, a_scale), (b, b_scale), groups)


def ends_of_problems(starts: torch.Tensor, sizes: torch.Tensor, n: int) -> torch.Tensor:
    """Where each group's rows end, int32; without data where they were not sampled."""
    if starts.is_meta or sizes.is_meta:
        return torch.empty(len(starts), dtype=torch.int32, device="meta")
    ends = starts.to(torch.int64) + sizes[:, 0].to(torch.int64) * sizes[:, 1] // n
    if int(starts[0]) or not torch.equal(ends[:-1], starts[1:].to(torch.int64)):
        raise Unrecognized("the groups' rows have gaps")
    return ends.to(torch.int32)


Operand = tuple[torch.Tensor, torch.Tensor | None]


def operand_of(call: Invocation, name: str) -> Operand:
    """A matrix, or a pair of one and its scales."""
    value = with_its_scale(call, name)
    return (value, None) if isinstance(value, torch.Tensor) else matrix_and_scale(value)


def grouped_gemm_instance(call: Invocation, a: Operand, b: Operand, groups: Groups) -> KernelInstance:
    """`a`: [M, K] or [G, M, K], `b`: [G, N, K]; scales of one row's blocks, and of blocks of both N and K."""
    if a[0].dtype != b[0].dtype or a[0].dtype not in (QUANTIZED_DTYPES if a[1] is not None else FLOATS):
        raise Unrecognized("not a product of floats, or of quantized matrices with scales")
    (g, n, k), leading = b[0].shape, ("M",) if a[0].dim() == 2 else ("G", "M")
    inputs = {
        "A": tensor_arg(a[0], *leading, "K"),
        "B": tensor_arg(b[0], "G", "N", "K"),
        **block_scales(a[1], b[1], leading),
    }
    inputs[groups.name] = tensor_arg(groups.tensor, groups.axis)
    out = result_dtype(call, torch.bfloat16 if a[1] is not None else a[0].dtype)
    quantized = "quantized_" if a[1] is not None else ""
    word = abbreviate(a[0].dtype, QUANTIZED_DTYPES[0] if quantized else torch.bfloat16) + abbreviate(
        out, torch.bfloat16
    )
    return KernelInstance(
        name=f"{quantized}grouped_gemm_by_{groups.name}{word}_g{g}_n{n}_k{k}",
        op_type="grouped_gemm",
        axes={"M": None, "G": g, "N": n, "K": k, **block_counts(b[1])},
        inputs=inputs,
        outputs={"C": lazy_arg(out, (*leading, "N"), lambda: groups.mask(written_or_returned(call, "out", "d")))},
        reference=_reference(list(inputs), (g, n, k), ROWS[groups.name], b[1], dtype_name(out)),
        description="One product for each group of rows. Rows of no group are zero.",
        tags=(f"quantization:{dtype_name(a[0].dtype)}",) if quantized else (),
        flops=lambda: 2 * groups.used()[0] * n * k,
        touched=lambda: _touched(groups.used(), (n, k), (a[0], b[0]), out),
    )


def _touched(
    used: tuple[int, int], sizes: tuple[int, int], operands: tuple[torch.Tensor, torch.Tensor], out: torch.dtype
) -> int:
    """Bytes of the rows and the groups in use; of the scales, which are few, none."""
    (rows, groups), (n, k), (a, b) = used, sizes, operands
    return int(rows * (k * a.element_size() + n * out.itemsize) + groups * n * k * b.element_size())


def block_scales(
    a: torch.Tensor | None, b: torch.Tensor | None, leading: tuple[str, ...], group: str = "G"
) -> dict[str, TensorArg]:
    """The inputs of scales: of A's rows, [..., K_group], and of B's blocks."""
    if a is None or b is None:
        return {}
    if {a.dtype, b.dtype} != {torch.float32}:
        raise Unrecognized("packed scales")
    return {"A_scale": tensor_arg(a, *leading, "K_group"), "B_scale": tensor_arg(b, group, "N_group", "K_group")}


def block_counts(scale: torch.Tensor | None) -> dict[str, int | None]:
    """The axes that count B's blocks."""
    return {} if scale is None else {"N_group": scale.shape[1], "K_group": scale.shape[2]}


def _reference(
    inputs: list[str], sizes: tuple[int, int, int], rows: str, scale: torch.Tensor | None, dtype: str
) -> str:
    g, n, k = sizes
    return REFERENCE.format(
        inputs=", ".join(inputs), g=g, n=n, k=k, rows=rows, scales=scaling(scale, n, k), dtype=dtype
    )


def scaling(scale: torch.Tensor | None, n: int, k: int) -> str:
    """The lines that multiply `a` and `b` of group `g` by their scales; `scale` is that of B, [G, N_group, K_group]."""
    if scale is None:
        return ""
    return SCALES.format(n=n, k=k, nb=block_size_of(n, scale.shape[1]), kb=block_size_of(k, scale.shape[2]))


@cost_function("grouped_gemm")
def grouped_gemm_cost(inputs: CostInputs) -> Cost:
    """A: [M, K] or [G, M, K], B: [G, N, K]."""
    (_, n, k), counts = inputs["B"].shape, rows_of_groups(inputs)
    rows, groups = int(counts.sum()), int((counts > 0).sum())
    read = rows * k * inputs["A"].element_size() + groups * distinct_bytes(inputs["B"][:1])
    return inputs.cost(read, 2 * rows * n * k)


def rows_of_groups(inputs: CostInputs) -> torch.Tensor:
    if "group_ends" in inputs:
        ends = inputs.index("group_ends")
        return ends.diff(prepend=ends.new_zeros(1))
    if "masked_m" in inputs:
        return inputs.index("masked_m")
    ids = inputs.index("group_ids")
    return ids[ids >= 0].bincount()


@replay_rule("_C::cutlass_moe_mm")
class CutlassMoeMm(ReplayRule):
    """Strides are those of whole rows, the same for each expert."""

    def prepare(self, bound: BoundCall) -> None:
        for name, matrix in (("a_strides", "a_tensors"), ("b_strides", "b_tensors"), ("c_strides", "out_tensors")):
            bound.set_content(name, torch.full(bound.spec(name).shape, bound.spec(matrix).shape[-1]))


GROUPED_OP_TYPES = ("grouped_gemm",)


@valid_input("group_ends", "offs", op_types=GROUPED_OP_TYPES)
def group_ends(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Rising, the last one all rows; groups may be empty."""
    if (rows := draft.size("M")) is None:
        return None
    ends = draft.integers(0, rows + 1, draft.shape(name)).sort().values
    ends[-1:] = rows
    return ends


@valid_input("group_ids", "m_indices", op_types=GROUPED_OP_TYPES)
def group_ids(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """The rows of a group lie together."""
    groups = draft.size("G")
    return draft.integers(0, groups, draft.shape(name)).sort().values if groups else None


@valid_input("masked_m", op_types=GROUPED_OP_TYPES)
def group_counts(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    rows = draft.size("M")
    return None if rows is None else draft.integers(0, rows + 1, draft.shape(name))
