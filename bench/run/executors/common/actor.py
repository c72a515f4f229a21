"""What runs on another node: a slot to which the dataset is sent, and which has CPU cores of the node to itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kcap.bench.judge.messages import JudgeRequest, JudgeSession
from kcap.bench.run.executors.common.slot import LocalSlot, scratch_folder
from kcap.errors import KcapError


def dataset_bytes(root: Path) -> int:
    """Bytes of what a judge reads of the dataset."""
    return sum(path.stat().st_size for path in _dataset_paths(root))


def dataset_files(root: Path) -> dict[str, bytes]:
    """What a judge reads of the dataset, by its path there."""
    return {str(path.relative_to(root)): path.read_bytes() for path in _dataset_paths(root)}


def _dataset_paths(root: Path) -> list[Path]:
    return [
        path for folder in ("definitions", "workloads", "blob") for path in (root / folder).rglob("*") if path.is_file()
    ]


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    """What `content` gave, below `root`."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class JudgeActor:
    """A slot of the node that it is on. `files`: the dataset; None where the node has it at the same path."""

    def __init__(self, session: JudgeSession, module: str, files: dict[str, bytes] | None) -> None:
        self._stack = ExitStack()
        self._cores: frozenset[int] = frozenset()
        self._threads = session["threads"] if session["device"] == "cpu" else None
        if files is not None:
            folder = self._stack.enter_context(scratch_folder())
            session = {**session, "root": str(folder)}
            write_files(folder, files)
        device = "cuda:0" if session["device"] == "cuda" else session["device"]
        self._missing = "" if Path(session["root"]).is_dir() else session["root"]
        self._slot = LocalSlot({**session, "device": device, "hidden": _hidden(session)}, module)

    def start(self) -> dict[str, Any]:
        """What the judge says of the device; under `error`, why there is none."""
        if self._missing:
            return {"error": f"{self._missing}: is too large to be sent, and a node does not have it: share the folder"}
        try:
            if self._threads is not None:
                self._cores = self._stack.enter_context(claimed_cores(self._threads + 1))
            self._pin()
            return self._slot.start()
        except KcapError as error:
            return {"error": str(error)}

    def run(self, request: JudgeRequest, limit_s: float) -> dict[str, Any]:
        self._pin()
        return self._slot.run(request, limit_s)

    def _pin(self) -> None:
        """This thread, from which a judge that is started has its cores."""
        if self._cores:
            os.sched_setaffinity(0, self._cores)

    def stop(self) -> None:
        self._slot.stop()

    def close(self) -> None:
        self._slot.close()
        self._stack.close()


def _hidden(session: JudgeSession) -> list[str]:
    inside = [Path(session["root"]) / name for name in ("definitions", "workloads", "blob")]
    return [*(folder for folder in session["hidden"] if Path(folder).is_dir()), *(str(folder) for folder in inside)]


@contextmanager
def claimed_cores(count: int) -> Iterator[frozenset[int]]:
    """`count` cores that no other slot of this machine holds; KcapError if there are not as many.

    A core is held by a socket of an abstract name, which ends with its process. See unix(7).
    """
    with ExitStack() as stack:
        cores: list[int] = []
        for core in sorted(os.sched_getaffinity(0)):
            if len(cores) < count and _held(core, stack):
                cores.append(core)
        if len(cores) < count:
            raise KcapError(f"a slot takes {count} CPU cores, and {len(cores)} are free: pass a smaller --threads")
        yield frozenset(cores)


def _held(core: int, stack: ExitStack) -> bool:
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0kcap-core-{core}")
    except OSError:
        held.close()
        return False
    stack.callback(held.close)
    return True
