"""moe_gemm by OpenAI's `matmul_ogs`, which runs gpt-oss on Hopper: one matrix of each expert, for its rows.

Rows are sorted by expert: those of expert g end at `group_ends[g]`; `gather` says which token each is of, `scatter`
where its product goes. An MXFP4 weight has two numbers to a byte along K and an exponent for each 32 of them. On Hopper
both lie as its tensor cores read them (`HOPPER_VALUE`, `HOPPER_SCALE`: triton_kernels/tensor_details/layout_details),
the exponents by the number of warps, and the reference puts them back. SwiGLU as gpt-oss has it may follow, columns in
turn.

vLLM's kernel counts the experts of each token (`N_EXPTS_ACT`), by which it divides `GatherIndx`; the newer one, which
SGLang has, takes tokens there.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.moe.align import drawn_experts
from kcap.schemas.derive.index_arguments import set_zeros
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
{epilogue}    return C.to(torch.{dtype})
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
WEIGHTS = "    C = C * row_weights[:, None].to(torch.float32)\n"
SCATTER = """    written = (torch.arange(len(scatter), device=A.device) < group_ends[-1]) & (scatter >= 0)
    C = torch.zeros_like(C).index_copy(0, scatter[written].to(torch.int64), C[written])
"""
WORDS = {"bias": "bias", "weighted": "row_weights", "scatter": "scatter"}

COUNTS, STARTS = ("ExptHist", "XSliceSizes"), ("ExptOffs", "XSliceOffs")  # as the newest package calls them, too
BLOCK_STARTS, BLOCKS = ("ExptTileOffs", "XBlockOffs"), ("ExptData", "XBlockSchedule")
STRIDED = (None, "STRIDED")  # the layout of a matrix as torch has it
UNMODELLED = (
    *("XMxScale", "XScale", "WScale", "YExpectedScale", "YActualScale", "YChecksumScale", "OutAcc", "Betas"),
    *("out_alpha", "EPILOGUE_FN", "IS_EPILOGUE_QUANT_MXFP8", "IS_EPILOGUE_QUANT_MX", "EXPT_IS_INNER", "pYPtrs"),
    *("XTensorScale", "WTensorScale", "W_SHUFFLED"),
)


@family("moe_gemm", "triton::_matmul_ogs", "triton::_p_matmul_ogs", "triton::_matmul", "triton::_p_matmul")
def matmul_ogs(call: Invocation) -> KernelInstance:
    """`XPtr`: [1, tokens, K], `WPtr`: [experts, …], `YPtr`: [1, num_rows, N or N / 2], indices: [num_rows].

    `_p_matmul_ogs` is the persistent kernel. Parts of K that a second kernel adds up, quantized inputs or outputs, and
    a scatter of the kernel that counts the experts of each token are declined.
    """
    top_k = int(call.number("N_EXPTS_ACT")) if "N_EXPTS_ACT" in call.arguments else None
    call.refuse(*UNMODELLED, *(() if top_k is None else ("WriteBackIndx",)))
    x, w, y = (call.tensor(name) for name in ("XPtr", "WPtr", "YPtr"))
    n, k, e = int(call.number("N")), int(call.number("K")), int(call.number("N_EXPTS_TOT"))
    if x.dim() != 3 or len(x) != 1 or y.dim() != 3 or len(y) != 1 or len(w) != e:
        raise Unrecognized("not one product for the rows of each expert")
    if call["SPLIT_K"] not in (None, 1) or call["RAGGED_DIMENSION"] not in (None, "M"):
        raise Unrecognized("parts of K")
    gather, scatter, gammas = (call.optional(name) for name in ("GatherIndx", "WriteBackIndx", "Gammas"))
    if scatter is not None and call["writeback_size"] != len(scatter):
        raise Unrecognized("it scatters some of its rows")
    rows = "num_tokens" if gather is None else "num_rows"
    inputs = {"A": tensor_arg(x[0], "num_tokens", "K"), **weight_inputs(call, w)}
    if (bias := call.optional("B")) is not None:
        inputs["bias"] = tensor_arg(bias, "num_experts", "N")
    ends = group_ends(call, e)
    inputs["group_ends"] = lazy_arg("int32", ("num_experts",), lambda: require_values(ends, "rows of the experts"))
    if gather is not None:
        token = "Token times the experts of each" if top_k else "Token"
        inputs["gather"] = tensor_arg(gather, rows, description=f"{token}, by row.")
    if gammas is not None:
        inputs["row_weights"] = tensor_arg(gammas.reshape(-1), rows)
    if scatter is not None:
        inputs["scatter"] = tensor_arg(scatter, rows, description="Of each row the row of C that it becomes; -1: none.")
    return _instance(call, inputs, (n, k, e), ends, rows, top_k)


def weight_inputs(call: Invocation, w: torch.Tensor) -> dict[str, TensorArg]:
    """B, and of an MXFP4 one its exponents. A Definition has no uint8: they are int8 of the same bits."""
    scale = call["WMxScale"]
    if scale is None:
        if w.dtype not in FLOATS or call["SWIZZLE_MX_VALUE"] not in STRIDED:
            raise Unrecognized("its weight is quantized")
        return {"B": tensor_arg(w, "num_experts", "K", "N")}
    if not isinstance(scale, torch.Tensor):
        raise Unrecognized("its scales are an object of triton_kernels, which a Recording has no values of")
    packed = w.dtype == torch.uint8 and call["W_TRANSPOSE"] is True and call["MX_BLOCK_SIZE"] in (None, 32)
    if scale.dtype != torch.uint8 or not packed:
        raise Unrecognized("its weight is not MXFP4 along K")
    return {
        "B": tensor_arg(w.view(torch.int8), "num_experts", "B_rows", "B_columns", description="Two numbers to a byte."),
        "B_scale": tensor_arg(scale.view(torch.int8), "num_experts", "scale_rows", "scale_columns"),
    }


def weight_text(call: Invocation, n: int, k: int) -> str:
    """The function `weight` of a reference, for an MXFP4 weight in the layouts that the kernel was compiled for."""
    value, scale, warps = call["SWIZZLE_MX_VALUE"], call["SWIZZLE_MX_SCALE"], call["num_warps"]
    values = {**dict.fromkeys(STRIDED, PLAIN_VALUES), "HOPPER_VALUE": HOPPER_VALUES}.get(value)
    exponents = {**dict.fromkeys(STRIDED, PLAIN_EXPONENTS), "HOPPER_SCALE": HOPPER_EXPONENTS}.get(scale)
    if values is None or exponents is None:
        raise Unrecognized(f"its weight lies in the layouts {value} and {scale}")
    if scale not in STRIDED and not isinstance(warps, int):
        raise Unrecognized("its scales lie by the number of warps, which is not known")
    return MXFP4.format(values=values, exponents=exponents.format(warps=warps), k=k, n=n)


def group_ends(call: Invocation, experts: int) -> torch.Tensor:
    """Where each expert's rows end, int32; without data where they were not sampled."""
    starts, counts = call.tensor(*STARTS), call.tensor(*COUNTS)
    if starts.is_meta or counts.is_meta:
        return torch.empty(experts, dtype=torch.int32, device="meta")
    return (starts[:experts] + counts[:experts]).to(torch.int32)


