"""selective_scan: the reference against the sum that the recurrence stands for; in-place outputs, padding, cost.

No CPU runs `_C::selective_scan_fwd`, which is CUDA alone: `scan` is written from arXiv:2312.00752 and the docstring of
vLLM's `selective_scan_fn`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from paging import starts

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for, replay_rule_for
from kcap.schemas.derive.invocation import Unrecognized
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

OPERATOR = "_C::selective_scan_fwd"
D, S, G = 6, 4, 2  # channels, numbers of a channel's state, groups
Arguments = dict[str, Any]


def arguments(counts: list[int], slots: list[int], dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    """Sequences of these lengths, every second one with a state already, as vLLM passes them."""
    tokens = sum(counts)
    return {
        "u": randn(D, tokens, dtype=dtype),
        "delta": randn(D, tokens, dtype=dtype, seed=1),
        "A": -randn(D, S, dtype=torch.float32, seed=2).exp(),
        "B": randn(G, S, tokens, dtype=dtype, seed=3),
        "C": randn(G, S, tokens, dtype=dtype, seed=4),
        "D_": randn(D, dtype=torch.float32, seed=5),
        "z_": randn(D, tokens, dtype=dtype, seed=6),
        "delta_bias_": randn(D, dtype=torch.float32, seed=7),
        "delta_softplus": True,
        "query_start_loc": starts(counts),
        "cache_indices": torch.tensor(slots, dtype=torch.int32),
        "has_initial_state": torch.arange(len(counts)) % 2 == 0,
        "ssm_states": randn(9, D, S, dtype=dtype, seed=8),
        "null_block_id": 0,
        "block_size": 1024,
        **more,
    }


def scan(**call: Any) -> None:
    """Token t sees each token j before it, decayed by all steps between: without a loop that carries a state."""
    bounds, gate = call["query_start_loc"].tolist(), call["z_"]
    out, skip, bias = (call["delta"] if gate is None else gate), call["D_"], call["delta_bias_"]
    for row, slot in enumerate(call["cache_indices"].tolist()):
        tokens, state = slice(bounds[row], bounds[row + 1]), call["ssm_states"][slot]
        if slot == call["null_block_id"] or bounds[row] == bounds[row + 1]:
            continue
        step = call["delta"][:, tokens].double() + (0.0 if bias is None else bias.double()[:, None])
        step = torch.nn.functional.softplus(step) if call["delta_softplus"] else step
        b, c = (call[name][:, :, tokens].double().repeat_interleave(D // G, dim=0) for name in ("B", "C"))
        sums = step.cumsum(1)[:, None] * call["A"].double()[..., None]  # [channels, numbers, tokens]
        seen = torch.exp(sums[..., :, None] - sums[..., None, :]).tril()
        added = b * (step * call["u"][:, tokens].double())[:, None]
        carried = call["has_initial_state"]
        begin = state.double() if carried is not None and carried[row] else torch.zeros(D, S).double()
        states = (seen * added[..., None, :]).sum(-1) + begin[..., None] * sums.exp()
        result = (states * c).sum(1) + (0.0 if skip is None else skip.double()[:, None] * call["u"][:, tokens].double())
        if gate is not None:
            result = result * torch.nn.functional.silu(gate[:, tokens].double())
        out[:, tokens] = result.to(out.dtype)
        state.copy_(states[..., -1].to(state.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[1], [7, 1, 2, 12]])
def test_scan_is_the_sum_over_all_tokens_before(counts: list[int], dtype: torch.dtype) -> None:
    instance = agrees(OPERATOR, scan, **arguments(counts, [4, 2, 7, 5][: len(counts)], dtype))
    words = "" if dtype == torch.bfloat16 else "_fp32"
    assert instance.name == f"selective_scan_z_pad0{words}_d6_s4_ng2"


def test_output_without_a_gate_is_written_over_the_time_steps() -> None:
    call = arguments([3, 5], [4, 2], z_=None)
    before = call["delta"].clone()
    instance = agrees(OPERATOR, scan, **call)
    assert not torch.equal(call["delta"], before)
    assert torch.equal(instance.outputs["output"].get(), call["delta"].mT)


def test_without_what_is_optional() -> None:
    more = {"z_": None, "D_": None, "delta_bias_": None, "has_initial_state": None, "delta_softplus": False}
    call = arguments([3, 5], [4, 2], null_block_id=-1, **more)
    instance = agrees(OPERATOR, scan, **{**call, "delta": call["delta"].abs()})
    assert instance.name == "selective_scan_noD_nodt_bias_nosoftplus_noinitial_d6_s4_ng2"


def test_states_of_another_dtype_and_of_older_versions() -> None:
    """Before vLLM 0.20 the state of padding was `pad_slot_id`."""
    call = arguments([3, 5], [4, 2], ssm_states=randn(9, D, S, dtype=torch.float32, seed=8))
    assert agrees(OPERATOR, scan, **call).name == "selective_scan_z_pad0_statefp32_d6_s4_ng2"
    older = {name: value for name, value in call.items() if name != "null_block_id"}
    assert kernel_of(OPERATOR, **older, pad_slot_id=-1).name == "selective_scan_z_statefp32_d6_s4_ng2"


def test_padding_and_empty_sequences_keep_their_states() -> None:
    call = arguments([4, 3, 0, 2], [4, 0, 7, 5])
    kept = call["ssm_states"][[0, 7]].clone()
    instance = agrees(OPERATOR, scan, **call)
    assert instance.outputs["output"].get()[4:7].abs().max() == 0
    assert torch.equal(call["ssm_states"][[0, 7]], kept)
    assert cost_of_instance(instance).flops == 6 * (4 + 2) * D * S


def test_what_is_declined() -> None:
    indices = torch.tensor([0, 1], dtype=torch.int32)
    usual = arguments([3, 5], [4, 2])
    for name in ("block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx"):
        assert declined(OPERATOR, **usual, **{name: indices}), name
    for name in ("query_start_loc", "cache_indices", "ssm_states", "delta_softplus"):
        assert declined(OPERATOR, **{**usual, name: None}), name
    padded = kernel_of(OPERATOR, **{**usual, "query_start_loc": starts([3, 4])})
    with pytest.raises(Unrecognized, match="padded"):
        padded.inputs["query_start_loc"].get()
    shared = kernel_of(OPERATOR, **{**usual, "cache_indices": torch.tensor([4, 4], dtype=torch.int32)})
    with pytest.raises(Unrecognized, match="one state"):
        shared.inputs["cache_indices"].get()


def test_cost_is_that_of_the_tokens_and_their_states() -> None:
    instance = kernel_of(OPERATOR, **arguments([7, 1, 2], [4, 2, 7]))
    cost = cost_of_instance(instance)
    assert cost.flops == 6 * 10 * D * S
    assert cost.bytes == 10 * 2 * (4 * D + 2 * G * S) + 4 * D * S + 3 * 2 * 2 * D * S
    definition = checked(instance)
    assert definition.var_axes == ["total_tokens", "state_cache_size", "num_seqs", "len_indptr"]
    function = cost_function_for("selective_scan")
    given = {name: arg.get() for name, arg in instance.inputs.items()}
    assert function is not None and function(CostInputs(definition, given)).flops == cost.flops


def test_replay_cuts_the_states_to_those_in_use_and_they_decay() -> None:
    specs = {
        "A": TensorSpec((D, S), "float32"),
        "ssm_states": TensorSpec((900, D, S), "float32"),
        "cache_indices": TensorSpec((2,), "int32"),
    }
    bound = BoundCall(OPERATOR, [Argument(name=name, value=spec) for name, spec in specs.items()])
    bound.set_content("cache_indices", torch.tensor([700, 41]))
    replay_rule_for(OPERATOR).prepare(bound)
    indices = bound.content("cache_indices")
    assert indices is not None and indices.tolist() == [2, 1] and bound.spec("ssm_states").shape == (3, D, S)
    rates = bound.content("A")
    assert rates is not None and rates.shape == (D, S) and (rates <= 0).all() and rates.mean() < -0.3
