"""The driver's way with a GPU, where there is none: memory and graphs are played, what it does with them is not."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from bench_datasets import definition, of, workload
from forked_candidates import Forked

from kcap.bench.judge.candidate import NoGraph
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.device import Gpu
from kcap.bench.judge.input_pool import open_input_pool
from kcap.bench.judge.process import ProcessEnded
from kcap.bench.judge.verdict import Rejected, check_report
from kcap.system.native_build import compiler

pytestmark = pytest.mark.alone

HERE = Path(__file__).parent
DOUBLE = definition("double", {"x": of("m n")}, {"y": of("m n")}, "2 * x")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "libcudart.so.0"
    subprocess.run([compiler(), "-shared", "-fPIC", HERE / "fake_cudart.cpp", "-o", path], check=True)
    return path


@pytest.fixture(scope="module")
def forked(library):
    with Forked("fake_gpu_candidate.py", library, gpu=Gpu(1 << 20, 1 << 30)) as candidates:
        yield candidates


@pytest.fixture
def start(forked):
    return lambda what, graphs=True, destination=True: forked.start(what, destination, graphs)


@pytest.fixture
def drawn():
    with open_input_pool(DOUBLE, workload(DOUBLE, "w", 64), None, None, on_gpu=True) as made:
        yield made


def mixed(seed, i, j):
    """driver/native/system.h's `mixed`."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15 * (i * 4096 + j + 1)) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def pool_of(drawn, seed, number):
    """The input of invocation `number`, read from the pool as the judge knows it to be."""
    content = drawn.contents[0]
    begin = content.offset + mixed(seed, number, 0) % (content.slack + 1) * 4
    count = torch.Size(content.shape).numel()
    return torch.frombuffer(bytearray(os.pread(drawn.pool, 4 * count, begin)), dtype=torch.float32)


@pytest.mark.parametrize("graphs, method", [(True, "graph"), (False, "host")])
def test_every_invocation_has_inputs_of_its_own_and_its_outputs_come_back(start, drawn, graphs, method):
    one = start("double", graphs)
    one.open(drawn, sets=8)
    for seed in (11, 12):
        done = one.run(seed, range(8))
        assert done.report.code == protocol.FINE, done.report.text
        assert one.deliver((0, 3, 7)).code == protocol.FINE
        assert protocol.METHODS[done.report.method] == method
        assert done.elapsed_ns > 8 * 200_000
        for number in (0, 3, 7):
            torch.testing.assert_close(one.outputs(number)[0].view(-1), 2 * pool_of(drawn, seed, number))


def test_a_replay_that_does_nothing_leaves_its_outputs_unwritten(start, drawn):
    one = start("double_once")
    one.open(drawn, sets=4)
    assert one.run(1, range(1)).report.code == protocol.FINE
    one.run(2, range(4))
    assert one.run(3, range(4)).report.code == one.deliver([3]).code == protocol.FINE
    assert one.outputs(3)[0].isnan().all()


def test_changed_inputs_are_told_by_name(start, drawn):
    one = start("double_in_place")
    one.open(drawn, sets=4)
    assert one.run(1, range(1)).report.code == protocol.FINE
    answer = one.deliver([0])
    assert (answer.code, answer.text) == (protocol.INPUT, "changed its input x")


def test_the_last_element_of_a_large_input_may_not_be_changed(start):
    """It is looked at in parts."""
    rows = (80 << 20) // 4 // 4
    with open_input_pool(DOUBLE, workload(DOUBLE, "w", rows), None, None, on_gpu=True) as large:
        one = start("double_changing_the_last")
        one.open(large, sets=1)
        assert one.run(1, range(1)).report.code == protocol.FINE
        answer = one.deliver([0])
        assert (answer.code, answer.text) == (protocol.INPUT, "changed its input x")


def test_what_cannot_be_captured_is_to_be_started_again(start, drawn):
    one = start("refuses_capture")
    one.open(drawn, sets=4)
    assert one.run(1, range(1)).report.code == protocol.FINE
    with pytest.raises(NoGraph, match="not permitted when stream is capturing") as refused:
        one.run(1, range(4))
    assert refused.value.candidate is one


def test_no_graph_said_where_none_was_asked_for_is_no_reason_to_start_again(start, drawn):
    """Else a process that forges answers would be started for ever."""
    one = start("refuses_capture")
    one.open(drawn, sets=4)
    one.graphs = False
    assert one.run(1, range(4)).report.code == protocol.NO_GRAPH


def test_first_call_is_made_before_the_capture(start, drawn):
    one = start("made_at_first_call")
    one.open(drawn, sets=4)
    assert one.run(1, range(4)).report.code == protocol.FINE


def test_outputs_in_one_memory_are_no_graph_but_right_when_launched(start, drawn):
    one = start("same_memory", destination=False)
    one.open(drawn, sets=8)
    with pytest.raises(NoGraph, match="same memory"):
        one.run(1, range(4))
    one = start("same_memory", graphs=False, destination=False)
    one.open(drawn, sets=8)
    for _ in range(2):
        report = one.run(7, range(8)).report
        assert report.code == one.deliver((2, 5, 7)).code == protocol.FINE, report.text
        for number in (2, 5, 7):
            torch.testing.assert_close(one.outputs(number)[0].view(-1), 2 * pool_of(drawn, 7, number))


def test_part_of_the_l2_that_is_set_aside_is_seen_in_the_next_run(start, drawn):
    one = start("reserves")
    one.open(drawn, sets=2)
    assert one.run(1, range(1)).report.code == protocol.FINE
    report = one.run(2, range(1)).report
    assert report.code == protocol.RESERVED
    with pytest.raises(Rejected, match="it keeps part of the GPU's L2"):
        check_report(report)


def test_more_invocations_than_sets_are_refused(start, drawn):
    one = start("double")
    one.open(drawn, sets=2)
    report = one.run(1, range(3)).report
    assert report.code == protocol.DRIVER and "more invocations than sets" in report.text


def test_a_candidate_that_is_gone_has_ended(start, drawn):
    one = start("double")
    one.open(drawn, sets=2)
    os.kill(one.pid, signal.SIGKILL)
    with pytest.raises(ProcessEnded):
        for _ in range(3):
            one.run(1, range(1))
