"""Kernels of OpenAI's triton_kernels: experts of each token, sums of rows, replay that stays inside its buffers."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn

from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.bound_call import BoundCall, replay_rule_for
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec


@pytest.mark.parametrize("softmax", [False, True])
def test_experts_of_each_token_by_number(softmax: bool) -> None:
    for seed, (tokens, e, k) in enumerate([(1, 32, 4), (7, 128, 4), (33, 40, 2)]):
        words = -(-e // 32)
        x, bits = randn(tokens, e, seed=seed), torch.empty((words, 64), dtype=torch.uint32).T[:tokens]
        results = {"Yv": torch.empty(tokens, k, dtype=x.dtype), "Yi": torch.empty(tokens, k, dtype=torch.int16)}

        def run(X: torch.Tensor, Yv: torch.Tensor, Yi: torch.Tensor, Bits: torch.Tensor, **_: Any) -> None:
            for token, row in enumerate(X.double().tolist()):
                best = sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[: Yi.shape[1]])
                values = torch.tensor([row[i] for i in best], dtype=torch.float64)
                Yi[token] = torch.tensor(best)
                Yv[token] = values.softmax(0) if softmax else values
                for word in range(Bits.shape[1]):
                    Bits[token, word] = sum(1 << i % 32 for i in best if i // 32 == word)

        fixed = {"USE_PROVIDED_INDX": False, "APPLY_SOFTMAX": softmax, "n_rows": tokens, "n_expts_tot": e}
        kernel = agrees("triton::_topk_forward.s704c409d", run, X=x, **results, Bits=bits, **fixed)
        assert kernel.name == f"moe_routing_bf16{'_softmax_of_best' if softmax else ''}_by_expert_topk{k}_e{e}"
        assert declined("triton::_topk_forward", X=x, **results, Bits=bits, **{**fixed, "USE_PROVIDED_INDX": True})
        stored, fixed = bits.T.new_zeros(words, 64), {**fixed, "stride_rm": 1, "stride_rn": 64}

        def run_stored(PeerBits: tuple[torch.Tensor], **call: Any) -> None:
            run(Bits=PeerBits[0].T[: len(call["X"])], **call)

        of_sglang = agrees("triton::_topk_forward", run_stored, X=x, **results, PeerBits=(stored,), **fixed)
        assert of_sglang.key == kernel.key and of_sglang.outputs["expert_bits"].get().shape == (tokens, words)


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_of_each_token_are_added_up(parts: int) -> None:
    x, out = randn(parts, 1, 12, 64), torch.empty(1, 4, 64, dtype=torch.bfloat16)
    index = torch.tensor([[0, 5, 2], [1, -1, 11], [-1, -1, -1], [3, 4, 6]], dtype=torch.int32)

    def run(X: torch.Tensor, Out: torch.Tensor, InIndx: torch.Tensor | None, **_: Any) -> None:
        for token, own in enumerate([[i] for i in range(12)] if InIndx is None else InIndx.tolist()):
            Out[0, token] = X[:, 0, [i for i in own if i >= 0]].double().sum((0, 1))

    kernel = agrees("triton::_reduce_grouped.unread", run, X=x, Out=out, InIndx=index, XScale=None)
    assert kernel.name == f"moe_sum_rows_parts{parts}_topk3_h64"
    whole = torch.empty(1, 12, 64, dtype=torch.bfloat16)
    assert agrees("triton::_reduce_grouped", run, X=x, Out=whole, InIndx=None).name == f"moe_sum_rows_parts{parts}_h64"
    assert declined("triton::_reduce_grouped", X=x, Out=out, InIndx=index, alpha=1.702, limit=7.0)


def test_names_of_gpt_oss() -> None:
    x, bits = torch.empty(64, 128, device="meta"), torch.empty(64, 4, dtype=torch.uint32, device="meta")
    tensors = {"X": x, "Yv": x[:, :4], "Yi": x[:, :4].to(torch.int16), "Bits": bits}
    definition = checked(kernel_of("triton::_topk_forward", **tensors, APPLY_SOFTMAX=True, n_rows=64))
    assert definition.var_axes == ["seq_len"] and definition.outputs["topk_ids"].dtype == "int16"


@pytest.mark.parametrize(("tokens", "e", "k", "recorded"), [(1, 32, 4, False), (70, 128, 4, True), (200, 32, 2, False)])
def test_replayed_routing_writes_every_row_once(tokens: int, e: int, k: int, recorded: bool) -> None:
    """As `_routing_compute_indx` and `_expt_data_compute` place what they write."""
    tiles = e - 1 - ((e - tokens * k - 1) // 16) if tokens * k > e else tokens * k
    shapes = {
        "ExptIndx": ((tokens, k), "int16"),
        "PartialOffs": ((-(-tokens // 32), e), "int32"),
        "TokensStart": ((e,), "int32"),
        "Hist": ((e,), "int32"),
        "MDTileStarts": ((4, e + 1), "int32"),
        "MDTileInfo": ((4, tiles), "int32"),
        "GatherIndx": ((tokens * k,), "int32"),
        "ScatterIndx": ((tokens * k,), "int32"),
    }
    args = [Argument(name=n, value=TensorSpec(s, d, storage=i)) for i, (n, (s, d)) in enumerate(shapes.items())]
    bound = BoundCall("triton::_combined_routing_compute", [*args, Argument(name="first_tile_dim_log2", value=4)])
    if recorded:
        bound.set_content("ExptIndx", torch.rand(tokens, e).argsort(-1)[:, :k].sort().values.to(torch.int16))
    replay_rule_for(bound.operator).prepare(bound)
    values = {name: bound.content(name) for name in shapes}
    assert all(content is not None and content.shape == shapes[name][0] for name, content in values.items())
    ids, partial, starts = (values[name].tolist() for name in ("ExptIndx", "PartialOffs", "TokensStart"))  # type: ignore[union-attr]
    places, seen = [], torch.zeros(e, dtype=torch.int64)
    for token, chosen in enumerate(ids):
        seen = seen if token % 32 else torch.zeros_like(seen)
        for expert in chosen:
            places.append(partial[token // 32][expert] + starts[expert] + int(seen[expert]))
            seen[expert] += 1
    assert sorted(places) == list(range(tokens * k))
    ends = values["MDTileStarts"][:, -1]  # type: ignore[index]
    assert int(ends.max()) <= tiles


def mixed(*shape: int, low: int, high: int) -> torch.Tensor:
    """Bytes of [low, high) that look random."""
    numbers = torch.arange(torch.Size(shape).numel()) * 2654435761 % (1 << 32) >> 13
    return (low + numbers % (high - low)).to(torch.uint8).reshape(shape)


def product(rows: int, n: int, k: int, **other: Any) -> dict[str, Any]:
    """The arguments of a product for two experts, of which the first has four rows."""
    return {
        "YPtr": torch.full((1, rows, n), 7.0, dtype=torch.bfloat16),
        "N": n,
        "K": k,
        "N_EXPTS_TOT": 2,
        "N_EXPTS_ACT": 2,
        "ExptHist": torch.tensor([4, rows - 4], dtype=torch.int32),
        "ExptOffs": torch.tensor([0, 4, rows], dtype=torch.int32),
        "SPLIT_K": 1,
        "ACTIVATION_REDUCTION_N": 1,
        **dict.fromkeys(("B", "Gammas", "GatherIndx", "WMxScale", "SWIZZLE_MX_VALUE", "SWIZZLE_MX_SCALE")),
        **other,
    }


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
def test_products_of_sorted_rows(swiglu: bool, gathers: bool) -> None:
    rows, n, k = 10, 64, 32
    x, w, bias, gammas = randn(1, 5 if gathers else rows, k), randn(2, k, n), randn(2, n, seed=1), torch.rand(rows)
    index = torch.randperm(rows, generator=torch.Generator().manual_seed(2)).int()
    other: dict[str, Any] = {"XPtr": x, "WPtr": w, "B": bias, "Gammas": gammas}
    other |= {"GatherIndx": index} if gathers else {}
    other |= {"alpha": 1.702, "limit": 7.0, "ACTIVATION_REDUCTION_N": 2} if swiglu else {}
    call_arguments = product(rows, n, k, **other)
    if swiglu:
        call_arguments["YPtr"] = torch.empty(1, rows, n // 2, dtype=torch.bfloat16)

    def run(YPtr: torch.Tensor, **_: Any) -> None:
        for row in range(rows):
            expert, token = int(row >= 4), int(index[row]) // 2 if gathers else row
            c = x[0, token].double() @ w[expert].double() + bias[expert].double()
            gate, up = c[::2].clamp(max=7.0), c[1::2].clamp(-7.0, 7.0)
            YPtr[0, row] = (gate * torch.sigmoid(1.702 * gate) * (up + 1) if swiglu else c) * gammas[row]

    kernel = agrees("triton::_matmul_ogs.s1dab747c", run, **call_arguments)
    words = f"{'_gather2' if gathers else ''}{'_swiglu' if swiglu else ''}_bias_weighted"
    assert kernel.name == f"moe_gemm_by_group_ends{words}_e2_n{n}_k{k}"
    assert callable(kernel.flops) and kernel.flops() == 2 * rows * n * k
    for other in ({"WriteBackIndx": index, "writeback_size": rows}, {"OutAcc": x}, {"YExpectedScale": gammas}):
        assert declined("triton::_matmul_ogs", **call_arguments | other), other


def test_products_of_the_newer_package_are_scattered() -> None:
    """Those of the rows that belong to an expert and have a place; the others are never written."""
    rows, n, k = 10, 64, 32
    x, w, places = randn(1, rows, k), randn(2, k, n), torch.tensor([3, -1, 0, 5, 6, 7, 8, 1, 2, 3]).int()
    call_arguments = product(rows, n, k, XPtr=x, WPtr=w, WriteBackIndx=places, writeback_size=rows)
    del call_arguments["N_EXPTS_ACT"]
    call_arguments["ExptHist"][1] = 5

    def run(YPtr: torch.Tensor, **_: Any) -> None:
        for row in (0, 2, 3, 4, 5, 6, 7, 8):
            YPtr[0, places[row]] = x[0, row].double() @ w[int(row >= 4)].double()

    kernel = agrees("triton::_matmul_ogs", run, **call_arguments)
    assert kernel.name == f"moe_gemm_by_group_ends_scatter_e2_n{n}_k{k}"
    inputs = {name: slot.get() for name, slot in kernel.inputs.items()}
    cost = cost_function_for("moe_gemm")
    assert cost is not None and cost(CostInputs(checked(kernel), inputs)).flops == 2 * 9 * n * k
    others = ({"writeback_size": 5}, {"EXPT_IS_INNER": True}, {"RAGGED_DIMENSION": "K"}, {"pYPtrs": places})
    for other in (*others, {"WTensorScale": w}, {"IS_EPILOGUE_QUANT_MX": True}):
        assert declined("triton::_matmul_ogs", **call_arguments | other), other


NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_a_weight_of_mxfp4_by_columns() -> None:
    """Two numbers to a byte, the first in the low half, and an exponent for each 32."""
    n, k = 8, 64
    w, scale = mixed(2, n, k // 2, low=0, high=256).mT, mixed(2, n, 2, low=120, high=131).mT
    x = torch.eye(k, dtype=torch.bfloat16)[None]

    def run(YPtr: torch.Tensor, **_: Any) -> None:
        for row in range(k):
            for column in range(n):
                expert = int(row >= 4)
                number = int(w[expert, row // 2, column]) >> 4 * (row % 2) & 15
                sign = -1.0 if number & 8 else 1.0
                YPtr[0, row, column] = sign * NUMBERS[number & 7] * 2.0 ** (int(scale[expert, row // 32, column]) - 127)

    quantized = {"XPtr": x, "WPtr": w, "WMxScale": scale, "W_TRANSPOSE": True}
    kernel = agrees("triton::_matmul_ogs", run, **product(k, n, k, **quantized))
    assert kernel.name == f"moe_gemm_by_group_ends_mxfp4_e2_n{n}_k{k}" and kernel.tags == ("quantization:mxfp4",)
    assert declined("triton::_matmul_ogs", **product(k, n, k, **{**quantized, "WMxScale": object()}))
    assert declined("triton::_matmul_ogs", **product(k, n, k, **quantized, SWIZZLE_MX_SCALE="BLACKWELL_SCALE"))
    assert declined("triton::_matmul_ogs", **{**product(k, n, k, **quantized), "SPLIT_K": 2})


@pytest.mark.parametrize(("warps", "digest"), [(4, "f91becaeda946b21"), (8, "788976ff7e239536")])
def test_a_weight_of_mxfp4_as_hopper_has_it(warps: int, digest: str) -> None:
    """The digest is of what `unswizzle_data` of triton_kernels makes of these bytes, multiplied out. vLLM 0.22.1's
    does the same as SGLang 0.5.15's and 0.5.23's.
    """
    n, k, columns = 256, 128, torch.eye(128, dtype=torch.bfloat16)
    hopper = {"SWIZZLE_MX_VALUE": "HOPPER_VALUE", "SWIZZLE_MX_SCALE": "HOPPER_SCALE", "W_TRANSPOSE": True}
    hopper |= {
        "WPtr": mixed(2, n // 4, 2 * k, low=0, high=256).mT,
        "WMxScale": mixed(2, n // 32, k, low=120, high=131).mT,
    }
    call_arguments = product(2 * k, n, k, XPtr=torch.cat([columns, columns])[None], **hopper)
    halves = {"ExptHist": torch.tensor([k, k]).int(), "ExptOffs": torch.tensor([0, k, 2 * k]).int()}
    kernel = kernel_of("triton::_matmul_ogs", **call_arguments | halves, num_warps=warps)
    definition = checked(kernel)
    assert definition.name == f"moe_gemm_by_group_ends_mxfp4_hopper_e2_n{n}_k{k}"
    inputs = [slot.get() for slot in kernel.inputs.values()]
    weight = compile_reference(definition.reference, definition.name)(*inputs)
    assert hashlib.sha256(weight.view(torch.int16).numpy().tobytes()).hexdigest()[:16] == digest
    assert declined("triton::_matmul_ogs", **call_arguments | halves)  # nothing says how many warps it has
