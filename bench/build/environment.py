"""The variables that keep caches, temporary files and compilers of one Solution in its own folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDERS = {
    "HOME": "home",
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "cache",
    "TORCH_EXTENSIONS_DIR": "cache/torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": "cache/torchinductor",
    "TRITON_CACHE_DIR": "cache/triton",
    "TRITON_HOME": "cache",
    "TVM_FFI_CACHE_DIR": "cache/tvm_ffi",
    "FLASHINFER_WORKSPACE_BASE": "cache/flashinfer",
    "TILELANG_CACHE_DIR": "cache/tilelang",
    "CUDA_CACHE_PATH": "cache/cuda",
}
MAX_JOBS = 4  # each may take 2 GB of memory


def environment(folder: Path) -> dict[str, str]:
    """The variables, and the folders that they name, made below `folder`, which only one Solution may write in.

    Put them into `os.environ` before the Solution's process imports more than torch. Jobs of compilers are as many as
    there are cores, 4 at most, unless MAX_JOBS says otherwise; inductor compiles in the process itself. Whoever fails
    to set them leaves what is built in the user's own caches.
    """
    folders = {name: (folder / below).absolute() for name, below in FOLDERS.items()}
    for path in folders.values():
        path.mkdir(parents=True, exist_ok=True)
    jobs = os.environ.get("MAX_JOBS") or str(min(MAX_JOBS, len(os.sched_getaffinity(0))))
    beside = str(Path(sys.executable).parent)  # where pip puts ninja
    return {
        **{name: str(path) for name, path in folders.items()},
        "MAX_JOBS": jobs,
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
        "PATH": os.pathsep.join(dict.fromkeys([*os.environ.get("PATH", os.defpath).split(os.pathsep), beside])),
    }
