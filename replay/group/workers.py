"""The processes that replay collectives, one for each rank of a group, all on this machine.

All get the same request, and rank r puts itself in place of the rank that was recorded. A rank that fails leaves the
others waiting inside the collective: they get some seconds to answer and are then ended, and the next request starts a
new group. So one that dies or hangs costs its own Call only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

import orjson

from kcap.errors import CallError, KcapError
from kcap.system.worker_process import CRASHED, Worker

MOST_RANKS_PER_CORE = 4
PATIENCE_S = 5.0  # after one rank has failed
GOOD = ("ok", "agrees")  # of a replay, of a check


class GroupWorker:
    """The processes of one group of `size`, which start with the first request."""

    def __init__(self, session: Mapping[str, object], module: str, size: int) -> None:
        self.session, self.module, self.size = session, module, size
        self.refused = _too_many(size)
        self._stack, self._ranks = ExitStack(), list[Worker]()

    def run(self, request: Mapping[str, object], timeout: float) -> dict[str, Any]:
        """The group's answer to one request: rank 0's, or that of the first rank that has none to give."""
        if self.refused:
            return {"status": "skipped", "reason": self.refused}
        with ThreadPoolExecutor(self.size) as pool:
            try:
                if self._has_lost_a_rank():  # which alone would start anew, and find no group
                    self.end()
                if not self._ranks and (failed := self._start(pool)):
                    return failed
                return self._ask(pool, request, timeout)
            except BaseException:  # the user's interrupt, too: a thread ends only when its rank does
                for worker in self._ranks:
                    worker.kill()
                raise

    def end(self, running: Collection[Future[Any]] = ()) -> None:
        """End all ranks; `running`: what still waits for an answer of theirs."""
        if running:
            for worker in self._ranks:
                worker.kill()
            wait(running)
        self._stack.close()
        self._ranks = []

    def _start(self, pool: ThreadPoolExecutor) -> dict[str, Any] | None:
        """Start all ranks; the answer to give where they do not start."""
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kcap-group-"))
        threads = self.session.get("threads") or max((os.cpu_count() or 1) // self.size, 1)
        for rank in range(self.size):
            place = {"rank": rank, "size": self.size, "store": f"{folder}/store"}
            self._ranks.append(Worker({**self.session, "group": place, "threads": threads}, self.module))
        starts = {pool.submit(worker.__enter__): rank for rank, worker in enumerate(self._ranks)}
        for worker in self._ranks:
            self._stack.push(worker)
        done, _ = wait(starts, return_when=FIRST_EXCEPTION)
        failed = [(starts[start], error) for start in done if (error := start.exception())]
        if not failed:
            return None
        self.end(starts)
        rank, error = next(((rank, error) for rank, error in failed if isinstance(error, CallError)), failed[0])
        if isinstance(error, CallError):  # this machine has no such devices: it will not have them later
            self.refused = str(error)
            return {"status": "skipped", "reason": self.refused}
        if not isinstance(error, KcapError):
            raise error
        return {"status": "failed", "reason": f"rank {rank} of {self.size}: {error}"}

    def _ask(self, pool: ThreadPoolExecutor, request: Mapping[str, object], timeout: float) -> dict[str, Any]:
        asked = [pool.submit(rank.run, request, timeout) for rank in self._ranks]
        pending = set(asked)
        while pending and all(each.result()["status"] in GOOD for each in asked if each.done()):
            pending = wait(pending, return_when=FIRST_COMPLETED).not_done
        pending = wait(pending, PATIENCE_S).not_done
        answers = {rank: each.result() for rank, each in enumerate(asked) if each not in pending}
        if pending or any(answer["status"] == "failed" for answer in answers.values()) or self._has_lost_a_rank():
            self.end(pending)
        rank = min(answers, key=lambda rank: (_blame(answers[rank]), rank))
        answer = answers[rank]
        named = {"reason": f"rank {rank} of {self.size}: {answer['reason']}"} if answer["status"] == "failed" else {}
        return {**answer, **named}

    def _has_lost_a_rank(self) -> bool:
        return any(rank.process is None or rank.process.poll() is not None for rank in self._ranks)


def _blame(answer: Mapping[str, Any]) -> int:
    """A rank that died is why others failed; one that failed, why others took too long."""
    if answer["status"] == "failed" and answer["reason"].startswith(CRASHED):
        return 0
    return {"failed": 1, "differs": 2, "skipped": 3}.get(answer["status"], 4)


def _too_many(size: int) -> str | None:
    cores = os.cpu_count() or 1
    if size <= MOST_RANKS_PER_CORE * cores:
        return None
    return f"its group has {size:,} ranks, more than {MOST_RANKS_PER_CORE} for each of the {cores} cores here"


class GroupedWorker(Worker):
    """A worker, and the groups of workers that its requests for collectives need: those that name `ranks`."""

    def __init__(self, session: Mapping[str, object], module: str, timeout_option: str | None = "--timeout") -> None:
        super().__init__(session, module, timeout_option)
        self._groups: dict[int, GroupWorker] = {}
        self._answers: dict[bytes, dict[str, Any]] = {}
        self._lost = ""  # why it could not be started again

    def run(self, request: Mapping[str, object], timeout: float) -> dict[str, Any]:
        size = request.get("ranks")
        if not isinstance(size, int):
            return self._run_alone(request, timeout)
        group = self._groups.setdefault(size, GroupWorker(self.session, self.module, size))
        if not isinstance(request.get("call"), Mapping):
            return group.run(request, timeout)
        key = _key_for_all_ranks(request)
        if key not in self._answers:  # another rank's Call was the same
            self._answers[key] = group.run(request, timeout)
        return dict(self._answers[key])

    def _run_alone(self, request: Mapping[str, object], timeout: float) -> dict[str, Any]:
        """Where it started once and does not again, what was done until then is not given up for it."""
        try:
            if not self._lost:
                return super().run(request, timeout)
        except KcapError as error:
            if not self.restarts:
                raise
            self._lost = f"the worker could not be started again: {error}"
        return {"status": "failed", "reason": self._lost}

    def __exit__(self, *failure: object) -> None:
        for group in self._groups.values():
            group.end()
        super().__exit__(*failure)


def _key_for_all_ranks(request: Mapping[str, Any]) -> bytes:
    """The same for the Calls of all ranks that are equal but for the rank."""
    call, sample = request["call"], request["sample"] or {}
    values = [sample.get(name) for name in ("scalars", "offsets", "tensors")]
    return orjson.dumps([*call_of_any_rank(call), values, request["seconds"]])


def call_of_any_rank(call: Mapping[str, Any]) -> list[Any]:
    """The operator and the arguments of a Call as JSON, the same for Calls that are equal but for the rank."""
    return [call["operator"], _by_rank_0(call["args"])]


def _by_rank_0(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: 0 if name == "rank" else _by_rank_0(item) for name, item in value.items()}
    return [_by_rank_0(item) for item in value] if isinstance(value, list) else value
