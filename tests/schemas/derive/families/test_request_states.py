"""What the kernels of vLLM's V2 runner are replayed with: the real kernels run on it, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import kernels

from kcap.replay.rebuild.memory import Target, build_inputs
from kcap.replay.rebuild.rebuild import ResolvedCall, apply_rule, resolve_integers, set_rebuilt_arguments
from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip
from kcap.schemas.derive.families import replay_rule_for
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import TensorSpec, Value

STARTS = torch.tensor([0, 1, 21])  # of a decode and of a prefill of 20 tokens
REQUESTS = torch.tensor([3, 1])
WIDTH = 4  # pages of a request


def tensor(*shape: int, dtype: str = "int32") -> TensorSpec:
    tensor.count += 1
    return TensorSpec(shape, dtype, device="cuda", storage=tensor.count)


tensor.count = 0


def rebuilt(name: str, values: dict[str, Value], contents: dict[str, torch.Tensor]) -> Inputs:
    bound = BoundCall(f"triton::{name}", [Argument(name=key, value=value) for key, value in values.items()])
    for key, content in contents.items():
        bound.set_content(key, content)
    rule = replay_rule_for(bound.operator)
    made = apply_rule(bound, rule)
    resolve_integers(bound)
    inputs = build_inputs(bound, Target("cpu", "cuda"))
    return set_rebuilt_arguments(ResolvedCall(None, rule, bound, made, 0), inputs)  # type: ignore[arg-type]


def runner_kernels() -> dict[str, Any]:
    return kernels("vllm", *(f"v1/worker/gpu/{name}.py" for name in ("block_table", "buffer_utils", "input_batch")))


def test_block_tables_are_made_behind_their_addresses() -> None:
    values: dict[str, Value] = {
        "batch_idx_to_req_idx": tensor(2, dtype="int64"),
        "src_block_table_ptrs": tensor(1, dtype="uint64"),
        "dst_block_table_ptrs": tensor(1, dtype="uint64"),
        "block_table_strides": tensor(1, dtype="int64"),
        "num_blocks_ptr": tensor(1, 6),
        "num_blocks_stride": 6,
        "num_reqs": 2,
    }
    counts = torch.tensor([[0, 2, 0, 4]])
    strides = torch.tensor([WIDTH])
    contents = {"batch_idx_to_req_idx": REQUESTS, "block_table_strides": strides, "num_blocks_ptr": counts}
    kernel, constants = runner_kernels()["_gather_block_tables_kernel"], {"BLOCK_SIZE": 16}
    if "MASK_SLIDING_WINDOW" in kernel.kernel.arg_names:  # vLLM 0.33's: pages before the window are left out
        reach = {"num_computed_tokens_ptr": 4, "sliding_window_reach_ptr": 1, "block_sizes_ptr": 1}
        values |= {name: tensor(size) for name, size in reach.items()}
        contents |= {name: torch.full((size,), 16) for name, size in reach.items()}
        constants["MASK_SLIDING_WINDOW"] = True
    inputs = rebuilt("_gather_block_tables_kernel", values, contents)
    source, gathered = inputs.keep
    assert [int(inputs.args[place]) for place in (1, 2)] == [source.data_ptr(), gathered.data_ptr()]
    assert len(source) == len(gathered) == 6 * WIDTH
    source.copy_(torch.arange(24))
    gathered.fill_(-1)
    kernel[1, 4](*inputs.args, **constants)  # two rows pad the batch
    assert gathered.reshape(6, WIDTH)[:4].tolist() == [[12, 13, 14, 15], [4, 5, -1, -1], [0] * 4, [0] * 4]
    with pytest.raises(Skip, match="block_table_strides"):
        rebuilt("_gather_block_tables_kernel", values, {"batch_idx_to_req_idx": REQUESTS, "num_blocks_ptr": counts})


def test_slots_are_computed_from_tables_behind_addresses() -> None:
    values: dict[str, Value] = {
        "max_num_tokens": 24,
        "idx_mapping": tensor(2, dtype="int64"),
        "query_start_loc": tensor(3),
        "pos": tensor(21, dtype="int64"),
        "block_table_ptrs": tensor(2, dtype="uint64"),
        "block_table_strides": tensor(2, dtype="int64"),
        "block_sizes": tensor(2),
        "slot_mapping_enabled": tensor(2, dtype="bool"),
        "dcp_sharded": tensor(2, dtype="bool"),
        "slot_mappings_ptr": tensor(2, 24, dtype="int64"),
        "slot_mappings_stride": 24,
        "cp_rank": 0,
    }
    contents = {
        "idx_mapping": REQUESTS,
        "query_start_loc": STARTS,
        "pos": torch.cat([torch.tensor([50]), torch.arange(20)]),
        "block_table_strides": torch.tensor([WIDTH, 9]),
        "block_sizes": torch.tensor([16, 16]),
    }
    inputs = rebuilt("_compute_slot_mappings_kernel", values, contents)
    assert [len(table) for table in inputs.keep] == [4 * WIDTH + 51, 4 * 9 + 51]
    assert inputs.args[7].all() and inputs.args[8].all()
    assert inputs.args[4].tolist() == [table.data_ptr() for table in inputs.keep]
    for number, table in enumerate(inputs.keep):
        table.copy_(torch.arange(len(table)) + 100 * number)
    constants = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 32}
    runner_kernels()["_compute_slot_mappings_kernel"][2, 3](*inputs.args, **constants)
    slots = inputs.args[9]
    assert slots[0, 0] == (3 * WIDTH + 50 // 16) * 16 + 50 % 16
    assert slots[1, 1:21].tolist() == [(100 + 9 + place // 16) * 16 + place % 16 for place in range(20)]
    assert slots[:, 21:].eq(-1).all()


@pytest.mark.parametrize(("output", "stride"), [((6, WIDTH), WIDTH), ((6,), 1)])
def test_writes_go_to_rows_of_their_own(output: tuple[int, ...], stride: int) -> None:
    values: dict[str, Value] = {
        "output_ptr": tensor(*output),
        "output_stride": stride,
        "write_indices_ptr": tensor(3),
        "write_starts_ptr": tensor(3),
        "write_contents_ptr": tensor(3 * stride),
        "write_cu_lens_ptr": tensor(3),
        "write_group_ids_ptr": None,
    }
    inputs = rebuilt("_apply_write_kernel", values, {"write_cu_lens_ptr": stride * torch.tensor([1, 2, 3])})
    inputs.args[0].fill_(-1)
    inputs.args[4].copy_(torch.arange(3 * stride))
    constants = {"BLOCK_SIZE": 8, "MULTI_GROUP": False}
    runner_kernels()["_apply_write_kernel"][3,](*inputs.args, **constants)
    assert inputs.args[0].flatten().tolist() == [*range(3 * stride), *[-1] * (3 * stride)]
    with pytest.raises(Skip, match="several tables"):
        rebuilt("_apply_write_kernel", {**values, "MULTI_GROUP": True}, {})


def test_token_ids_of_a_batch_need_no_sample() -> None:
    """Of the decode the last sampled token is written, of the prefill its own tokens."""
    states = {"idx_mapping_ptr": tensor(2, dtype="int64"), "query_start_loc_ptr": tensor(3)}
    prefill: dict[str, Value] = {
        "input_ids_ptr": tensor(24),
        "next_prefill_tokens_ptr": tensor(1, 6),
        "next_prefill_tokens_stride": 6,
        "num_lookahead": 1,
        **states,
        "all_token_ids_ptr": tensor(6, 64),
        "all_token_ids_stride": 64,
        "prefill_lens_ptr": tensor(6),
        "num_computed_tokens_ptr": tensor(6),
    }
    sampled = {"idx_mapping_ptr": REQUESTS, "query_start_loc_ptr": STARTS}
    lengths, computed = torch.tensor([0, 20, 0, 9]), torch.tensor([0, 0, 0, 50])
    contents = {**sampled, "prefill_lens_ptr": lengths, "num_computed_tokens_ptr": computed}
    inputs = rebuilt("_prepare_prefill_inputs_kernel", prefill, contents)
    inputs.args[6].fill_(7)
    runner_kernels()["_prepare_prefill_inputs_kernel"][2,](*inputs.args, BLOCK_SIZE=8, LOOKAHEAD_BLOCK=1)
    assert inputs.args[0].tolist() == [0, *[7] * 20, 0, 0, 0]

    combine: dict[str, Value] = {
        "input_ids_ptr": tensor(24),
        "idx_mapping_ptr": states["idx_mapping_ptr"],
        "last_sampled_tokens_ptr": tensor(6, 1, dtype="int64"),
        "query_start_loc_ptr": states["query_start_loc_ptr"],
        "seq_lens_ptr": tensor(2),
        "prefill_len_ptr": tensor(6),
        "draft_tokens_ptr": tensor(6, 0, dtype="int64"),
        "draft_tokens_stride": 1,
        "cu_num_logits_ptr": tensor(3),
        "logits_indices_ptr": tensor(2, dtype="int64"),
    }
    contents = {**sampled, "seq_lens_ptr": torch.tensor([51, 20]), "prefill_len_ptr": lengths}
    contents |= {"cu_num_logits_ptr": torch.arange(3), "logits_indices_ptr": torch.zeros(2, dtype=torch.int64)}
    inputs = rebuilt("_combine_sampled_and_draft_tokens_kernel", combine, contents)
    inputs.args[2].fill_(7)
    constants = {"BLOCK_SIZE": 1, "NUM_NEW_SAMPLED_TOKENS": 1}
    runner_kernels()["_combine_sampled_and_draft_tokens_kernel"][2,](*inputs.args, **constants)
    assert inputs.args[0].tolist() == [7, *[0] * 23] and inputs.args[9].tolist() == [0, 20]


def test_requests_that_would_grow_with_each_run_are_not_replayed() -> None:
    with pytest.raises(Skip, match="a token longer"):
        rebuilt("_post_update_kernel", {"total_len_ptr": tensor(6)}, {})
