"""Slots and units: what stays together, what a dead judge costs, and that nothing is left."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from bench_datasets import MASKED, SCALE
from hypothesis import given
from hypothesis import strategies as st
from judged import WORKLOADS, outcomes_in, statuses, write_judged, write_solution

from kcap.bench.run.executors import SlotRequest, executors, find_executor, local
from kcap.bench.run.executors.common import actor as cores_file
from kcap.bench.run.executors.common import slot as scratch_file
from kcap.bench.run.executors.common.actor import claimed_cores
from kcap.bench.run.executors.common.dispatcher import (
    AskedAgain,
    Dispatcher,
    LostSlot,
    WorkQueue,
    WorkUnit,
    queue_by_definition,
)
from kcap.bench.run.executors.common.slot import LocalSlot, Stopped, scratch_folder
from kcap.bench.run.options import Options
from kcap.bench.sandbox import process_tree
from kcap.errors import CallError, KcapError
from kcap.replay.datasets.spreads import spreads_for
from kcap.schemas.flashinfer import solution as solutions_file
from kcap.schemas.results.outcome import Outcome
from kcap.system.worker_process import Worker


@pytest.fixture
def units(tmp_path):
    """Makes a unit of each (name, Definition, what the fake judge is told)."""

    def make(*given):
        made = []
        for name, definition, told in given:
            file = write_solution(tmp_path / "solutions", name, definition.name, **told)
            workloads = tuple(WORKLOADS[definition.name])
            made.append(WorkUnit(str(file), solutions_file.read(file), definition, workloads))
        return made

    return make


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """What the fake judges were asked: process, Definition, Solution, Workload."""
    path = tmp_path / "journal"
    monkeypatch.setenv("FAKE_JOURNAL", str(path))
    return lambda: [line.split() for line in path.read_text().splitlines()]


def slots(count):
    return [LocalSlot({"device": "cpu"}, "fake_judge") for _ in range(count)]


def test_a_judge_may_take_all_first_runs_of_both():
    """A Solution's process is started twice, its reference's four times, on as many spreads as there are."""
    options = Options(path=Path(), solutions=Path(), output=Path(), build_timeout=1000.0, timeout=1.0)
    assert len(spreads_for(SCALE)) == 3
    assert options.limit_s > 1000 * (2 + 2 + 4 + 4 * 3)


def judged(units, count=1, limit_s=30.0):
    told = list(Dispatcher(slots(count), queue_by_definition(units), limit_s).judge())
    return [one for one in told if isinstance(one, Outcome)]


def test_each_executor_is_one_file():
    assert executors() == ["local", "ray"]


def test_the_workloads_of_a_solution_stay_on_one_slot_and_follow_each_other(faked, units, journal):
    judged(units(*((f"s{i}", SCALE, {"sleep": 0.01}) for i in range(6))), count=2)
    processes, order = defaultdict(set), defaultdict(list)
    for process, _, solution, _ in journal():
        processes[solution].add(process)
        order[process].append(solution)
    assert all(len(found) == 1 for found in processes.values())
    assert all(seen == sorted(seen, key=seen.index) for seen in order.values())


def test_one_slot_does_definition_after_definition(faked, units, journal):
    judged(units(("a", SCALE, {}), ("b", MASKED, {}), ("c", SCALE, {}), ("d", MASKED, {})))
    assert [definition for _, definition, _, _ in journal()] == ["scale"] * 4 + ["masked"] * 2


names = st.lists(st.sampled_from(["a", "b", "c"]), max_size=12)


class Named:
    """As much of a unit as its order needs."""

    def __init__(self, name):
        self.definition = self
        self.name = name


@given(names, st.lists(st.integers(0, 2), max_size=40))
def test_every_unit_is_taken_once_whatever_slot_is_free(given_names, turns):
    waiting = WorkQueue([Named(name) for name in given_names])
    previous, taken = {}, []
    for slot in [*turns, *[0] * (len(given_names) + 1)]:
        unit = waiting.take(previous.get(slot))
        previous[slot] = unit.name if unit else None
        taken += [unit.name] if unit else []
    assert sorted(taken) == sorted(given_names)


def test_a_second_slot_begins_with_another_definition():
    waiting = WorkQueue([Named("a"), Named("a"), Named("b"), Named("b")])
    assert [waiting.take(None).name, waiting.take(None).name] == ["a", "b"]
    assert [waiting.take("a").name, waiting.take("b").name] == ["a", "b"]


def test_a_judge_that_dies_once_is_started_again_and_asked_again(faked, units, journal):
    told = list(Dispatcher(slots(1), queue_by_definition(units(("a", SCALE, {"s1": {"die": 1}}))), 30).judge())
    _, again, first, second = told
    assert again == AskedAgain("a", "s1", "crashed: SIGABRT")
    assert (first.status, second.status) == ("PASSED", "PASSED")
    processes = [process for process, *_ in journal()]
    assert len(processes) == 3 and processes[0] != processes[1]


def test_a_judge_that_dies_twice_costs_that_workload_alone(faked, units):
    found = judged(units(("a", SCALE, {"s1": {"die": 9}}), ("b", SCALE, {})))
    assert [one.status for one in found] == ["NOT_JUDGED", "PASSED", "PASSED", "PASSED"]
    assert found[0].reason == "the judge failed 2 times: crashed: SIGABRT"
    assert (found[0].solution, found[0].workload) == ("a", "s1")


def test_a_judge_that_does_not_answer_in_time_costs_that_workload_alone(faked, units):
    found = judged(units(("a", SCALE, {"s1": {"sleep": 60}})), limit_s=0.3)
    assert [one.status for one in found] == ["NOT_JUDGED", "PASSED"]
    assert found[0].reason == "the judge failed 2 times: took longer than 0.3 s (of --timeout and --build-timeout)"


def test_an_answer_that_is_no_outcome_is_not_believed(faked, units):
    found = judged(units(("a", SCALE, {"status": "WON"})))
    assert [(one.status, one.reason) for one in found] == [("NOT_JUDGED", found[0].reason)] * 2
    assert "as the source says" in found[0].reason


def test_a_judge_that_has_no_device_stops_the_run_with_its_words(faked, units, monkeypatch):
    class Poor(LocalSlot):
        def start(self):
            raise CallError("no such device")

    crew = Dispatcher(
        [Poor({"device": "cpu"}, "fake_judge"), *slots(1)], queue_by_definition(units(("a", SCALE, {}))), 30
    )
    with pytest.raises(CallError, match="no such device"):
        list(crew.judge())


def test_a_judge_that_does_not_start_leaves_its_work_to_the_others(faked, units):
    class Poor(LocalSlot):
        def start(self):
            raise KcapError("its cores are not free")

    crew = Dispatcher(
        [Poor({"device": "cpu"}, "fake_judge"), *slots(1)], queue_by_definition(units(("a", SCALE, {}))), 30
    )
    outcomes, slots_lost = told_by(crew)
    assert ([one.status for one in outcomes.values()], slots_lost) == (["PASSED"] * 2, 1)
    with pytest.raises(KcapError, match="its cores are not free"):
        list(Dispatcher([Poor({"device": "cpu"})], queue_by_definition(units(("a", SCALE, {}))), 30).judge())


def test_a_device_that_cannot_be_used_costs_its_own_judge_alone(faked, units):
    """Another user's memory fills one GPU of eight, or it has fallen out."""
    lost = LocalSlot({"device": "lost"}, "fake_judge")
    crew = Dispatcher([lost, *slots(1)], queue_by_definition(units(("a", SCALE, {}))), 30)
    outcomes, slots_lost = told_by(crew)
    assert ([one.status for one in outcomes.values()], slots_lost) == (["PASSED"] * 2, 1)
    lost = LocalSlot({"device": "lost"}, "fake_judge")
    with pytest.raises(KcapError, match="lost: cannot be used"):
        list(Dispatcher([lost], queue_by_definition(units(("a", SCALE, {}))), 30).judge())


