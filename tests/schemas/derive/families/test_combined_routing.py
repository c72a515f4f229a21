"""The older triton_kernels, which vLLM has: what sorts tokens by expert in two launches, against plain loops, and
against its own kernels, interpreted, where they are installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched, on_meta, randn
from interpreted import folder_of, kernels
from test_chunked_delta_rule import made_by_rule
from test_newer_triton_kernels import Routing, counting, launch

from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.derive.workload_draft import WorkloadDraft

MEMSET, COMPUTE, SUM = "_combined_routing_memset", "_combined_routing_compute", "_sum_bitmatrix_rows"
ROUTING = ("routing_details/_routing_compute.py", "routing_details/_expt_data.py")
TOKEN_BLOCK, SIZES, FIRST, WIDTH = 32, 4, 4, 512
Arguments = dict[str, Any]
Run = Callable[..., None]


def run_memset(**call: Any) -> None:
    counts, blocks, starts = call["ExpertHist"].tolist(), call["PartialHist"], call["MDStarts"]
    call["Indx"].fill_(call["sentinel"])
    call["MDTileInfo"].fill_(-1)
    for expert in range(len(counts)):
        call["FinalExpertOffs"][expert] = sum(counts[:expert])
        total = 0
        for block in range(len(blocks)):
            total, blocks[block, expert] = total + int(blocks[block, expert]), total
    for table in range(SIZES + 1):
        rows = 1 if table == 0 else 1 << FIRST + table - 1
        for expert in range(starts.shape[1]):
            starts[table, expert] = sum(-(-n // rows) for n in counts[:expert])


def run_compute(**call: Any) -> None:
    seen: Counter[int] = Counter()
    k = call["ExptIndx"].shape[1]
    for slot, expert in enumerate(call["ExptIndx"].flatten().tolist()):
        block, within = divmod(slot, TOKEN_BLOCK * k)
        seen = Counter() if within == 0 else seen
        if expert >= 0:
            row = int(call["PartialOffs"][block, expert] + call["TokensStart"][expert]) + seen[expert]
            seen[expert] += 1
            call["GatherIndx"][row], call["ScatterIndx"][slot] = slot, row
            call["GateScal"][row] = call["ExptScal"].flatten()[slot]
    for table in range(SIZES):
        for expert, rows in enumerate(call["Hist"].tolist()):
            for number in range(-(-rows // (1 << FIRST + table))):
                place = int(call["MDTileStarts"][table, expert]) + number
                call["MDTileInfo"][table, place] = (number << 16) + expert


@pytest.fixture(params=["loops", "kernels"])
def runs(request: pytest.FixtureRequest) -> dict[str, Run]:
    """How to launch each kernel: written out here, or the package's own."""
    if request.param == "loops":
        return {MEMSET: run_memset, COMPUTE: run_compute}
    found = kernels("triton_kernels", *installed(*ROUTING))

    def memset(**call: Any) -> None:
        grid = call["blocks1a"] + call["n_expts_tot"] + 1 + -(-call["size"] // call["BLOCK"])
        launch(found[MEMSET], (grid,), **call)

    def compute(**call: Any) -> None:
        launch(found[COMPUTE], (call["blocks2a"] + len(call["PartialOffs"]),), **call)

    return {MEMSET: memset, COMPUTE: compute}


def installed(*files: str) -> tuple[str, ...]:
    """`files`, if a package has them: the older one alone."""
    root = folder_of("triton_kernels")
    if root is None or not all((root / file).exists() for file in files):
        pytest.skip(f"no triton_kernels with {files[0]} is installed")
    return files


def most_blocks(slots: int, experts: int) -> int:
    """Of 16 rows, of that many slots: as the package makes its schedule."""
    return slots if slots <= experts else experts - 1 - ((experts - slots - 1) // 16)


def before(tokens: int, k: int, experts: int) -> tuple[Routing, Arguments]:
    """The arguments of the first launch; its tables are cut out of wider ones, as the package has them."""
    routing = Routing.drawn(tokens, k, experts)
    blocks, columns = -(-tokens // TOKEN_BLOCK), -(-tokens // 128) * 4
    counts = torch.full((experts, columns), 9, dtype=torch.int32).T[:blocks]
    for block, ids in enumerate(routing.ids.split(TOKEN_BLOCK)):
        counts[block] = torch.bincount(ids.flatten(), minlength=experts)
    schedule, slots = torch.full((SIZES, WIDTH), 9, dtype=torch.int32), 2 * tokens * k
    call = {"Indx": torch.full((slots,), 9, dtype=torch.int32), "size": slots, "sentinel": -1, "BLOCK": 1024}
    call |= {"ExpertHist": routing.counts, "FinalExpertOffs": torch.full_like(routing.counts, 9)}
    call |= {"hist_size": experts, "n_expts_tot": experts, "PartialHist": counts, "shape_pm": blocks}
    call |= {"stride_pm": 1, "stride_pn": columns, "MDStarts": torch.full((SIZES + 1, WIDTH), 9, dtype=torch.int32)}
    call |= {"tile_starts_stridem": WIDTH, "blocks1a": 2 * SIZES + 1, "first_tile_dim_log2": FIRST, "SIZES": SIZES}
    call |= {"MDTileInfo": schedule[:, : most_blocks(tokens * k, experts)], "BLOCK_A": WIDTH, "BLOCK_N": WIDTH}
    return routing, {**call, "BLOCK_M": 512}


def after(routing: Routing, call: Arguments) -> Arguments:
    """The arguments of the second launch, of what the first wrote."""
    slots, rows = call["Indx"].chunk(2)
    weights = randn(*routing.ids.shape, seed=1)
    compute = {"GatherIndx": slots, "ScatterIndx": rows, "GateScal": torch.full((len(slots),), 7.0).bfloat16()}
    compute |= {"ExptScal": weights, "ExptIndx": routing.ids.to(torch.int16), "PartialOffs": call["PartialHist"]}
    compute |= {name: call[name] for name in ("stride_pm", "stride_pn", "tile_starts_stridem", "first_tile_dim_log2")}
    compute |= {"TokensStart": call["FinalExpertOffs"], "n_tokens": len(weights), "BLOCK_M": TOKEN_BLOCK}
    compute |= {"N_EXPTS_ACT": weights.shape[1], "Hist": routing.counts, "SIZES": SIZES, "BLOCK": WIDTH}
    compute |= {"MDTileStarts": call["MDStarts"][1:, : len(routing.counts) + 1], "MDTileInfo": call["MDTileInfo"]}
    return {**compute, "tile_info_stridem": WIDTH, "blocks2a": SIZES * len(routing.counts)}


CASES = [(1, 4, 32), (5, 2, 32), (70, 4, 64), (33, 1, 40), (130, 4, 32)]


@pytest.mark.parametrize(("tokens", "k", "experts"), CASES)
def test_slots_and_weights_are_sorted_by_expert(runs: dict[str, Run], tokens: int, k: int, experts: int) -> None:
    routing, call = before(tokens, k, experts)
    kernel = agrees(f"triton::{MEMSET}.s01234567", runs[MEMSET], **call)
    assert kernel.name == f"moe_align_combined_starts_e{experts}_c{experts}_n4_tile16"
    assert launched(f"triton::{MEMSET}", call, "BLOCK", "SIZES", "BLOCK_A", "BLOCK_N", "BLOCK_M").key == kernel.key
    sampled = {name: call[name].contiguous() for name in ("PartialHist", "MDTileInfo")}
    assert kernel_of(f"triton::{MEMSET}", **call | sampled).key == kernel.key, "a Sample's values lie in order"
    call = after(routing, call)
    kernel = agrees(f"triton::{COMPUTE}.s01234567", runs[COMPUTE], **call)
    assert kernel.name == f"moe_align_combined_rows_topk{k}_e{experts}_c{experts}_bs32_n4_tile16"
    assert launched(f"triton::{COMPUTE}", call, "BLOCK_M", "N_EXPTS_ACT", "SIZES", "BLOCK").key == kernel.key
    assert call["GatherIndx"].tolist() == routing.order.tolist()
    assert torch.equal(call["GateScal"], call["ExptScal"].flatten()[routing.order])
    blocks = (routing.counts + 31) // 32
    expected = [expert + (number << 16) for expert, n in enumerate(blocks.tolist()) for number in range(n)]
    schedule = call["MDTileInfo"][1].tolist()
    assert schedule == expected + [-1] * (len(schedule) - len(expected))


def test_a_token_with_an_expert_less_leaves_the_last_row(runs: dict[str, Run]) -> None:
    routing, call = before(40, 2, 32)
    run_memset(**call)
    routing.ids[-1, -1] = -1
    call = after(routing, call)
    agrees(f"triton::{COMPUTE}", runs[COMPUTE], **call)
    assert int(call["ScatterIndx"][-1]) == -1 and call["GateScal"].eq(7.0).sum() == 1


def of_vllm(tokens: int, k: int, experts: int) -> tuple[torch.Tensor, Arguments]:
    ids, call = counting(tokens, k, experts)
    names = {"Out": "Ret", "OutPartials": "Partials"}
    return ids, {names.get(name, name): value for name, value in call.items()}


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("tokens", "k", "experts"), [(5, 2, 32), (70, 4, 64), (133, 1, 32)])
def test_tokens_are_counted_under_other_names(tokens: int, k: int, experts: int, kernel: bool) -> None:
    """It adds to what was counted before."""
    ids, call = of_vllm(tokens, k, experts)
    call["Ret"] += 3

    def loops(**call: Any) -> None:
        call["Partials"].zero_()
        for token, own in enumerate(ids.tolist()):
            for expert in own:
                call["Partials"][token // 32, expert] += 1
                call["Ret"][expert] += 1

    run: Run = loops
    if kernel:
        found = kernels("triton_kernels", *installed("reduction_details/reduce_bitmatrix.py"))[SUM]
        run = partial(launch, found, (-(-tokens // 128), experts // 32))
    assert agrees(f"triton::{SUM}.s01234567", run, **call).name == f"moe_align_counts_e{experts}_bs32"
    longer = torch.zeros(len(call["Partials"]) + 4, experts, dtype=torch.int32)
    assert declined(f"triton::{SUM}", **call | {"Partials": longer}), "some blocks are not counted"


def test_what_is_not_modelled_is_declined() -> None:
    routing, call = before(70, 4, 32)
    others: list[Arguments] = [{"size": 8}, {"hist_size": 31}, {"shape_pm": 2}, {"stride_pn": 1}, {"blocks1a": 7}]
    others += [{"SIZES": 3}, {"tile_starts_stridem": 33}, {"ExpertHist": call["ExpertHist"].long()}]
    assert all(declined(f"triton::{MEMSET}", **on_meta(call | other)) for other in others)
    call = after(routing, call)
    others = [{"n_tokens": 69}, {"n_tokens": torch.tensor([70]).to("meta")}, {"N_EXPTS_ACT": 2}, {"blocks2a": 32}]
    others += [{"PartialOffs": call["PartialOffs"][:2]}, {"ExptScal": call["ExptScal"].T.contiguous().T}]
    others += [
        {"tile_info_stridem": 33},
        {"GateScal": call["GateScal"].float()},
        {"GatherIndx": call["GatherIndx"][1:]},
    ]
    assert all(declined(f"triton::{COMPUTE}", **on_meta(call | other)) for other in others)


def test_costs_and_what_is_written() -> None:
    routing, call = before(70, 4, 32)
    starts = kernel_of(f"triton::{MEMSET}", **call)
    run_memset(**call)
    rows = kernel_of(f"triton::{COMPUTE}", **after(routing, call))
    for kernel in (starts, rows):
        function, inputs = cost_function_for(kernel.op_type), {name: slot.get() for name, slot in kernel.inputs.items()}
        assert function is not None and kernel.touched is not None
        assert function(CostInputs(checked(kernel), inputs)).bytes == kernel.touched()
    assert checked(starts).written_inputs == {
        "block_counts": "block_starts",
        "slots": "slots_out",
        "block_schedule": "block_schedule_out",
    }
    written = ("sorted_slots", "slot_rows", "sorted_weights", "block_schedule")
    assert checked(rows).written_inputs == {name: f"{name}_out" for name in written}


def test_drawn_inputs_fit_together() -> None:
    """Each row is written once, and each block has room."""
    routing, call = before(70, 4, 32)
    kernel = kernel_of(f"triton::{COMPUTE}", **after(routing, call))
    axes = {name: size for name, size in kernel.sizes().items() if kernel.axes[name] is None}
    for seed in range(3):
        draft = WorkloadDraft(checked(kernel), axes, {}, torch.Generator().manual_seed(seed), made_by_rule)
        made = {name: draft[name] for name in kernel.inputs}
        made = {name: torch.full(draft.shape(name), -1) if made[name] is None else made[name] for name in made}
        inputs = {name: value.to(kernel.inputs[name].get().dtype) for name, value in made.items()}
        slots, rows, _, schedule = compile_reference(kernel.reference, kernel.name)(*inputs.values())
        assert sorted(slots.tolist()) == sorted(rows.tolist()) == list(range(280))
        counts = torch.bincount(inputs["topk_ids"].flatten(), minlength=32)
        assert torch.equal(inputs["expert_counts"], counts.int())
        assert (schedule[0] >= 0).sum() == ((counts + 15) // 16).sum()
