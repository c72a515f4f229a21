"""Collectives are replayed by as many processes as their group had, on gloo; one that dies costs its own Call."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch
from handmade import call, request_for, tensor
from hypothesis import given
from hypothesis import strategies as st

from kcap.replay.group import clock
from kcap.replay.group.clock import GpuGroupSampler, GroupSampler, time_collective
from kcap.replay.group.collectives import SUM_ASSUMED, callable_of, resolve_collective, waiting
from kcap.replay.group.peers import Alone, Peers
from kcap.replay.group.workers import GroupedWorker, GroupWorker, _key_for_all_ranks
from kcap.replay.jobs import REPLAY_WORKER, CallJob, SampleGroup
from kcap.replay.timing.blocking import SpinBlocker
from kcap.replay.timing.device import device_of_rank
from kcap.replay.timing.graphs import KernelRun
from kcap.replay.timing.sampling import BLOCKER_TIMED_OUT
from kcap.schemas.derive.bound_call import Inputs, Skip, bind_call
from kcap.schemas.recording.recording import Argument, Call
from kcap.schemas.recording.values import Group, Opaque, Value

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
SESSION = {"device": "cpu", "home": "cpu", "root": None, "operators": [], "threads": 1}
X = tensor(64, 32, dtype="bfloat16")
WORK = (False, -1)  # not asynchronous, no time limit


def all_reduce(size: int, rank: int = 0, **more: Any) -> Call:
    return call("c10d::allreduce_", [X], Group(size, rank, "tp"), Opaque("ReduceOp"), None, *WORK, **more)


def request(collective: Call, seconds: float = 0.001) -> dict[str, object]:
    assert collective.group is not None
    return {**request_for(collective, seconds), "ranks": collective.group.size}


@pytest.fixture(scope="module")
def pair() -> Iterable[GroupedWorker]:
    with GroupedWorker(SESSION, REPLAY_WORKER) as worker:
        yield worker


GATHERED = tensor(128, 32, dtype="bfloat16", storage=1)
SCATTERED = tensor(32, 32, dtype="bfloat16", storage=1)
PAIR = Group(2, 1)
CUSTOM = SimpleNamespace(disabled=False, buffer_ptrs=[100, 200], max_size=1024)
COLLECTIVES: dict[str, list[Value]] = {
    "c10d::_allgather_base_": [GATHERED, X, PAIR, *WORK],
    "c10d::allgather_": [[[X, tensor(64, 32, dtype="bfloat16", storage=2)]], [X], PAIR, *WORK],
    "c10d::_reduce_scatter_base_": [SCATTERED, X, PAIR, Opaque("ReduceOp"), *WORK],
    "c10d::alltoall_base_": [tensor(64, 32, dtype="bfloat16", storage=1), X, PAIR, [], [], *WORK],
    "c10d::broadcast_": [[X], PAIR, 0, 0, *WORK],
    "c10d::barrier": [tensor(1), PAIR, [], *WORK],
    "_c10d_functional::all_reduce": [X, "sum", PAIR],
    "_c10d_functional::all_gather_into_tensor": [X, 2, PAIR],
    "_c10d_functional::reduce_scatter_tensor": [X, "sum", 2, PAIR],
    "c10d::allreduce_": [[tensor(8, dtype="int32")], PAIR, Opaque("ReduceOp"), None, *WORK],
}


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_of_this_size_replays_it_and_tells_the_transfer_from_the_wait(pair: GroupedWorker, size: int) -> None:
    answer = pair.run(request(all_reduce(size)), 60)
    assert answer["status"] == "ok" and answer["ranks"] == size
    assert answer["method"] == "host" and answer["median_us"] > 0 and answer["waited_us"] >= 0
    assert SUM_ASSUMED in answer["notes"]


@pytest.mark.parametrize("operator", COLLECTIVES)
def test_every_symmetric_collective_is_replayed(pair: GroupedWorker, operator: str) -> None:
    answer = pair.run(request(call(operator, *COLLECTIVES[operator])), 60)
    assert answer["status"] == "ok", answer


def test_four_ranks_scatter_a_sum(pair: GroupedWorker) -> None:
    scatter = call("_c10d_functional::reduce_scatter_tensor", X, "sum", 4, Group(4, 3, "tp"))
    answer = pair.run(request(scatter), 60)
    assert (answer["status"], answer["ranks"]) == ("ok", 4), answer


UNEVEN: dict[str, list[Value]] = {
    "c10d::alltoall_base_": [tensor(64, 32, storage=1), tensor(64, 32), PAIR, [10, 54], [20, 44], *WORK],
    "c10d::allgather_": [[[tensor(64), tensor(65, storage=2)]], [tensor(64)], PAIR, *WORK],
    "c10d::send": [[X], PAIR, 1, 0],
    "c10d::gather_": [[[X, X]], [X], PAIR, 0, *WORK],
    "aten::add.Tensor": [X, X, PAIR],
}


@pytest.mark.parametrize("operator", UNEVEN)
def test_what_needs_what_the_peers_were_given_is_skipped_by_all_and_the_group_goes_on(
    pair: GroupedWorker, operator: str
) -> None:
    group = pair._groups[2]
    before = [rank.process for rank in group._ranks]
    answer = pair.run(request(call(operator, *UNEVEN[operator])), 60)
    assert answer["status"] == "skipped" and answer["reason"]
    assert before == [rank.process for rank in group._ranks] and all(before)


def test_the_same_call_of_another_rank_is_not_run_again(pair: GroupedWorker) -> None:
    first = pair.run(request(all_reduce(2, 0)), 60)
    assert pair.run(request(all_reduce(2, 1, id=7, count=3)), 60) == first
    assert pair.run(request(all_reduce(2, 1), seconds=0.002), 60)["samples_us"] != first["samples_us"]


def test_a_rank_that_dies_is_the_calls_own_failure_and_the_next_one_runs(pair: GroupedWorker) -> None:
    pair.run(request(all_reduce(2), seconds=0.011), 60)
    process = pair._groups[2]._ranks[1].process
    assert process is not None
    threading.Timer(2, os.kill, (process.pid, signal.SIGSEGV)).start()
    began = time.monotonic()
    answer = pair.run(request(all_reduce(2), seconds=20), 60)
    assert answer["status"] == "failed" and time.monotonic() - began < 15
    assert answer["reason"] == "rank 1 of 2: crashed: SIGSEGV"
    assert pair.run(request(all_reduce(2), seconds=0.003), 60)["status"] == "ok"


def test_a_rank_that_has_died_meanwhile_is_started_with_its_group(pair: GroupedWorker) -> None:
    pair.run(request(all_reduce(2), seconds=0.006), 60)
    dead = pair._groups[2]._ranks[1].process
    assert dead is not None
    dead.kill()
    dead.wait(10)
    assert pair.run(request(all_reduce(2), seconds=0.007), 20)["status"] == "ok"


def test_what_a_dead_rank_leaves_hanging_has_a_few_seconds(pair: GroupedWorker) -> None:
    pair.run(request(all_reduce(2), seconds=0.008), 60)
    stuck, dead = (rank.process for rank in pair._groups[2]._ranks)
    assert stuck is not None and dead is not None
    os.kill(stuck.pid, signal.SIGSTOP)
    threading.Timer(2, os.kill, (dead.pid, signal.SIGSEGV)).start()
    began = time.monotonic()
    answer = pair.run(request(all_reduce(2), seconds=0.009), 60)
    assert answer["reason"] == "rank 1 of 2: crashed: SIGSEGV" and time.monotonic() - began < 30


def test_a_collective_ends_with_the_wait_that_c10d_leaves_to_the_caller() -> None:
    waited = []
    work = SimpleNamespace(wait=lambda: waited.append("c10d"))
    for result in (work, ([X], work)):
        operator: Any = SimpleNamespace(name="c10d::allreduce_", call=lambda result=result: result)
        waiting(operator)()
    assert waited == ["c10d"] * 2


@pytest.mark.parametrize(
    ("backend", "device", "asynchronous", "waits"),
    [("gloo", "cpu", False, 1), ("nccl", "cuda:0", True, 1), ("nccl", "cuda:0", False, 0), ("nccl", "cpu", False, 1)],
)
def test_no_work_is_waited_for_where_there_is_none(backend: str, device: str, asynchronous: bool, waits: int) -> None:
    """NCCL's synchronous collectives return none that a process survives waiting for."""
    waited = []
    work = SimpleNamespace(wait=lambda: waited.append(1))
    operator: Any = SimpleNamespace(name="c10d::allreduce_", call=lambda: work)
    peers: Any = SimpleNamespace(backend=backend)
    named = {"tensors": [tensor(8, device=device)], "async_op": asynchronous}
    callable_of(operator, named, PAIR, peers)()
    assert len(waited) == waits


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("reg_buffer", [0, 4711])
def test_what_a_graph_reduces_in_place_is_copied_outside_one(
    captured: bool, reg_buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    given = []
    operator: Any = SimpleNamespace(name="_C_custom_ar::all_reduce", call=lambda *args: given.append(args[3:]))
    group = SimpleNamespace(device_communicator=SimpleNamespace(ca_comm=CUSTOM))
    peers: Any = SimpleNamespace(rank=1, engine_group=lambda *_: group, custom_all_reduce=Peers.custom_all_reduce)
    run = callable_of(operator, {"reg_buffer": reg_buffer}, PAIR, peers)
    run(1, torch.ones(2), torch.ones(2), reg_buffer, 16 if reg_buffer else 0)
    assert given == [(4711, 16) if reg_buffer else (0, 0) if captured else (200, 1024)]


def test_the_ranks_tell_each_other_what_a_graph_was_captured_on() -> None:
    told = []
    peers = Peers.__new__(Peers)
    custom = SimpleNamespace(disabled=False, register_graph_buffers=lambda: told.append(1))
    communicators = [None, SimpleNamespace(ca_comm=None), SimpleNamespace(ca_comm=custom)]
    peers.coordinators = [SimpleNamespace(device_communicator=one) for one in communicators]
    peers.end_capture()
    custom.disabled = True
    peers.end_capture()
    assert told == [1]


def test_a_rank_that_hangs_is_ended_with_its_group_at_the_limit(pair: GroupedWorker) -> None:
    pair.run(request(all_reduce(2), seconds=0.010), 60)
    process = pair._groups[2]._ranks[1].process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    answer = pair.run(request(all_reduce(2), seconds=0.004), 1)
    assert answer == {"status": "skipped", "reason": "took longer than 1 s (--timeout)"}
    assert process.wait(10) == -signal.SIGKILL
    assert pair.run(request(all_reduce(2), seconds=0.005), 60)["status"] == "ok"


def test_more_ranks_than_a_machine_can_run_are_not_started() -> None:
    huge = GroupWorker(SESSION, REPLAY_WORKER, 1 << 30)
    answer = huge.run(request(all_reduce(1 << 30)), 60)
    assert answer["status"] == "skipped" and "1,073,741,824 ranks" in answer["reason"]


def test_fewer_gpus_than_ranks_are_a_reason_to_skip_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of_rank("cuda:0", rank, 2) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert device_of_rank("cpu", 3, 4) == "cpu"
    with pytest.raises(ValueError, match="4 ranks, and this machine 2 GPUs"):
        device_of_rank("cuda:0", 0, 4)


def test_a_group_begins_with_the_gpu_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [device_of_rank("cuda:5", rank, 3) for rank in range(3)] == ["cuda:5", "cuda:6", "cuda:7"]
    with pytest.raises(ValueError, match="4 ranks, and this machine 8 GPUs, of which 3 from cuda:5 on"):
        device_of_rank("cuda:5", 0, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_group_without_its_devices_is_skipped_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group = GroupWorker({**SESSION, "device": "cuda"}, REPLAY_WORKER, 2)
    answer = group.run(request(all_reduce(2)), 60)
    assert answer["status"] == "skipped" and "no CUDA GPU" in answer["reason"]
    monkeypatch.setattr(group, "_start", None)
    assert group.run(request(all_reduce(2)), 60) == answer


def test_a_job_asks_for_as_many_ranks_as_its_group_had() -> None:
    (asked,) = CallJob({"decode": 5}, all_reduce(4, 3), [SampleGroup(None, None)]).requests(0.1)
    assert asked.body["ranks"] == 4
    (alone,) = CallJob({"decode": 5}, call("aten::mm", X, X), [SampleGroup(None, None)]).requests(0.1)
    assert "ranks" not in alone.body


@given(st.integers(1, 64), st.integers(0, 63))
def test_calls_of_all_ranks_have_one_key_and_those_of_other_groups_another(size: int, rank: int) -> None:
    key = _key_for_all_ranks(orjson.loads(orjson.dumps(request(all_reduce(size, rank % size)))))
    assert key == _key_for_all_ranks(orjson.loads(orjson.dumps(request(all_reduce(size, 0)))))
    assert key != _key_for_all_ranks(orjson.loads(orjson.dumps(request(all_reduce(size + 1, 0)))))


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8), st.integers(1, 10**5))
def test_the_transfer_is_from_the_last_arrival_on_and_the_rest_is_waiting(
    times: list[tuple[int, int]], transfer: int
) -> None:
    starts = torch.tensor([float(start) for start, _ in times], dtype=torch.float64)
    end = float(starts.max()) + transfer
    host = torch.stack([starts, torch.full_like(starts, end), end - starts, torch.zeros_like(starts)], 1)
    for sampler in (GroupSampler, GpuGroupSampler):
        took, waits = sampler.split(object.__new__(sampler), host)
        assert took == transfer and waits.tolist() == [float(starts.max()) - start for start in starts.tolist()]