def test_a_judge_that_has_not_started_holds_up_no_run_that_is_done(units):
    class Late:
        """A slot that waits for its node."""

        stopped = threading.Event()

        def start(self):
            assert self.stopped.wait(20)
            raise Stopped("stopped")

        def stop(self):
            self.stopped.set()

        def close(self):
            pass

    begun = time.monotonic()
    judges = Played(lambda request, limit_s: {"status": "PASSED"})
    outcomes, slots_lost = told_by(Dispatcher([Late(), judges], queue_by_definition(units(("a", SCALE, {}))), 30))
    assert (len(outcomes), slots_lost) == (2, 0)
    assert time.monotonic() - begun < 10


class Played:
    """A slot without a process, of which `run` answers; `ready`: it starts then."""

    def __init__(self, run, ready=None):
        self.run = run
        self.ready = ready

    def start(self):
        assert self.ready is None or self.ready.wait(10)
        return {}

    def stop(self):
        pass

    def close(self):
        pass


def lost(request, limit_s):
    raise CallError("cuda:1: cannot be used")


def told_by(crew):
    """The Outcomes by Solution and Workload, and how many slots were lost."""
    found = list(crew.judge())
    outcomes = [one for one in found if isinstance(one, Outcome)]
    return {(one.solution, one.workload): one for one in outcomes}, sum(isinstance(one, LostSlot) for one in found)


