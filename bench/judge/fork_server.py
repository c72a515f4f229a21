"""The process that candidates are forked from: `python -m kcap.bench.judge.fork_server`.

It has torch and the driver loaded, has never touched CUDA, and runs no code from elsewhere itself. The judge speaks to
it on a socket, its standard input: a JSON object a packet, with the descriptors that the candidate gets.
"""

from __future__ import annotations

import array
import os
import socket

import orjson
import torch  # noqa: F401  here, so that no candidate has to

from kcap.bench.integrity import driver
from kcap.bench.judge.allocating import keep_memory
from kcap.bench.judge.cages import Cages

LONGEST = 1 << 16


def main() -> None:
    """Start and end candidates until the judge closes its end."""
    judge = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    cages = Cages(driver.Driver(driver.build()))
    keep_memory()
    try:
        judge.send(orjson.dumps({"ready": True}))
        while True:
            content, descriptors = _receive(judge)
            if not content:
                break
            judge.send(orjson.dumps(cages.answer(orjson.loads(content), descriptors)))
    finally:
        cages.close()


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
