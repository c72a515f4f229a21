"""The newer triton_kernels, as SGLang 0.5.15 and 0.5.23 have it: references against its kernels, interpreted."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agreement import agrees, launched, randn
from interpreted import Launcher, folder_of, kernels

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