def test_a_judge_that_cannot_be_started_again_costs_its_slot_alone(units):
    begun = threading.Event()

    def dies(request, limit_s):
        begun.set()
        time.sleep(0.5)  # the other slot has no more work by then
        lost(request, limit_s)

    def judges(request, limit_s):
        assert begun.wait(10)
        return {"status": "PASSED"}

    crew = Dispatcher(
        [Played(dies), Played(judges)], queue_by_definition(units(("a", SCALE, {}), ("b", MASKED, {}))), 30
    )
    outcomes, slots_lost = told_by(crew)
    assert {key: one.status for key, one in outcomes.items()} == dict.fromkeys(
        [("a", "s1"), ("a", "s2"), ("b", "k1")], "PASSED"
    )
    assert slots_lost == 1


def test_where_no_slot_is_left_the_run_ends_with_what_the_last_one_said(units):
    crew = Dispatcher(
        [Played(lost), Played(lost)],
        queue_by_definition(units(("a", SCALE, {}), ("b", MASKED, {}), ("c", SCALE, {}))),
        30,
    )
    with pytest.raises(CallError, match="cuda:1: cannot be used"):
        list(crew.judge())


def test_a_workload_that_costs_two_slots_costs_no_third(units):
    others = threading.Semaphore(0)
    ready = threading.Event()

    def dies(request, limit_s):
        if others.acquire(blocking=False):
            ready.set()
        others.release()
        lost(request, limit_s)

    judges = Played(lambda request, limit_s: {"status": "PASSED"}, ready)
    outcomes, slots_lost = told_by(
        Dispatcher([Played(dies), Played(dies), judges], queue_by_definition(units(("a", SCALE, {}))), 30)
    )
    assert outcomes["a", "s1"].reason == "the judge failed 2 times: cuda:1: cannot be used"
    assert (outcomes["a", "s1"].status, outcomes["a", "s2"].status, slots_lost) == ("NOT_JUDGED", "PASSED", 2)


def test_a_run_that_is_stopped_ends_at_once_and_leaves_no_judge(faked, units):
    others = children()
    crew = Dispatcher(
        slots(2), queue_by_definition(units(("a", SCALE, {"sleep": 60}), ("b", MASKED, {"sleep": 60}))), 120
    )
    told = crew.judge()
    assert isinstance(next(told), dict) and isinstance(next(told), dict)
    begun = time.monotonic()
    told.close()
    assert time.monotonic() - begun < 10
    assert not [thread for thread in threading.enumerate() if "_work" in thread.name]
    assert children() <= others


def children() -> set[int]:
    """Process ids of this process's children."""
    return set(process_tree.children(os.getpid()))


