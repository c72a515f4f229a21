"""A shared library compiled once: used again if it is what was linked, made anew if it is not."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kcap.bench.build.failure import BuildFailed
from kcap.schemas.solution import Solution

T = TypeVar("T")
CPP = frozenset({".cpp", ".cc", ".cxx", ".c"})
CUDA = frozenset({".cu"})
STAMP = "linked"  # holds what the library was linked with, and its digest


def compiled(folder: Path, name: str, make: Callable[[], T]) -> T | None:
    """Have `folder` hold `name`.so, and return what `make` does, which puts it there; None if it was there, whole.

    What a process left that died while it compiled is removed: a lock of its would be waited for.
    """
    stamp, library = folder / STAMP, folder / f"{name}.so"
    if stamp.is_file() and library.is_file() and stamp.read_text(errors="replace") == _digest(library):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    done = make()
    if not library.is_file():
        raise BuildFailed(f"the compiler left no {library.name}")
    stamp.write_text(_digest(library))
    return done


def _digest(library: Path) -> str:
    import torch

    made_with = f"{torch.__version__} {sys.implementation.cache_tag} {os.environ.get('CXX')}".encode()
    return hashlib.sha256(made_with + library.read_bytes()).hexdigest()


def to_compile(solution: Solution, sources: Path) -> list[str]:
    """The sources that a compiler takes, in their order; the others are headers. BuildFailed if there are none."""
    names = [source.path for source in solution.sources]
    taken = [str(sources / name) for name in names if Path(name).suffix in CPP | CUDA]
    if not taken:
        raise BuildFailed(f"none of its sources ends in {', '.join(sorted(CPP | CUDA))}")
    return taken


def needs_cuda(solution: Solution) -> bool:
    """Whether nvcc is needed."""
    return solution.spec.language == "cuda" or any(Path(one.path).suffix in CUDA for one in solution.sources)


def check_compilers() -> None:
    """BuildFailed if there is no C++ compiler, or no ninja."""
    cxx = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(cxx) is None:
        raise BuildFailed(f"no C++ compiler here ({cxx}): install g++, or name one in the variable CXX")
    if shutil.which("ninja") is None:
        raise BuildFailed("no ninja here: pip install ninja")
