"""Recurrent states: only those that a Sample's sequences have are rebuilt, by the rule of the kernel's family."""

from __future__ import annotations

import pytest
import torch

from kcap.replay.rebuild.launches import rule_of
from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.recording.recording import Argument, Call
from kcap.schemas.recording.values import TensorSpec, Value

STATES = TensorSpec((3000, 64, 128), "bfloat16", (10000, 128, 1), 0, "cuda:0", 1)
UPDATE = "triton::_selective_scan_update_kernel.s01234567"
RECURRENT = "triton::fused_recurrent_gated_delta_rule_fwd_kernel.s01234567"


def prepared(operator: str, values: dict[str, Value], contents: dict[str, torch.Tensor]) -> BoundCall:
    bound = BoundCall(operator, [Argument(name=name, value=value) for name, value in values.items()])
    for name, content in contents.items():
        bound.set_content(name, content)
    rule_of(Call(id=0, operator=operator, args=bound.args), "", inductor=False).prepare(bound)
    return bound


def indices(count: int) -> TensorSpec:
    return TensorSpec((count, 1), "int32", device="cuda:0", storage=2)


def test_states_are_renumbered_together_and_zero_stays() -> None:
    names = ("state_batch_indices_ptr", "dst_state_batch_indices_ptr")
    slots = (torch.tensor([[2000], [7], [0], [-1]]), torch.tensor([[2000], [9], [0], [-1]]))
    values: dict[str, Value] = {"state_ptr": STATES, **dict.fromkeys(names, indices(4))}
    bound = prepared(UPDATE, values, dict(zip(names, slots, strict=True)))
    assert [bound.contents[str(place)].flatten().tolist() for place in (1, 2)] == [[3, 1, 0, -1], [3, 2, 0, -1]]
    assert bound.spec("state_ptr").shape == (4, 64, 128)
    assert bound.spec("state_ptr").strides == STATES.strides


def test_a_launch_whose_states_were_not_sampled_is_skipped() -> None:
    with pytest.raises(Skip, match="states of its sequences"):
        prepared(UPDATE, {"state_ptr": STATES, "state_batch_indices_ptr": indices(4)}, {})


def test_states_in_place_share_their_storage_and_those_of_a_batch_stay() -> None:
    values: dict[str, Value] = {"h0": STATES, "ht": STATES, "ssm_state_indices": indices(2)}
    bound = prepared(RECURRENT, values, {"ssm_state_indices": torch.tensor([[40], [30]])})
    assert bound.spec("h0") == bound.spec("ht") and bound.spec("h0").shape[0] == 3
    alone = prepared(RECURRENT, {"h0": STATES, "ht": STATES, "ssm_state_indices": None}, {})
    assert alone.spec("h0") == STATES


def test_what_the_sampler_writes_and_its_seeds_need_no_sample() -> None:
    wide = TensorSpec((4, 125), "int64", device="cuda:0", storage=3)
    bound = prepared("triton::_gumbel_sample_kernel.s01234567", {"local_argmax_ptr": wide, "seeds_ptr": wide}, {})
    assert [bound.contents[path].abs().max() for path in ("0", "1")] == [0, 0]


@pytest.mark.parametrize(
    "operator", ["_C::rejection_greedy_sample_kernel_impl", "triton::rejection_greedy_sample_kernel"]
)
def test_rejection_sampling_needs_no_token_ids(operator: str) -> None:
    ends = "_ptr" if operator.startswith("triton") else ""
    names = [f"{name}{ends}" for name in ("output_token_ids", "draft_token_ids", "target_argmax", "bonus_token_ids")]
    wide = TensorSpec((4, 3), "int64", storage=3)
    bound = prepared(operator, dict.fromkeys(names, wide), {})
    assert [int(bound.contents[str(place)].abs().max()) for place in range(4)] == [0, 0, 0, 0]


def test_a_pass_of_states_keeps_those_into_which_it_puts_the_last_ones() -> None:
    operator = "triton::_state_passing_fwd_kernel.s01234567"
    values: dict[str, Value] = {"final_states_ptr": STATES, "final_state_indices_ptr": indices(2)}
    bound = prepared(operator, values, {"final_state_indices_ptr": torch.tensor([[2000], [7]])})
    assert bound.spec("final_states_ptr").shape[0] == 3
    alone: dict[str, Value] = {"states_ptr": STATES, "final_states_ptr": None}
    assert prepared(operator, alone, {}).spec("states_ptr") == STATES


def test_what_a_mamba_models_pages_are_put_together_in_needs_no_sample() -> None:
    bound = prepared("triton::_mamba_align_block_table_kernel.s01234567", {"out_ptr": indices(4)}, {})
    assert bound.contents["0"].abs().max() == 0


def test_checkpoints_of_states_are_replayed_where_no_table_says_which_are_read() -> None:
    operator = "triton::store_cache_checkpoints_kernel.s01234567"
    values: dict[str, Value] = {
        "conv_state_ptr": STATES,
        "recurrent_state_ptr": STATES,
        "token_indices_ptr": indices(2),
    }
    values["checkpoint_state_indices_ptr"] = indices(2)
    slots = {"checkpoint_state_indices_ptr": torch.tensor([[40], [0]])}
    bound = prepared(operator, values, slots)
    assert bound.spec("conv_state_ptr").shape[0] == bound.spec("recurrent_state_ptr").shape[0] == 2
    for constant in ("HAS_RECURRENT_ROWS", "HAS_TOKEN_MAP"):
        with pytest.raises(Skip, match="tables that no Sample holds"):
            prepared(operator, {**values, constant: True}, slots)
