"""decode_metadata: the reference against SGLang's Triton kernel, interpreted; bytes, what is declined, replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched
from interpreted import Launcher, kernels

from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.bound_call import BoundCall, replay_rule_for
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function_for, input_rules_for
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

OPERATOR = "triton::_fused_decode_metadata_kernel"
LENGTHS, REQUESTS, CONTEXT, SLOTS = [5, 1, 32, 17], [3, 0, 4, 3], 40, 200


@pytest.fixture(scope="module")
def found() -> Launcher:
    return kernels("sglang", "kernels/ops/attention/metadata.py")["_fused_decode_metadata_kernel"]


def decode(page_size: int = 4, sliding: bool = False, **more: Any) -> dict[str, Any]:
    """The arguments of the kernel, as SGLang 0.5.23 passes them, of more rows than there are sequences."""
    generator, batch, pages = torch.Generator().manual_seed(page_size), len(LENGTHS), CONTEXT // page_size
    slots = torch.randint(0, SLOTS, (6, CONTEXT + 4), generator=generator, dtype=torch.int32)
    swa = torch.randperm(SLOTS, generator=generator) if sliding else None
    tensors = {
        "seq_lens": torch.tensor(LENGTHS),
        "req_to_token": slots,
        "req_pool_indices": torch.tensor(REQUESTS),
        "cache_seqlens_int32": torch.full((batch,), -7, dtype=torch.int32),
        "cu_seqlens_k": torch.full((batch + 1,), -7, dtype=torch.int32),
        "page_table": torch.full((batch + 1, pages + 1), 7, dtype=torch.int32),
        "swa_page_table": torch.full((batch + 1, pages + 1), 7, dtype=torch.int32) if sliding else None,
        "full_to_swa_index_mapping": swa,
    }
    strides = {
        f"{name.replace('_index_mapping', '_mapping')}_stride_{dim}": stride
        for name, tensor in tensors.items()
        for dim, stride in enumerate((0, 0) if tensor is None else tensor.stride())
    }
    mappings = {"full_v2p": None, "full_v2p_stride_0": 0, "swa_v2p": None, "swa_v2p_stride_0": 0}
    sizes = {"B": batch, "max_seq_pages": pages, "PAGE_SIZE": page_size, "SEQ_LEN_DELTA": 0, "BLOCK_COLS": 8}
    flags = {"SKIP_PAGE_TABLE": False, "ZERO_TAIL": False}
    return {**tensors, **strides, **mappings, **sizes, **flags, **more}


@pytest.mark.parametrize(
    ("page_size", "sliding", "more", "word"),
    [
        (4, False, {}, "_p10_ps4"),
        (1, False, {"SEQ_LEN_DELTA": 3}, "_delta3_p40_ps1"),
        (4, False, {"SEQ_LEN_DELTA": 4, "ZERO_TAIL": True}, "_delta4_zeroed_p10_ps4"),
        (8, True, {}, "_swa_p5_ps8"),
        (1, True, {"ZERO_TAIL": True}, "_swa_zeroed_p40_ps1"),
        (4, False, {"SKIP_PAGE_TABLE": True, "SEQ_LEN_DELTA": 1}, "_delta1"),
        (4, True, {"max_seq_pages": 0}, ""),
    ],
)
def test_reference_is_sglangs_kernel(found: Launcher, page_size: int, sliding: bool, more: dict[str, Any], word: str):
    call_arguments = decode(page_size, sliding, **more)
    kernel = agrees(f"{OPERATOR}.s0123", lambda **a: found[4, 5](**a), **call_arguments)
    assert kernel.name == f"decode_metadata{word}"
    assert checked(kernel).written_inputs.get("page_table") == ("page_table_out" if "_p" in word else None)


def test_lengths_of_32_bits_and_one_sequence(found: Launcher):
    call_arguments = decode()
    call_arguments["seq_lens"] = call_arguments["seq_lens"].int()
    agrees(OPERATOR, lambda **a: found[1, 2](**a), **{**call_arguments, "B": 1})


def test_inputs_that_are_drawn_are_valid():
    kernel = kernel_of(OPERATOR, **decode(8, True))
    definition = checked(kernel)
    axes = {name: size for name, size in kernel.sizes().items() if name in definition.var_axes}
    draft = WorkloadDraft(definition, axes, {}, torch.Generator().manual_seed(1), lambda _draft, _name: None)
    made = {name: next(input_rules_for("decode_metadata", name))(draft, name) for name in list(definition.inputs)[:4]}
    rest = {name: arg.get() for name, arg in kernel.inputs.items() if name not in made}
    compile_reference(definition.reference, definition.name)(*({**made, **rest}[name] for name in definition.inputs))
    assert made["req_pool_indices"] is not None and len(made["req_pool_indices"].unique()) == 4
    assert made["swa_slots"] is not None and made["swa_slots"].shape == (SLOTS,)


def test_launches_are_known_as_they_are_recorded():
    call_arguments = decode(8, True)
    constants = ("PAGE_SIZE", "SEQ_LEN_DELTA", "BLOCK_COLS", "SKIP_PAGE_TABLE", "ZERO_TAIL")
    kernel = launched(OPERATOR, call_arguments, *constants)
    assert kernel.key == kernel_of(OPERATOR, **call_arguments).key and kernel.family == "decode_metadata"


def test_bytes_and_what_is_declined():
    call_arguments = decode()
    kernel = kernel_of(OPERATOR, **call_arguments)
    assert kernel.touched is not None and kernel.touched() == 8 * 4 + 4 * 4 + 4 * 5
    count = cost_function_for("decode_metadata")
    assert count is not None
    tensors = {name: arg.get() for name, arg in kernel.inputs.items()}
    assert count(CostInputs(checked(kernel), tensors)).bytes == kernel.touched()
    assert declined(OPERATOR, **{**call_arguments, "full_v2p": torch.zeros(9)})
    sliding = {"swa_page_table": call_arguments["page_table"], "swa_v2p": torch.zeros(9)}
    assert declined(OPERATOR, **{**call_arguments, **sliding})


@pytest.mark.parametrize("operator", [OPERATOR, "triton::_fused_metadata_kernel_ps1_no_swa"])
def test_replay_cuts_the_table_to_the_requests_of_the_batch(operator: str):
    specs = {
        name: TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."), storage=number)
        for number, (name, value) in enumerate(decode(4, True).items())
        if isinstance(value, torch.Tensor)
    }
    bound = BoundCall(operator, [Argument(name=name, value=spec) for name, spec in specs.items()])
    bound.set_content("seq_lens", torch.tensor(LENGTHS))
    bound.set_content("req_pool_indices", torch.tensor(REQUESTS))
    rule = replay_rule_for(operator)
    rule.prepare(bound)
    assert len(bound.contents) == len(specs)
    assert rule.touched(bound, 10000) == 10000 - 2 * (CONTEXT + 4) * 4
    rule.trim_tables(bound)
    assert bound.spec("req_to_token").shape == (3, CONTEXT + 4)
    assert bound.contents["2"].tolist() == [1, 0, 2, 1]
