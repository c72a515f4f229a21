"""The candidate's view of the disk: all of it read-only, hidden folders empty, and a scratch of a fixed size.

It needs a mount namespace: nothing of this is seen, or left behind, outside. See mount(2), tmpfs(5).
"""

from __future__ import annotations

import os
from pathlib import Path

from kcap.bench.integrity.cage import calls
from kcap.bench.integrity.cage.pieces import Pieces

READ_ONLY, HIDDEN, SCRATCH, SHARED = "read-only files", "hidden folders", "scratch", "own /dev/shm"
LAID = (READ_ONLY, HIDDEN, SCRATCH, SHARED)
SHARED_FOLDER = Path("/dev/shm")
PLAIN = calls.MS_NOSUID | calls.MS_NODEV
FILES = 1 << 15  # inodes of the scratch: each costs the kernel about a KiB


def lay(folder: Path, hidden: tuple[Path, ...], disk: int, owner: int, pieces: Pieces) -> None:
    """Mount all but /proc. `disk` is in bytes; `owner` is the user that may write."""
    calls.mount("none", "/", None, calls.MS_REC | calls.MS_PRIVATE)
    pieces.attempt(READ_ONLY, calls.make_all_mounts_read_only)
    pieces.attempt(HIDDEN, lambda: _hide(hidden, folder))
    room = f"size={disk},nr_inodes={FILES},uid={owner}"
    pieces.attempt(SCRATCH, lambda: calls.mount("tmpfs", str(folder), "tmpfs", PLAIN, f"{room},mode=0700"))
    pieces.attempt(SHARED, lambda: calls.mount("tmpfs", str(SHARED_FOLDER), "tmpfs", PLAIN, f"{room},mode=1777"))


def _hide(hidden: tuple[Path, ...], folder: Path) -> None:
    """Cover each with an empty file system; one that holds the scratch keeps the way to it."""
    for path in sorted(hidden):
        if path.is_dir():
            calls.mount("tmpfs", str(path), "tmpfs", PLAIN, "size=64k,nr_inodes=64,mode=0755")
            if folder.is_relative_to(path):
                folder.mkdir(parents=True, exist_ok=True)
            calls.mount(None, str(path), None, calls.MS_REMOUNT | calls.MS_RDONLY | PLAIN)
        elif path.exists():
            calls.mount(os.devnull, str(path), None, calls.MS_BIND)
