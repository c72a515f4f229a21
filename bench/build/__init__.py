"""A Solution's sources made its function: one file per language or binding, each with a Builder.

This runs in the process that is to run the Solution: what is built is foreign code, and importing it runs it.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kcap.bench.build.environment import environment
from kcap.bench.build.failure import BuildFailed
from kcap.bench.build.sources import write_sources
from kcap.schemas.solution import BuildSpec, Solution, to_bytes

__all__ = ["BuildFailed", "Builder", "build", "builder", "environment"]
BUILDERS: dict[tuple[str, str | None], Builder] = {}
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
        BUILDERS.update({(language, binding): kind() for language in languages})
        return kind

    return register


def build(solution: Solution, folder: Path) -> Function:
    """The entry point of `solution`, built below `folder`; BuildFailed says why there is none.

    What was compiled there before is used again where it is whole. `environment` must be in `os.environ`.
    """
    tempfile.tempdir = None  # torch's import asked for it before TMPDIR was set
    name = f"solution_{hashlib.sha256(to_bytes(solution)).hexdigest()[:16]}"
    return _builder_of(solution.spec).build(solution, write_sources(solution, folder / name), name)


@cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def _builder_of(spec: BuildSpec) -> Builder:
    _load()
    return BUILDERS[spec.language, (spec.binding or "tvm-ffi") if spec.language in COMPILED else None]
