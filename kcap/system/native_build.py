"""Compiles a C++ source of kcap against torch: once per torch, compiler and source, kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from errno import ENOSPC
from pathlib import Path

from kcap.errors import KcapError

# -DNDEBUG: torch's wheel is built with it, and the layout of some of its classes depends on it. The last three let the
# library's own functions, and ATen's inline ones in it, call each other directly: a seventh of what a recorded call
# costs.
FLAGS = (
    *("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-w"),
    *("-fno-semantic-interposition", "-Wl,-Bsymbolic-functions", "-fno-plt"),
)
LIMIT_S = 300.0


class Unavailable(KcapError):
    """The library cannot be had here; the message says why."""


def compiler() -> str:
    """The C++ compiler's path; Unavailable if there is none."""
    found = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )
    if found is None:
        raise Unavailable("no C++ compiler: install g++ (or name one in CXX)")
    return found


def build(sources: Sequence[Path], extra: Sequence[str] = ()) -> Path:
    """The library of the first of `sources`, which includes the others, built if it is not cached (about 10 s).

    `extra`: further arguments for the compiler. Unavailable if it cannot be built. The name of a library in the cache
    ends with its content's hash: a damaged one, which would end the process that loads it, is built again. Where there
    is no compiler, any one's will do.
    """
    try:
        return _cached_or_built(sources, extra)
    except OSError as error:
        raise Unavailable(f"{sources[0].name} cannot be compiled: {error}") from None


def _cached_or_built(sources: Sequence[Path], extra: Sequence[str]) -> Path:
    folder, stem = cache_folder(), f"{sources[0].stem}-{_key(sources, extra)}"
    try:
        cxx = compiler()
    except Unavailable:
        if cached := _cached(folder, stem):
            return cached
        raise
    stem = f"{stem}-{_digest(_run([cxx, '--version']).stdout)}"
    if cached := _cached(folder, stem):
        return cached
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{stem}.{os.getpid()}.tmp"
    try:
        done = _run(_command(cxx, sources[0], partial, extra))
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").splitlines()
            lines = [line for line in said if "error" in line or os.strerror(ENOSPC) in line] or ["no message"]
            raise Unavailable(f"{sources[0].name} does not compile with {cxx}: {lines[0][:200]}")
        return partial.replace(folder / f"{stem}-{_digest(partial.read_bytes())}.so")
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _cached(folder: Path, stem: str) -> Path | None:
    """The library in `folder` whose name begins with `stem` and which is whole."""
    for library in sorted(folder.glob(f"{stem}-*.so")):
        with suppress(OSError):
            if library.is_file() and library.stem.endswith(f"-{_digest(library.read_bytes())}"):
                return library
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def cache_folder() -> Path:
    """Where kcap keeps what it compiled or measured on this machine.

    Where the home cannot be written to, that is a folder of this user's alone among the temporary ones. Unavailable
    where somebody else has that name: libraries are loaded from it.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache")) / "kcap"
    if is_writable(folder):
        return folder
    private = Path(tempfile.gettempdir()) / f"kcap-{os.getuid()}"
    with suppress(FileExistsError):
        private.mkdir(mode=0o700)
    status = private.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise Unavailable(f"{folder} cannot be written to, and {private} is not this user's alone: set XDG_CACHE_HOME")
    return private


def is_writable(folder: Path) -> bool:
    """Whether files can be put into `folder`, which is made if need be. One that is relative is of a home not known."""
    try:
        if folder.is_absolute():
            folder.mkdir(parents=True, exist_ok=True)
            return os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        pass
    return False


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """What comes of it; Unavailable where it does not end in time."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a compiler runs others
            if isinstance(error, subprocess.TimeoutExpired):
                raise Unavailable(f"{command[0]} does not end within {LIMIT_S:g} s") from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _command(cxx: str, source: Path, output: Path, extra: Sequence[str]) -> list[str]:
    import torch

    root = Path(torch.__file__).parent
    return [
        cxx,
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}",
        str(source),
        *("-o", str(output)),
        *(f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"),
        *extra,
    ]


def _key(sources: Sequence[Path], extra: Sequence[str]) -> str:
    import torch

    what = f"{torch.__version__} {sys.platform} {FLAGS} {list(extra)}".encode()
    return _digest(b"".join([what, *(source.read_bytes() for source in sources)]))
