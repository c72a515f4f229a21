"""The fork server's candidates, each in a cage: started, ended, and forgotten."""

from __future__ import annotations

import contextlib
import errno
import os
import select
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from kcap.bench.integrity.cage import Cage, Caged, open_cage
from kcap.bench.integrity.driver import Driver
from kcap.bench.judge.candidate_process import Order, run
from kcap.bench.judge.room import check_room
from kcap.errors import KcapError

PASSED = 3  # descriptors that come with a request to start: the channel, the log, and what is ordered
STARTING = 8  # files that may be open at a time to start a cage, two of them then to end it: pipes, namespaces, /proc
GONE_S = 5.0  # until a process that closed its channel has ended


@dataclass
class Cages:
    """`running`: by their candidates' process ids, until their scratch is given up, too. `owed`: those whose end could
    not be seen to, which comes before the next start.
    """

    loaded: Driver
    running: dict[int, Caged] = field(default_factory=dict)
    owed: set[int] = field(default_factory=set)

    def answer(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """What came of one request; `lack`, where the machine has too little of what it takes, or another `error`."""
        try:
            if "end" in request:
                return {"how": self._end(request["end"], request["gone"], request["keep"])}
            return self._start(request, descriptors)
        except OSError as error:
            return {"lack": str(error)}
        except KcapError as error:
            return {"error": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """End them all."""
        for caged in self.running.values():
            with contextlib.suppress(OSError):
                caged.end()

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        if len(descriptors) != PASSED:  # the kernel leaves out those for which there is no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        for pid in list(self.owed):
            self._end(pid)
        check_room(STARTING)
        channel, log, written = descriptors
        order = Order.from_json(orjson.loads(os.pread(written, os.fstat(written).st_size, 0)))
        cage, after = _cage(request["cage"], channel), self.running.pop(request["after"], None)
        try:
            caged = open_cage(cage, log, lambda: run(order, channel, self.loaded), after=after)
        finally:
            if after is not None:
                after.end()
        self._forget()
        self.running[caged.pid] = caged
        return {"pid": caged.pid, "confined": caged.confined}

    def _forget(self) -> None:
        for pid in [pid for pid, one in self.running.items() if one.how is not None and one.spaces is None]:
            del self.running[pid]

    def _end(self, pid: int, gone: bool = False, keep: bool = False) -> str:
        """How it ended. `gone`: by itself, so that it is only waited for."""
        caged = self.running.get(pid)
        if caged is None:
            return "it had ended"
        self.owed.add(pid)
        if gone and caged.how is None:
            select.select([caged], [], [], GONE_S)
            caged.poll()
        how = str(caged.end(keep_scratch=keep))
        self.owed.remove(pid)
        return how


def _cage(given: dict[str, Any], channel: int) -> Cage:
    return Cage(
        folder=Path(given["folder"]),
        memory=given["memory"],
        disk=given["disk"],
        processes=given["processes"],
        hidden=tuple(Path(path) for path in given["hidden"]),
        keep=(channel,),
    )
