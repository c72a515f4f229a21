"""moe_gemm by OpenAI's `matmul_ogs`, with which vLLM runs gpt-oss on Hopper: one matrix of each expert, for its rows.

Rows are sorted by expert: those of expert g end at `group_ends[g]`; `gather` says which token each is of. An MXFP4
weight has two numbers to a byte along K and an exponent for each 32 of them. On Hopper both lie as its tensor cores
read them (`HOPPER_VALUE`, `HOPPER_SCALE`: triton_kernels/tensor_details/layout_details), the exponents by the number of
warps, and the reference puts them back. SwiGLU as gpt-oss has it may follow, columns in turn.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.moe.align import drawn_experts
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, dtype_name, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.recording.values import TensorSpec

REFERENCE = """import torch

{weight}

@torch.no_grad()
def run({inputs}):
    assert B.shape == {shape}
    C = torch.zeros(({rows}, {n}), dtype=torch.float32, device=A.device)
    for g in range({e}):
        rows = slice(int(group_ends[g - 1]) if g else 0, int(group_ends[g]))
        if rows.start < rows.stop:
            C[rows] = A[{tokens}].to(torch.float32) @ {matrix}{bias}
{activation}    return {result}.to(torch.{dtype})
"""

MXFP4 = """
def weight(values, exponents):
{values}
{exponents}
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=values.device)
    numbers = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)[:, :{k}].to(torch.int64)
    signed = table[numbers & 7] * (1.0 - 2.0 * (numbers >> 3))
    scale = torch.exp2(exponents.to(torch.float32) - 127.0).repeat_interleave(32, dim=-1)[:{n}, :{k}]
    return (signed[:{n}] * scale).T
"""
PLAIN_VALUES = "    values = values.view(torch.uint8).T"
PLAIN_EXPONENTS = "    exponents = exponents.view(torch.uint8).T"
HOPPER_VALUES = """    words = values.T.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF  # eight numbers
    fourth = words << 1 & 0x80008000 | words >> 3 & 0x01800180 | words >> 7 & 0x00400040
    parts = torch.stack([*(words << shift & 0x81C081C0 for shift in (0, 3, 6)), fourth], dim=-1).flatten(-2)
    low, high = ((half >> 15 & 1) << 3 | half >> 6 & 7 for half in (parts & 0xFFFF, parts >> 16))
    tiles = (low | high << 4).to(torch.uint8).unflatten(0, (-1, 4)).unflatten(-1, (-1, 2, 4, 8, 2))
    values = tiles.permute(0, 6, 1, 3, 2, 5, 4).reshape(4 * len(words), -1)"""
HOPPER_EXPONENTS = """    rows = exponents.view(torch.uint8).T
    tiles = rows.unflatten(0, (-1, {warps})).unflatten(-1, (-1, 2, 8, 2, 2))
    exponents = tiles.permute(0, 3, 1, 6, 4, 2, 5).reshape(32 * len(rows), -1)"""
SWIGLU = """    gate, up = C.unflatten(-1, (-1, 2)).unbind(dim=-1)
    gate, up = gate.clamp(max={limit!r}), up.clamp(-{limit!r}, {limit!r})
    C = gate * torch.sigmoid({alpha!r} * gate) * (up + 1.0)
