"""Which state each sequence has, in a Definition and in replay; inputs under which none is shared or grows on."""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.families import ReplayRule, replay_rule, valid_input
from kcap.schemas.derive.families.recurrent.chunks import DELTA_TYPES, forgetting_rates
from kcap.schemas.derive.index_arguments import renumber_densely, set_zeros, shrink_caches
from kcap.schemas.derive.invocation import Invocation, Unrecognized, require_values
from kcap.schemas.derive.kernel import TensorArg, lazy_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

CUDA_UPDATES = ("sgl_kernel::causal_conv1d_update", "sglang::mamba_causal_conv1d_update")  # SGLang 0.5.15's, 0.5.23's
CUDA_PREFILLS = ("sgl_kernel::causal_conv1d_fwd", "sglang::mamba_causal_conv1d_fwd")
STATEFUL = ("gdn", "mamba_ssu", "mamba", "causal_conv1d", "selective_scan")  # op_types that name their states


def state_of_each(call: Invocation, count: int, padding: float | None, *names: str) -> torch.Tensor:
    """The number of each sequence's state, int32 [count], from the first column of the first of `names`.

    Unrecognized where the others, to which states are written, name other states, or two sequences have one state.
    """
    read, *written = (
        require_values(tensor.reshape(len(tensor), -1)[:count, 0], "states of its sequences")
        for name in names
        if (tensor := call.optional(name)) is not None
    )
    if any(not torch.equal(read, other) for other in written):
        raise Unrecognized("it reads one state of a sequence and writes another")
    used = read[used_states(read, padding)]
    if len(used) != len(used.unique()):
        raise Unrecognized("two of its sequences have one state")
    return read.to(torch.int32)


def used_states(states: torch.Tensor, padding: float | None) -> torch.Tensor:
    """Which of `states` are numbers of states: neither negative nor the padding's."""
    return (states >= 0) if padding is None else (states >= 0) & (states != padding)


