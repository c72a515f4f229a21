"""The CUDA toolkit and GPU that a Solution is compiled for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kcap.bench.build.failure import BuildFailed

NO_NVCC = "no nvcc here: install the CUDA toolkit, or name its folder in the variable CUDA_HOME"
LAST_HEADERS = "CPLUS_INCLUDE_PATH"  # compilers search it after every folder of the command line


def prepare() -> None:
    """Have torch and tvm-ffi find nvcc and compile for this process's GPU; BuildFailed if one of these is missing.

    From Hopper on code may use what only the very architecture has (`sm_90a`). Headers of libraries that the toolkit
    lacks are looked for in the packages that torch's wheel brings. Variables that are set are left.
    """
    import torch

    if torch.version.cuda is None:
        raise BuildFailed(f"CUDA sources, but torch {torch.__version__} is a build without CUDA")
    if not torch.cuda.is_available():
        raise BuildFailed("CUDA sources, but there is no CUDA GPU here")
    os.environ["CUDA_HOME"] = str(home())
    major, minor = torch.cuda.get_device_capability()
    for variable in ("TORCH_CUDA_ARCH_LIST", "TVM_FFI_CUDA_ARCH_LIST"):
        os.environ.setdefault(variable, f"{major}.{minor}{'a' if major >= 9 else ''}")
    headers = [os.environ.get(LAST_HEADERS), *sorted(map(str, packages(Path(torch.__file__)).glob("*/include")))]
    os.environ[LAST_HEADERS] = os.pathsep.join(filter(None, headers))


def packages(torch_file: Path) -> Path:
    """The folder of NVIDIA's packages beside torch's."""
    return torch_file.parents[1] / "nvidia"


def home() -> Path:
    """The folder whose `bin/nvcc` is used: a whole toolkit before one that has no headers. BuildFailed if none."""
    found = [folder for folder in _homes() if (folder / "bin" / "nvcc").is_file()]
    whole = [folder for folder in found if (folder / "include" / "cuda_runtime.h").is_file()]
    if not found:
        raise BuildFailed(NO_NVCC)
    return (whole or found)[0]


def _homes() -> Iterator[Path]:
    yield from (Path(folder) for name in ("CUDA_HOME", "CUDA_PATH") if (folder := os.environ.get(name)))
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).parent.parent
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")
    yield from sorted(Path("/usr/local").glob("cuda-*"), reverse=True)
