"""The collectives that are replayed: those in which every rank is given the same shapes.

What only some ranks send or receive (`send`, `gather_`, an all-to-all with uneven splits) needs what the others were
given, which no Call tells. Addresses of shared buffers are never taken from a Recording: they are those of the group
that was joined here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from kcap.replay.group.peers import DEFAULT_NAME, STATES, Peers
from kcap.replay.rebuild.operators import Operator, Parameters, resolve_function, resolve_operator
from kcap.schemas.derive.bound_call import BoundCall, Inputs, ReplayRule, Skip
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.recording import Call
from kcap.schemas.recording.values import Group, Opaque, TensorSpec, tensors

SUM_ASSUMED = "its reduce operation was not recorded: a sum"
ADDRESSES = ("reg_buffer", "reg_buffer_sz_bytes")
SPLITS = ("output_split_sizes", "input_split_sizes", "sizes")
SYMMETRIC = {
    "c10d": "allreduce_ allreduce_coalesced_ allgather_ _allgather_base_ allgather_into_tensor_coalesced_ "
    "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ alltoall_ alltoall_base_ broadcast_ "
    "reduce_ barrier",
    "_c10d_functional": "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ all_gather_into_tensor "
    "all_gather_into_tensor_out all_gather_into_tensor_coalesced reduce_scatter_tensor reduce_scatter_tensor_out "
    "reduce_scatter_tensor_coalesced all_to_all_single broadcast broadcast_",
    "vllm": "all_reduce all_gather reduce_scatter",
    "sglang": "inplace_all_reduce outplace_all_reduce reg_all_gather_into_tensor reg_reduce_scatter_tensor",
    "_C": "shm_allreduce shm_all_gather",
    "_C_custom_ar": "all_reduce",
    "pynccl": "all_reduce outplace_all_reduce all_gather all_gatherv reduce_scatter reduce_scatterv broadcast reduce "
    "all_to_all_single",
    "flashinfer": "allreduce_fusion",
}
FUSED_WORKSPACE = "TRTLLMAllReduceFusionWorkspace"  # another is by multicast, which not every machine has
FUSED_PATTERNS = range(6)  # FlashInfer's AllReduceFusionPattern: alone, with a norm, with that quantized
UNLIKE = frozenset(f"c10d::{name}" for name in "send recv_ recv_any_source_ gather_ scatter_".split())
PEERS_UNKNOWN = "its ranks are given different things, and it tells only its own"
REPLAYED = frozenset(f"{namespace}::{name}" for namespace, names in SYMMETRIC.items() for name in names.split())


class CollectiveRule(ReplayRule):
    """Puts what this process has in place of the recorded group, and of what belongs to it."""

    def __init__(self, group: Group, peers: Peers, rebuilt_args: Sequence[str]) -> None:
        self.group, self.peers, self.rebuilt_args = group, peers, tuple(rebuilt_args)

    def prepare(self, bound: BoundCall) -> None:
        """Skip where its peers were not given what it was."""
        for name in ADDRESSES:
            bound.set_value(name, stand_in(bound, name, self.group, self.peers) if bound[name] else bound[name])
        for name in SPLITS:
            splits = bound[name]
            parts = [size for each in splits for size in _list(each)] if isinstance(splits, list) else []
            if len({str(size) for size in parts}) > 1:
                raise Skip("its ranks send parts of different sizes, and it tells only its own")
        for argument in bound.args:
            lists = argument.value if isinstance(argument.value, list) else []
            shapes = {spec.shape for item in lists if isinstance(item, list) for spec in item if _is_tensor(spec)}
            if len(shapes) > 1:
                raise Skip("its ranks have tensors of different shapes, and it tells only its own")

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        return {name: stand_in(bound, name, self.group, self.peers) for name in self.rebuilt_args}


class FusedRule(CollectiveRule):
    """Puts the memory of this group in place of that in which FlashInfer's ranks exchanged what they sum."""

    def __init__(self, group: Group, peers: Peers) -> None:
        super().__init__(group, peers, ["workspace", "group"])

    def prepare(self, bound: BoundCall) -> None:
        """Skip what reads rows by indices, of which a collective's are guessed: sums over experts."""
        super().prepare(bound)
        if bound["pattern"] not in FUSED_PATTERNS:
            raise Skip("it sums over experts, whose rows no Recording tells")
        if not _is_tensor(bound["input"]) or len(bound.spec("input").shape) != 2:
            raise Skip("its input is no matrix")

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        spec = bound.spec("input")
        tokens, hidden_size = spec.shape
        workspace = self.peers.fused_workspace(tokens, hidden_size, torch_dtype(spec.dtype, Skip))
        return {"workspace": workspace, "group": None}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TensorSpec)


