"""The driver's way with a GPU. Where there is none, memory and graphs are played, what it does with them is not."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_datasets import definition, of, workload
from forked_candidates import Forked
from played_memory import PlayedGate, PlayedMemory, build_library, build_tensors

from kcap.bench.judge.candidate import NoGraph
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.device import Gpu
from kcap.bench.judge.driver.gpu_memory import GpuMemory
from kcap.bench.judge.input_pool import draw_inputs
from kcap.bench.judge.process import ProcessEnded, Stirred
from kcap.bench.judge.verdict import Rejected, check_report
from kcap.errors import KcapError

pytestmark = pytest.mark.alone

PROGRAM, SMALL = "fake_gpu_candidate.py", Gpu(1 << 20, 1 << 30)
DOUBLE = definition("double", {"x": of("m n")}, {"y": of("m n")}, "2 * x")


ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module", params=["played", pytest.param("real", marks=ON_A_GPU)])
def forked(request, tmp_path_factory):
    if request.param == "real":
        with Forked(PROGRAM, "real", gpu=SMALL, gpu_memory=GpuMemory("cuda:0")) as candidates:
            yield candidates
        return
    folder = tmp_path_factory.mktemp("cuda")
    library = build_library(folder)
    memory = PlayedMemory(library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAYED_RUNTIME", str(library))
        patch.setenv("PLAYED_TENSORS", str(build_tensors()))
        patch.setenv("LD_LIBRARY_PATH", str(folder), prepend=os.pathsep)
        with Forked(PROGRAM, "played", gpu=SMALL, gpu_memory=memory) as candidates:
            yield candidates


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A machine that others work on passes a gate late."""
    monkeypatch.setattr("kcap.bench.judge.candidate.PATIENCE_S", 30)


@pytest.fixture
def start(forked):
    return lambda what, graphs=True, destination=True: forked.start(what, destination, graphs)


@pytest.fixture
def drawn():
    return draw_inputs(DOUBLE, workload(DOUBLE, "w", 64), None, None)


def right(one, seed, number):
    """The output of invocation `number`."""
    return 2 * one.workload.drawn.draws.draw(seed, number, one.limits.gpu_memory.device)[0]


@pytest.mark.parametrize("what", ["double", "doubled"])
@pytest.mark.parametrize("graphs, method", [(True, "graph"), (False, "host")])
def test_every_invocation_has_inputs_of_its_own_and_its_outputs_come_back(start, drawn, what, graphs, method):
    one = start(what, graphs, destination=what == "double")
    one.open(drawn, sets=8)
    for seed in (11, 12):
        done = one.run(range(8), seed, chosen=8)
        assert done.report.code == protocol.FINE, done.report.text
        assert one.changed(range(8)).code == protocol.FINE
        assert protocol.METHODS[done.report.method] == method and one.gated == (method == "graph")
        assert done.elapsed_ns > 8 * 200_000
        assert {*done.outputs} == {*range(8)}
        for number, outputs in done.outputs.items():
            assert torch.equal(outputs[0], right(one, seed, number))


@pytest.mark.parametrize("what", ["double", "doubled"])
def test_a_batch_of_several_graphs_is_whole(start, drawn, what):
    one = start(what, destination=what == "double")
    one.open(drawn, sets=600)
    done = one.run(range(600), 11, chosen=600)
    assert (done.report.code, protocol.METHODS[done.report.method], one.gated) == (protocol.FINE, "graph", True)
    assert all(torch.equal(outputs[0], right(one, 11, number)) for number, outputs in done.outputs.items())


@pytest.mark.parametrize(("turns", "most", "untimed"), [(True, 60.0, True), (False, 60.0, False), (True, 1e-3, False)])
def test_what_the_gpu_takes_to_turn_counts_where_that_is_long(turns, most, untimed, monkeypatch):
    """What a candidate does meanwhile has its inputs."""
    word = torch.zeros(2 * protocol.GATE, dtype=torch.uint8)
    monkeypatch.setattr("kcap.bench.judge.driver.gate.TURN_S", most)
    gate = PlayedGate(word.data_ptr(), 2, [])
    monkeypatch.setattr(gate, "_turns", lambda: time.sleep(0.05) or turns)
    gate.open()
    assert (time.perf_counter_ns() - gate.began_ns < 50_000_000) == untimed
    assert word[0] == 2


