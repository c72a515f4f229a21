"""slot_mapping: the reference against vLLM's CPU operator, and its Triton kernel's padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, load_vllm_kernels
from paging import Batch, batch

BATCHES = [([1], [1]), ([3, 5], [3, 5]), ([1, 1, 1], [40, 128, 129]), ([64, 2], [300, 2]), ([7, 1, 130], [9, 64, 130])]
TRITON = "triton::_compute_slot_mapping_kernel.s2c7fca39"
Arguments = dict[str, Any]


def arguments(requests: Batch, suffix: str = "") -> Arguments:
    ends = zip(requests.queries, requests.lengths, strict=True)
    positions = torch.cat([torch.arange(length - n, length) for n, length in ends])
    room = torch.full((requests.tokens + 9,), -7)
    call_arguments = {
        "query_start_loc": requests.starts,
        "positions": positions,
        "block_table": requests.table,
        "slot_mapping": room,
    }
    return {name + suffix: value for name, value in call_arguments.items()}


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_reference_is_vllms_cpu_operator(page_size: int):
    load_vllm_kernels()
    run = torch.ops._C.compute_slot_mapping_kernel_impl
    for seed, (queries, lengths) in enumerate(BATCHES):
        requests = batch(queries, lengths, page_size, seed)
        kernel = agrees("_C::compute_slot_mapping_kernel_impl", run, **arguments(requests), block_size=page_size)
    definition = checked(kernel)
    assert definition.name == f"slot_mapping_ps{page_size}"
    assert definition.var_axes == ["num_tokens", "len_indptr", "max_num_reqs", "max_num_pages"]


def test_tritons_kernel_pads_the_rest():
    def run(**call_arguments: Any) -> None:
        slots, table = call_arguments["slot_mapping_ptr"], call_arguments["block_table_ptr"]
        slots.fill_(-1)
        for row, (start, end) in enumerate(zip(requests.starts.tolist(), requests.starts.tolist()[1:], strict=False)):
            for token in range(start, end):
                page, place = divmod(int(call_arguments["positions_ptr"][token]), 16)
                slots[token] = int(table[row, page]) * 16 + place

    requests = batch([3, 1, 20], [3, 40, 33], 16)
    call_arguments = {
        "num_tokens": 24,
        "max_num_tokens": 33,
        "block_size": 16,
        "block_table_stride": requests.table.shape[1],
    }
    constants = {"TOTAL_CP_WORLD_SIZE": 1, "PAD_ID": -1}
    kernel = agrees(TRITON, run, **arguments(requests, "_ptr"), **call_arguments, **constants)
    assert kernel.name == "slot_mapping_n33_ps16" and kernel.axes["max_num_tokens"] == 33
    assert declined(TRITON, **arguments(requests, "_ptr"), **call_arguments)
    assert declined(TRITON, **arguments(requests, "_ptr"), **call_arguments, **{**constants, "TOTAL_CP_WORLD_SIZE": 2})
