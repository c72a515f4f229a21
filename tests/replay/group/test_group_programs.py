"""A Program of one rank with its collectives in it, run by all ranks of the group together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from handmade import call, tensor
from programs import M, N, linear, program, relu

from kcap.replay.group.peers import Alone
from kcap.replay.group.workers import GroupWorker
from kcap.replay.jobs import REPLAY_WORKER
from kcap.replay.program.choose import most_frequent_programs
from kcap.replay.program.durations import CallDurations
from kcap.replay.program.job import ProgramJob, StandaloneResult, program_job
from kcap.replay.program.report import program_times
from kcap.replay.program.runner import NOT_IN_ALL, leave_out_what_others_lack
from kcap.replay.program.timing import PROFILED_RUNS, take_waits_out, time_invocations
from kcap.schemas.recording.recording import load
from kcap.schemas.recording.values import Group

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
REDUCE = call("_c10d_functional::all_reduce_", tensor(M, N), "sum", Group(2, 1, "tp"), id=2)
GATHER = call("_c10d_functional::all_gather_into_tensor", tensor(M, N), 3, Group(3, 1, "ep"), id=3)
ORDER = [0, 2, 1, 0, 2, 1, 3]


@pytest.fixture
def job(recorded: Callable[..., Path]) -> ProgramJob:
    path = recorded([linear(0), relu(1), REDUCE, GATHER], programs=[program(0, ORDER, {"decode": 3})])
    recording = load(path)
    return program_job(recording, most_frequent_programs(recording)[0])


def test_a_program_is_run_by_as_many_ranks_as_most_of_its_collectives_had(job: ProgramJob) -> None:
    alone = {number: StandaloneResult("ok", method="host") for number in job.counts}
    request = job.request(alone, 0.01)
    assert request["ranks"] == 2
    session = {"device": "cpu", "home": "cpu", "root": str(job.recording.path), "operators": [], "threads": 1}
    group = GroupWorker(session, REPLAY_WORKER, 2)
    answer = group.run(request, 60)
    group.end()
    assert answer["status"] == "ok", answer
    measurement = job.measurement(alone, answer, {"device": "cpu", "torch": torch.__version__})
    assert (measurement.ranks, measurement.replayed, measurement.left_out) == (2, len(ORDER) - 1, 1)
    calls = {call.call: call for call in measurement.calls}
    assert calls[3].reason == "its group has 3 ranks, and this one 2"
    assert (calls[2].us or 0) > 0 and (measurement.waited_us or 0) >= 0
    assert "by 2 ranks, which waited" in program_times(measurement)


def test_a_program_without_collectives_needs_no_group(job: ProgramJob) -> None:
    alone = {number: StandaloneResult("ok", method="host") for number in (0, 1)}
    assert "ranks" not in job.request(alone, 0.01)


def test_what_another_rank_could_not_prepare_no_rank_runs() -> None:
    """It would wait there for the others."""
    failed = {"status": "skipped", "reason": "there is no room for it"}
    parts: Any = SimpleNamespace(all={0: SimpleNamespace(failed=None, sets=[1]), 2: SimpleNamespace(failed=failed)})
    parts.all[3] = SimpleNamespace(failed=None, sets=[1])
    leave_out_what_others_lack(parts, Others([1.0, 0.0, 0.0], [0.0, 0.0, 0.0]))
    assert parts.all[0].failed == {"status": "skipped", "reason": NOT_IN_ALL} and not parts.all[0].sets
    assert parts.all[2].failed is failed and parts.all[3].failed is None


class Later(Alone):
    """The other rank of two starts everything so many microseconds later, and ends it at the same time."""

    size, late = 2, 300.0

    def gather(self, row: Sequence[float]) -> torch.Tensor:
        own = torch.tensor(row, dtype=torch.float64)
        self.starts, self.ends = own.view(2, -1).tolist()
        return torch.stack([own, own + torch.tensor([self.late, 0.0]).repeat_interleave(len(row) // 2)])


def test_a_collectives_time_is_from_the_last_arrival_on_and_other_calls_keep_this_ranks_own() -> None:
    parts: list[Any] = [SimpleNamespace(run=lambda: None, call=each) for each in (linear(0), REDUCE)]
    peers = Later("cpu")
    took, waited_us = time_invocations(parts, peers)
    assert waited_us == Later.late / 2
    own, together = (end - start for start, end in zip(peers.starts, peers.ends, strict=True))
    assert took == [own, together - Later.late]


class Others(Alone):
    """Two other ranks, whose kernels of collectives took so many microseconds; nan: they have none."""

    size = 3

    def __init__(self, *rows: list[float]) -> None:
        super().__init__("cuda:0")
        self.rows = rows

    def gather(self, row: Sequence[float]) -> torch.Tensor:
        return torch.tensor([list(row), *self.rows], dtype=torch.float64)


PARTS: dict[int, Any] = {0: SimpleNamespace(call=linear(0)), 2: SimpleNamespace(call=REDUCE)}


def test_the_shortest_kernel_of_a_collective_in_any_rank_is_its_transfer() -> None:
    durations = CallDurations({0: 7.0, 2: 30.0}, runs=[[7.0, 30.0, 7.0, 30.0]])
    waited_us = take_waits_out(durations, [0, 2, 0, 2], PARTS, Others([10.0, 12.0], [20.0, 18.0]))
    assert durations.us == {0: 7.0, 2: 11.0}
    assert waited_us == 20 - 12  # the mean over three ranks; in the first it waited for the others to start


def test_a_wait_of_all_ranks_for_an_idle_link_is_not_transfer() -> None:
    durations = CallDurations({2: 106.0}, runs=[[4.0, 4.0, 310.0, 6.0]])
    waited_us = take_waits_out(durations, [2, 2, 2, 2], PARTS, Others([9.0, 4.0, 400.0, 5.0], [9.0, 4.0, 520.0, 4.0]))
    assert durations.us == {2: 4.0}
    assert waited_us == 0 + (410 - 4) + (5 - 4)


def test_a_collective_that_one_rank_has_no_kernel_of_keeps_its_time() -> None:
    durations = CallDurations({2: 30.0}, runs=[[30.0, 30.0]])
    assert take_waits_out(durations, [2, 2], PARTS, Others([10.0, 10.0], [float("nan"), 10.0])) == 0
    assert durations.us == {2: 30.0}


def test_a_rank_whose_profiler_saw_nothing_gathers_as_many_times_as_the_others() -> None:
    others = [10.0] * PROFILED_RUNS
    assert take_waits_out(CallDurations(), [0, 2], PARTS, Others(others, others)) == 0
