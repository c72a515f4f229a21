"""The newer triton_kernels, as SGLang 0.5.15 and 0.5.23 have it: references against its kernels, interpreted."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched, randn
from interpreted import Launcher, folder_of, kernels

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for

TOKENS, TOP_K, EXPERTS, BLOCK = 5, 2, 32, 16
Arguments = dict[str, Any]


def launchers(*files: str, head: str = "") -> dict[str, Launcher]:
    """The kernels in these files of `triton_kernels`, which has them in some versions."""
    root = folder_of("triton_kernels")
    if root is None or not all((root / file).exists() for file in files):
        pytest.skip(f"no triton_kernels with {files[0]} is installed")
    return kernels("triton_kernels", *files, head=head)


def launch(launcher: Launcher, grid: tuple[int, ...], **call: Any) -> None:
    """With null for every argument that is missing and has no default."""
    parameters = inspect.signature(launcher.kernel.fn).parameters.items()
    launcher[grid](**{name: call.get(name, None if p.default is p.empty else p.default) for name, p in parameters})


@dataclass(frozen=True)
class Routing:
    """Experts of tokens by rising number, rows sorted by expert, and blocks of these."""

    ids: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor
    block_starts: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def drawn(cls, tokens: int, top_k: int, experts: int, seed: int = 0) -> Routing:
        scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
        ids = scores.argsort(-1)[:, :top_k].sort(-1).values
        counts = torch.bincount(ids.flatten(), minlength=experts)
        blocks = (counts + BLOCK - 1) // BLOCK
        words = [expert + (number << 16) for expert, n in enumerate(blocks.tolist()) for number in range(n)]
        schedule = torch.tensor([*words, -1, -1, -1], dtype=torch.int32)
        return cls(ids, ids.flatten().argsort(stable=True), counts.int(), starts(blocks).int(), schedule)


def starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


OGS, NEWEST = "matmul_ogs_details", "matmul_details"
HEAD = """_matmul_ogs_repr = _matmul_repr = matmul_launch_metadata = swiglu_repr = swiglu_launch_metadata = None
MXFP_BLOCK_SIZE = tl.constexpr(32)
NVFP_BLOCK_SIZE = tl.constexpr(16)


def cuda_capability_geq(*_):
    return False