def test_a_replay_that_does_nothing_leaves_its_outputs_unwritten(start, drawn):
    one = start("double_once")
    one.open(drawn, sets=4)
    assert one.run(range(1), 1).report.code == protocol.FINE
    one.run(range(4), 2)
    done = one.run(range(4), 3, chosen=4)
    assert done.report.code == protocol.FINE
    assert done.outputs[3][0].isnan().all()


def test_changed_inputs_are_told_by_name(start, drawn):
    one = start("double_in_place")
    one.open(drawn, sets=4)
    assert one.run(range(1), 1).report.code == protocol.FINE
    answer = one.changed([0])
    assert (answer.code, answer.text) == (protocol.INPUT, "changed its input x")


def test_the_last_element_of_a_large_input_may_not_be_changed(start):
    large = draw_inputs(DOUBLE, workload(DOUBLE, "w", 1 << 20), None, None)
    one = start("double_changing_the_last")
    one.open(large, sets=1)
    assert one.run(range(1), 1).report.code == protocol.FINE
    answer = one.changed([0])
    assert (answer.code, answer.text) == (protocol.INPUT, "changed its input x")


def test_what_cannot_be_captured_is_to_be_started_again(start, drawn):
    one = start("refuses_capture")
    one.open(drawn, sets=4)
    assert one.run(range(1), 1).report.code == protocol.FINE
    with pytest.raises(NoGraph, match="not permitted when stream is capturing") as refused:
        one.run(range(4), 1)
    assert refused.value.candidate is one


def test_no_graph_said_where_none_was_asked_for_is_no_reason_to_start_again(start, drawn):
    """Else a process that forges answers would be started for ever."""
    one = start("refuses_capture")
    one.open(drawn, sets=4)
    one.graphs = False
    assert one.run(range(4), 1).report.code == protocol.NO_GRAPH


def test_first_call_is_made_before_the_capture(start, drawn):
    one = start("made_at_first_call")
    one.open(drawn, sets=4)
    assert one.run(range(4), 1).report.code == protocol.FINE


def test_outputs_in_one_memory_are_no_graph_but_right_when_launched(start, drawn):
    one = start("same_memory", destination=False)
    one.open(drawn, sets=8)
    with pytest.raises(NoGraph, match="same memory"):
        one.run(range(4), 1)
    one = start("same_memory", graphs=False, destination=False)
    one.open(drawn, sets=8)
    for _ in range(2):
        done = one.run(range(8), 7, chosen=8)
        assert done.report.code == protocol.FINE, done.report.text
        for number in (2, 5, 7):
            assert torch.equal(done.outputs[number][0], right(one, 7, number))


def test_part_of_the_l2_that_is_set_aside_is_seen_in_the_next_run(start, drawn):
    one = start("reserves")
    one.open(drawn, sets=2)
    assert one.run(range(1), 1).report.code == protocol.FINE
    report = one.run(range(1), 2).report
    assert report.code == protocol.RESERVED
    with pytest.raises(Rejected, match="it keeps part of the GPU's L2"):
        check_report(report)


def test_more_invocations_than_sets_are_refused(start, drawn):
    one = start("double")
    one.open(drawn, sets=2)
    report = one.run(range(3), 1).report
    assert report.code == protocol.DRIVER and "more invocations than sets" in report.text


def test_a_candidate_that_is_gone_has_ended(start, drawn):
    one = start("double")
    one.open(drawn, sets=2)
    os.kill(one.pid, signal.SIGKILL)
    with pytest.raises(ProcessEnded):
        for _ in range(3):
            one.run(range(1), 1)


@pytest.fixture
def gpu(forked):
    gpu = forked.limits.gpu_memory
    if not isinstance(gpu, PlayedMemory):
        pytest.skip("the GPU is played")
    yield gpu
    gpu.busy, gpu.others = [False], False