def _instance(
    call: Invocation,
    inputs: dict[str, TensorArg],
    sizes: tuple[int, int, int],
    ends: torch.Tensor,
    row_axis: str,
    top_k: int | None,
) -> KernelInstance:
    """`top_k`: by which `gather` is divided, if it is."""
    (n, k, e), y, w, x = sizes, call.tensor("YPtr"), call.tensor("WPtr"), call.tensor("XPtr")
    swiglu, quantized, gathered = "alpha" in call.arguments, "B_scale" in inputs, "gather" in inputs
    columns = n // 2 if swiglu else n
    if y.shape[1] != (len(inputs["gather"].get()) if gathered else x.shape[1]):
        raise Unrecognized("rows that are not those of its tokens")
    if y.shape[2] != columns or call["ACTIVATION_REDUCTION_N"] not in (None, 2 if swiglu else 1):
        raise Unrecognized("another activation")
    axes: dict[str, int | None] = {"num_tokens": None, "num_experts": e, "K": k, "N": n, "num_columns": columns}
    if quantized:
        scale = call.tensor("WMxScale")
        axes |= {"B_rows": w.shape[1], "B_columns": w.shape[2]}
        axes |= {"scale_rows": scale.shape[1], "scale_columns": scale.shape[2]}
    axes |= {"num_rows": None} if gathered else {}
    layout = "" if not quantized else f"_mxfp4{'' if call['SWIZZLE_MX_VALUE'] in STRIDED else '_hopper'}"
    word = f"{layout}{f'_gather{top_k or str()}' * gathered}{'_swiglu' * swiglu}"
    word += "".join(f"_{name}" for name, argument in WORDS.items() if argument in inputs)

    def output() -> torch.Tensor:
        written = torch.arange(y.shape[1], device=y.device) < ends[-1]
        if "scatter" in inputs:
            places = inputs["scatter"].get()
            places = places[written & (places >= 0)].to(torch.int64)
            written = torch.zeros_like(written).index_fill(0, places, True)
        return y[0].where(written[:, None], torch.zeros_like(y[0]))

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
            tokens=f"gather[rows].to(torch.int64){f' // {top_k}' if top_k else ''}" if gathered else "rows",
            matrix="weight(B[g], B_scale[g])" if quantized else "B[g].to(torch.float32)",
            bias=" + bias[g].to(torch.float32)" if "bias" in inputs else "",
            epilogue=epilogue_text(call, inputs),
            dtype=dtype_name(y.dtype),
        ),
        description="One matrix of each expert, for its rows, which are sorted by expert.",
        tags=("quantization:mxfp4",) if quantized else (),
        flops=lambda: 2 * used()[0] * n * k,
        touched=lambda: (
            used()[0] * (k * x.element_size() + columns * y.element_size()) + used()[1] * total_bytes(w[:1])
        ),
    )