class OtherRank(Alone):
    """A group of this rank and one whose kernels last `others` µs."""

    def __init__(self, others: list[float]) -> None:
        super().__init__("cpu")
        self.others = others

    def gather(self, row: Sequence[float]) -> torch.Tensor:
        other = [float(len(self.others))] if len(row) == 1 else self.others
        return torch.tensor([[*row], other], dtype=torch.float64)


@pytest.mark.parametrize(("others", "found"), [([2.0, 7.0], [2.0, 3.0]), ([2.0], [5.0, 3.0]), ([], [5.0, 3.0])])
def test_a_kernel_of_a_collective_takes_the_shortest_time_in_any_rank(
    others: list[float], found: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [KernelRun("reduce", 0, 5.0, 1), KernelRun("copy", 9, 3.0, 1)]
    monkeypatch.setattr(clock, "kernel_runs", lambda work: kernels)
    sampler = GpuGroupSampler.__new__(GpuGroupSampler)
    sampler.peers, sampler.prepare = OtherRank(others), lambda: None
    assert [(kernel.name, kernel.us) for kernel in sampler.kernels(lambda: None, 1)] == list(
        zip(("reduce", "copy"), found, strict=True)
    )


def test_what_connecting_took_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects in the first call, for longer than a kernel holds the GPU back."""
    sampler = GpuGroupSampler.__new__(GpuGroupSampler)
    sampler.blocker, sampler.waited_us = SpinBlocker(None, torch.zeros(2, dtype=torch.int32)), [1e6]
    sampler.blocker.timed_out = True
    assert sampler.notes == [BLOCKER_TIMED_OUT]
    sampler.forget()
    assert (sampler.notes, sampler.waited_us) == ([], [])


@pytest.mark.parametrize(("size", "most"), [(2, 64), (4, 32), (8, 21)])
def test_sums_in_place_are_ended_before_they_overflow(size: int, most: int) -> None:
    """What is too fast for a sample of its own is repeated, and grows by the size of the group each time."""
    peers: Any = Alone("cpu")
    peers.size = size
    x = torch.zeros(4, dtype=torch.uint8)
    timing, _ = time_collective(lambda: None, Inputs([], {}, {0: x}), [0], 0.001, peers)
    assert timing.n == most


class Communicator:
    """An engine's NCCL communicator, which notes what it is asked."""

    def __init__(self, available: bool = True) -> None:
        self.available, self.asked = available, list[Any]()

    def all_gather(self, output_tensor: Any, input_tensor: Any, stream: Any = None) -> None:
        self.asked.append(("all_gather", output_tensor, input_tensor))

    def reduce_scatter(self, output_tensor: Any, input_tensor: Any, op: Any = None, stream: Any = None) -> None:
        self.asked.append(("reduce_scatter", output_tensor, input_tensor, op))

    def all_gatherv(self, output_tensor: Any, input_tensor: Any, sizes: list[int], stream: Any = None) -> None: ...

    def group_start(self) -> None:
        self.asked.append("start")

    def group_end(self) -> None:
        self.asked.append("end")


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are there."""
    monkeypatch.setattr("kcap.replay.group.collectives.find_spec", lambda name: name)


def by_nccl(communicator: Communicator, name: str, **values: Value) -> tuple[Any, Any, Call]:
    """The operator and the rule of a call of the engine's communicator in a group of two."""
    coordinator = SimpleNamespace(pynccl_comm=communicator)
    engines = {"vllm": SimpleNamespace(device_communicator=None), "sglang": coordinator}  # the second one has it
    peers: Any = SimpleNamespace(size=2, rank=0, world=1, engine_group=lambda engine, _: engines[engine])
    args = [Argument(name=name, value=value) for name, value in {**values, "group": PAIR}.items()]
    collective = call(f"pynccl::{name}").model_copy(update={"args": args})
    return *resolve_collective(collective, peers), collective


def test_the_engines_own_nccl_communicator_is_called_with_what_was_recorded() -> None:
    communicator = Communicator()
    operator, rule, collective = by_nccl(
        communicator, "reduce_scatter", output_tensor=SCATTERED, input_tensor=X, op="sum"
    )
    rule.prepare(bind_call(collective, None, operator.schema, lambda _: None))
    assert rule.rebuilt_args == ("group",)
    written = [parameter.name for parameter in operator.schema.arguments if parameter.alias_info]
    assert written == ["output_tensor"]
    operator.call("out", "in", "sum", None)
    assert communicator.asked == [("reduce_scatter", "out", "in", torch.distributed.ReduceOp.SUM)]


def test_collectives_of_one_nccl_group_are_launched_together() -> None:
    communicator = Communicator()
    lists: dict[str, Value] = {"output_tensor": [GATHERED, GATHERED], "input_tensor": [X, X]}
    operator, _, _ = by_nccl(communicator, "all_gather", **lists)
    some = [torch.ones(number) for number in range(4)]
    operator.call(some[:2], some[2:], None)
    asked = [one if isinstance(one, str) else (one[0], *map(len, one[1:])) for one in communicator.asked]
    assert asked == ["start", ("all_gather", 0, 2), ("all_gather", 1, 3), "end"]
    with pytest.raises(IndexError):
        operator.call(some[:2], some[:1], None)
    assert communicator.asked[-1] == "end"  # whatever happens in between


@pytest.mark.parametrize(
    ("name", "available", "more", "reason"),
    [
        ("all_gather", False, {}, "no engine here has an NCCL communicator that does this: it needs GPUs"),
        ("all_gather", True, {"sizes": None}, "that does this"),
        ("broadcast", True, {}, "that does this"),
        ("group", True, {}, "does not know how to call"),
    ],
)
def test_what_an_nccl_communicator_here_cannot_do_is_skipped(
    name: str, available: bool, more: dict[str, Value], reason: str
) -> None:
    with pytest.raises(Skip, match=reason):
        by_nccl(Communicator(available), name, output_tensor=GATHERED, input_tensor=X, **more)


@pytest.mark.parametrize("sizes", [[96, 32], [[96, 32], [96, 32]]])
def test_parts_of_different_sizes_are_skipped(sizes: Any) -> None:
    tensors: list[Value] = [GATHERED, X] if sizes[0] == 96 else [[GATHERED, GATHERED], [X, X]]
    operator, rule, collective = by_nccl(
        Communicator(), "all_gatherv", output_tensor=tensors[0], input_tensor=tensors[1], sizes=sizes
    )
    with pytest.raises(Skip, match="parts of different sizes"):
        rule.prepare(bind_call(collective, None, operator.schema, lambda _: None))


def fused(workspace: Opaque, x: Any, pattern: int, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """What is made for a call of FlashInfer's by a rank of two; `flashinfer.comm` cannot be imported."""
    monkeypatch.setitem(sys.modules, "flashinfer.comm", None)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(allreduce_fusion=lambda **_: None))
    peers = Peers.__new__(Peers)
    peers.rank, peers.size, peers._workspaces = 0, 2, {}
    monkeypatch.setattr(peers, "any", bool)
    values = {"input": x, "workspace": workspace, "pattern": pattern, "group": PAIR}
    args = [Argument(name=name, value=value) for name, value in values.items()]
    collective = call("flashinfer::allreduce_fusion").model_copy(update={"args": args})
    operator, rule = resolve_collective(collective, peers)
    bound = bind_call(collective, None, operator.schema, lambda _: None)
    rule.prepare(bound)
    return Inputs([], rule.rebuild_args(bound, Inputs([], {}, {})), {})


SHARED = Opaque("TRTLLMAllReduceFusionWorkspace")


@pytest.mark.parametrize(
    ("workspace", "x", "pattern", "reason"),
    [
        (SHARED, X, 0, "FlashInfer has no all-reduce here: ModuleNotFoundError"),
        (Opaque("MNNVLAllReduceFusionWorkspace"), X, 0, "in other memory"),
        (SHARED, tensor(64), 1, "no matrix"),
        (SHARED, X, 7, "sums over experts"),
    ],
)
def test_a_sum_by_flashinfer_that_is_not_replayed_says_why(
    workspace: Opaque, x: Any, pattern: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Skip, match=reason):
        fused(workspace, x, pattern, monkeypatch)


class FlashInferMemory:
    """`flashinfer.comm`, of which memory for more than `most` tokens is refused; `asked`: what for."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, list[tuple[int, int, torch.dtype]]()

    def create_allreduce_fusion_workspace(
        self, max_token_num: int, hidden_dim: int, dtype: torch.dtype, **_: object
    ) -> object:
        self.asked.append((max_token_num, hidden_dim, dtype))
        if max_token_num > self.most:
            raise RuntimeError("no room")
        return object()

    TorchDistBackend = SimpleNamespace


def test_sums_by_flashinfer_share_memory_that_has_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = FlashInferMemory(most=4096)
    for module in ("flashinfer", "flashinfer.comm", "flashinfer.comm.mnnvl"):
        monkeypatch.setitem(sys.modules, module, memory)
    peers = Peers.__new__(Peers)
    peers.rank, peers.size, peers._workspaces, peers.world = 0, 2, {}, None
    monkeypatch.setattr(peers, "any", bool)
    of = partial(peers.fused_workspace, hidden_size=32, dtype=torch.bfloat16)
    small, large = of(5), of(3000)
    assert of(2048) is small and of(2049) is large and small is not large
    assert peers.fused_workspace(5, 32, torch.float16) is not small
    for _ in range(2):
        with pytest.raises(Skip, match="FlashInfer has no all-reduce here: RuntimeError: no room"):
            of(5000)
    assert of(4096) is large
    asked = [(2048, torch.bfloat16), (4096, torch.bfloat16), (2048, torch.float16), (8192, torch.bfloat16)]
    assert [(tokens, dtype) for tokens, hidden_size, dtype in memory.asked if hidden_size == 32] == asked
    wide = partial(peers.fused_workspace, hidden_size=64, dtype=torch.bfloat16)
    with pytest.raises(Skip, match="no room"):
        wide(5000)
    assert wide(5) is wide(6), "what has less room can be made"
    monkeypatch.setattr(peers, "any", lambda failed: True)
    with pytest.raises(Skip, match="FlashInfer has no all-reduce in another rank"):
        wide(3000)


def test_a_broken_gpu_is_no_reason_to_skip_a_sum_by_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("kcap.replay.group.peers.importlib.import_module", fail)
    peers = Peers.__new__(Peers)
    peers.rank, peers.size, peers._workspaces = 0, 2, {}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        peers.fused_workspace(5, 32, torch.bfloat16)
