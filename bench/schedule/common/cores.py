"""CPU cores that one slot has to itself among those of the same node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kcap.errors import KcapError


@contextmanager
def claimed(count: int) -> Iterator[frozenset[int]]:
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
