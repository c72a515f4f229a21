"""A candidate's process seen from the judge: a Solution, or a Definition's reference, under the driver."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch

from kcap.bench.judge import wire
from kcap.bench.judge.candidate_process import Order
from kcap.bench.judge.draws import Draws
from kcap.bench.judge.failures import Ended, NoGraph, NotBuilt, TooSlow
from kcap.bench.judge.forking import ForkServer
from kcap.bench.judge.limits import Limits
from kcap.bench.judge.processors import used
from kcap.bench.judge.shared import Shared
from kcap.bench.judge.wire import Answer, Layout
from kcap.schemas.definition import Definition
from kcap.schemas.solution import Solution

SLOTS_BYTES = 256 << 20  # of outputs that are kept at a time
MOST_INVOCATIONS = 4096
SETS_BYTES = 256 << 20
FEWEST_SETS, MOST_SETS = 3, 8
TOLD = 2000  # characters of what it printed


@dataclass
class Candidate:
    """One process. `confined`: what keeps it in its place."""

    server: ForkServer
    limits: Limits
    pid: int
    channel: socket.socket
    folder: Path
    log: Any
    confined: list[str]
    destination: bool = False
    graphs: bool = True  # on a GPU: its batches are captured
    sets: int = 0
    shared: Shared | None = None
    drawn: Draws | None = field(default=None, repr=False)
    spent: float = 0.0  # seconds, since a Workload was opened
    how: str | None = None  # it ended
    last_words: str = ""  # the end of what it had printed by then

    @classmethod
    def start(
        cls,
        server: ForkServer,
        limits: Limits,
        code: Solution | Definition,
        after: Candidate | None = None,
        graphs: bool = True,
    ) -> Candidate:
        """Fork it and build `code`; NotBuilt, Ended or TooSlow where that comes to nothing. `after`: an earlier
        process of the same code that has ended, whose build serves again."""
        own = after.folder if after else Path(tempfile.mkdtemp(prefix="candidate-", dir=limits.scratch))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = tempfile.TemporaryFile(dir=limits.scratch)  # noqa: SIM115 closed in end()
        cage = {
            "folder": str(own),
            "memory": limits.memory,
            "disk": limits.disk,
            "processes": limits.processes,
            "hidden": [str(path) for path in limits.hidden],
        }
        is_solution = isinstance(code, Solution)
        text = orjson.dumps(code.model_dump(mode="json")).decode()
        order = Order(
            str(own),
            limits.device,
            limits.threads,
            solution=text if is_solution else None,
            definition=None if is_solution else text,
            cores=limits.cores,
        )
        with theirs, tempfile.TemporaryFile(dir=limits.scratch) as written:
            written.write(orjson.dumps(order.to_json()))
            written.flush()
            started = server.ask(
                {"cage": cage, "after": after.pid if after else None}, [theirs.fileno(), log.fileno(), written.fileno()]
            )
        one = cls(server, limits, started["pid"], ours, own, log, started["confined"])
        one.graphs = graphs
        one.destination = isinstance(code, Solution) and code.spec.destination_passing_style
        one._await_build()
        return one

    def _await_build(self) -> None:
        try:
            told = orjson.loads(self._receive(self.limits.build_timeout))
        except orjson.JSONDecodeError:
            self.end()
            raise Ended("it spoke to the judge itself") from None
        except TooSlow:
            self.end()
            raise TooSlow(f"was not built within {self.limits.build_timeout:g} s") from None
        except Ended as ended:
            raise Ended(f"while it was built: {ended}") from None
        if "failed" in told:
            printed = self.printed()
            self.end()
            raise NotBuilt(str(told["failed"]), str(told.get("log", "")) or printed)

    def open(self, drawn: Draws, sets: int | None = None) -> None:
        """Make `drawn` the Workload that it runs, with `sets` sets of inputs that take turns (None: a few)."""
        again = self.drawn is drawn
        self._forget()
        self.spent = self.spent if again else 0.0
        self.sets = sets or max(min(SETS_BYTES // max(drawn.bytes, 1), MOST_SETS), FEWEST_SETS)
        slot = sum(result.reserved for result in drawn.results) or 64
        layout = Layout(slot, max(min(SLOTS_BYTES // slot, MOST_INVOCATIONS), self.sets), MOST_INVOCATIONS)
        self.shared, self.drawn = Shared.made(layout), drawn
        flags = wire.DESTINATION * self.destination + wire.GRAPHS * self.graphs
        content = wire.opening(drawn.contents, drawn.results, layout, drawn.size, drawn.variants, self.sets, flags)
        answer = self._ask(content, [drawn.pool, self.shared.descriptor])
        if answer.code != wire.FINE:
            raise Ended(answer.text)

    @property
    def most(self) -> int:
        """Invocations at a time: the outputs of all of them are kept, so that none knows whether it is looked at."""
        assert self.shared is not None
        return min(self.shared.layout.slots, MOST_INVOCATIONS)

    def run(self, seed: int, count: int, first: int = 0, upcast: int = 0) -> Answer:
        """`count` invocations with the inputs of `seed`, numbered from `first`; NoGraph if they cannot be captured."""
        answer = self._ask(wire.running(first, count, seed, upcast))
        if answer.code == wire.NO_GRAPH and self.graphs and self.limits.gpu:
            raise NoGraph(self, answer.text)
        return answer

    def deliver(self, numbers: Sequence[int]) -> Answer:
        """The outputs of these invocations of the last run, counted from 0; whether their inputs are as they were."""
        return self._ask(wire.delivering(numbers))

    def replaced(self) -> Answer:
        """Which watched names are no longer what they were."""
        return self._ask(wire.checking())

    def times_ns(self, count: int) -> list[int]:
        """Of each of the last `count` invocations, by the driver's clock."""
        assert self.shared is not None
        return self.shared.times_ns(count)

    def outputs(self, number: int, upcast: bool = False) -> list[torch.Tensor]:
        """Those of invocation `number` of the last run, delivered; `upcast`: floating ones are in float64."""
        assert self.shared is not None and self.drawn is not None
        return [self.shared.output(number, result, upcast) for result in self.drawn.results]

    def printed(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), TOLD, max(size - TOLD, 0)).decode(errors="replace").replace("\0", "")

    def end(self, keep: bool = False, gone: bool = False) -> str:
        """End it and all that it started; how it ended.

        `keep`: what it built, for the next process of its code; `gone`: it closed its end, and so ends by itself.
        """
        if self.how is None:
            self._forget()
            self.last_words = self.printed()
            self.channel.close()
            self.log.close()
        ended = str(self.server.ask({"end": self.pid, "keep": keep, "gone": gone})["how"])
        self.how = self.how or ended
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.how

    def _forget(self) -> None:
        if self.shared is not None:
            self.shared.close()
        self.shared = self.drawn = None

    def _ask(self, content: bytes, descriptors: Sequence[int] = ()) -> Answer:
        before = used(self.pid)
        began = time.perf_counter_ns()
        try:
            socket.send_fds(self.channel, [content], list(descriptors))
        except OSError:
            raise Ended(self.end(keep=True, gone=True)) from None
        answer = self._receive(max(self.limits.timeout - self.spent, 0.01))
        elapsed = time.perf_counter_ns() - began
        self.spent += elapsed / 1e9
        after = used(self.pid)
        try:
            return wire.answered(answer, elapsed, after.cpu(before) / elapsed)
        except ValueError:
            self.end(keep=True)
            raise Ended("it spoke to the judge itself") from None

    def _receive(self, timeout: float) -> bytes:
        self.channel.settimeout(timeout)
        try:
            content = self.channel.recv(wire.LONGEST)
        except TimeoutError:
            self.end(keep=True)
            raise TooSlow(f"took longer than {self.limits.timeout:g} s") from None
        except OSError:
            content = b""
        if not content:
            raise Ended(self.end(keep=True, gone=True))
        return content


def fresh_seed() -> int:
    return secrets.randbits(63)
