"""sgmv_shrink and sgmv_expand: the references against SGLang's Triton kernels, interpreted; replay, Workloads, cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched, randn
from interpreted import Launcher, kernels
from test_chunked_delta_rule import made_by_rule
from test_sglang_delta_rule import bound_call

from kcap.replay.rebuild.persistent import is_persistent_name
from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.derive.workload_draft import WorkloadDraft

FOLDER = "kernels/ops/lora/dense"
FILES = ("chunked_sgmv_shrink", "chunked_sgmv_expand", "kernel_utils", "sgemm_lora_a", "sgemm_lora_b", "qkv_lora_b")
Arguments = dict[str, Any]
RANK, HIDDEN, CHUNK = 16, 40, 16
RANKS = [16, 0, 8]  # of each adapter; the second is none
SIZES = [40, 8, 24]  # columns of queries, keys and values


def operator(name: str) -> str:
    return f"triton::_{name}_kernel.s01234567"


@pytest.fixture(scope="module")
def launchers() -> dict[str, Launcher]:
    return kernels("sglang", *(f"{FOLDER}/{name}.py" for name in (*FILES, "gate_up_lora_b")))


def segments(loras: list[int], graph: bool = False) -> Arguments:
    """What SGLang prepares of each token's adapter: chunks of one adapter. `graph`: room for more tokens and chunks."""
    tokens = torch.tensor(loras)
    permutation = tokens.argsort(stable=True)
    chunks = [
        (lora, min(CHUNK, count - start))
        for lora, count in zip(*(part.tolist() for part in tokens.unique(return_counts=True)), strict=True)
        for start in range(0, count, CHUNK)
    ]
    starts = torch.tensor([0, *(length for _, length in chunks)]).cumsum(0)
    indices, room = torch.tensor([lora for lora, _ in chunks]), 3 * graph
    pad = torch.nn.functional.pad
    return {
        "seg_indptr": pad(starts, (0, room), value=len(loras)).int(),
        "weight_indices": pad(indices, (0, room)).int(),
        "lora_ranks": torch.tensor(RANKS, dtype=torch.int32),
        "permutation": pad(permutation, (0, room)).int(),
        "num_segs": len(indices) + room,
    }


BATCHES = [[0], [2, 2, 1, 0, 2, 1, 0], [1, 1], [2, 0, 0, 1, 2] * 9]  # each token's adapter