"""
TABLES = {
    OGS: ("_matmul_ogs", "ExptHist", "ExptOffs", "ExptTileOffs", "ExptData"),
    NEWEST: ("_matmul", "XSliceSizes", "XSliceOffs", "XBlockOffs", "XBlockSchedule"),
}
CONSTANTS = {
    "ALLOW_TF32": False,
    "BLOCK_M": BLOCK,
    "BLOCK_N": 64,
    "BLOCK_K": 32,
    "GROUP_M": 1,
    "XCD_SWIZZLE": 1,
    "EVEN_K": True,
    "SPLIT_K": 1,
    "stride_y_k": 0,
    "NUM_SMS": 0,
    "EPILOGUE_SUBTILE": 1,
    "W_CACHE_MODIFIER": "",
    **dict.fromkeys(("X_TRANSPOSE", "W_TRANSPOSE", "FLEXPOINT_SATURATE_INF", "INIT_OUTPUT_TO_ZERO"), False),
    **dict.fromkeys(("PER_BATCH_W_SCALE", "PER_BATCH_OUT_SCALE", "PER_BATCH_ACC_SCALE"), False),
}
OGS_CONSTANTS = {**dict.fromkeys(("EXPT_IS_INNER", "X_IS_PADDED", "W_IS_PADDED"), False)}
NEWEST_CONSTANTS = {"RAGGED_DIMENSION": "M", "X_SLICE_SIZES_DIVISIBILITY": 1, "MX_BLOCK_SIZE": 32}
NEWEST_CONSTANTS |= {"SWIZZLE_MX_VALUE": "STRIDED", "SWIZZLE_MX_SCALE": "STRIDED"}


def product(package: str, up: bool, n: int = 64, k: int = 32) -> Arguments:
    """The arguments of gpt-oss's first product, which gathers tokens, or of its second one, which scatters."""
    routing, rows = Routing.drawn(TOKENS, TOP_K, EXPERTS), TOKENS * TOP_K
    x, w = randn(1, TOKENS if up else rows, k, seed=1), randn(EXPERTS, k, n, seed=2)
    y = torch.full((1, rows, n // 2 if up else n), 7.0, dtype=torch.bfloat16)
    _, *names = TABLES[package]
    tables = (routing.counts, starts(routing.counts).int(), routing.block_starts, routing.blocks)
    call: Arguments = {"Y": y, "YPtr": y, "X": x, "XPtr": x, "W": w, "WPtr": w, "B": randn(EXPERTS, n, seed=3)}
    call |= {"N": n, "K": k, "K_W": k, "batch_size": 1, "grid_m": len(routing.blocks), "grid_n": 1}
    call |= {"ACTIVATION_REDUCTION_N": 1, "N_EXPTS_TOT": EXPERTS, **dict(zip(names, tables, strict=True)), **CONSTANTS}
    if up:
        call |= {"GatherIndx": (routing.order // TOP_K).int(), "alpha": 1.702, "limit": 7.0}
        call["ACTIVATION_REDUCTION_N"] = 2
    else:
        call |= {"WriteBackIndx": routing.order.int(), "writeback_size": rows, "Gammas": torch.rand(rows)}
        call["WriteBackIndx"][-1] = -1
    return call | (OGS_CONSTANTS if package == OGS else NEWEST_CONSTANTS)


def strides(**tensors: torch.Tensor) -> dict[str, int]:
    axes = {"y": "zmn", "x": "zmk", "w": "ekn", "b": "en"}
    return {f"stride_{t}_{axis}": s for t, v in tensors.items() for axis, s in zip(axes[t], v.stride(), strict=True)}


@pytest.mark.parametrize("package", [OGS, NEWEST])
@pytest.mark.parametrize("up", [True, False])
def test_products_of_gathered_and_of_scattered_rows(package: str, up: bool) -> None:
    files = [f"{package}/_common.py", f"{package}/{TABLES[package][0]}.py"]
    found = launchers(*files, "numerics_details/flexpoint.py", "swiglu_details/_swiglu.py", head=HEAD)
    activation = {"ACTIVATION_FN": found["_swiglu_fn"].kernel, "activation_fn_args": (1.702, 7.0)} if up else {}

    def run(**call: Any) -> None:
        x, w = call["X"].float(), call["W"].float()  # the interpreter adds bfloat16 up by its bits
        sizes = strides(y=call["Y"], x=x, w=w, b=call["B"])
        launch(found[TABLES[package][0]], (call["grid_m"],), **{**call, **sizes, **activation, "X": x, "W": w})

    call = product(package, up)
    kernel = agrees(f"triton::{TABLES[package][0]}.s01234567", run, **call)
    words = "_gather_swiglu_bias" if up else "_bias_weighted_scatter"
    assert kernel.name == f"moe_gemm_by_group_ends{words}_e{EXPERTS}_n64_k32"
    fixed = [name for name in call if name in CONSTANTS or name in OGS_CONSTANTS or name in NEWEST_CONSTANTS]
    assert launched(f"triton::{TABLES[package][0]}", call, *fixed).key == kernel.key


@pytest.mark.parametrize("softmax", [True, False])
def test_experts_of_each_token(softmax: bool) -> None:
    """But for their order, which is the newest package's own."""
    launcher = launchers("topk_details/_topk_forward.py")["_topk_forward"]
    x, bits = randn(TOKENS, 40, dtype=torch.float32), torch.empty((2, 32), dtype=torch.uint32).T[:TOKENS]
    weights, ids = torch.empty(TOKENS, TOP_K), torch.empty(TOKENS, TOP_K, dtype=torch.int16)

    def run(**call: Any) -> None:
        sizes = {"stride_xm": 40, "stride_ym": TOP_K, "stride_rm": 1, "stride_rn": 32, "n_expts_tot": 40}
        launch(launcher, (1,), **call, **sizes, BLOCK_M=32, BLOCK_N=32, N_EXPTS_PAD=64, N_EXPTS_ACT=TOP_K)
        order = ids.argsort(-1)
        weights[:], ids[:] = weights.gather(-1, order), ids.gather(-1, order)

    call = {"X": x, "PeerYvs": (weights,), "PeerYis": (ids,), "PeerBits": (bits,), "n_rows": TOKENS, "dst_offs_m": 0}
    fixed = {"USE_PROVIDED_INDX": False, "APPLY_SOFTMAX": softmax}
    kernel = agrees("triton::_topk_forward", run, **call, **fixed)
    assert kernel.name == f"moe_routing{'_softmax_of_best' if softmax else ''}_by_expert_topk{TOP_K}_e40"
    assert launched("triton::_topk_forward", call | fixed, *fixed).key == kernel.key


def sums(x: torch.Tensor, dim: int, mask: torch.Tensor | None) -> Arguments:
    moved, out = x.movedim(dim, 0), torch.empty(x.select(dim, 0).shape, dtype=x.dtype)
    sizes = dict(zip(("K", "S0", "X_S1"), moved.shape, strict=True)) | {"Y_S1": x.shape[2]}
    names = ("stride_xr", "stride_x0", "stride_x1")
    call = {"X": x, "Y": out, "Mask": mask, **sizes, **dict(zip(names, moved.stride(), strict=True))}
    masked = dict.fromkeys(("stride_mr", "stride_m0", "stride_m1"), 0)
    if mask is not None:
        masked = dict(zip(masked, mask.movedim(dim, 0).stride(), strict=True))
    fixed = {"IS_MASK_NONE": mask is None, "IS_SCALE_NONE": True, "BLOCK_S0": 64, "BLOCK_X_S1": 128, "BLOCK_Y_S1": 128}
    fixed |= {"BROADCAST_R": masked["stride_mr"] == 0, "BROADCAST_S0": masked["stride_m0"] == 0}
    return {**call, **masked, "stride_y0": x.shape[2], "stride_y1": 1, **fixed, "BROADCAST_S1": True}


@pytest.mark.parametrize(("dim", "masked"), [(1, True), (1, False), (0, False)])
def test_sums_of_rows(dim: int, masked: bool) -> None:
    launcher = launchers("numerics_details/flexpoint.py", "reduce.py", head="reduce_launch_metadata = None\n")
    if "_reduce" not in launcher:
        pytest.skip("its sums are another kernel's")
    x = randn(3, 4, 96, dtype=torch.float16)
    x[0, 1, 2] = float("nan") if masked else 1.0
    mask = (torch.arange(12).reshape(3, 4) % 3 != 1)[..., None].expand(3, 4, 96) if masked else None
    call = sums(x, dim, mask)
    kernel = agrees("triton::_reduce", lambda **call: launch(launcher["_reduce"], (1, 1), **call), **call)
    word = "moe_sum" if dim else "moe_sum_rows"
    assert kernel.name == f"{word}{'_used' * masked}_fp16{'_topk4' if dim else '_parts3'}_h96"
    assert launched("triton::_reduce", call, "IS_MASK_NONE").key == kernel.key


def bits_of(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Sets of experts, 32 to a word, column by column as the kernels have them."""
    words = torch.zeros(len(ids), experts // 32, dtype=torch.int64).scatter_add_(1, ids // 32, 1 << ids % 32)
    columns = torch.zeros((experts // 32, -(-len(ids) // 32) * 32), dtype=torch.int32)
    columns[:, : len(ids)] = words.to(torch.int32).T
    return columns.view(torch.uint32).T[: len(ids)]


BITMATRIX, SUM_BITMATRIX = "tensor_details/bitmatrix.py", "tensor_details/bitmatrix_details/sum_bitmatrix_rows.py"
SIZES = [(5, 2, 32), (70, 4, 64), (33, 1, 32)]


def counting(tokens: int, top_k: int, experts: int) -> tuple[torch.Tensor, Arguments]:
    ids = Routing.drawn(tokens, top_k, experts).ids
    partial = torch.full((experts, -(-tokens // 128) * 4), 9, dtype=torch.int32).T
    bits, counts = bits_of(ids, experts), torch.zeros(experts, dtype=torch.int32)
    call = {"B": bits, "shape_bm": tokens, "Out": counts, "OutPartials": partial, "stride_bm": 1, "BLOCK_M": 32}
    call |= {"stride_bn": bits.stride(1), "stride_pm": 1, "stride_pn": partial.stride(1), "shape_pn": experts}
    return ids, {**call, "BLOCK_MM": 128}


def starting(partial: torch.Tensor, counts: torch.Tensor, slots: int) -> Arguments:
    call: Arguments = {"PartialColSum": partial, "ColSum": counts, "ColOffs": torch.full_like(counts, 9)}
    call |= {"CombinedIndx": torch.full((2 * slots,), 9, dtype=torch.int32), "n_combined_indx": 2 * slots}
    call |= {"shape_pm": len(partial), "stride_pm": 1, "stride_pn": partial.stride(1), "n_cols": len(counts)}
    return {**call, "sentinel": -1, "BLOCK": 64, "BLOCK_M": 512, "BLOCK_N": 512}


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SIZES)
def test_slots_are_sorted_by_expert(tokens: int, top_k: int, experts: int) -> None:
    """The three launches one after another. A token with an expert less leaves the last row as it was."""
    count = launchers(SUM_BITMATRIX)["_sum_bitmatrix_rows"]
    found = launchers(BITMATRIX)
    ids, call = counting(tokens, top_k, experts)
    grid, memset = (-(-tokens // 128), experts // 32), experts + 1 + -(-2 * ids.numel() // 64)
    agrees("triton::_sum_bitmatrix_rows", lambda **call: launch(count, grid, **call), **call)
    partial, counts = call["OutPartials"][: -(-tokens // 32)], call["Out"]
    assert counts.tolist() == torch.bincount(ids.flatten(), minlength=experts).tolist()
    call = starting(partial, counts, ids.numel())
    stage1, stage2 = (found[f"_bitmatrix_metadata_compute_stage{stage}"] for stage in (1, 2))
    kernel = agrees("triton::_bitmatrix_metadata_compute_stage1", lambda **c: launch(stage1, (memset,), **c), **call)
    assert kernel.name == f"moe_align_starts_e{experts}_c{experts}"
    slots, rows = call["CombinedIndx"].chunk(2)
    ids[-1, -1] = -1
    call = {"ColSortedIndx": slots, "RowSortedIndx": rows, "NonzeroIndx": ids.to(torch.int16), "n_tokens": tokens}
    call |= {"ColPartialSum": partial, "stride_pm": 1, "stride_pn": partial.stride(1), "ColOffs": starts(counts)[:-1]}
    call |= {"ColOffs": starts(counts)[:-1].int(), "TOKS_PER_ROW": top_k, "BLOCK_PER_TOK": 32}
    grid = (len(partial),)
    kernel = agrees("triton::_bitmatrix_metadata_compute_stage2", lambda **call: launch(stage2, grid, **call), **call)
    assert kernel.name == f"moe_align_rows_topk{top_k}_e{experts}_c{experts}_bs32"
    order = ids.flatten().where(ids.flatten() >= 0, experts).argsort(stable=True)[:-1]
    assert slots[slots >= 0].tolist() == order.tolist() and rows[order].tolist() == rows[rows >= 0].sort()[0].tolist()
    fixed = launched("triton::_bitmatrix_metadata_compute_stage2", call, "TOKS_PER_ROW", "BLOCK_PER_TOK")
    assert fixed.key == kernel.key


@pytest.mark.parametrize("counts", [[3, 0, 40, 1], [0] * 3 + [16], [1] * 32, [129, 128, 0, 1]])
def test_blocks_of_rows(counts: list[int]) -> None:
    """For blocks of 16, 32, 64 and 128 rows. Tables are cut out of wider ones."""
    found = launchers("tensor_details/ragged_tensor.py")
    e, rows = len(counts), sum(counts)
    width = rows if rows <= e else e - 1 - (e - rows - 1) // 16
    tables, blocks = torch.full((5, 512), 9, dtype=torch.int32), torch.full((4, 512), 9, dtype=torch.int32)
    schedule, sizes = blocks[:, :width], torch.tensor(counts, dtype=torch.int32)
    fixed = {"first_block_size_log2": 4, "SIZES": 4, "BLOCK": 512}
    call = {"SliceSizes": sizes, "n_slices": e, "BlockOffs": tables[:, : e + 1], "BlockSchedule": schedule}
    call |= {"slice_offs_stride_m": 512, **fixed}
    memset, compute = (found[f"_ragged_tensor_metadata_{name}"] for name in ("memset", "compute"))
    kernel = agrees("triton::_ragged_tensor_metadata_memset", lambda **c: launch(memset, (9,), **c), **call)
    assert kernel.name == f"moe_align_block_starts_e{e}_n4_bs16"
    call = {"SliceSizes": sizes, "BlockOffs": tables[1:, : e + 1], "BlockSchedule": schedule, **fixed}
    call |= {"block_offs_stride_m": 512, "block_schedule_stride_m": 512}
    kernel = agrees("triton::_ragged_tensor_metadata_compute", lambda **c: launch(compute, (4 * e,), **c), **call)
    assert kernel.name == f"moe_align_blocks_e{e}_n4_bs16"
    assert launched("triton::_ragged_tensor_metadata_compute", call, "SIZES", "BLOCK").key == kernel.key
    expected = [expert + (number << 16) for expert, n in enumerate(counts) for number in range(-(-n // 16))]
    assert schedule[0].tolist() == expected + [-1] * (width - len(expected))


def test_what_is_not_modelled_is_declined() -> None:
    x = randn(3, 4, 96)
    call = sums(x, 1, torch.ones(3, 4, 1, dtype=torch.bool).expand(3, 4, 96))
    assert not declined("triton::_reduce", **call)
    whole = torch.ones(3, 4, 96, dtype=torch.bool)
    others: list[Arguments] = [{"Mask": whole}, {"Scale": x}, {"YMx": x}, {"XFlex": x}, {"alpha": 1.0}, {"S0": 2}]
    assert all(
        declined("triton::_reduce", **call | other) for other in (*others, {"Y": x[0].T}, {"Y": x[:, 0].float()})
    )
    assert declined("triton::_reduce", **sums(x, 2, None)) and declined("triton::_reduce", **sums(x, 0, whole))
    _, call = counting(5, 2, 32)
    others = [
        {"Out": call["Out"][:30]},
        {"shape_bm": 4},
        {"shape_bm": torch.tensor([5]).to("meta")},
        {"OutPartials": None},
    ]
    assert all(declined("triton::_sum_bitmatrix_rows", **call | other) for other in others)
    call = starting(call["OutPartials"], call["Out"], 10)
    others = [{"stride_pm": 32}, {"shape_pm": 1}, {"n_cols": 8}, {"n_combined_indx": 4}, {"ColOffs": x}]
    assert all(declined("triton::_bitmatrix_metadata_compute_stage1", **call | other) for other in others)
    ranks = {"PeerYvs": (x[0],), "PeerYis": (x[0, :, :2].short(),), "PeerBits": (x[0, :, :3].int(),)}
    call = {"X": x[0], **ranks, "n_rows": 4, "APPLY_SOFTMAX": True}
    assert not declined("triton::_topk_forward", **call)
    for other in ({name: 2 * tensors for name, tensors in ranks.items()}, {"dst_offs_m": 4}, {"n_rows": 3}):
        assert declined("triton::_topk_forward", **call | other), other


def test_names_and_costs() -> None:
    """Of blocks those are counted that are written; the schedules are longer."""
    counts = torch.tensor([3, 0, 40, 129], dtype=torch.int32)
    tables = {"SliceSizes": counts, "BlockOffs": torch.zeros(4, 5, dtype=torch.int32)}
    call = {**tables, "BlockSchedule": torch.zeros(4, 40, dtype=torch.int32), "SIZES": 4, "first_block_size_log2": 4}
    kernel = kernel_of("triton::_ragged_tensor_metadata_compute", **call)
    inputs, cost = {name: slot.get() for name, slot in kernel.inputs.items()}, cost_function_for("moe_align_blocks")
    assert cost is not None and kernel.touched is not None
    blocks = (1 + 3 + 9) + (1 + 2 + 5) + (1 + 1 + 3) + (1 + 1 + 2)
    assert cost(CostInputs(checked(kernel), inputs)).bytes == kernel.touched() == 4 * (4 + 4 * 5 + blocks)
    assert checked(kernel).written_inputs == {"block_schedule": "block_schedule_out"}
    call = starting(torch.zeros(32, 4, dtype=torch.int32).T, torch.zeros(32, dtype=torch.int32), 10)
    definition = checked(kernel_of("triton::_bitmatrix_metadata_compute_stage1", **call))
    assert definition.written_inputs == {"block_counts": "block_starts", "slots": "slots_out"}
