"""Python, Triton and TileLang: sources imported as a package, which plain imports of their names find, too.

What is installed wins over a source of its name: the sources come last on the path.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path, PurePosixPath
from types import ModuleType

from kcap.bench.build import Builder, BuildFailed, Function, builder, check_callable, import_failure
from kcap.schemas.flashinfer.solution import Solution

PACKAGES = {"triton": "triton", "tilelang": "tilelang"}  # that a language needs


@builder("python", "triton", "tilelang")
class PythonSource(Builder):
    def build(self, solution: Solution, sources: Path, name: str) -> Function:
        spec = solution.spec
        package = PACKAGES.get(spec.language)
        if package and importlib.util.find_spec(package) is None:
            raise BuildFailed(f"{package} is not installed here: pip install {package}")
        if not spec.entry_file.endswith(".py"):
            raise BuildFailed(f"the entry file {spec.entry_file} is no .py file")
        _append_path(sources, spec.entry_file)
        try:
            function = getattr(_import(sources, name, spec.entry_file), spec.entry_function, None)
        except BaseException as error:  # whatever foreign code raises, SystemExit among it
            raise import_failure(error) from None
        return check_callable(function, spec.entry_file, spec.entry_function)


def _append_path(sources: Path, entry: str) -> None:
    """Let the package, its files and those beside the entry file be found where nothing installed has their names."""
    for folder in (sources.parent, sources, (sources / entry).parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    importlib.invalidate_caches()


def _import(sources: Path, package: str, entry: str) -> ModuleType:
    """The entry file as a module of `package`, under a name without the dots that a file's name may have."""
    *folders, stem = PurePosixPath(entry).with_suffix("").parts
    parent = ".".join([package, *folders])
    importlib.import_module(parent)
    spec = importlib.util.spec_from_file_location(f"{parent}.{stem.replace('.', '_')}", sources / entry)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
