"""A candidate: a Solution or a Definition's reference under the driver, with a Workload open, and how it is started."""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import orjson
import torch

from kcap.bench.judge import input_pool
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.candidate_process import CandidateOrder
from kcap.bench.judge.driver.protocol import Answer, Layout, OutputMemory
from kcap.bench.judge.input_pool import HandedInputs, InputPool
from kcap.bench.judge.messages import BuildReport, Started, StartRequest
from kcap.bench.judge.process import ForkServer, Limits, NotBuilt, Process, ProcessEnded, TooSlow, remove_folder
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.flashinfer.solution import Solution

SLOTS_BYTES = 256 << 20  # of outputs that are kept at a time
MOST_INVOCATIONS = 4096
SETS_BYTES = 256 << 20
FEWEST_SETS, MOST_SETS = 3, 8


@dataclass
class Candidate(Process):
    """`graphs`: on a GPU its batches are captured. `handed`: makes its inputs, where they are large and on the CPU."""

    destination: bool = False
    graphs: bool = True
    sets: int = 0
    shared: OutputMemory | None = None
    handed: HandedInputs | None = None
    drawn: InputPool | None = field(default=None, repr=False)

    def open(self, drawn: InputPool, sets: int | None = None) -> None:
        """Make `drawn` the Workload that it runs, with `sets` sets of inputs that take turns (None: a few)."""
        again = self.drawn is drawn
        self.forget()
        self.spent = self.spent if again else 0.0
        handing = self.limits.gpu is None and input_pool.are_handed_over(drawn)
        self.sets = sets or (input_pool.handed_set_count(drawn) if handing else usual_set_count(drawn))
        slot = sum(result.reserved for result in drawn.results) or 64
        layout = Layout(slot, max(min(SLOTS_BYTES // slot, MOST_INVOCATIONS), self.sets), MOST_INVOCATIONS)
        self.shared, self.drawn = OutputMemory.allocate(layout), drawn
        flags = protocol.DESTINATION * self.destination + protocol.GRAPHS * self.graphs + protocol.HANDED * handing
        sizes = drawn.size, drawn.variants, self.sets
        content = protocol.open_message(drawn.contents, drawn.results, layout, *sizes, flags, self.limits.threads)
        if handing:
            self.handed = HandedInputs.open(content, drawn)
        answer = self.ask(content, [self.shared.descriptor, *([] if handing else [drawn.pool])])
        if answer.code != protocol.FINE:
            raise ProcessEnded(answer.text)

    @property
    def most(self) -> int:
        """Invocations at a time: the outputs of all of them are kept, so that none knows whether it is looked at."""
        assert self.shared is not None
        kept = min(self.shared.layout.slots, MOST_INVOCATIONS)
        return min(kept, self.sets) if self.handed else kept

    def run(
        self, seed: int, count: int, first: int = 0, upcast: int = 0, keep: Sequence[int] = (), empty: bool = False
    ) -> Answer:
        """`count` invocations with the inputs of `seed`, numbered from `first`; NoGraph if they cannot be captured.

        `keep`: those whose outputs are wanted, counted from 0: this process alone knows. On the CPU it copies them
        at once, on a GPU when they are delivered. `upcast`: floating ones are in float64. `empty`: the driver does
        all that it does for them but the calls, on the CPU.
        """
        assert self.shared is not None and self.drawn is not None
        self.shared.prepare(keep, self.drawn.results, upcast != 0)
        take = (lambda: None) if self.limits.gpu else self.shared.take
        content = protocol.run_message(first, count, seed, upcast, empty)
        if self.handed and count:
            places, descriptor = self.handed.fill(seed, first, count)
            answer = self.ask(content + places, [descriptor], take)
        else:
            answer = self.ask(content, at_once=take)
        if answer.code == protocol.NO_GRAPH and self.graphs and self.limits.gpu:
            raise NoGraph(self, answer.text)
        return answer

    def deliver(self, numbers: Sequence[int]) -> Answer:
        """Whether the inputs of these invocations of the last run, counted from 0, are as they were; on a GPU, their
        outputs.
        """
        assert self.shared is not None
        answer = self.ask(protocol.deliver_message(numbers), at_once=self.shared.take)
        changed = self.handed.changed(list(numbers)) if self.handed and answer.code == protocol.FINE else None
        if changed is None:
            return answer
        assert self.drawn is not None
        return replace(answer, code=protocol.INPUT, text=f"changed its input {self.drawn.contents[changed].name}")

    def replaced(self) -> Answer:
        """Which watched names are no longer what they were."""
        return self.ask(protocol.check_message())

    def times_ns(self, count: int) -> list[int]:
        """Of each of the last `count` invocations, by the driver's clock."""
        assert self.shared is not None
        return self.shared.times_ns(count)

    def outputs(self, number: int) -> list[torch.Tensor]:
        """Those of invocation `number` of the last run, which was to be kept, delivered."""
        assert self.shared is not None
        return self.shared.outputs[number]

    def forget(self) -> None:
        memories = self.shared, self.handed
        self.shared = self.handed = self.drawn = None
        for memory in memories:
            if memory is not None:
                memory.close()


def usual_set_count(drawn: InputPool) -> int:
    """Of inputs, where the driver fills them."""
    return max(min(SETS_BYTES // max(drawn.bytes, 1), MOST_SETS), FEWEST_SETS)


def fresh_seed() -> int:
    return secrets.randbits(63)


class NoGraph(Exception):
    """On a GPU: what `candidate` runs cannot be captured, and its process has to be started again."""

    def __init__(self, candidate: Candidate, reason: str) -> None:
        super().__init__(reason)
        self.candidate = candidate


def start_candidate(
    server: ForkServer,
    limits: Limits,
    code: Solution | Definition,
    after: Candidate | None = None,
    graphs: bool = True,
) -> Candidate:
    """Fork a process and build `code` in it; NotBuilt, ProcessEnded or TooSlow where that comes to nothing.

    `after`: an earlier process of the same code that has ended, whose build serves again. OSError or KcapError where
    the machine lacks what it takes. Whatever is raised, nothing is left open.
    """
    candidate = _fork(server, limits, code, after)
    candidate.graphs = graphs
    candidate.destination = isinstance(code, Solution) and code.spec.destination_passing_style
    try:
        _await_build(candidate)
    except BaseException:
        candidate.end()
        raise
    return candidate


def _fork(server: ForkServer, limits: Limits, code: Solution | Definition, after: Candidate | None) -> Candidate:
    with contextlib.ExitStack() as undo:
        if after is None:
            folder = Path(tempfile.mkdtemp(prefix="candidate-", dir=limits.scratch))
            undo.callback(remove_folder, folder)
        else:
            folder = after.folder
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.enter_context(ours)
        with theirs:
            log = undo.enter_context(tempfile.TemporaryFile(dir=limits.scratch))
            request: StartRequest = {
                "sandbox": {
                    "folder": str(folder),
                    "memory": limits.memory,
                    "disk": limits.disk,
                    "processes": limits.processes,
                    "hidden": [str(path) for path in limits.hidden],
                },
                "after": after.pid if after else None,
            }
            order = _order(folder, limits, code)
            started = _ask_to_start(server, limits, request, order, [theirs.fileno(), log.fileno()])
        undo.pop_all()
    return Candidate(server, limits, started["pid"], ours, folder, log, started["confined"])


def _ask_to_start(
    server: ForkServer, limits: Limits, request: StartRequest, order: CandidateOrder, descriptors: list[int]
) -> Started:
    """`order` may be longer than a message, and goes in a file."""
    with tempfile.TemporaryFile(dir=limits.scratch) as written:
        written.write(orjson.dumps(order.to_json()))
        written.flush()
        return server.start(request, [*descriptors, written.fileno()])


def _order(folder: Path, limits: Limits, code: Solution | Definition) -> CandidateOrder:
    text = orjson.dumps(code.model_dump(mode="json")).decode()
    kind = "solution" if isinstance(code, Solution) else "definition"
    return CandidateOrder(str(folder), limits.device, limits.threads, cores=limits.cores, **{kind: text})


def _await_build(candidate: Candidate) -> None:
    limit_s = candidate.limits.build_timeout
    try:
        report = _read_build_report(candidate.receive(limit_s))
    except TooSlow:
        raise TooSlow(f"was not built within {limit_s:g} s (--build-timeout)") from None
    except ProcessEnded as ended:
        raise ProcessEnded(f"while it was built: {ended}") from None
    if "failed" in report:
        raise NotBuilt(str(report["failed"]), str(report.get("log", "")) or candidate.printed())


def _read_build_report(content: bytes) -> BuildReport:
    """How building went, as its process says; ProcessEnded where that is no report. Foreign code may have sent it."""
    with contextlib.suppress(orjson.JSONDecodeError):
        if isinstance(report := orjson.loads(content), dict):
            return cast(BuildReport, report)
    raise ProcessEnded("it spoke to the judge itself")
