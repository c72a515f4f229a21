"""The process that candidates are forked from: `python -m kcap.bench.judge.fork_server`.

It has torch and the driver loaded, has never touched CUDA, and runs no code from elsewhere itself. The judge speaks to
it on a socket, its standard input: a JSON object a packet, with the descriptors that the candidate gets.
"""

from __future__ import annotations

import array
import os
import select
import socket
from pathlib import Path
from typing import Any

import orjson
import torch  # noqa: F401  here, so that no candidate has to

from kcap.bench.integrity import driver
from kcap.bench.integrity.cage import Cage, Caged, open_cage
from kcap.bench.judge.allocating import keep_memory
from kcap.bench.judge.candidate_process import Order, run
from kcap.errors import KcapError

LONGEST = 1 << 16
PASSED = 3  # descriptors that come with a request to start: the channel, the log, and what is ordered
GONE_S = 5.0  # until a process that closed its channel has ended


def main() -> None:
    """Start and end candidates until the judge closes its end."""
    judge = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    loaded = driver.Driver(driver.build())
    keep_memory()
    running: dict[int, Caged] = {}
    try:
        judge.send(orjson.dumps({"ready": True}))
        while True:
            content, descriptors = _receive(judge)
            if not content:
                break
            judge.send(orjson.dumps(_answer(orjson.loads(content), descriptors, running, loaded)))
    finally:
        for caged in running.values():
            caged.end()


def _answer(
    request: dict[str, Any], descriptors: list[int], running: dict[int, Caged], loaded: driver.Driver
) -> dict[str, Any]:
    """What came of one request; `error`, where the machine lacks what a candidate takes."""
    if "end" in request:
        return {"how": _end(running.get(request["end"]), request["gone"], request["keep"])}
    try:
        return _started(request, descriptors, running, loaded)
    except (KcapError, OSError) as error:
        return {"error": str(error)}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _started(
    request: dict[str, Any], descriptors: list[int], running: dict[int, Caged], loaded: driver.Driver
) -> dict[str, Any]:
    if len(descriptors) != PASSED:
        raise KcapError("a Solution's process cannot be started: too many open files")
    channel, log, written = descriptors
    order = Order.from_json(orjson.loads(os.pread(written, os.fstat(written).st_size, 0)))
    given = request["cage"]
    cage = Cage(
        folder=Path(given["folder"]),
        memory=given["memory"],
        disk=given["disk"],
        processes=given["processes"],
        hidden=tuple(Path(path) for path in given["hidden"]),
        keep=(channel,),
    )
    after = running.pop(request["after"], None)
    try:
        caged = open_cage(cage, log, lambda: run(order, channel, loaded), after=after)
    finally:
        if after is not None:
            after.end()
    for name in [name for name, one in running.items() if one.how is not None and one.spaces is None]:
        del running[name]
    running[caged.pid] = caged
    return {"pid": caged.pid, "confined": caged.confined}


def _end(caged: Caged | None, gone: bool, keep: bool) -> str:
    """How it ended. `gone`: by itself, so that it is only waited for."""
    if caged is None:
        return "it had ended"
    if gone and caged.how is None:
        select.select([caged], [], [], GONE_S)
        caged.poll()
    return str(caged.end(keep_scratch=keep))


def _receive(judge: socket.socket) -> tuple[bytes, list[int]]:
    """One request with its descriptors; empty where the judge has ended."""
    content, ancillary, _, _ = judge.recvmsg(LONGEST, socket.CMSG_SPACE(32))
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return content, list(found)


if __name__ == "__main__":
    main()