def _whole_starts(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """`starts`: where each of the joined sequences begins, and where they end; Unrecognized unless after `tokens`."""
    if int(require_values(starts, "sequence starts")[-1]) != tokens:
        raise Unrecognized("its sequences are padded")
    return starts


def starts_arg(starts: torch.Tensor, tokens: int) -> TensorArg:
    """`starts` as the input `query_start_loc`; Unrecognized, when it is read, if tokens follow the last sequence."""
    return lazy_arg(starts.dtype, ("len_indptr",), lambda: _whole_starts(starts, tokens), "Where each sequence begins.")


def used_tokens(
    call: Invocation, starts: torch.Tensor, out: torch.Tensor, padding: float | None, name: str
) -> torch.Tensor:
    """Of each token of `out`, [tokens, …], whether its sequence is no padding."""
    sequences = used_states(state_of_each(call, len(starts) - 1, padding, name), padding)
    return sequences.to(out.device).repeat_interleave(_whole_starts(starts, len(out)).diff().long())


def states_arg(call: Invocation, axis: str, count: int, padding: float | None, *names: str) -> TensorArg:
    """`state_of_each` as an input."""
    text = "The number of each sequence's state" + ("." if padding is None else f"; {padding:g}: padding, and none.")
    return lazy_arg("int32", (axis,), lambda: state_of_each(call, count, padding, *names), text)


def shrink_states(bound: BoundCall, caches: tuple[str, ...], *names: str) -> int:
    """Renumber the states that the arguments of these `names` tell, and cut the `caches` down to them: how many.

    State 0 stays: it may stand for padding. Skip where no Sample holds them.
    """
    tables: dict[str, torch.Tensor] = {}
    for name in names:
        if bound[name] is not None:
            if (table := bound.content(name)) is None:
                raise Skip("no Sample holds the states of its sequences")
            tables[name] = table
    states = [torch.zeros(1, dtype=torch.int64), *(table.flatten().long() for table in tables.values())]
    dense, count = renumber_densely(torch.cat(states))
    parts = dense.split([len(part) for part in states])[1:]
    for (name, table), part in zip(tables.items(), parts, strict=True):
        bound.set_content(name, part.reshape(table.shape))
    shrink_caches(bound, caches, count)
    return count


@replay_rule("triton::_selective_scan_update_kernel", "_C::selective_state_update_cpu")
class StateUpdate(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        triton = ("state_batch_indices_ptr", "dst_state_batch_indices_ptr")
        shrink_states(bound, ("state_ptr", "state"), *triton, "state_batch_indices", "dst_state_batch_indices")


@replay_rule("triton::_causal_conv1d_update_kernel", "_C::causal_conv1d_update_cpu_vec", *CUDA_UPDATES)
class ConvolutionUpdate(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        shrink_states(bound, ("conv_state_ptr", "conv_state"), "conv_state_indices_ptr", "conv_state_indices")


@replay_rule("triton::_causal_conv1d_fwd_kernel", *CUDA_PREFILLS)
class Convolution(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        shrink_states(bound, ("initial_states_ptr", "conv_states"), "cache_indices_ptr", "cache_indices")


@replay_rule("triton::_state_passing_fwd_kernel")
class StatePassing(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        if bound["final_state_indices_ptr"] is not None:
            shrink_states(bound, ("final_states_ptr",), "final_state_indices_ptr")


@replay_rule("triton::_mamba_align_block_table_kernel")
class AlignedStates(ReplayRule):
    """The states of a request among its pages, by its length."""

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "out_ptr")


@replay_rule("triton::store_cache_checkpoints_kernel")
class StateCheckpoints(ReplayRule):
    """States within a prompt, which a prefix cache keeps."""

    def prepare(self, bound: BoundCall) -> None:
        if bound["HAS_RECURRENT_ROWS"] or bound["HAS_TOKEN_MAP"]:
            raise Skip("it reads tokens or states by tables that no Sample holds")
        set_zeros(bound, "recurrent_rows_ptr", "token_indices_ptr")
        shrink_states(bound, ("conv_state_ptr", "recurrent_state_ptr"), "checkpoint_state_indices_ptr")


@replay_rule("_C::selective_scan_fwd")
class SelectiveScan(ReplayRule):
    """States that decay, as in models: else they grow from token to token, and outputs overflow."""

    def prepare(self, bound: BoundCall) -> None:
        shrink_states(bound, ("ssm_states",), "cache_indices")
        bound.set_content("A", -torch.rand(bound.spec("A").shape))


@replay_rule(
    "triton::fused_recurrent_gated_delta_rule_fwd_kernel",
    "triton::fused_recurrent_gated_delta_rule_packed_decode_kernel",
    "triton::fused_sigmoid_gating_delta_rule_update_kernel",
)
class DeltaRule(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        if bound["ssm_state_indices"] is not None:  # else the states are the batch's own
            shrink_states(bound, ("h0", "ht"), "ssm_state_indices")


@valid_input("q", "k", op_types=("gdn", *DELTA_TYPES))
def unit_vectors(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Of length one, as in models: the delta rule multiplies the state by 1 - beta |k|^2 each step."""
    drawn = torch.randn(draft.shape(name), generator=draft.generator)
    return torch.nn.functional.normalize(drawn, dim=-1)


@valid_input("g", op_types=("gdn",))
def log_decay(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Negative: the state decays by exp(g)."""
    return draft.reals(-2.0, 0.0, draft.shape(name))


@valid_input("beta", op_types=("gdn", *DELTA_TYPES))
def update_rate(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.reals(0.0, 1.0, draft.shape(name))


@valid_input("A", op_types=("mamba_ssu", "mamba", "mamba2_chunk_cumsum", "mamba2_scan", "selective_scan"))
def decay(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Negative: the state decays by exp(A dt)."""
    return -8.0 * forgetting_rates(draft, *draft.shape(name))


@valid_input("A_log", op_types=("gdn",))
def log_rates(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """The state decays by exp(-exp(A_log) dt)."""
    return forgetting_rates(draft, *draft.shape(name)).log()


@valid_input("state_indices", op_types=("gdn_chunk_state", "mamba_track"))
@valid_input("*_indices", "cache_indices", "*_slots", op_types=STATEFUL)
def state_indices(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """A state each, no two the same: each is written by its own sequence."""
    states = draft.size("pool_size", "state_cache_size", "num_states")
    return draft.distinct(draft.shape(name)[0], states) if states else None
