"""`ray`: judge workers over a Ray cluster, an actor for each GPU; or on CPUs, for each `--threads` and one more.

The cluster is the one that $RAY_ADDRESS names, or one that is started here. Every node needs kcap, and the dataset: a
small one is sent to the actors, a large one must lie at the same path on each node.
Source: https://docs.ray.io/en/latest/ray-core/actors.html
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kcap.bench.judge.messages import JudgeRequest
from kcap.bench.run.executors import Executor, SlotRequest, executor
from kcap.bench.run.executors.common.actor import JudgeActor, dataset_bytes, dataset_files
from kcap.bench.run.executors.common.slot import Slot, Stopped
from kcap.errors import CallError, KcapError
from kcap.system.worker_process import START_LIMIT_S

try:
    import ray
except ImportError:
    raise CallError("--executor ray: needs Ray: pip install kcap[ray]") from None

MOST_SENT = 64 << 20  # bytes of a dataset that is sent to the actors
ANSWER_S = 60.0  # that an actor may be late with an answer that its judge gave
LOOK_S = 1.0  # between looks whether a node still has room for an actor that waits


@executor("ray")
class Ray(Executor):
    """Slots in actors."""

    def check(self, device: str, threads: int | None) -> None:
        if device.startswith("cuda:"):
            raise CallError(f"--device {device}: Ray chooses the GPU: pass --device cuda")
        if device == "cpu" and threads is None:
            raise CallError("--executor ray --device cpu: pass --threads N, the CPUs of a Solution")

    @contextmanager
    def open(self, where: SlotRequest) -> Iterator[Sequence[Slot]]:
        mine = not ray.is_initialized()
        if mine:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(address=os.environ.get("RAY_ADDRESS") or "local", log_to_driver=False, configure_logging=False)
        try:
            count = slots_of(ray.nodes(), where)
            root = Path(where.session["root"])
            files = ray.put(dataset_files(root)) if dataset_bytes(root) <= MOST_SENT else None
            crew: set[RaySlot] = set()
            yield [RaySlot(where, files, crew) for _ in range(count)]
        finally:
            if mine:
                ray.shutdown()


def slots_of(nodes: Sequence[Mapping[str, Any]], where: SlotRequest) -> int:
    """How many actors the cluster has room for, at most as many as have work; CallError if it has none."""
    count = room(nodes, where)
    if not count:
        kind, each = resource(where)
        most = max((node["Resources"].get(kind, 0) for node in nodes if node["Alive"]), default=0)
        raise CallError(
            f"--executor ray: a slot takes {each} {kind}, and no node of the cluster has more than {most:g}"
        )
    return min(count, where.most)


def room(nodes: Sequence[Mapping[str, Any]], where: SlotRequest) -> int:
    """How many actors find a place: each is on one node, so what is left of several nodes makes none."""
    kind, each = resource(where)
    return sum(int(node["Resources"].get(kind, 0) // each) for node in nodes if node["Alive"])


def resource(where: SlotRequest) -> tuple[str, int]:
    """What one actor takes of its node. On CPUs the judge has a core beside those of the Solutions."""
    threads = where.session.get("threads") or 0  # `check` saw to it that there are some
    return ("GPU", 1) if where.device == "cuda" else ("CPU", threads + 1)


class RaySlot:
    """An actor seen from the command; where it is lost, the next request starts another if a node has room for it.

    `crew`: the slots that have an actor, or wait for one.
    """

    def __init__(self, where: SlotRequest, files: Any, crew: set[RaySlot]) -> None:
        self._where = where
        self._files = files
        self._crew = crew
        self._actor: Any = None
        self._stopped = False

    def start(self) -> dict[str, Any]:
        where = self._where
        kind, each = resource(where)
        needs: dict[str, Any] = {"num_gpus" if kind == "GPU" else "num_cpus": each}
        actor = ray.remote(max_concurrency=2, **needs)(JudgeActor)  # stop() while run() waits
        self._actor = actor.remote({**where.session, "device": where.device}, where.module, self._files)
        self._crew.add(self)
        try:
            self._await_node()
            environment: dict[str, Any] = ray.get(self._actor.start.remote(), timeout=START_LIMIT_S)
        except ray.exceptions.RayError as error:
            raise KcapError(f"--executor ray: a slot does not start: {_last_line(error)}") from None
        if "error" in environment:
            raise KcapError(environment["error"])
        return environment

    def _await_node(self) -> None:
        """Wait until the actor is on a node; KcapError where none that is alive has room for it."""
        ready, until = self._actor.__ray_ready__.remote(), time.monotonic() + START_LIMIT_S
        while not ray.wait([ready], timeout=LOOK_S)[0]:
            if self._stopped:
                raise Stopped("stopped")
            if len(self._crew) > room(ray.nodes(), self._where) or time.monotonic() > until:
                self._kill()
                raise KcapError("--executor ray: no node has room for its actor")
        ray.get(ready)

    def run(self, request: JudgeRequest, limit_s: float) -> dict[str, Any]:
        if self._stopped:
            raise Stopped("stopped")
        if self._actor is None:
            self.start()
        try:
            answer: dict[str, Any] = ray.get(self._actor.run.remote(request, limit_s), timeout=limit_s + ANSWER_S)
            return answer
        except ray.exceptions.RayError as error:
            self._kill()
            return {"status": "failed", "reason": f"its actor was lost: {_last_line(error)}"}

    def stop(self) -> None:
        self._stopped = True
        if self._actor is not None:
            self._actor.stop.remote()

    def close(self) -> None:
        if self._actor is not None:
            with suppress(ray.exceptions.RayError):
                ray.get(self._actor.close.remote(), timeout=ANSWER_S)
        self._kill()

    def _kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None
        self._crew.discard(self)


def _last_line(error: Exception) -> str:
    """Ray's errors hold the other process's traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