def epilogue_text(call: Invocation, inputs: dict[str, TensorArg]) -> str:
    """What a reference makes of the products before it returns them."""
    swiglu = "alpha" in call.arguments
    text = SWIGLU.format(alpha=float(call.number("alpha")), limit=float(call.number("limit"))) if swiglu else ""
    return text + (WEIGHTS if "row_weights" in inputs else "") + (SCATTER if "scatter" in inputs else "")


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


@valid_input("scatter", op_types=("moe_gemm",))
def valid_scatter(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """A row of C for each."""
    (rows,) = draft.shape(name)
    return draft.distinct(rows, rows)


ROW_INDICES = ("GatherIndx", "ScatterSrcIndx", "WriteBackIndx")
BLOCK_TABLES = (*BLOCK_STARTS, *BLOCKS, "ExptOffsSum")


@replay_rule("triton::_matmul_ogs", "triton::_p_matmul_ogs", "triton::_matmul", "triton::_p_matmul")
class MatmulOgs(ReplayRule):
    """A graph that routes by itself leaves no Sample of it: each token gets other experts, drawn.

    `ExptData` has for each block of rows its expert, and its number among the expert's in the upper half; -1: none
    (`compute_expt_data` of triton_kernels/routing.py). Where nothing says how many experts a token has, each row's is
    drawn by itself.
    """

    def chosen_experts(self, bound: BoundCall) -> torch.Tensor | None:
        return next((counts for name in COUNTS if (counts := bound.content(name)) is not None), None)

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "GatherDstIndx")  # the kernel does not read it
        tables = [n for n in (*COUNTS, *STARTS, *ROW_INDICES, *BLOCK_TABLES) if isinstance(bound[n], TensorSpec)]
        missing = [name for name in tables if bound.content(name) is None]
        if not missing or tables[0] not in COUNTS or bound["EXPT_IS_INNER"] or bound["RAGGED_DIMENSION"] == "K":
            return
        if not set(missing) <= set(BLOCK_TABLES):
            draw_rows(bound, tables[0])
            missing = tables
        counts, block = bound.contents[str(bound.index(tables[0]))].to(torch.int64), bound["BLOCK_M"]
        if not isinstance(block, int):
            raise Skip("the rows of its blocks are not known")
        blocks = (counts + block - 1) // block
        starts = torch.nn.functional.pad(blocks.cumsum(0), (1, 0))
        number = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(blocks)
        owners = torch.arange(len(counts)).repeat_interleave(blocks) + (number << 16)
        for name in set(missing) & set(BLOCK_TABLES):
            if name in BLOCKS:
                length = bound.spec(name).numel
                bound.set_content(
                    name, torch.nn.functional.pad(owners[:length], (0, length - len(owners[:length])), value=-1)
                )
            else:
                bound.set_content(name, starts if name in BLOCK_STARTS else starts[-1])


def draw_rows(bound: BoundCall, counts_name: str) -> None:
    """Draw the experts of each token, and sort the rows by them."""
    rows, experts, top_k = bound.spec("YPtr").shape[-2], bound.spec(counts_name).shape[0], bound["N_EXPTS_ACT"]
    gathers_tokens = top_k is None and isinstance(bound["GatherIndx"], TensorSpec)
    if top_k is None:
        top_k = rows // max(bound.spec("XPtr").shape[-2], 1) if gathers_tokens else 1
    if not isinstance(top_k, int) or not top_k or rows % top_k:
        raise Skip("no Sample holds the rows of its experts, nor is it known how many each token has")
    ids = drawn_experts(bound, rows // top_k, top_k, experts).flatten()
    counts, order = torch.bincount(ids, minlength=experts), ids.argsort(stable=True)
    values = dict.fromkeys(COUNTS, counts) | dict.fromkeys(STARTS, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    values |= dict.fromkeys(ROW_INDICES, order) | ({"GatherIndx": order // top_k} if gathers_tokens else {})
    for name in values:
        if isinstance(bound[name], TensorSpec):
            bound.set_content(name, values[name])
