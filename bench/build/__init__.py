"""A Solution's sources made its function: one file per language or binding, each with a Builder.

This runs in the process that is to run the Solution: what is built is foreign code, and importing it runs it. Caches,
temporary files and compilers of a Solution are kept in its own folder (`environment`).
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kcap.schemas.flashinfer.solution import BuildSpec, Solution
from kcap.system.registry import Registry, import_plugins

__all__ = ["BuildFailed", "Builder", "build", "builder", "environment"]
BUILDERS: Registry[tuple[str, str | None], Builder] = Registry("builder of language and binding")
COMPILED = frozenset({"cpp", "cuda"})
Function = Callable[..., Any]


class Builder:
    """Makes the function of Solutions of one language and binding."""

    def build(self, solution: Solution, sources: Path, name: str) -> Function:
        """The entry point. `sources`: the folder that has them; `name`: an identifier that no other Solution has.

        BuildFailed if there is none. What is made goes beside `sources`, into folders whose names begin with `name`.
        """
        raise NotImplementedError


def builder(*languages: str, binding: str | None = None) -> Callable[[type[Builder]], type[Builder]]:
    """Register a Builder for `languages`, of which those that are compiled have a `binding`."""

    def register(kind: type[Builder]) -> type[Builder]:
        for language in languages:
            BUILDERS.add((language, binding), kind())
        return kind

    return register


def build(solution: Solution, folder: Path) -> Function:
    """The entry point of `solution`, built below `folder`; BuildFailed says why there is none.

    What was compiled there before is used again where it is whole. `environment` must be in `os.environ`.
    """
    tempfile.tempdir = None  # torch's import asked for it before TMPDIR was set
    name = f"solution_{solution.sha256[:16]}"
    return _builder_of(solution.spec).build(solution, write_sources(solution, folder / name), name)


def _builder_of(spec: BuildSpec) -> Builder:
    import_plugins(__name__)
    return BUILDERS[spec.language, (spec.binding or "tvm-ffi") if spec.language in COMPILED else None]


MAX_REASON, MAX_LOG = 500, 20_000  # characters
FIRST_ERROR = re.compile(r"^.*(?:\berror *:|error [A-Z]+\d+:|undefined reference to|cannot find -l).*$", re.MULTILINE)


class BuildFailed(Exception):
    """`reason` is one line; `log` is the beginning of the compiler's output, or the traceback of an import."""

    def __init__(self, reason: str, log: str = "") -> None:
        line = " ".join(reason.split())[:MAX_REASON]
        super().__init__(line)
        self.reason = line
        self.log = log[:MAX_LOG]


def describe_error(error: BaseException) -> str:
    """`error` in words, even one whose `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__


def import_failure(error: BaseException) -> BuildFailed:
    """The failure of an import that raised `error`."""
    try:
        log = "".join(traceback.format_exception(error))
    except BaseException:
        log = ""
    return BuildFailed(describe_error(error), log)


def compiler_failure(output: str, sources: str) -> BuildFailed:
    """The failure of a compiler or linker that printed `output`; paths below the folder `sources` lose that prefix."""
    output = output.replace(f"{sources}/", "")
    first = FIRST_ERROR.search(output)
    return BuildFailed(f"does not compile: {first[0].strip() if first else output.strip()}", output)


def check_callable(function: Any, file: str, name: str) -> Callable[..., Any]:
    """`function`; BuildFailed if it is None, or nothing that can be called."""
    if function is None:
        raise BuildFailed(f"{file} defines no {name}")
    if not callable(function):
        raise BuildFailed(f"{file}: {name} is no function but of type {type(function).__name__}")
    entry: Callable[..., Any] = function
    return entry


def write_sources(solution: Solution, folder: Path) -> Path:
    """`folder`, absolute, with the sources in it, those that were there already left as they are."""
    folder = folder.absolute()
    for source in solution.sources:
        path, content = folder / source.path, source.content.encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise BuildFailed(f"sources: {source.path[:100]} cannot be written: {why}") from None
    return folder


CACHE_FOLDERS = {
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
    folders = {name: (folder / below).absolute() for name, below in CACHE_FOLDERS.items()}
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