"""


@family("moe_gemm", "triton::_matmul_ogs", "triton::_p_matmul_ogs")
def matmul_ogs(call: Invocation) -> KernelInstance:
    """`XPtr`: [1, tokens, K], `WPtr`: [experts, …], `YPtr`: [1, num_rows, N or N / 2], `GatherIndx`: [num_rows].

    `_p_matmul_ogs` is the persistent kernel. Parts of K that a second kernel adds up, a scatter of its own and
    quantized inputs or outputs are declined.
    """
    call.refuse("XMxScale", "XScale", "WScale", "Betas", "WriteBackIndx", "out_alpha", "IS_EPILOGUE_QUANT_MXFP8")
    x, w, y = (call.tensor(name) for name in ("XPtr", "WPtr", "YPtr"))
    n, k, e = int(call.number("N")), int(call.number("K")), int(call.number("N_EXPTS_TOT"))
    if call["SPLIT_K"] not in (None, 1) or x.dim() != 3 or len(x) != 1 or y.dim() != 3 or len(y) != 1 or len(w) != e:
        raise Unrecognized("not one product for the rows of each expert")
    inputs = {"A": tensor_arg(x[0], "num_tokens", "K"), **weight_inputs(call, w)}
    if (bias := call.optional("B")) is not None:
        inputs["bias"] = tensor_arg(bias, "num_experts", "N")
    ends = group_ends(call, e)
    inputs["group_ends"] = lazy_arg("int32", ("num_experts",), lambda: require_values(ends, "rows of the experts"))
    gather, gammas = call.optional("GatherIndx"), call.optional("Gammas")
    if gather is not None:
        inputs["gather"] = tensor_arg(gather, "num_rows", description="Token times the experts of each, by row.")
    if gammas is not None:
        inputs["row_weights"] = tensor_arg(gammas.reshape(-1), "num_rows")
    return _instance(call, inputs, (n, k, e), ends)


def weight_inputs(call: Invocation, w: torch.Tensor) -> dict[str, TensorArg]:
    """B, and of an MXFP4 one its exponents. A Definition has no uint8: they are int8 of the same bits."""
    scale = call["WMxScale"]
    if scale is None:
        if w.dtype not in FLOATS or call["SWIZZLE_MX_VALUE"] is not None:
            raise Unrecognized("its weight is quantized")
        return {"B": tensor_arg(w, "num_experts", "K", "N")}
    if not isinstance(scale, torch.Tensor):
        raise Unrecognized("its scales are an object of triton_kernels, which a Recording has no values of")
    if w.dtype != torch.uint8 or scale.dtype != torch.uint8 or call["W_TRANSPOSE"] is not True:
        raise Unrecognized("its weight is not MXFP4 along K")
    return {
        "B": tensor_arg(w.view(torch.int8), "num_experts", "B_rows", "B_columns", description="Two numbers to a byte."),
        "B_scale": tensor_arg(scale.view(torch.int8), "num_experts", "scale_rows", "scale_columns"),
    }


def weight_text(call: Invocation, n: int, k: int) -> str:
    """The function `weight` of a reference, for an MXFP4 weight in the layouts that the kernel was compiled for."""
    value, scale, warps = call["SWIZZLE_MX_VALUE"], call["SWIZZLE_MX_SCALE"], call["num_warps"]
    values = {None: PLAIN_VALUES, "HOPPER_VALUE": HOPPER_VALUES}.get(value)
    exponents = {None: PLAIN_EXPONENTS, "HOPPER_SCALE": HOPPER_EXPONENTS}.get(scale)
    if values is None or exponents is None:
        raise Unrecognized(f"its weight lies in the layouts {value} and {scale}")
    if scale is not None and not isinstance(warps, int):
        raise Unrecognized("its scales lie by the number of warps, which is not known")
    return MXFP4.format(values=values, exponents=exponents.format(warps=warps), k=k, n=n)


def group_ends(call: Invocation, experts: int) -> torch.Tensor:
    """Where each expert's rows end, int32; without data where they were not sampled."""
    starts, counts = call.tensor("ExptOffs"), call.tensor("ExptHist")
    if starts.is_meta or counts.is_meta:
        return torch.empty(experts, dtype=torch.int32, device="meta")
    return (starts[:experts] + counts[:experts]).to(torch.int32)


def _instance(
    call: Invocation, inputs: dict[str, TensorArg], sizes: tuple[int, int, int], ends: torch.Tensor
) -> KernelInstance:
    (n, k, e), y, w, x = sizes, call.tensor("YPtr"), call.tensor("WPtr"), call.tensor("XPtr")
    swiglu, quantized, top_k = "alpha" in call.arguments, "B_scale" in inputs, int(call.number("N_EXPTS_ACT"))
    columns = n // 2 if swiglu else n
    if y.shape[1] != (len(inputs["gather"].get()) if "gather" in inputs else x.shape[1]):
        raise Unrecognized("rows that are not those of its tokens")
    if y.shape[2] != columns or call["ACTIVATION_REDUCTION_N"] not in (None, 2 if swiglu else 1):
        raise Unrecognized("another activation")
    axes: dict[str, int | None] = {"num_tokens": None, "num_experts": e, "K": k, "N": n, "num_columns": columns}
    if quantized:
        scale = call.tensor("WMxScale")
        axes |= {"B_rows": w.shape[1], "B_columns": w.shape[2]}
        axes |= {"scale_rows": scale.shape[1], "scale_columns": scale.shape[2]}
    gathered = "gather" in inputs
    axes |= {"num_rows": None} if gathered else {}
    row_axis = "num_rows" if gathered else "num_tokens"
    inputs = {
        name: TensorArg((row_axis,), arg.dtype, arg.value) if name == "row_weights" else arg
        for name, arg in inputs.items()
    }
    layout = "" if not quantized else f"_mxfp4{'_hopper' if call['SWIZZLE_MX_VALUE'] else ''}"
    word = f"{layout}{f'_gather{top_k}' if gathered else ''}{'_swiglu' if swiglu else ''}"
    word += f"{'_bias' if 'bias' in inputs else ''}{'_weighted' if 'row_weights' in inputs else ''}"
    swiglu_text = SWIGLU.format(alpha=float(call.number("alpha")), limit=float(call.number("limit"))) if swiglu else ""

    def output() -> torch.Tensor:
        inside = torch.arange(y.shape[1], device=y.device) < ends[-1]
        return y[0].where(inside[:, None], torch.zeros_like(y[0]))

    def used() -> tuple[int, int]:
        counts = require_values(ends, "rows of the experts").diff(prepend=ends.new_zeros(1))
        return int(counts.sum()), int((counts > 0).sum())

    return KernelInstance(
        name=f"moe_gemm_by_group_ends{word}{abbreviate(x.dtype, torch.bfloat16)}_e{e}_n{n}_k{k}",
        op_type="moe_gemm",
        axes=axes,
        inputs=inputs,
        outputs={"C": lazy_arg(y.dtype, (row_axis, "num_columns"), output)},
        reference=REFERENCE.format(
            weight=weight_text(call, n, k) if quantized else "",
            inputs=", ".join(inputs),
            shape=tuple(w.shape),
            rows="len(gather)" if gathered else "len(A)",
            n=n,
            e=e,
            tokens=f"gather[rows].to(torch.int64) // {top_k}" if gathered else "rows",
            matrix="weight(B[g], B_scale[g])" if quantized else "B[g].to(torch.float32)",
            bias=" + bias[g].to(torch.float32)" if "bias" in inputs else "",
            activation=swiglu_text,
            result="(C * row_weights[:, None].to(torch.float32))" if "row_weights" in inputs else "C",
            dtype=dtype_name(y.dtype),
        ),
        description="One matrix of each expert, for its rows, which are sorted by expert.",
        tags=("quantization:mxfp4",) if quantized else (),
        flops=lambda: 2 * used()[0] * n * k,
        touched=lambda: (
            used()[0] * (k * x.element_size() + columns * y.element_size()) + used()[1] * total_bytes(w[:1])
        ),
    )


