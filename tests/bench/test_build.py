"""Python Solutions built: what they import, what wins, what is said when it fails."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile

import pytest
from solution_files import RETURNING, solution

from kcap.bench.build import BuildFailed, build, compiler_failure, environment


@pytest.fixture(autouse=True)
def unchanged_imports(monkeypatch, tmp_path):
    """What a test imports of its own folder and puts on the path is gone after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    yield
    own = [name for name, found in sys.modules.items() if str(tmp_path) in str(getattr(found, "__spec__", ""))]
    for name in own:
        del sys.modules[name]


def failure(of, folder):
    with pytest.raises(BuildFailed) as caught:
        build(of, folder)
    return caught.value


def test_function_of_one_file(tmp_path):
    run = build(solution({"main.py": RETURNING}), tmp_path)
    assert run(2, 3) == 6


def test_sources_import_each_other_by_relative_and_by_plain_name(tmp_path):
    run = build(
        solution(
            {
                "main.py": "from .inner.half import half\nfrom twice import twice\ndef run(a, b): return half + twice",
                "twice.py": "twice = 2\n",
                "inner/half.py": "from ..twice import twice\nhalf = 1 / twice\n",
            }
        ),
        tmp_path,
    )
    assert run(0, 0) == 2.5


def test_file_in_a_folder_imports_what_is_beside_it_and_what_is_at_the_root(tmp_path):
    sources = {
        "deep/main.py": "import beside, at_root\nfrom . import beside\ndef run(x, eps): return beside.a + at_root.b\n",
        "deep/beside.py": "a = 1\n",
        "at_root.py": "b = 2\n",
    }
    assert build(solution(sources, "deep/main.py::run"), tmp_path)(0, 0) == 3


def test_package_with_an_init_runs_it(tmp_path):
    sources = {"__init__.py": "START = 4\n", "main.py": "from . import START\ndef run(x, eps): return START\n"}
    assert build(solution(sources), tmp_path)(0, 0) == 4


def test_source_called_torch_does_not_hide_torch(tmp_path):
    import torch

    sources = {
        "main.py": "import torch, json\nfrom . import torch as own\ndef run(x, eps): return torch, own.mine, json\n",
        "torch.py": "mine = 1\n",
        "json.py": "raise RuntimeError('hidden')\n",
    }
    assert build(solution(sources), tmp_path)(0, 0) == (torch, 1, importlib.import_module("json"))


def test_installed_package_that_was_not_imported_yet_wins_over_a_source(tmp_path):
    sys.modules.pop("this_is_installed", None)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "this_is_installed.py").write_text("who = 'installed'\n")
    sys.path.append(str(tmp_path / "site"))
    sources = {
        "main.py": "import this_is_installed\ndef run(x, eps): return this_is_installed.who\n",
        "this_is_installed.py": "who = 'source'\n",
    }
    assert build(solution(sources), tmp_path / "build")(0, 0) == "installed"


def test_entry_file_called_torch_is_the_solutions(tmp_path):
    assert build(solution({"torch.py": RETURNING}, "torch.py::run"), tmp_path)(2, 2) == 4


def test_source_of_the_function_can_be_looked_at(tmp_path):
    run = build(solution({"main.py": RETURNING}), tmp_path)
    assert inspect.getsource(run) == RETURNING
    assert sys.modules[run.__module__].run is run


@pytest.mark.parametrize("name", ["my-kernel.v2.py", "2.py", "class.py", "__init__.py"])
def test_file_names_that_are_no_identifiers(tmp_path, name):
    sources = {name: "from .helper import made\ndef run(x, eps): return made\n", "helper.py": "made = 5\n"}
    assert build(solution(sources, f"{name}::run"), tmp_path)(0, 0) == 5


def test_triton_kernel_is_imported(tmp_path):
    triton = pytest.importorskip("triton")
    text = (
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef kernel(x, n: tl.constexpr):\n"
        "    tl.store(x, n)\n\ndef run(x, eps):\n    return kernel\n"
    )
    kernel = build(solution({"main.py": text}, language="triton"), tmp_path)(0, 0)
    assert isinstance(kernel, triton.JITFunction)
    assert "tl.store(x, n)" in kernel.src


FAILS = {
    "raises": ("raise ValueError('no good')", "ValueError: no good"),
    "exits": ("import sys\nsys.exit('bye')", "SystemExit: bye"),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
    "missing": ("import there_is_no_such_package", "ModuleNotFoundError: No module named 'there_is_no_such_package'"),
    "syntax": ("def run(:", "SyntaxError: invalid syntax (main.py, line 1)"),
    "lacks": ("other = 1", "main.py defines no run"),
    "number": ("run = 3", "main.py: run is no function but of type int"),
    "lazy": ("def __getattr__(name): raise OSError('lazy')", "OSError: lazy"),
    "lines": ("raise ValueError('a\\nb ' + 'c' * 9999)", "ValueError: a b ccc"),
    "wordless": ("class E(Exception):\n    def __str__(self): raise E\nraise E", "E"),
}


