"""C++ and CUDA bound by tvm-ffi, which torch tensors pass through without a copy; built as FlashInfer-Bench does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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


@builder("cpp", "cuda", binding="tvm-ffi")
class TvmFfi(Builder):
    def build(self, solution: Solution, sources: Path, name: str) -> Function:
        if importlib.util.find_spec("tvm_ffi") is None:
            raise BuildFailed("tvm_ffi is not installed here: pip install apache-tvm-ffi")
        folder = sources.with_name(f"{name}_tvm_ffi")
        compile_once(folder, name, lambda: _compile(solution, sources, folder, name))
        return _function(folder / f"{name}.so", solution.spec.entry_function)


def _compile(solution: Solution, sources: Path, folder: Path, name: str) -> None:
    files = sources_to_compile(solution, sources)
    check_compilers()
    if needs_cuda(solution):
        compilers.prepare_toolkit()
    from tvm_ffi import cpp

    try:
        cpp.build(name, sources=files, extra_include_paths=[str(sources)], build_directory=str(folder))
    except RuntimeError as error:
        raise compiler_failure(str(error), str(sources)) from None


def _function(library: Path, name: str) -> Function:
    import tvm_ffi

    try:
        function = getattr(tvm_ffi.load_module(library), name, None)
    except BaseException as error:  # what the library's initializers raise
        raise BuildFailed(f"does not load: {describe_error(error)}") from None
    return check_callable(function, "the library", name)