@pytest.mark.parametrize("before", [0, 1], ids=["while inputs are filled in", "after the batch"])
def test_a_run_that_others_disturb_is_made_again_on_other_inputs(gpu, start, drawn, before):
    one = start("double")
    one.open(drawn, sets=2)
    gpu.busy = [*before * [False], True, False]
    done = one.run(range(2), chosen=2)
    assert not gpu.busy[0] and torch.equal(done.outputs[1][0], right(one, done.seed, 1))


def test_a_run_whose_inputs_take_longer_to_come_is_made_again(gpu, start, drawn):
    """As they do where a stream waits for them."""
    one = start("double")
    one.open(drawn, sets=2)
    gpu.copies = [0.0014, 0.0012]
    done = one.run(range(2), chosen=2)
    assert not gpu.copies and torch.equal(done.outputs[1][0], right(one, done.seed, 1))


@pytest.mark.parametrize("before", [0, 1], ids=["while inputs are filled in", "after the batch"])
def test_who_works_on_when_stopped_is_found(gpu, start, drawn, before):
    one = start("double")
    one.open(drawn, sets=2)
    gpu.busy = [*(before * [False] + [True]) * 100]
    with pytest.raises(Stirred, match="the GPU goes on working"):
        one.run(range(2))
    assert one.how is not None


def test_a_gpu_that_others_use_is_not_held_against_a_solution(gpu, start, drawn):
    one = start("double")
    one.open(drawn, sets=2)
    gpu.busy, gpu.others = [True], True
    with pytest.raises(KcapError, match="others use"):
        one.run(range(2))


def test_memory_of_outputs_goes_with_their_workload(start):
    """In sum the outputs of all sizes may not fit into a GPU."""
    one = start("doubled", destination=False)
    for _ in range(3):
        drawn = draw_inputs(DOUBLE, workload(DOUBLE, "w", 3 << 18), None, None)
        one.open(drawn, sets=3)
        done = one.run(range(3), chosen=1)
        assert all(torch.equal(outputs[0], right(one, done.seed, at)) for at, outputs in done.outputs.items())
        assert sum(len(piece.bytes) for piece in one.pieces.known.values()) == 64 << 20


def test_memory_is_not_taken_from_kernels_that_a_failed_run_left(start, drawn):
    one = start("raises_at_first", destination=False)
    one.open(drawn, sets=2)
    assert one.run(range(1)).report.code == protocol.RAISED
    one.open(draw_inputs(DOUBLE, workload(DOUBLE, "w", 64), None, None), sets=2)
    report = one.run(range(1)).report
    assert report.code == protocol.FINE, report.text


@pytest.mark.parametrize("what", ["unmapped", "forbidden", "unshared"])
def test_memory_that_cuda_refuses_is_not_kept(gpu, start, drawn, what):
    one = start(what, destination=False)
    one.open(drawn, sets=1)
    code = one.run(range(1)).report.code
    assert code == (protocol.RAISED if what == "unshared" else protocol.FINE)  # smaller pieces are tried
    held = sum("of a GPU" in os.readlink(file) for file in Path(f"/proc/{one.pid}/fd").iterdir())
    assert held == 1 + len(one.pieces.known)  # that of its inputs, too


def test_memory_that_is_none_ends_the_process(start, drawn):
    one = start("forges_a_piece", destination=False)
    one.open(drawn, sets=2)
    with pytest.raises(ProcessEnded, match="its memory is not what it says"):
        one.run(range(2), 1, chosen=1)


def test_words_that_are_no_piece_leave_nothing_open(start, drawn):
    one = start("sends_nonsense", destination=False)
    one.open(drawn, sets=2)
    before = len(os.listdir("/proc/self/fd"))
    done = one.run(range(2), chosen=2)
    assert done.report.code == protocol.FINE
    assert len(os.listdir("/proc/self/fd")) < before + 10  # of memory that it has made for its outputs


