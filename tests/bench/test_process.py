"""How the judge asks a process, and what it makes of one that does not do as it should: its keeper is played here."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kcap.bench.judge.driver import protocol
from kcap.bench.judge.process import Process, ProcessEnded, Stirred, TooSlow
from kcap.bench.sandbox import keeper

STOPPED = keeper.RAN.pack(keeper.STOPPED, 70_000_000)
FINE = protocol.REPORT.pack(protocol.FINE, 0, 0, 0)


@pytest.fixture
def both():
    """A process that runs nothing, and its keeper's end."""
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control, keepers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = os.memfd_create("report")
    os.ftruncate(memory, protocol.REPORT_BYTES)
    server = SimpleNamespace(end=lambda request: {"how": "exit code 3"})
    limits = SimpleNamespace(timeout=60.0, build_timeout=60.0, option="--timeout")
    with theirs, keepers, tempfile.TemporaryFile() as log:
        one = Process(server, limits, 0, channel, control, memory, Path("/nowhere"), log, [])
        yield one, keepers
        if one.how is None:
            one.end()


def asked(both, says, report=FINE, compiling=False, takes=0.0):
    """What comes of a question, where the keeper says `says` and the process has left `report`."""
    one, keepers = both

    def answer():
        assert keepers.recv(16) == keeper.RUN
        time.sleep(takes)
        with contextlib.suppress(OSError):  # who is too slow is ended meanwhile
            if report:
                os.pwrite(one.memory, report, 0)
            if says:
                keepers.send(says)
            else:
                keepers.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        return one.ask(b"anything", compiling=compiling)
    finally:
        thread.join()


def test_who_wants_to_be_told_is_told_before_everything_stands_still(both):
    one, keepers = both
    order = []

    def answer():
        order.append(keepers.recv(16))
        os.pwrite(one.memory, FINE, 0)
        keepers.send(keeper.TOLD)
        time.sleep(0.05)
        order.append("still")
        keepers.send(STOPPED)

    thread = threading.Thread(target=answer)
    thread.start()
    done = one.ask(b"anything", told=lambda: order.append(one.report().code))
    thread.join()
    assert order == [keeper.TELL, protocol.FINE, "still"] and done.elapsed_ns == 70_000_000


def test_its_time_is_its_keepers(both):
    done = asked(both, STOPPED)
    assert done.report.code == protocol.FINE and done.elapsed_ns == 70_000_000
    assert both[0].spent == done.elapsed_ns / 1e9


@pytest.mark.parametrize("others", [[], [8]])
def test_work_after_the_stop_counts_in_full(monkeypatch, others):
    """Of the one that stopped itself, and of whoever is told to."""
    had = {7: iter([100, 100 + 10**9]), 8: iter([50, 50 + 10**9])}
    kept = keeper.KeptProcesses(7, alone=True)
    monkeypatch.setattr(kept, "_signal_others", lambda number: others)
    monkeypatch.setattr(kept, "_others", lambda: others)
    monkeypatch.setattr(keeper, "_cpu_ns", lambda pid: next(had[pid]))
    monkeypatch.setattr(keeper.process_tree, "still", lambda pid: True)
    monkeypatch.setattr(keeper.process_tree, "tells_who_runs", lambda pid: True)
    began = time.perf_counter_ns()
    ended = kept.stop_all()
    assert 0 <= ended - (1 + len(others)) * 10**9 - began <= time.perf_counter_ns() - began


def test_a_report_of_before_counts_for_nothing(both):
    asked(both, STOPPED)
    with pytest.raises(ProcessEnded, match="it stopped itself"):
        asked(both, STOPPED, report=None)


def test_who_went_on_while_it_stood_still_is_ended(both):
    with pytest.raises(Stirred, match="went on working when it had been stopped"):
        asked(both, keeper.STIRRED)
    assert both[0].how == "exit code 3"


def test_who_answers_without_having_read_is_ended_before_the_judge_would_wait(both):
    one, _ = both
    with contextlib.suppress(BlockingIOError):
        while True:
            one.channel.send(bytes(1000), socket.MSG_DONTWAIT)
    with pytest.raises(Stirred, match="leaves what the judge asks unread"):
        one.ask(b"anything")
    assert one.how == "exit code 3"


@pytest.mark.parametrize("says", [keeper.ENDED, b""])
def test_a_process_that_is_gone_has_ended(both, says):
    with pytest.raises(ProcessEnded, match="exit code 3"):
        asked(both, says)


@pytest.mark.parametrize("compiling, longest, option", [(False, 0.2, "--timeout"), (True, 0.4, "--build-timeout")])
def test_each_limit_is_named_where_it_is_over(both, compiling, longest, option):
    both[0].limits.timeout, both[0].limits.build_timeout = 0.2, 0.4
    with pytest.raises(TooSlow, match=rf"took longer than {longest} s \({option}\)"):
        asked(both, STOPPED, compiling=compiling, takes=longest + 0.1)


def test_compiling_is_not_counted_in_its_time_on_the_workload(both):
    asked(both, STOPPED, compiling=True, takes=0.1)
    assert both[0].spent == 0


def test_all_of_a_first_run_has_one_limit(both):
    """What is prepared for it is a part of it."""
    both[0].limits.build_timeout, both[0].compiled = 0.4, 0.3
    with pytest.raises(TooSlow, match=r"took longer than 0.4 s \(--build-timeout\)"):
        asked(both, STOPPED, compiling=True, takes=0.2)