@pytest.mark.parametrize("name", FAILS)
def test_failure_of_an_import_says_why(tmp_path, name):
    text, reason = FAILS[name]
    failed = failure(solution({"main.py": text}), tmp_path)
    assert failed.reason.startswith(reason.strip())
    assert len(failed.reason) <= 500
    assert "\n" not in failed.reason


def test_failure_of_an_import_has_the_traceback(tmp_path):
    failed = failure(solution({"main.py": "def f():\n    raise ValueError\nf()\n"}), tmp_path)
    assert 'main.py", line 2, in f' in failed.log


def test_language_without_its_package_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    failed = failure(solution({"main.py": RETURNING}, language="tilelang"), tmp_path)
    assert failed.reason == "tilelang is not installed here: pip install tilelang"


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"main.py": RETURNING, "main.py/deeper.py": "x"}, "main.py/deeper.py cannot be written: "),
        ({"main.py": RETURNING, "a" * 300 + ".py": "x"}, "File name too long"),
        ({"main.py": RETURNING, ".": "x"}, "sources: . cannot be written: Is a directory"),
    ],
)
def test_sources_that_no_folder_can_hold_fail(tmp_path, sources, said):
    assert said in failure(solution(sources), tmp_path).reason


def test_solution_whose_helper_changed_has_the_new_one(tmp_path):
    main = "from .helper import made\ndef run(x, eps): return made\n"
    first, second = (solution({"main.py": main, "helper.py": f"made = {number}\n"}) for number in (1, 2))
    assert [build(one, tmp_path)(0, 0) for one in (first, second)] == [1, 2]


def test_source_that_a_dead_process_left_half_written_is_written_again(tmp_path):
    one = solution({"main.py": RETURNING})
    build(one, tmp_path)
    (written,) = tmp_path.rglob("main.py")
    written.write_text("def r")
    assert build(one, tmp_path)(2, 3) == 6


def test_environment_keeps_every_cache_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    found = environment(tmp_path / "own")
    kept = {name for name, value in found.items() if value.startswith(str(tmp_path / "own"))}
    wanted = "TORCH_EXTENSIONS_DIR TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR XDG_CACHE_HOME TMPDIR HOME CUDA_CACHE_PATH"
    assert set(wanted.split()) <= kept
    assert all(os.path.isdir(found[name]) for name in kept)
    assert 1 <= int(found["MAX_JOBS"]) <= 4


def test_programs_beside_python_are_found_last(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert environment(tmp_path)["PATH"] == f"/usr/bin:/bin:{os.path.dirname(sys.executable)}"


def test_users_number_of_jobs_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "7")
    assert environment(tmp_path)["MAX_JOBS"] == "7"


def test_temporary_files_go_where_the_environment_says(tmp_path, monkeypatch):
    tempfile.gettempdir()
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    text = "import tempfile\ndef run(x, eps): return tempfile.mkdtemp()\n"
    assert build(solution({"main.py": text}), tmp_path)(0, 0).startswith(str(tmp_path / "tmp"))


OUTPUTS = {
    "g++": (
        "[1/2] c++ -c /s/a.cpp\n/s/a.cpp: In function 'f':\n/s/a.cpp:3:5: error: 'x' was not declared\n",
        "a.cpp:3:5: error: 'x' was not declared",
    ),
    "fatal": ("/s/a.cpp:1:10: fatal error: no.h: No such file\n", "a.cpp:1:10: fatal error: no.h: No such file"),
    "nvcc": (
        '/s/a.cu(7): error: identifier "x" is undefined\n\n1 error detected\n',
        'a.cu(7): error: identifier "x" is undefined',
    ),
    "ptxas": (
        "ptxas error   : Entry function uses too much shared data\n",
        "ptxas error   : Entry function uses too much",
    ),
    "linker": (
        "ld: a.o: in function `f':\na.cpp:(.text+0x5): undefined reference to `g'\ncollect2: error: ld\n",
        "undefined reference to `g'",
    ),
    "library": ("/usr/bin/ld: cannot find -lcudart: No such file\n", "cannot find -lcudart"),
    "killed": ("g++: fatal error: Killed signal terminated program cc1plus\n", "Killed signal terminated program"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_first_error_of_a_compiler_is_the_reason(name):
    output, wanted = OUTPUTS[name]
    failed = compiler_failure(output, "/s")
    assert " ".join(wanted.split()) in failed.reason
    assert failed.reason.startswith("does not compile: ")
    assert "/s/" not in failed.log
