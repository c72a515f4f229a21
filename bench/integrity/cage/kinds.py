"""What of the confinement this machine has: found out by confining a process that does nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kcap.bench.integrity.cage import calls, landlock, limits, mounts, namespaces, own_proc, privileges, seccomp
from kcap.errors import KcapError

HOLDS = "holds"
PIECES = (
    namespaces.PIDS,
    namespaces.MOUNTS,
    *namespaces.OTHERS,
    own_proc.NAME,
    *mounts.LAID,
    landlock.NAME,
    landlock.SIGNALS,
    seccomp.NAME,
    privileges.USER,
    privileges.CAPABILITIES,
    privileges.NO_NEW,
    limits.LIMITS,
    limits.PROCESSES,
    limits.DIES_FIRST,
)


def kinds(without: frozenset[str] = frozenset()) -> dict[str, str]:
    """Each piece of the confinement: "holds", or why it does not on this machine."""
    from kcap.bench.integrity.cage import Cage, open_cage

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as log:
        place = Path(folder).resolve()
        place.chmod(0o711)
        secret, scratch = place / "hidden", place / "scratch"
        secret.mkdir()
        scratch.mkdir()
        cage = Cage(scratch, memory=1 << 30, disk=1 << 20, processes=64, hidden=(secret,))
        try:
            with open_cage(cage, log.fileno(), lambda: None, without) as caged:
                held, refused = caged.confined, caged.refused
        except (KcapError, OSError) as error:
            return dict.fromkeys(PIECES, str(error))
        finally:
            calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 0)  # who only asks adopts nobody
    users = (namespaces.USERS,) if namespaces.USERS in (*held, *refused) else ()
    return {each: HOLDS if each in held else refused.get(each, _missing(each, held)) for each in (*users, *PIECES)}


def _missing(piece: str, held: list[str]) -> str:
    if piece == privileges.CAPABILITIES and privileges.READING in held:
        return "keeps the capability to read files: the folders of Python or of its packages are closed to other users"
    return "needs a mount namespace"