def resolve_collective(call: Call, peers: Peers) -> tuple[Operator, ReplayRule]:
    """The operator that runs `call` together with the other ranks, and its rule; Skip says why there is none."""
    group = call.group
    assert group is not None
    if group.size != peers.size:
        raise Skip(f"its group has {group.size} ranks, and this one {peers.size}")
    if call.operator.split(".")[0] not in REPLAYED:
        unlike = call.operator.split(".")[0] in UNLIKE
        raise Skip(PEERS_UNKNOWN if unlike else "kcap does not know how to call this collective")
    if call.namespace == "pynccl":
        return communicator_method(call, peers), CollectiveRule(group, peers, ["group"])
    if call.namespace == "flashinfer":
        if not any(isinstance(one.value, Opaque) and FUSED_WORKSPACE in one.value.type for one in call.args):
            raise Skip(f"its ranks exchange what they sum in other memory than FlashInfer's {FUSED_WORKSPACE}")
        return resolve_function(call), FusedRule(group, peers)
    operator = resolve_operator(call.operator, in_group=True)
    arguments = [argument.name for argument in operator.schema.arguments]
    named = {argument.name or arguments[index]: argument.value for index, argument in enumerate(call.args)}
    rebuilt = [name for name, value in named.items() if isinstance(value, Group | Opaque)]
    notes = [SUM_ASSUMED] if isinstance(named.get("reduce_op"), Opaque) else []
    rule = CollectiveRule(group, peers, rebuilt)
    return replace(operator, call=callable_of(operator, named, group, peers), notes=notes), rule


def stand_in(bound: BoundCall, name: str, group: Group, peers: Peers) -> Any:
    """What the operator takes for its argument `name`: the group by name, handle or object, or what belongs to it."""
    assert peers.world is not None
    match bound.namespace:
        case "c10d":
            return torch.classes.c10d.ReduceOp() if name == "reduce_op" else peers.world.boxed()
        case "_c10d_functional":
            return peers.world.group_name
        case "vllm" | "sglang":
            return peers.engine_group(bound.namespace, group.name).unique_name
        case "pynccl":
            return None  # the communicator has it
        case "_C":
            shared = getattr(peers.engine_group("vllm", group.name).device_communicator, "dist_module", None)
            if not isinstance(handle := getattr(shared, "handle", None), int):
                raise Skip("vLLM has no collectives over shared memory here")
            return handle
    custom = custom_all_reduce(group, peers)
    return {"fa": custom._ptr, "reg_buffer": custom.buffer_ptrs[peers.rank]}.get(name, custom.max_size)


