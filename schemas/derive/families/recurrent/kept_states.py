"""mamba_track: SGLang's Triton kernel that copies the states of some sequences, for its prefix cache to keep.

A sequence's convolution and recurrent state are copied every so many tokens. 0.5.15 launches it for each layer, 0.5.23
for one layer or for all, whose states are then stacked. Negative numbers of states stand for padding.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.recurrent.states import shrink_states
from kcap.schemas.derive.index_arguments import shrink_caches
from kcap.schemas.derive.invocation import Invocation, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

REFERENCE = """import torch


@torch.no_grad()
def run(conv_state, ssm_state, state_indices, track_mask, track_indices):
    tracked = track_mask & (state_indices >= 0) & (track_indices >= 0)
    sources, targets = state_indices[tracked].long(), track_indices[tracked].long()
    new_conv_state, new_ssm_state = conv_state.clone(), ssm_state.clone()
    new_conv_state[{layers}targets] = conv_state[{layers}sources]
    new_ssm_state[{layers}targets] = ssm_state[{layers}sources]
    return new_conv_state, new_ssm_state
"""

OPERATOR = "triton::track_mamba_state_if_needed_kernel"
STATES = ("conv_states_ptr", "ssm_states_ptr")
CONV, SSM = ("pool_size", "conv_dim", "conv_width"), ("pool_size", "nheads", "head_dim", "dstate")


@family("mamba_track", OPERATOR)
def track_states(call: Invocation) -> KernelInstance:
    """`conv_states_ptr`: [states, channels, width], `ssm_states_ptr`: [states, heads, …], with layers before them.

    Of a graph's batch, a buffer may be longer than the others.
    """
    conv, ssm = (call.tensor(name) for name in STATES)
    names = ("cache_indices_ptr", "mamba_track_mask_ptr", "mamba_track_indices_ptr")
    tensors = [call.tensor(name) for name in names]
    sources, mask, targets = (tensor[: min(map(len, tensors))] for tensor in tensors)
    layered = conv.dim() == len(CONV) + 1
    conv_axes, ssm_axes = (("num_layers", *axes) if layered else axes for axes in (CONV, SSM))
    sizes = {
        axis: size
        for axes, tensor in ((CONV, conv), (SSM, ssm))
        for axis, size in zip(axes[1:], tensor.shape[-len(axes) + 1 :], strict=True)
    }
    words = (f"_l{conv.shape[0]}" if layered else "") + abbreviate(conv.dtype, torch.bfloat16)
    words += abbreviate(ssm.dtype, torch.float32).replace("_", "_state")
    letters = dict(zip(sizes, "cwhds", strict=True))
    return KernelInstance(
        name=f"mamba_track{words}" + "".join(f"_{letters[axis]}{size}" for axis, size in sizes.items()),
        op_type="mamba_track",
        axes={**({"num_layers": conv.shape[0]} if layered else {}), "pool_size": None, **sizes, "batch_size": None},
        inputs={
            "conv_state": tensor_arg(conv, *conv_axes, description="Of the short convolution, updated in place."),
            "ssm_state": tensor_arg(ssm, *ssm_axes, description="Of the recurrence, updated in place."),
            "state_indices": tensor_arg(sources, "batch_size", description="The state of each sequence."),
            "track_mask": tensor_arg(mask, "batch_size", description="Whether its state is copied."),
            "track_indices": tensor_arg(targets, "batch_size", description="The state that it is copied to."),
        },
        outputs={
            "new_conv_state": lazy_arg(conv.dtype, conv_axes, lambda: conv),
            "new_ssm_state": lazy_arg(ssm.dtype, ssm_axes, lambda: ssm),
        },
        reference=REFERENCE.format(layers=":, " if layered else ""),
        description="States of sequences, copied to other places of their pool.",
        touched=lambda: 2 * copied_bytes(sources, mask, targets, conv, ssm) + total_bytes(sources, mask, targets),
    )


def copied_bytes(sources: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor, *pools: torch.Tensor) -> int:
    """Of the states that are copied. `pools`: whose axis of states is told from that of layers by their rank."""
    states = [total_bytes(pool) // pool.shape[-len(axes)] for pool, axes in zip(pools, (CONV, SSM), strict=True)]
    copied = require_values(mask, "mask of its sequences") & (require_values(sources, "states of its sequences") >= 0)
    return int((copied & (require_values(targets, "states to copy to") >= 0)).sum()) * int(sum(states))


@cost_function("mamba_track")
def track_cost(inputs: CostInputs) -> Cost:
    numbers = ("state_indices", "track_mask", "track_indices")
    copied = copied_bytes(*(inputs[name] for name in (*numbers, "conv_state", "ssm_state")))
    read = copied + inputs.read(*numbers)
    return Cost(read + copied, read, 0, inputs.dtype)


@replay_rule(OPERATOR)
class TrackStates(ReplayRule):
    """Each sequence may be copied to a state that no other has. None is where it is timed, as in most steps (all but
    one in 256); what is compared copies each that has a state and a place to go."""

    idempotent_writes = STATES

    def prepare(self, bound: BoundCall) -> None:
        count = shrink_states(bound, (), "cache_indices_ptr")
        sources = bound.contents[str(bound.index("cache_indices_ptr"))]
        states = bound.spec("conv_states_ptr").shape[-len(CONV)]
        targets = count + torch.arange(len(sources))
        copied = (sources >= 0) & (targets < states) & (not bound.timed)
        bound.set_content("mamba_track_mask_ptr", copied)
        bound.set_content("mamba_track_indices_ptr", torch.where(targets < states, targets, -1))
        if len(bound.spec("conv_states_ptr").shape) == len(CONV):
            shrink_caches(bound, STATES, min(count + len(sources), states))

    def touched(self, bound: BoundCall, total: int) -> int:
        """Where none is copied, the numbers alone."""
        return min(total, 16 * len(bound.contents[str(bound.index("cache_indices_ptr"))])) if bound.timed else total


@valid_input("track_indices", op_types=("mamba_track",))
def targets(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """None is another's, and none is a sequence's own state, where there are as many."""
    states, taken = torch.arange(draft.size("pool_size") or 1), draft["state_indices"].cpu().long()
    free = states[~torch.isin(states, taken)]
    free = free if len(free) else states
    return free[draft.distinct(draft.shape(name)[0], len(free))]