def pipes_and_files() -> set[str]:
    """That are open in this process: what a worker is spoken to by, its log and its folder."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {target for target in found if target.startswith(("pipe:", tempfile.gettempdir()))}


def test_nothing_is_left_of_many_judges(faked, units, tmp_path, monkeypatch):
    (place := tmp_path / "slots").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    others, opened = children(), pipes_and_files()
    for _ in range(3):
        judged(units(("a", SCALE, {"die": 1})), count=2)
    assert pipes_and_files() <= opened
    assert not list(place.iterdir())
    assert children() <= others


def test_a_scratch_folder_of_a_killed_run_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_file.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "kcap-slot-dead" / "build").mkdir(parents=True)
    (tmp_path / "kcap-slot-file").write_text("no folder")
    with scratch_folder() as mine, scratch_folder() as other:
        assert mine.is_dir() and other.is_dir()
        assert not (tmp_path / "kcap-slot-dead").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["kcap-slot-file"]


def test_a_scratch_folder_is_not_removed_by_another_run_while_it_is_made(tmp_path, monkeypatch):
    make = tempfile.mkdtemp

    def beside(**given):
        folder = make(**given)
        scratch_file._sweep(tmp_path)
        return folder

    monkeypatch.setattr(scratch_file.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(scratch_file.tempfile, "mkdtemp", beside)
    with scratch_folder() as mine:
        scratch_file._sweep(tmp_path)
        assert mine.is_dir() and mine.name.startswith(scratch_file.SCRATCH_PREFIX)
    assert not list(tmp_path.iterdir())


def test_slots_of_one_machine_never_share_a_core(monkeypatch):
    monkeypatch.setattr(cores_file.os, "sched_getaffinity", lambda _: {900, 901, 902, 903})
    with claimed_cores(2) as one, claimed_cores(2) as other:
        assert one | other == {900, 901, 902, 903}
        with pytest.raises(KcapError, match="0 are free"), claimed_cores(1):
            pass
    with claimed_cores(4) as again:
        assert len(again) == 4


def test_a_slot_for_each_gpu_and_no_more_than_have_work(monkeypatch):
    monkeypatch.setattr(local, "gpus", lambda: ("H200",) * 4)
    opened = []
    for most in (9, 2):
        with find_executor("local").open(SlotRequest("cuda", {}, most)) as found:
            opened.append([slot._session["device"] for slot in found])
    assert opened == [["cuda:0", "cuda:1", "cuda:2", "cuda:3"], ["cuda:0", "cuda:1"]]


def test_gpus_are_asked_for_in_a_process_of_their_own(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was touched here"))
    local.gpus.cache_clear()
    assert isinstance(local.gpus(), tuple)


def test_without_a_device_it_is_the_recorded_one_or_a_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(local, "gpus", lambda: ("H200",))
    assert (local.choose_device(None, "cpu"), local.choose_device(None, None)) == ("cpu", "cuda")
    monkeypatch.setattr(local, "gpus", tuple)
    assert (local.choose_device(None, "cuda"), local.choose_device(None, None)) == ("cuda", "cpu")


def test_several_slots_judge_all(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("kcap.bench.run.executors.local.each", lambda device: ["cpu", "cpu"])
    write_judged(tmp_path / "dataset")
    for i in range(5):
        write_solution(tmp_path / "solutions", f"s{i}")
        write_solution(tmp_path / "solutions", f"m{i}", "masked")
    assert bench().code == 0
    assert len(statuses(tmp_path / "out")) == len(outcomes_in(tmp_path / "out")) == 15


def test_a_run_that_loses_a_slot_is_whole(bench, tmp_path, monkeypatch):
    start, failed = Worker._start, []

    def once(self):
        if self.restarts == 0 and not failed:
            failed.append(self)
            raise CallError("cuda:1: cannot be used")
        start(self)

    monkeypatch.setattr(Worker, "_start", once)
    monkeypatch.setattr("kcap.bench.run.executors.local.each", lambda device: ["cpu", "cpu"])
    write_judged(tmp_path / "dataset")
    for i in range(4):
        write_solution(tmp_path / "solutions", f"s{i}", sleep=0.1, s1={"die": 1})
    done = bench()
    assert (done.code, "cannot be started: cuda:1: cannot be used" in done.err) == (0, True), done.err
    assert len(statuses(tmp_path / "out")) == len(outcomes_in(tmp_path / "out")) == 8 and failed
    assert list((tmp_path / "out" / "traces").rglob("*.jsonl"))


def test_a_stopped_slot_takes_no_request():
    slot = slots(1)[0]
    slot.stop()
    with pytest.raises(KcapError, match="stopped"):
        slot.run({}, 1)