def communicator_method(call: Call, peers: Peers) -> Operator:
    """The method of an engine's own NCCL communicator; where its arguments are lists, NCCL launches all together."""
    names, base = [argument.name or "" for argument in call.args], call.operator.split("::")[1]
    lists = [argument.value for argument in call.args if isinstance(argument.value, list)]
    together = max((len(values) for values in lists if any(map(_is_tensor, values))), default=0)
    communicator = next(filter(None, (_communicator(engine, base, names, peers) for engine in STATES)), None)
    if communicator is None:
        raise Skip("no engine here has an NCCL communicator that does this: it needs GPUs")
    method = getattr(communicator, base)
    enabling = getattr(communicator, "change_state", None)  # SGLang's is off where no operator turns it on

    def run(*values: Any) -> Any:
        given = {name: value for name, value in zip(names, values, strict=True) if name != "group"}
        with enabling(enable=True) if enabling else nullcontext():
            if not together:
                return method(**_with_reduction(given))
            communicator.group_start()
            try:
                for number in range(together):
                    method(**_with_reduction({name: value[number] for name, value in given.items()}))
            finally:
                communicator.group_end()

    written = {name for name in names if name.startswith(("out", "tensor"))}
    return Operator(call.operator, run, Parameters.of(names, written))


def _communicator(engine: str, method: str, names: Sequence[str], peers: Peers) -> Any:
    """That of `engine`, where its method takes what was recorded; None otherwise, and where it has none here."""
    if find_spec(engine) is None:
        return None
    coordinator = peers.engine_group(engine, DEFAULT_NAME)
    found = getattr(getattr(coordinator, "device_communicator", None) or coordinator, "pynccl_comm", None)
    if found is None or not found.available or not hasattr(found, method):
        return None
    return found if {*names} - {"group"} <= {*inspect.signature(getattr(found, method)).parameters} else None


def _with_reduction(given: dict[str, Any]) -> dict[str, Any]:
    """`given` with the reduction that it has by name."""
    return {**given, "op": getattr(dist.ReduceOp, str(given["op"]).upper())} if "op" in given else given


def custom_all_reduce(group: Group, peers: Peers) -> Any:
    """vLLM's over each other's memory; Skip where it has none here."""
    custom = peers.custom_all_reduce(peers.engine_group("vllm", group.name))
    if custom is None:
        raise Skip("vLLM has no custom all-reduce here: it needs GPUs that reach each other's memory")
    return custom


def callable_of(operator: Operator, named: Mapping[str, Any], group: Group, peers: Peers) -> Callable[..., Any]:
    """The operator with what its callers do around it; `named`: the recorded arguments."""
    match operator.name.split("::")[0]:
        case "c10d" if named.get("async_op", True) is False and peers.backend == "nccl" and on_gpu(named):
            return operator.call  # NCCL runs it on the caller's stream and returns no work to wait for
        case "c10d" | "_c10d_functional":
            return waiting(operator)
        case "_C_custom_ar" if not named.get("reg_buffer"):
            return copying_outside_graphs(operator.call, custom_all_reduce(group, peers), peers.rank)
    return operator.call


def on_gpu(named: Mapping[str, Any]) -> bool:
    return any(spec.device.startswith("cuda") for _, spec in tensors([*named.values()]))


def copying_outside_graphs(call: Callable[..., Any], custom: Any, rank: int) -> Callable[..., Any]:
    """The custom all-reduce of a graph: it reads tensors where they are, which the ranks tell each other once it is
    captured (`Peers.end_capture`). Outside a graph they are copied to where the ranks read."""

    def run(fa: int, inp: torch.Tensor, out: torch.Tensor, *_: int) -> None:
        captured = torch.cuda.is_current_stream_capturing()
        call(fa, inp, out, *((0, 0) if captured else (custom.buffer_ptrs[rank], custom.max_size)))

    return run


def waiting(operator: Operator) -> Callable[..., Any]:
    """The operator with the wait for its result that c10d leaves to the caller."""
    call = operator.call
    if operator.name.startswith("c10d::"):

        def run_and_wait(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            (result[-1] if isinstance(result, tuple | list) else result).wait()
            return result[0] if isinstance(result, tuple | list) else None

        return run_and_wait
    wait = torch.ops._c10d_functional.wait_tensor.default

    def run_and_wait_for_tensors(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        return [wait(each) for each in result] if isinstance(result, list | tuple) else wait(result)

    return run_and_wait_for_tensors
