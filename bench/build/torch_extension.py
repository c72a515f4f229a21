"""C++ and CUDA bound by pybind11, compiled by `torch.utils.cpp_extension` as FlashInfer-Bench has it do."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

from kcap.bench.build import (
    Builder,
    BuildFailed,
    Function,
    builder,
    check_callable,
    compiler_failure,
    compilers,
    describe_error,
)
from kcap.bench.build.compilers import check_compilers, compile_once, needs_cuda, sources_to_compile
from kcap.schemas.flashinfer.solution import Solution


@builder("cpp", "cuda", binding="torch")
class TorchExtension(Builder):
    def build(self, solution: Solution, sources: Path, name: str) -> Function:
        folder = sources.with_name(f"{name}_torch")
        try:
            module = compile_once(folder, name, lambda: _load(solution, sources, folder, name))
            module = module or _import(folder / f"{name}.so", name)
            function = getattr(module, solution.spec.entry_function, None)
        except BuildFailed:
            raise
        except BaseException as error:  # whatever foreign code raises, SystemExit among it
            verb = "load" if isinstance(error, ImportError) else "build"
            raise BuildFailed(f"does not {verb}: {describe_error(error)}") from None
        return check_callable(function, "the extension", solution.spec.entry_function)


def _load(solution: Solution, sources: Path, folder: Path, name: str) -> ModuleType:
    """The module, compiled into `folder`."""
    files = sources_to_compile(solution, sources)
    check_compilers()
    with_cuda = needs_cuda(solution)
    if with_cuda:
        compilers.prepare_toolkit()
    from torch.utils import cpp_extension

    if with_cuda:
        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"]  # asked for when the module was imported, perhaps long ago
    paths = {"extra_include_paths": [str(sources)], "build_directory": str(folder), "extra_cflags": ["-O3"]}
    try:
        module: ModuleType = cpp_extension.load(name, files, **paths, with_cuda=with_cuda)
    except RuntimeError as error:
        if isinstance(error.__cause__, Exception):  # the compiler's exit code
            raise compiler_failure(str(error), str(sources)) from None
        raise
    return module


def _import(library: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
