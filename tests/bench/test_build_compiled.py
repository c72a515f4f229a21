"""C++ Solutions built by both bindings, and what is said where one fails.

Each build is made in a process of its own, as the library stays in the one that loads it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time

import pytest
from solution_files import solution

from kcap.bench.build import BuildFailed, build, environment
from kcap.schemas.flashinfer import solution as solutions_file

PYBIND = """
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
#include "factor.h"
void scale(at::Tensor x, double eps, at::Tensor y) { y.copy_(x.mul(eps * FACTOR)); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("scale", &scale); }
"""
FFI = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include "factor.h"
void scale(tvm::ffi::TensorView x, double eps, tvm::ffi::TensorView y) {
  auto* in = static_cast<float*>(x.data_ptr());
  auto* out = static_cast<float*>(y.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = in[i] * eps * FACTOR;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, scale);
"""
SOURCES = {"torch": PYBIND, "tvm-ffi": FFI, None: FFI}
RUN = """
    import os, sys
    from pathlib import Path
    import torch
    from kcap.bench.build import BuildFailed, build, environment
    from kcap.schemas.flashinfer import solution
    folder = Path(sys.argv[1])
    os.environ.update(environment(folder))
    try:
        run = build(solution.read(folder / "solution.json"), folder / "build")
    except BuildFailed as error:
        sys.exit(error.reason)
    x, y = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
    run(x, 0.5, y)
    print(y.sum().item())
"""


def cpp(binding, **sources):
    more = {} if binding is None else {"binding": binding}
    files = {"scale.cpp": SOURCES[binding], "factor.h": "#define FACTOR 2\n"} | sources
    return solution(files, "scale.cpp::scale", "cpp", **more)


def in_a_process(folder, of):
    """What is printed by a process that builds `of` in `folder` and calls it, the failure's reason, and the seconds."""
    folder.mkdir(exist_ok=True)
    solutions_file.write(folder / "solution.json", of)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), str(folder)], capture_output=True, text=True, timeout=300
    )
    return done.stdout.strip(), done.stderr.strip(), time.monotonic() - begun


@pytest.fixture(scope="module", params=["torch", None])
def built(request, tmp_path_factory):
    """A binding (None: tvm-ffi), the folder that a Solution of it was built in, and what came of it."""
    folder = tmp_path_factory.mktemp("built")
    return request.param, folder, in_a_process(folder, cpp(request.param))


def test_library_is_called_with_tensors_and_scalars(built):
    assert built[2][0] == "15.0", built[2][1]


def test_everything_is_in_the_folder(built):
    _, folder, _ = built
    assert sorted(os.listdir(folder)) == ["build", "cache", "home", "solution.json", "tmp"]
    assert not any((folder / "home").iterdir())


def stamps_of(folder):
    return {path: path.stat().st_mtime_ns for path in (folder / "build").rglob("*.so")}


def test_second_process_compiles_nothing(built):
    binding, folder, _ = built
    before = stamps_of(folder)
    (lock,) = (path.parent / "lock" for path in before)  # torch waits for ever on what a dead process left
    lock.touch()
    out, err, _ = in_a_process(folder, cpp(binding))
    assert out == "15.0", err
    assert stamps_of(folder) == before


@pytest.mark.parametrize("built", [None], indirect=True)  # torch's takes longer, and asks the same function
def test_library_that_is_damaged_is_made_anew(built):
    binding, folder, _ = built
    (library,) = stamps_of(folder)
    library.write_bytes(library.read_bytes()[:1000])
    (library.parent / "lock").touch()
    assert in_a_process(folder, cpp(binding))[0] == "15.0"


@pytest.fixture
def own(tmp_path, monkeypatch):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def reason(of, folder):
    with pytest.raises(BuildFailed) as caught:
        build(of, folder)
    return caught.value.reason


@pytest.mark.parametrize("binding", ["torch", "tvm-ffi"])
def test_source_that_does_not_compile_says_its_first_error(own, binding):
    failed = reason(cpp(binding, **{"scale.cpp": "int f() {\n  return nowhere;\n}\n"}), own)
    assert failed.startswith("does not compile: scale.cpp:2:10: error: ")
    assert "nowhere" in failed


def test_library_without_the_entry_point(own):
    assert reason(cpp("tvm-ffi", **{"scale.cpp": "int f() { return 1; }\n"}), own) == "the library defines no scale"


def test_library_that_lacks_a_symbol_does_not_load(own):
    text = 'extern "C" int nowhere;\nint* scale = &nowhere;\n'
    failed = reason(cpp("tvm-ffi", **{"scale.cpp": text}), own)
    assert failed.startswith("does not load: ")
    assert "nowhere" in failed


def test_extension_without_a_module_does_not_load(own):
    failed = reason(cpp("torch", **{"scale.cpp": "int f() { return 1; }\n"}), own)
    assert failed.startswith("does not load: ImportError: ")


def test_sources_that_no_compiler_takes(own):
    files = {"scale.h": "int f();\n"}
    failed = reason(solution(files, "scale.h::scale", "cpp", binding="torch"), own)
    assert failed == "none of its sources ends in .c, .cc, .cpp, .cu, .cxx"


@pytest.mark.parametrize("binding", ["torch", "tvm-ffi"])
@pytest.mark.parametrize(("program", "said"), [("c++", "no C++ compiler here (c++)"), ("ninja", "no ninja here")])
def test_missing_programs_are_named(own, monkeypatch, binding, program, said):
    monkeypatch.delenv("CXX", raising=False)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **more: None if name == program else which(name, **more))
    assert reason(cpp(binding), own).startswith(said)


def test_missing_tvm_ffi_is_named(own, monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    assert reason(cpp("tvm-ffi"), own) == "tvm_ffi is not installed here: pip install apache-tvm-ffi"
