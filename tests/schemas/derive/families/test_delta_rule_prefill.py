"""gdn_prefill: the reference against vLLM's kernel of a CPU, which goes by chunks, too; what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import checked, declined, kernel_of, load_vllm_kernels, randn, referred

from kcap.bench.check.checker import compare_outputs, in_float64
from kcap.replay.datasets.invocations import InvocationDraws
from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.invocation import Unrecognized
from kcap.schemas.flashinfer.definition import RandomInput, ScalarInput, Workload

OPERATOR = "flashinfer::chunk_gated_delta_rule"
H, HV, D = 2, 4, 64
STARTS = torch.tensor([0, 70, 71, 200])  # a chunk has 64 tokens


def arguments(**more: Any) -> dict[str, Any]:
    tokens = int(STARTS[-1])
    unit = torch.nn.functional.normalize
    return {
        "q": unit(randn(tokens, H, D, seed=1), dim=-1),
        "k": unit(randn(tokens, H, D, seed=2), dim=-1),
        "v": randn(tokens, HV, D, seed=3),
        "g": torch.exp(-0.1 * randn(tokens, HV, dtype=torch.float32, seed=4).sigmoid()),
        "beta": randn(tokens, HV, seed=5).sigmoid().float(),
        "scale": None,
        "initial_state": 0.1 * randn(3, HV, D, D, dtype=torch.float32, seed=6),
        "output_final_state": True,
        "cu_seqlens": STARTS,
        **more,
    }


def by_vllm(given: dict[str, Any]) -> list[torch.Tensor]:
    """Its kernel of a CPU takes the logarithm of the decay, and has values last in its states."""
    load_vllm_kernels()
    rows = [given[name][None] for name in ("q", "k", "v")]
    gates = [given["g"].log()[None], given["beta"].bfloat16()[None]]
    state = given["initial_state"].mT.contiguous()
    bounds, numbers = STARTS.int(), torch.arange(3, dtype=torch.int32)
    output, new = torch.ops._C.chunk_gated_delta_rule_cpu(*rows, *gates, state, True, bounds, False, False, numbers)
    return [output[0], new.mT]


def test_reference_is_a_kernel_that_goes_by_chunks() -> None:
    given = arguments()
    kernel = kernel_of(OPERATOR, **given)
    assert kernel.name == "gdn_prefill_gates_qk2_v4_d64_k_last"
    assert checked(kernel).var_axes == ["num_seqs", "total_seq_len", "len_indptr"]
    inputs = [in_float64(slot.get()) for slot in kernel.inputs.values()]
    truth = compile_reference(kernel.definition().reference, kernel.name)(*inputs)
    result = compare_outputs(kernel, by_vllm(given), referred(kernel), truth=[*truth])
    assert result["status"] == "agrees", result
    late = arguments(g=torch.ones_like(given["g"]))
    assert compare_outputs(kernel, by_vllm(late), referred(kernel), truth=[*truth])["status"] == "differs"


def test_states_stay_small_on_drawn_inputs() -> None:
    definition = kernel_of(OPERATOR, **arguments()).definition()
    inputs = {name: RandomInput() for name in definition.inputs} | {"scale": ScalarInput(value=0.125)}
    workload = Workload(uuid="drawn", axes={"num_seqs": 2, "total_seq_len": 300, "len_indptr": 3}, inputs=inputs)
    drawn = InvocationDraws(definition, workload, None, 0).example.inputs
    output, state = compile_reference(definition.reference, definition.name)(*drawn)
    assert output.isfinite().all() and 0 < state.abs().max() < 100


def test_outputs_are_what_it_returns_or_writes() -> None:
    output, state = randn(200, HV, D), randn(3, HV, D, D, dtype=torch.float32)
    written = kernel_of(OPERATOR, **arguments(output=output, output_state=state))
    assert [slot.get() is given for slot, given in zip(written.outputs.values(), (output, state), strict=True)]
    halved = kernel_of(OPERATOR, **arguments(output_state=state.bfloat16(), checkpoint_every_n_tokens=64))
    assert [one.dtype for one in referred(halved)] == [torch.bfloat16] * 2
    alone = kernel_of(OPERATOR, **arguments(output_final_state=False))
    assert alone.name == "gdn_prefill_gates_nofinal_qk2_v4_d64_k_last" and [*alone.outputs] == ["output"]
    assert len(referred(alone)) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"use_qk_l2norm_in_kernel": True},
        {"state_indices": torch.arange(3)},
        {"gate_domain": "log"},
        {"initial_state": None},
        {"v": randn(200, 1, D)},
    ],
    ids=str,
)
def test_what_is_declined(more: dict[str, Any]) -> None:
    assert declined(OPERATOR, **arguments(**more))


def test_tokens_after_the_last_sequence_are_declined() -> None:
    padded = kernel_of(OPERATOR, **arguments(cu_seqlens=torch.tensor([0, 70, 71, 199])))
    with pytest.raises(Unrecognized, match="padded"):
        padded.inputs["query_start_loc"].get()