def shrunk(batch: Arguments, tokens: int, slices: int, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    return {
        "x": randn(tokens, HIDDEN, dtype=dtype, seed=1),
        "weights": randn(len(RANKS), slices * RANK, HIDDEN, dtype=dtype, seed=2),
        "output": randn(tokens, slices * RANK, dtype=dtype, seed=3),
        **batch,
        **dict(zip(SHRINK_CONSTANTS, (slices * RANK, HIDDEN, slices, CHUNK, 16, 32), strict=True)),
    }


def runs_shrink(launchers: dict[str, Launcher]) -> Callable[..., None]:
    def run(**call: Any) -> None:
        grid = (call["N"] // call["BLOCK_N"], call["num_segs"])
        launchers["_chunked_lora_shrink_kernel"][grid](**call)

    return run


SHRINK, EXPAND = operator("chunked_lora_shrink"), operator("chunked_lora_expand")
SHRINK_CONSTANTS = ("N", "K", "NUM_SLICES", "BLOCK_M", "BLOCK_N", "BLOCK_K")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("slices", [1, 3])
def test_shrink_is_sglangs_kernel(launchers: dict[str, Launcher], slices: int, graph: bool) -> None:
    for dtype, loras in zip([torch.bfloat16, torch.float16] * 2, BATCHES, strict=True):
        call = shrunk(segments(loras, graph), len(loras), slices, dtype)
        before = call["output"].clone()
        kernel = agrees(SHRINK, runs_shrink(launchers), **call)
        after, of = call["output"], torch.tensor(loras)
        assert torch.equal(after[of == 1], before[of == 1])
        assert torch.equal(after[of == 2, slices * 8 :], before[of == 2, slices * 8 :])
    assert kernel.name == f"sgmv_shrink_fp16_s{slices}_r16_k40"
    recorded = launched(SHRINK.rpartition(".")[0], call, *SHRINK_CONSTANTS)
    assert recorded.definition() == checked(kernel) and recorded.family == "sgmv_shrink"


def expanded(batch: Arguments, tokens: int, sizes: list[int], room: int = 0, fixed: bool = True) -> Arguments:
    """`room`: columns of the output behind those of the slices; `fixed`: 0.5.23 knows the slices' sizes beforehand."""
    slices, dtype, total = len(sizes), torch.bfloat16, sum(sizes)
    output = randn(tokens, total + room, dtype=dtype, seed=3)
    offsets = [sum(sizes[:part]) for part in range(slices + 1)]
    return {
        "x": randn(tokens, slices * RANK, dtype=dtype, seed=1),
        "weights": randn(len(RANKS), total, RANK, dtype=dtype, seed=2),
        "output": output,
        "output_stride_0": output.stride(0),
        "output_stride_1": 1,
        **batch,
        "scalings": torch.tensor([0.5, 3.0, 2.0]),
        "slice_offsets": torch.tensor(offsets, dtype=torch.int32),
        **dict(zip(EXPAND_CONSTANTS, (slices, total, RANK, CHUNK, 16, 16), strict=False)),
        "SLICE_OFFSETS": tuple(offsets) if fixed else (),
    }


EXPAND_CONSTANTS = ("NUM_SLICES", "OUTPUT_DIM", "MAX_RANK", "BLOCK_M", "BLOCK_N", "BLOCK_K", "SLICE_OFFSETS")


def runs_expand(launchers: dict[str, Launcher]) -> Callable[..., None]:
    def run(**call: Any) -> None:
        tiles = [-(-size // 16) for size in call["slice_offsets"].diff().tolist()]
        fixed = bool(call["SLICE_OFFSETS"])
        sizes = (sum(tiles), call["num_segs"]) if fixed else (max(tiles), len(tiles), call["num_segs"])
        launchers["_chunked_lora_expand_kernel"][sizes](**call)

    return run


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(("sizes", "room"), [([40], 0), ([40], 8), ([24, 24], 0), (SIZES, 0)])
def test_expand_is_sglangs_kernel(launchers: dict[str, Launcher], sizes: list[int], room: int, fixed: bool) -> None:
    for loras in BATCHES:
        call = expanded(segments(loras, graph=fixed), len(loras), sizes, room, fixed)
        before = call["output"].clone()
        kernel = agrees(EXPAND, runs_expand(launchers), **call)
        untouched = torch.tensor(loras) == 1
        assert torch.equal(call["output"][untouched], before[untouched])
    sized = "_".join(map(str, sizes))
    assert kernel.name == f"sgmv_expand_s{len(sizes)}_n{sized}_r16{f'_of{40 + room}' if room else ''}"
    if fixed:
        assert launched(EXPAND.rpartition(".")[0], call, *EXPAND_CONSTANTS).definition() == checked(kernel)


def walked(batch: Arguments, in_order: bool) -> Arguments:
    """As the kernels of `--lora-backend triton` take segments: in a request's order, or sorted by adapter."""
    tables = {name: batch[name] for name in ("seg_indptr", "weight_indices", "lora_ranks")}
    rows = None if in_order else batch["permutation"]
    tables |= {"seg_lens": batch["seg_indptr"].diff(), "sorted_token_ids": rows}
    return {**tables, "SORTED_BY_ADAPTER": not in_order, "BLOCK_S": 16, "BLOCK_N": 16, "BLOCK_K": 16}


WALKERS = {"sgemm_lora_a": 1, "sgemm_lora_b": 1, "qkv_lora_b": 3, "gate_up_lora_b": 2}  # with their slices


def walk(name: str, loras: list[int], in_order: bool) -> Arguments:
    batch, slices = walked(segments(loras), in_order), WALKERS[name]
    if name == "sgemm_lora_a":
        call = shrunk(batch, len(loras), slices) | {"stack_num": slices, "BLOCK_N": 16, "BLOCK_K": 16}
        call = {key: value for key, value in call.items() if key not in ("NUM_SLICES", "BLOCK_M")}
    else:
        sizes = {1: [40], 2: [24, 24], 3: SIZES}[slices]
        call = expanded(batch, len(loras), sizes)
        given = {"N": 40, "K": RANK, "output_dim": 24, "n_offs": call["slice_offsets"], "max_qkv_out_dim": 40}
        kept = {"sgemm_lora_b": ("N", "K"), "qkv_lora_b": ("K", "n_offs", "max_qkv_out_dim")}
        chunked = (*EXPAND_CONSTANTS, "slice_offsets", "num_segs")
        call = {key: value for key, value in call.items() if key not in chunked} | {"BLOCK_N": 16, "BLOCK_K": 16}
        call |= {key: given[key] for key in kept.get(name, ("K", "output_dim"))}
    strides = {"x": 2, "weights": 3, "output": 2}
    return call | {
        f"{key[0] if key == 'weights' else key}_stride_{dim}": call[key].stride(dim)
        for key, count in strides.items()
        for dim in range(count)
    }


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("name", WALKERS)
def test_kernels_that_walk_segments_are_sglangs(launchers: dict[str, Launcher], name: str, in_order: bool) -> None:
    def run(**call: Any) -> None:
        last = (WALKERS[name], len(call["weight_indices"])) if WALKERS[name] > 1 else (len(call["weight_indices"]),)
        launchers[f"_{name}_kernel"][(3, *last)](**call)

    for loras in BATCHES:
        loras = sorted(loras) if in_order else loras
        kernel = agrees(operator(name), run, **walk(name, loras, in_order))
    assert ("_inorder" in kernel.name) == in_order
    assert kernel.op_type == ("sgmv_shrink" if name == "sgemm_lora_a" else "sgmv_expand")


def test_what_the_reference_does_not_model_is_declined() -> None:
    batch = segments(BATCHES[1])
    assert declined(SHRINK, **{**shrunk(batch, 7, 1), "num_segs": 2})
    assert declined(SHRINK, **{**shrunk(batch, 7, 1), "output": randn(7, RANK, dtype=torch.float32)})
    unknown = {**expanded(batch, 7, SIZES, fixed=False), "slice_offsets": torch.empty(4, device="meta")}
    assert declined(EXPAND, **unknown)
    assert not declined(EXPAND, **{**unknown, "SLICE_OFFSETS": (0, 40, 48, 72)})
    plain = walk("sgemm_lora_a", [0], False)
    assert declined(operator("sgemm_lora_a"), **{**plain, "SORTED_BY_ADAPTER": None})
    assert declined(operator("sgemm_lora_a"), **{**plain, "ENABLE_PDL": False}), "of SGLang's experimental kernels"


@pytest.mark.parametrize("name", [SHRINK, EXPAND])
def test_cost_counts_tokens_of_adapters_by_their_ranks(name: str) -> None:
    batch, size = segments(BATCHES[3]), 2
    call = shrunk(batch, 45, 3) if name == SHRINK else expanded(batch, 45, SIZES)
    kernel, token_ranks, columns = kernel_of(name, **call), 18 * 16 + 18 * 8, sum(SIZES)
    cost = cost_of_instance(kernel)
    if name == SHRINK:
        read = (36 * HIDDEN + 3 * (16 + 8) * HIDDEN) * size
        assert cost.bytes == read + 3 * token_ranks * size and cost.flops == 2 * HIDDEN * 3 * token_ranks
    else:
        read = (3 * token_ranks + (16 + 8 + 36) * columns) * size
        assert cost.bytes == read + 36 * columns * size and cost.flops == 2 * columns * token_ranks
    function = cost_function_for(kernel.op_type)
    inputs = {name: arg.get() for name, arg in kernel.inputs.items()}
    assert function is not None
    derived = function(CostInputs(checked(kernel), inputs))
    assert (derived.bytes, derived.read, derived.flops) == (cost.bytes, read, cost.flops)


def test_segments_behind_the_tokens_cost_nothing() -> None:
    """As in a graph's buffers, whose rest may be older."""
    call = walk("sgemm_lora_a", [0, 0], False)
    tokens = len(call["x"])
    starts = torch.arange(0, 40 * tokens, tokens // 2 or 1, dtype=torch.int32)
    longer = {"seg_indptr": starts, "weight_indices": torch.zeros(len(starts) - 1, dtype=torch.int32)}
    whole = {"seg_indptr": torch.tensor([0, tokens]), "weight_indices": torch.zeros(1, dtype=torch.int32)}
    costs = [cost_of_instance(kernel_of(operator("sgemm_lora_a"), **{**call, **batch})) for batch in (longer, whole)]
    assert costs[0].flops == costs[1].flops > 0


@pytest.mark.parametrize(("tokens", "count"), [(70, 6), (300, 8), (2, 4)])
def test_inputs_made_by_rule_are_chunks_of_adapters(tokens: int, count: int) -> None:
    kernel = kernel_of(SHRINK, **shrunk(segments(BATCHES[1]), 7, 3))
    sizes = {"num_tokens": tokens, "num_segments": count, "len_indptr": count + 1, "num_loras": 3}
    axes = sizes | {"len_permutation": tokens}
    draft = WorkloadDraft(checked(kernel), axes, {}, torch.Generator().manual_seed(0), made_by_rule)
    lengths = draft["seg_indptr"].diff()
    assert lengths.sum() == tokens and lengths.min() >= int(count <= tokens) and lengths.max() <= 64
    assert sorted(draft["permutation"].tolist()) == list(range(tokens))
    assert draft["weight_indices"].max() < 3 and draft["lora_ranks"].tolist() == [RANK] * 3


def test_replay_has_segments_whatever_a_sample_holds(launchers: dict[str, Launcher]) -> None:
    """Without the rule all would be zero: adapters without a rank, for which no kernel does anything."""
    call = shrunk(segments(BATCHES[3]), 45, 3)
    bound = bound_call(SHRINK, call)
    made = contents(bound, "seg_indptr", "weight_indices", "lora_ranks", "permutation")
    assert made["lora_ranks"].tolist() == [RANK] * 3 and made["seg_indptr"].diff().max() <= CHUNK
    assert made["seg_indptr"][-1] == 45 and sorted(made["permutation"].tolist()) == list(range(45))
    agrees(SHRINK, runs_shrink(launchers), **{**call, **made})
    ranks = torch.tensor(RANKS, dtype=torch.int32)
    assert torch.equal(contents(bound_call(SHRINK, call, lora_ranks=ranks), "lora_ranks")["lora_ranks"], ranks)
    made = contents(
        bound_call(operator("sgemm_lora_b"), walk("sgemm_lora_b", BATCHES[3], False)), "seg_lens", "lora_ranks"
    )
    assert made["seg_lens"].sum() == 45 and made["lora_ranks"].tolist() == [RANK] * 3


def contents(bound: BoundCall, *names: str) -> dict[str, torch.Tensor]:
    held = {name: bound.content(name) for name in names}
    return {name: values for name, values in held.items() if values is not None}


def test_replay_needs_the_sizes_of_slices() -> None:
    batch, offsets = segments(BATCHES[1]), [0, 40, 48, 72]
    unknown = {**expanded(batch, 7, SIZES), "SLICE_OFFSETS": []}
    with pytest.raises(Skip, match="sizes of their own"):
        bound_call(EXPAND, unknown)
    assert slices_of(bound_call(EXPAND, {**expanded(batch, 7, [40]), "SLICE_OFFSETS": []})) == [0, 40]
    assert slices_of(bound_call(EXPAND, {**unknown, "SLICE_OFFSETS": offsets})) == offsets
    assert slices_of(bound_call(EXPAND, unknown, slice_offsets=torch.tensor(offsets))) == offsets


def slices_of(bound: BoundCall) -> list[int]:
    held = bound.content("slice_offsets")
    assert held is not None
    return held.tolist()


def test_adapters_are_kept_from_step_to_step_and_their_indices_are_not() -> None:
    assert is_persistent_name("weights")
    assert not any(is_persistent_name(name) for name in segments([0]))
