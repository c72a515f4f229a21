"""Compilers of C++ and CUDA: whether they are here, for which toolkit and GPU, and a library compiled once."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kcap.bench.build import BuildFailed
from kcap.schemas.flashinfer.solution import Solution

T = TypeVar("T")
CPP = frozenset({".cpp", ".cc", ".cxx", ".c"})
CUDA = frozenset({".cu"})
STAMP = "linked"  # holds what the library was linked with, and its digest


def compile_once(folder: Path, name: str, make: Callable[[], T]) -> T | None:
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


def sources_to_compile(solution: Solution, sources: Path) -> list[str]:
    """The sources that a compiler takes, in their order; the others are headers. BuildFailed if there are none."""
    names = [source.path for source in solution.sources]
    taken = [str(sources / name) for name in names if Path(name).suffix in CPP | CUDA]
    if not taken:
        raise BuildFailed(f"none of its sources ends in {', '.join(sorted(CPP | CUDA))}")
    return taken


def needs_cuda(solution: Solution) -> bool:
    """Whether nvcc is needed."""
    return solution.spec.language == "cuda" or any(Path(source.path).suffix in CUDA for source in solution.sources)


def check_compilers() -> None:
    """BuildFailed if there is no C++ compiler, or no ninja."""
    cxx = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(cxx) is None:
        raise BuildFailed(f"no C++ compiler here ({cxx}): install g++, or name one in the variable CXX")
    if shutil.which("ninja") is None:
        raise BuildFailed("no ninja here: pip install ninja")


NO_NVCC = "no nvcc here: install the CUDA toolkit, or name its folder in the variable CUDA_HOME"
LAST_HEADERS = "CPLUS_INCLUDE_PATH"  # compilers search it after every folder of the command line


def prepare_toolkit() -> None:
    """Have torch and tvm-ffi find nvcc and compile for this process's GPU; BuildFailed if one of these is missing.

    From Hopper on code may use what only the very architecture has (`sm_90a`). Headers of libraries that the toolkit
    lacks are looked for in the packages that torch's wheel brings. Variables that are set are left.
    """
    import torch

    if torch.version.cuda is None:
        raise BuildFailed(f"CUDA sources, but torch {torch.__version__} is a build without CUDA")
    if not torch.cuda.is_available():
        raise BuildFailed("CUDA sources, but there is no CUDA GPU here")
    os.environ["CUDA_HOME"] = str(cuda_home())
    major, minor = torch.cuda.get_device_capability()
    for variable in ("TORCH_CUDA_ARCH_LIST", "TVM_FFI_CUDA_ARCH_LIST"):
        os.environ.setdefault(variable, f"{major}.{minor}{'a' if major >= 9 else ''}")
    headers = [os.environ.get(LAST_HEADERS), *sorted(map(str, nvidia_packages(Path(torch.__file__)).glob("*/include")))]
    os.environ[LAST_HEADERS] = os.pathsep.join(filter(None, headers))


def nvidia_packages(torch_file: Path) -> Path:
    """The folder of NVIDIA's packages beside torch's."""
    return torch_file.parents[1] / "nvidia"


def cuda_home() -> Path:
    """The folder whose `bin/nvcc` is used: a whole toolkit before one that has no headers. BuildFailed if none."""
    homes = [folder for folder in _cuda_homes() if (folder / "bin" / "nvcc").is_file()]
    whole = [folder for folder in homes if (folder / "include" / "cuda_runtime.h").is_file()]
    if not homes:
        raise BuildFailed(NO_NVCC)
    return (whole or homes)[0]


def _cuda_homes() -> Iterator[Path]:
    yield from (Path(folder) for name in ("CUDA_HOME", "CUDA_PATH") if (folder := os.environ.get(name)))
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).parent.parent
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")
    yield from sorted(Path("/usr/local").glob("cuda-*"), reverse=True)