@cost_function("moe_gemm")
def matmul_cost(inputs: CostInputs) -> Cost:
    counts = inputs.index("group_ends").diff(prepend=inputs.index("group_ends").new_zeros(1))
    rows, groups, sizes = int(counts.sum()), int((counts > 0).sum()), inputs.sizes
    read = rows * sizes["K"] * inputs["A"].element_size() + groups * distinct_bytes(inputs["B"][:1])
    return inputs.cost(read, 2 * rows * sizes["N"] * sizes["K"])


@valid_input("group_ends", op_types=("moe_gemm",))
def valid_ends(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Rising, the last one all rows; experts may have none."""
    rows = draft.size("num_rows") if "gather" in draft else draft.size("num_tokens")
    if rows is None:
        return None
    ends = draft.integers(0, rows + 1, draft.shape(name)).sort().values
    ends[-1:] = rows
    return ends


@valid_input("gather", op_types=("moe_gemm",))
def valid_gather(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Any row of A, whatever its number is divided by."""
    tokens = draft.size("num_tokens")
    return draft.integers(0, tokens, draft.shape(name)) if tokens else None


TABLES = ("ExptHist", "ExptOffs", "ExptData")


@replay_rule("triton::_matmul_ogs", "triton::_p_matmul_ogs")
class MatmulOgs(ReplayRule):
    """A graph that routes by itself leaves no Sample of it: each token gets other experts, drawn.

    `ExptData` has for each block of rows its expert, and its number among the expert's in the upper half; -1: none
    (`compute_expt_data` of triton_kernels/routing.py).
    """

    def chosen_experts(self, bound: BoundCall) -> torch.Tensor | None:
        return bound.content("ExptHist")

    def prepare(self, bound: BoundCall) -> None:
        tables = [name for name in TABLES if isinstance(bound[name], TensorSpec)]
        if not tables or all(bound.content(name) is not None for name in tables):
            return
        rows, experts = bound.spec("YPtr").shape[1], bound.spec("ExptHist").shape[0]
        top_k, block = bound["N_EXPTS_ACT"], bound["BLOCK_M"]
        if not isinstance(top_k, int) or not isinstance(block, int) or rows % top_k:
            raise Skip("no Sample holds the rows of its experts, nor is it known how many each token has")
        ids = drawn_experts(bound, rows // top_k, top_k, experts).flatten()
        counts = torch.bincount(ids, minlength=experts)
        blocks = (counts + block - 1) // block
        number = torch.arange(int(blocks.sum())) - (blocks.cumsum(0) - blocks).repeat_interleave(blocks)
        data = torch.full(bound.spec("ExptData").shape, -1, dtype=torch.int64)
        owners = torch.arange(experts).repeat_interleave(blocks)[: len(data)]
        data[: len(owners)] = owners + (number[: len(data)] << 16)
        bound.set_content("ExptHist", counts)
        bound.set_content("ExptOffs", torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
        bound.set_content("ExptData", data)
        order = ids.argsort(stable=True)
        for name, values in {"ExptOffsSum": blocks.sum(), "GatherIndx": order, "ScatterSrcIndx": order}.items():
            if isinstance(bound[name], TensorSpec):
                bound.set_content(name, values)
