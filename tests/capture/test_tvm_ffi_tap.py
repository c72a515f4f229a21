"""The tap of tvm-ffi's modules, on the real library."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from library_calls import Heard

from kcap.capture.taps.libraries import tvm_ffi as tap
from kcap.capture.taps.libraries.library import Calls, wrap

tvm_ffi = pytest.importorskip("tvm_ffi")
SOURCE = """
void add_one(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {
  for (int i = 0; i < x.size(0); ++i)
    static_cast<float*>(y.data_ptr())[i] = static_cast<float*>(x.data_ptr())[i] + 1;
}
int64_t rows(tvm::ffi::TensorView x) { return x.size(0); }
int64_t twice(int64_t value) { return 2 * value; }
int64_t call(tvm::ffi::Function function, tvm::ffi::TensorView x) { return function(x).cast<int64_t>(); }
"""
X = torch.ones(3)


@pytest.fixture(scope="module")
def library() -> Path:
    pytest.importorskip("ninja")
    functions = ["add_one", "rows", "twice", "call"]
    return Path(tvm_ffi.cpp.build_inline("kcap_tap", cpp_sources=SOURCE, functions=functions))


@pytest.fixture(scope="module")
def built(library: Path) -> Any:
    return tvm_ffi.load_module(library)


@pytest.fixture
def module(built: Any) -> Iterator[Any]:
    """The module without the functions that it has handed out."""
    vars(built).clear()
    yield built
    vars(built).clear()


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    installed = tap.install(heard)
    yield heard
    installed.undo()


def test_a_modules_function_is_recorded_by_name_with_numbered_arguments(heard: Heard, module: Any) -> None:
    result = torch.zeros(3)
    module.add_one(X, result)
    assert result.tolist() == [2, 2, 2]
    assert heard.calls == [("tvm::add_one", {"arg0": X, "arg1": result})]
    assert (heard.flags, heard.left) == ([(True, True)], 1)


@pytest.mark.parametrize("way", ["attribute", "item", "get_function"])
def test_every_way_to_a_function_is_recorded(heard: Heard, module: Any, way: str) -> None:
    function = {"attribute": lambda: module.rows, "item": lambda: module["rows"]}.get(
        way, lambda: module.get_function("rows")
    )()
    assert function(X) == 3
    assert heard.operators == ["tvm::rows"]


def test_what_a_module_hands_out_stays_a_function_of_tvm_ffi(heard: Heard, module: Any) -> None:
    assert isinstance(module.rows, tvm_ffi.Function)
    assert module.rows is module.rows
    assert module.rows == module.rows
    assert len({module.rows, module.rows}) == 1
    assert module.call(module.rows, X) == 3
    assert heard.operators == ["tvm::call"]
    assert module.rows.release_gil == tvm_ffi.Function.__new__(tvm_ffi.Function).release_gil
    with pytest.raises(AttributeError, match="no_such"):
        _ = module.no_such


def test_a_setting_without_tensors_is_not_recorded(heard: Heard, module: Any) -> None:
    assert module.twice(4) == 8
    assert heard.calls == []


def test_a_function_inside_another_librarys_call_is_its_detail(heard: Heard, module: Any) -> None:
    outer = wrap(lambda x: module.rows(x), "flashinfer::outer", Calls("flashinfer", heard))
    assert outer(X) == 3
    assert heard.operators == ["flashinfer::outer"]


def test_an_error_of_the_kernel_is_its_own(heard: Heard, module: Any) -> None:
    with pytest.raises(TypeError):
        module.rows(X, X)
    assert (heard.left, heard.failures) == (1, [])


def test_a_closed_listener_is_told_nothing(heard: Heard, module: Any) -> None:
    heard.on = False
    assert module.rows(X) == 3
    assert (heard.calls, heard.asked) == ([], 1)


def test_installing_twice_records_once_and_undo_restores(module: Any) -> None:
    before = vars(tvm_ffi.Module)["get_function"]
    heard = Heard()
    first, second = tap.install(heard), tap.install(heard)
    held = module.rows
    held(X)
    first.undo()
    second.undo()
    held(X)
    assert (heard.operators, heard.failures) == (["tvm::rows"], [])
    assert vars(tvm_ffi.Module)["get_function"] is before
    vars(module).clear()
    assert type(module.rows) is tvm_ffi.Function


def test_a_library_is_kept_once_when_one_of_its_functions_is_first_recorded(heard: Heard, library: Path) -> None:
    module = tvm_ffi.load_module(library)
    assert module.twice(4) == 8
    heard.on = False
    module.rows(X)
    heard.on = True
    wrap(lambda x: module.rows(x), "flashinfer::outer", Calls("flashinfer", heard))(X)
    assert heard.libraries == [], "no call of its own was recorded"
    module.add_one(X, torch.zeros(3))
    module.rows(X)
    module.rows(X)
    assert heard.libraries == [library.read_bytes()]
    kernel = f"{hashlib.sha256(library.read_bytes()).hexdigest()}.so"
    first, second = ({"language": "tvm", "function": name, "kernel": kernel} for name in ("add_one", "rows"))
    assert heard.launched == [None, first, second, second]
    assert heard.launches == [first, second], "each is numbered once"


def test_each_recording_keeps_the_library(library: Path) -> None:
    first, second = Heard(), Heard()
    installed = tap.install(first)
    module = tvm_ffi.load_module(library)
    module.get_function("rows")(X)
    installed.undo()
    installed = tap.install(second)
    module.get_function("rows")(X)
    installed.undo()
    assert first.libraries == second.libraries == [library.read_bytes()]


def test_functions_of_a_module_loaded_before_are_counted_without_a_library(heard: Heard, module: Any) -> None:
    assert module.rows(X) == 3
    assert heard.launched == [{"language": "tvm", "function": "rows", "unread": tap.NO_FILE}]
    assert heard.libraries == []


def append_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(("change", "reason"), [(os.unlink, tap.NOT_KEPT), (append_byte, tap.REPLACED)])
def test_another_file_in_the_librarys_place_is_not_kept(
    heard: Heard, library: Path, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    copy = tmp_path / "copy.so"
    shutil.copy(library, copy)
    module = tvm_ffi.load_module(copy)
    shutil.copy(copy, tmp_path / "other.so")
    (tmp_path / "other.so").replace(copy)  # what is mapped stays as it was
    change(copy)
    assert module.rows(X) == 3
    assert heard.launched == [{"language": "tvm", "function": "rows", "unread": reason}]
    assert (heard.libraries, heard.failures) == ([], [])


def test_a_file_that_is_gone_once_it_is_loaded_is_none(
    heard: Heard, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Path) -> tap.LoadedFile:
        raise FileNotFoundError

    monkeypatch.setattr(tap.LoadedFile, "of", gone)
    assert tvm_ffi.load_module(library).rows(X) == 3
    assert heard.launched == [{"language": "tvm", "function": "rows", "unread": tap.NO_FILE}]
    assert heard.failures == []


def test_functions_of_a_library_that_cannot_be_kept_are_counted(
    heard: Heard, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: bytes) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(heard, "library", fails)
    module = tvm_ffi.load_module(library)
    assert module.rows(X) == module.rows(X) == 3
    assert (len(heard.calls), heard.failures) == (2, [])
    assert heard.launched[0] == {"language": "tvm", "function": "rows", "unread": tap.NOT_KEPT}


def test_a_large_library_is_not_kept(heard: Heard, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "LARGEST", 100)
    assert tvm_ffi.load_module(library).rows(X) == 3
    assert heard.launched == [{"language": "tvm", "function": "rows", "unread": tap.TOO_LARGE}]
    assert heard.libraries == []


def test_without_the_function_that_loads_files_calls_are_recorded(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tvm_ffi._ffi_api, tap.LOAD)
    heard = Heard()
    installed = tap.install(heard)
    assert built.get_function("rows")(X) == 3
    installed.undo()
    assert (heard.operators, heard.failures) == (["tvm::rows"], [])


def test_a_library_whose_functions_cannot_be_taken_over_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm_ffi, "Function", object)
    heard = Heard()
    installed = tap.install(heard)
    assert [name for name, _ in heard.failures] == ["tvm_ffi"]
    assert len(installed) == 0
