"""Builds and loads the native recorder: once per torch version, compiler and source, kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kcap.capture.samples import RANGE_ARGUMENTS, VALUE_ARGUMENTS

SOURCE = Path(__file__).with_name("dispatcher.cpp")
# -DNDEBUG: the wheel is built with it, and RecordFunction's layout depends on it. The last three let the recorder's
# own functions, and ATen's inline ones in it, call each other directly: a seventh of what a call costs.
FLAGS = (
    *("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-w"),
    *("-fno-semantic-interposition", "-Wl,-Bsymbolic-functions", "-fno-plt"),
)


class Unavailable(Exception):
    """The native recorder cannot be had here; the message says why."""


def compiler() -> str:
    found = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )
    if found is None:
        raise Unavailable("no C++ compiler: install g++ (or name one in CXX) for the native recorder")
    return found


def _sources() -> list[Path]:
    return [SOURCE, *sorted(SOURCE.parent.glob("native/*.h"))]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kcap"


def _command(cxx: str, output: Path) -> list[str]:
    import torch

    root = Path(torch.__file__).parent
    return [
        cxx,
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}",
        str(SOURCE),
        *("-o", str(output)),
        *(f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]


def _key(cxx: str) -> str:
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {sys.platform} {FLAGS}".encode())
    digest.update(subprocess.run([cxx, "--version"], capture_output=True, timeout=60).stdout)
    for source in _sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def build() -> Path:
    """The compiled recorder, built if it is not cached (about 10 s); Unavailable if it cannot be."""
    cxx = compiler()
    target = _cache() / f"dispatcher-{_key(cxx)}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    done = subprocess.run(_command(cxx, partial), capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise Unavailable(f"the native recorder does not compile with {cxx}: {lines[0][:200]}")
    partial.replace(target)
    return target


class NativeRecorder:
    """The native recorder of this process (there is one). What may write to disk releases the GIL."""

    kind = "RecordFunction"

    def __init__(self, stem: Path, keep_tokens: bool = False, fail_after: int = -1) -> None:
        path = str(build())
        self._lib, self._quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        self._lib.kcap_error.restype = ctypes.c_char_p
        self._lib.kcap_step_end.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p]
        self._lib.kcap_fail_after.argtypes = [ctypes.c_int64]
        names = [" ".join(sorted(group)).encode() for group in (VALUE_ARGUMENTS, RANGE_ARGUMENTS)]
        if self._lib.kcap_open(str(stem).encode(), *names, int(keep_tokens)):
            reason = self.error
            if reason:
                self._lib.kcap_close()
            raise RuntimeError(reason or "this process records already")
        self._lib.kcap_fail_after(fail_after)

    @property
    def error(self) -> str:
        """Why it stopped by itself; empty while it is well."""
        return (self._lib.kcap_error() or b"").decode(errors="replace")

    def start(self, loose: bool) -> None:
        self._lib.kcap_start(int(loose))

    def stop(self) -> None:
        self._lib.kcap_stop()

    def set_phase(self, phase: int) -> None:
        self._lib.kcap_set_phase(phase)

    def step_begin(self, phase: int) -> None:
        self._quick.kcap_step_begin(phase)

    def step_pause(self) -> None:
        self._quick.kcap_step_pause()

    def step_resume(self) -> None:
        self._quick.kcap_step_resume()

    def step_end(self, tokens: int, sequences: int, details: bytes) -> None:
        self._lib.kcap_step_end(tokens, sequences, details)

    def line(self, text: bytes) -> None:
        self._lib.kcap_line(text)

    def close(self) -> None:
        self._lib.kcap_close()