def test_who_reports_after_it_was_stopped_is_not_believed(start, drawn, monkeypatch):
    """Else nothing would be compared: outputs are taken when it has been stopped."""
    one = start("doubled", graphs=False, destination=False)
    one.open(drawn, sets=2)
    ask = one.ask

    def late(content, *more, told=None, **others):
        def too_early():
            report = os.pread(one.memory, protocol.REPORT_BYTES, 0)
            os.pwrite(one.memory, protocol.REPORT.pack(protocol.UNREPORTED, 0, 0, 0), 0)
            told()
            os.pwrite(one.memory, report, 0)

        return ask(content, *more, told=too_early if told else None, **others)

    monkeypatch.setattr(one, "ask", late)
    with pytest.raises(Stirred, match="it reported that it was done when it had been stopped"):
        one.run(range(2), chosen=2)


def test_a_workload_that_cannot_be_opened_leaves_nothing_open(gpu, start, drawn, monkeypatch):
    one = start("double")
    monkeypatch.setattr(one, "report", lambda: protocol.Report(protocol.DRIVER, text="no memory"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProcessEnded, match="no memory"):
        one.open(drawn, sets=2)
    assert one.how is not None and len(os.listdir("/proc/self/fd")) < before


def test_without_gates_a_process_replays_its_graph_itself(forked, start, drawn, monkeypatch):
    monkeypatch.setattr(forked.limits.gpu_memory, "gates", False)
    one = start("double")
    one.open(drawn, sets=4)
    done = one.run(range(4), 5, chosen=4)
    assert (done.report.code, protocol.METHODS[done.report.method]) == (protocol.FINE, "graph")
    assert all(torch.equal(outputs[0], right(one, 5, number)) for number, outputs in done.outputs.items())


@pytest.fixture
def soon_stuck(forked, monkeypatch):
    """The GPU's memory, where what takes 0.1 s at a gate is stuck. Called with whether a gate has worked before."""
    memory = forked.limits.gpu_memory
    monkeypatch.setattr("kcap.bench.judge.driver.gpu_memory.STUCK_S", 0.1)

    def make(worked):
        monkeypatch.setattr(memory, "gates_worked", worked)
        monkeypatch.setattr(memory, "gates", True)  # is set back to it
        return memory

    return make


@pytest.mark.parametrize("before", [True, False])
def test_what_does_not_get_on_at_a_gate_is_timed_without(soon_stuck, start, drawn, monkeypatch, before):
    """Where a gate worked before, that is this Workload's; else the driver's."""
    memory = soon_stuck(before)
    one = start("double")
    one.open(drawn, sets=4)
    deliver = one.workload.arena.deliver
    monkeypatch.setattr(one.workload.arena, "deliver", lambda: time.sleep(0.3) or deliver())
    done = one.run(range(4), 5, chosen=4)
    assert memory.gates == before and not one.gated and done.report.code == protocol.FINE
    assert all(torch.equal(outputs[0], right(one, 5, number)) for number, outputs in done.outputs.items())
    one.open(drawn, sets=2)
    assert not one.gated
    two = start("double")
    two.open(drawn, sets=2)
    assert two.gated == before


@pytest.mark.parametrize("before", [True, False])
def test_who_is_late_at_a_gate_has_none_and_pays_where_gates_work(soon_stuck, start, drawn, monkeypatch, before):
    memory = soon_stuck(before)
    one = start("double")
    one.open(drawn, sets=2)
    ask = one.ask

    def late(content, *more, **others):
        if content != protocol.prepare_message(2, 0, one.workload.gate_value or 2):
            return ask(content, *more, **others)
        time.sleep(0.3)
        one.spent += 0.3
        return ask(content, *more, **others)

    monkeypatch.setattr(one, "ask", late)
    done = one.run(range(2), 3, chosen=2)
    assert torch.equal(done.outputs[1][0], right(one, 3, 1))
    assert (one.gated, memory.gates, one.spent > 0.3) == (False, before, before)


def test_what_fails_once_its_gate_was_opened_is_not_the_solutions_fault(soon_stuck, start, drawn, monkeypatch):
    soon_stuck(True)
    one = start("double")
    one.open(drawn, sets=2)
    ask, deliver = one.ask, one.workload.arena.deliver
    monkeypatch.setattr(one.workload.arena, "deliver", lambda: time.sleep(0.3) or deliver())

    def failing(content, *more, **others):
        done = ask(content, *more, **others)
        ran = content == protocol.run_message(2, 0)
        return replace(done, report=protocol.Report(protocol.RAISED)) if ran else done

    monkeypatch.setattr(one, "ask", failing)
    with pytest.raises(KcapError, match="does not get on"):
        one.run(range(2), 3)
    assert one.how is not None


@pytest.mark.parametrize("graphs", [True, False])
def test_the_way_is_that_of_a_run_of_no_invocations(start, drawn, graphs):
    one = start("double", graphs)
    one.open(drawn, sets=4)
    for _ in range(2):
        assert 0 < one.nothing(chosen=3) < 1_000_000_000
        assert one.run(range(4)).report.code == protocol.FINE


def test_what_has_not_come_through_when_it_says_so_is_run_again_without_a_gate(gpu, start, drawn, monkeypatch):
    monkeypatch.setattr("played_memory.PlayedGate.passed_within", lambda gate, seconds: False)
    one = start("double")
    one.open(drawn, sets=2)
    seeds = iter([5, 7])
    monkeypatch.setattr("kcap.bench.judge.candidate.fresh_seed", lambda: next(seeds))
    done = one.run(range(2), chosen=2)
    assert not one.gated and done.seed == 7
    assert torch.equal(done.outputs[1][0], right(one, 7, 1))


def test_a_launch_that_fails_at_a_gate_is_made_without(start, drawn, monkeypatch):
    one = start("double")
    one.open(drawn, sets=2)
    ask = one.ask

    def failing(content, *more, **others):
        done = ask(content, *more, **others)
        at_gate = content == protocol.prepare_message(2, 0, one.workload.gate_value or 2)
        return replace(done, report=protocol.Report(protocol.DRIVER)) if at_gate else done

    monkeypatch.setattr(one, "ask", failing)
    done = one.run(range(2), 3, chosen=2)
    assert not one.gated and torch.equal(done.outputs[1][0], right(one, 3, 1))


def test_what_is_disturbed_again_and_again_at_a_gate_is_run_without(gpu, start, drawn):
    one = start("double")
    one.open(drawn, sets=2)
    gpu.busy = [True, True, False]
    assert one.run(range(2), 2).report.code == protocol.FINE and one.gated
    gpu.busy = [True, True, True, False]
    done = one.run(range(2), 3, chosen=2)
    assert not one.gated and torch.equal(done.outputs[1][0], right(one, 3, 1))


def test_who_ends_at_the_gate_leaves_nobody_waiting_there(forked, start, drawn, monkeypatch):
    one = start("double")
    one.open(drawn, sets=2)
    one.run(range(2))
    monkeypatch.setattr(one.workload.arena, "deliver", lambda: not os.kill(one.pid, signal.SIGKILL))
    with pytest.raises(ProcessEnded):
        one.run(range(2))
    assert one.how is not None and one.gate is None
    two = start("double")
    two.open(drawn, sets=2)
    assert two.run(range(2)).report.code == protocol.FINE


def test_what_needs_its_process_at_a_gate_is_timed_without(start, drawn, monkeypatch):
    monkeypatch.setattr("kcap.bench.judge.candidate.PATIENCE_S", 1e-6)
    one = start("double")
    one.open(drawn, sets=2)
    done = one.run(range(2), chosen=2)
    assert not one.gated and protocol.METHODS[done.report.method] == "graph"
    assert torch.equal(done.outputs[1][0], right(one, done.seed, 1))


@pytest.mark.parametrize(("busy", "others"), [(10 * [True], False), (100 * [True, False, False], True)])
def test_others_are_seen_when_they_take_turns(gpu, monkeypatch, busy, others):
    """Whoever waits for a turn looks longer."""
    now, looks = [0.0], iter(busy)

    def quiet():
        found = not next(looks, False)
        now[0] += 0.0005 if found else 0.003
        return found

    monkeypatch.setattr(gpu, "quiet", quiet)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    assert GpuMemory.used_by_others(gpu) == others
