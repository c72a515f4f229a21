"""cache_zero: the reference against plain loops; what replay makes of addresses that another process had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of
from test_chunked_delta_rule import made_by_rule

from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, replay_rule_for
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

OPERATOR = "triton::_zero_kv_blocks_kernel"
SEGMENTS, BLOCKS, WORDS = 3, 5, 64


def arguments(ids: list[int], **more: Any) -> dict[str, Any]:
    fixed = {"n_blocks": len(ids), "N_SEGS": SEGMENTS, "PAGE_SIZE_EL": WORDS, "BLOCK_SIZE": 32}
    addresses = torch.zeros(SEGMENTS, dtype=torch.uint64)
    return {"seg_addrs_ptr": addresses, "block_ids_ptr": torch.tensor(ids), **fixed, **more}


@pytest.mark.parametrize("ids", [[3], [4, 0, 2]])
def test_blocks_of_all_caches_are_zeroed(ids: list[int]) -> None:
    caches = torch.arange(1, SEGMENTS * BLOCKS * WORDS + 1, dtype=torch.int32).reshape(SEGMENTS, BLOCKS, WORDS)

    def run(N_SEGS: int, PAGE_SIZE_EL: int, BLOCK_SIZE: int, block_ids_ptr: torch.Tensor, **_: Any) -> None:
        words = caches.view(N_SEGS, -1)
        for block in block_ids_ptr.tolist():
            for segment in range(N_SEGS):
                for chunk in range(PAGE_SIZE_EL // BLOCK_SIZE):
                    start = block * PAGE_SIZE_EL + chunk * BLOCK_SIZE
                    words[segment, start : start + BLOCK_SIZE] = 0

    kernel = agrees(f"{OPERATOR}.s01234567", run, {"caches": caches}, **arguments(ids))
    assert kernel.name == f"cache_zero_s{SEGMENTS}_w{WORDS}" and int((caches == 0).sum()) == len(ids) * SEGMENTS * WORDS
    cost, inputs = cost_function_for("cache_zero"), {name: slot.get() for name, slot in kernel.inputs.items()}
    assert cost is not None and kernel.touched is not None
    assert cost(CostInputs(checked(kernel), inputs)).bytes == kernel.touched() == len(ids) * (SEGMENTS * WORDS * 4 + 8)
    assert checked(kernel).written_inputs == {"caches": "caches_out"}


def test_what_zeroes_less_is_declined() -> None:
    newer: dict[str, Any] = {"PAGE_SIZE_EL": None, "seg_page_sizes_ptr": torch.zeros(SEGMENTS)}
    apart = {"block_ids_ptr": torch.empty(6, dtype=torch.int64, device="meta")[::2]}
    for other in ({"BLOCK_SIZE": 48}, {"n_blocks": 2}, {"N_SEGS": 2}, {"PAGE_SIZE_EL": 0}, apart, newer):
        assert declined(OPERATOR, **arguments([4, 0, 2], **other)), other


def test_replay_zeroes_blocks_of_its_own_memory() -> None:
    specs = {"seg_addrs_ptr": TensorSpec((SEGMENTS,), "uint64"), "block_ids_ptr": TensorSpec((2,), "int64", storage=1)}
    sizes = {"N_SEGS": SEGMENTS, "PAGE_SIZE_EL": WORDS, "n_blocks": 2}
    rule = replay_rule_for(OPERATOR)
    bound = BoundCall(OPERATOR, [Argument(name=name, value=value) for name, value in {**specs, **sizes}.items()])
    with pytest.raises(Skip, match="not known"):
        rule.prepare(bound)
    bound.set_content("block_ids_ptr", torch.tensor([57, 58]))
    rule.prepare(bound)
    ids = bound.content("block_ids_ptr")
    assert ids is not None and ids.tolist() == [1, 2], "block 0 stays"
    inputs = Inputs([None, ids, SEGMENTS, WORDS], {}, {})
    with pytest.raises(Skip, match="more blocks than it is given"):
        bound.set_value("n_blocks", 3)
        rule.prepare(bound)
    table = rule.rebuild_args(bound, inputs)["seg_addrs_ptr"]
    (hidden,) = inputs.keep
    assert hidden.caches.shape == (SEGMENTS, 3, WORDS) and rule.extra_bytes(bound) == hidden.caches.numel() * 4
    assert table.tolist() == [cache.data_ptr() for cache in hidden.caches]
    kernel = kernel_of(OPERATOR, **arguments([1, 2], seg_addrs_ptr=None))
    assert kernel.sizes()["num_blocks"] == 3, "as before its addresses are made"


def test_drawn_blocks_are_blocks_of_the_caches() -> None:
    definition = checked(kernel_of(OPERATOR, **arguments([4, 0, 2])))
    draft = WorkloadDraft(definition, {"num_blocks": 5, "num_zeroed": 5}, {}, torch.Generator(), made_by_rule)
    assert sorted(draft["block_ids"].tolist()) == [0, 1, 2, 3, 4]
