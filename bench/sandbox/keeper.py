"""The candidate's parent: it lets the whole sandbox run, and brings all of it to a standstill.

In a pid namespace it is process 1: signals from within do nothing to it, and the kernel kills all the others when it
ends. With a `control` socket the candidate runs only when it is told to, from then until it stops itself (SIGSTOP) or
ends: then every process of the sandbox is stopped, and only when all their threads have left their processors (or,
where the kernel does not tell, none has had CPU time between two looks) the keeper says so, and how long it ran: from
before it was let run until all had been told to stop, and the CPU time that any of them had from then on.

Whoever is let run again meanwhile, by a signal that the kernel sends for a timer or for somebody's end, is found before
the next run: nobody may be new, and all together may have had but a fraction of a millisecond since.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from kcap.bench.sandbox import confinement, libc, namespaces, process_tree
from kcap.bench.sandbox.spec import SandboxSetup

RUN, TELL = b"run", b"tell"  # what the keeper is told; TELL: also to say when all have been told to stop,
TOLD, STOPPED, ENDED, STIRRED = b"told", b"stopped", b"ended", b"stirred"  # and what it says
RAN = struct.Struct("<7sQ")  # STOPPED, and nanoseconds
REST_NS = 200_000  # of CPU time
PAUSE_S = 1e-4
CPU_CLOCK = 2  # CPUCLOCK_SCHED, linux/posix-timers.h: all threads of a process, in nanoseconds


def keep(setup: SandboxSetup, output: int, proc: int, user: int | None) -> NoReturn:
    """Fork the candidate, keep it until it has ended, and tell how; for a process that was forked for this."""
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(libc.PR_SET_DUMPABLE, 0)
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
    control, cores = setup.spec.control, os.sched_getaffinity(0)
    child = os.fork()
    if child == 0:
        if control is not None:
            os.close(control)
        confinement.run_confined(setup, output, proc, user)
    for descriptor in (output, proc, setup.report, *setup.spec.keep):
        os.close(descriptor)
    os.sched_setaffinity(0, cores - {*setup.spec.cores} or cores)
    kept = KeptProcesses(child, setup.features.holds(namespaces.PID_NAMESPACE))
    status = kept.wait() if control is None else serve(kept, control)
    os.write(setup.ended, f"{status}\n".encode())
    os._exit(0)


def serve(kept: KeptProcesses, control: int) -> int:
    """Answer on `control` until the candidate has ended; its wait status."""
    began, command = time.perf_counter_ns(), RUN
    status = kept.wait_for_stop()
    while os.WIFSTOPPED(status):
        ended = kept.stop_all(partial(os.write, control, TOLD) if command == TELL else None)
        os.write(control, RAN.pack(STOPPED, ended - began))
        if (command := os.read(control, 16)) not in (RUN, TELL):  # nobody is left to ask for anything
            os.kill(kept.child, signal.SIGKILL)
            return kept.wait()
        changed, status = os.waitpid(kept.child, os.WCONTINUED | os.WUNTRACED | os.WNOHANG)
        if changed and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            break
        if changed or kept.stirred():
            os.write(control, STIRRED)
            os.kill(kept.child, signal.SIGKILL)
            return kept.wait()
        began = time.perf_counter_ns()
        kept.run_all()
        status = kept.wait_for_stop()
    with contextlib.suppress(OSError):
        os.write(control, ENDED)
    return status


class KeptProcesses:
    """`child` and all that comes of it. `alone`: nothing else can be signalled from here."""

    def __init__(self, child: int, alone: bool) -> None:
        self.child, self.alone = child, alone
        self.at_rest: dict[int, int] = {}  # what `cpu_times` was when everything stood still

    def wait(self) -> int:
        """Until `child` has ended: its wait status."""
        while (ended := os.wait())[0] != self.child:
            pass
        return ended[1]

    def wait_for_stop(self) -> int:
        """Until `child` has stopped or ended: its wait status. Orphans that have ended are reaped."""
        _, status = os.waitpid(self.child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == self.child:
                        return ended[1]
        return status

    def stop_all(self, told: Callable[[], object] | None = None) -> int:
        """Stop everything, and return when nothing runs: when all had been told to stop, by `time.perf_counter_ns`, and
        the CPU time that they had from then on, added up. `told` is called when they have been told.
        """
        told_to_stop, before = time.perf_counter_ns(), {self.child: _cpu_ns(self.child)}
        if others := self._signal_others(signal.SIGSTOP):
            before |= {pid: _cpu_ns(pid) for pid in others}
            told_to_stop = time.perf_counter_ns()
        if told is not None:
            told()
        self.at_rest = {}
        if others:  # one of them may have let another run
            others = self._signal_others(signal.SIGSTOP)
        while True:
            pids = (self.child, *others)
            still, times = all(map(process_tree.still, pids)), self.cpu_times()
            still = still and times.keys() <= {*pids}  # else somebody was not looked at
            known = self.alone and all(map(process_tree.tells_who_runs, pids))
            looked_before, self.at_rest = self.at_rest, times if still else {}
            if still and (known or times == looked_before):
                return told_to_stop + sum(had - before.get(pid, 0) for pid, had in times.items())
            if not still:
                time.sleep(PAUSE_S)
            others = self._signal_others(signal.SIGSTOP)

    def stirred(self) -> bool:
        """Whether anybody is new, or all together had more CPU time since than the way through the kernel takes."""
        now = self.cpu_times()
        return bool(now.keys() - self.at_rest.keys()) or sum(now.values()) > REST_NS + sum(
            self.at_rest[pid] for pid in now
        )

    def cpu_times(self) -> dict[int, int]:
        """Nanoseconds that each has had so far."""
        return {pid: _cpu_ns(pid) for pid in (self.child, *self._others())}

    def run_all(self) -> None:
        """Let everything run, and hear at once what the kernel tells of it."""
        if self.alone:
            os.kill(-1, signal.SIGCONT)
        else:
            self._signal_others(signal.SIGCONT)
            os.kill(self.child, signal.SIGCONT)
        os.waitpid(self.child, os.WCONTINUED | os.WNOHANG)

    def _signal_others(self, number: signal.Signals) -> list[int]:
        """All but `child`, which were sent the signal, and in a pid namespace that, too."""
        if self.alone:
            os.kill(-1, number)
            return self._others()
        for pid in (others := self._others()):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        return others

    def _others(self) -> list[int]:
        """Numbered as /proc numbers them here."""
        if self.alone and os.path.basename(os.readlink("/proc/self")) == "1":
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name not in ("1", str(self.child))]
        own = int(os.readlink("/proc/self"))
        return [pid for pid in process_tree.below(own) if pid != self.child]


def _cpu_ns(pid: int) -> int:
    """By the clock of another process, clock_getcpuclockid(3); 0 where there is none."""
    try:
        return time.clock_gettime_ns((~pid << 3) | CPU_CLOCK)
    except OSError:
        return 0
