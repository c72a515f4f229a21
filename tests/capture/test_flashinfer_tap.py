"""FlashInfer's tap, on a stand-in whose decorator behaves like FlashInfer's own: it may leave nothing on a function."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from library_calls import Heard, forget, imported, write_package

from kcap.capture.taps.libraries import flashinfer
from kcap.capture.taps.libraries.library import LibraryTap

X = torch.ones(2)
MARKING = """
import functools
LEVEL = {level}
def attach(wrapped, trace):
    if trace is None:
        return wrapped
    @functools.wraps(wrapped)
    def dump(*args, **kwargs):
        return wrapped(*args, **kwargs)
    dump.fi_trace = trace
    return dump
def flashinfer_api(func=None, *, trace=None):
    if LEVEL == 0:
        return (lambda f: attach(f, trace)) if func is None else attach(func, trace)
    def decorator(f):
        @functools.wraps(f)
        def wrapper(*args, **kwargs):
            return f(*args, **kwargs)
        return attach(wrapper, trace)
    return decorator if func is None else decorator(func)
"""
NORM = """
import functools
from flashinfer.api_logging import flashinfer_api

def same(function):
    return function

@flashinfer_api(trace=lambda: None)
def rmsnorm(input, weight, eps=1e-6, out=None):
    return input

@functools.cache
def helper(x):
    return x

def untold(x):
    return x

exec("@flashinfer_api(trace=lambda: None)\\ndef without_source(x): return x")

@same
@flashinfer_api
@same
def layernorm(input, weight):
    return untold(input)

@flashinfer_api
def allreduce_fusion(input, workspace, pattern):
    return input
"""
DECODE = """
import functools
from flashinfer.api_logging import flashinfer_api

class BatchDecodeWithPagedKVCacheWrapper:
    @flashinfer_api
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto", jit_args=None):
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._workspace = float_workspace_buffer

    @property
    def is_cuda_graph_enabled(self):
        return self._use_cuda_graph

    @flashinfer_api
    def plan(self, indptr, indices, last_page_len, num_qo_heads=8, window_left=-1):
        if num_qo_heads < 0:
            raise ValueError("heads")
        self._backend = "fa2"
        self._module_plan(indptr)

    begin_forward = plan

    def _module_plan(self, indptr):
        return indptr

    @flashinfer_api(trace=lambda: None)
    def run(self, q, paged_kv_cache, *args, out=None, return_lse=False):
        return (q, q) if return_lse else q

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(self, q, paged_kv_cache):
        return self.run(q, paged_kv_cache)

class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    pass

class SegmentGEMMWrapper:
    @flashinfer_api
    def run(self, x):
        return x

class Module:
    def plan(self, x):
        return x

    def run(self, x):
        return x

def fast_decode_plan(self, indptr, indices):
    return None
"""
INIT = """
from flashinfer.norm import rmsnorm, layernorm
from flashinfer.decode import *
"""
LATE = "from flashinfer.api_logging import flashinfer_api\n@flashinfer_api\ndef allreduce(x):\n    return x\n"
FILES = {"__init__.py": INIT, "norm.py": NORM, "decode.py": DECODE, "comm.py": LATE}


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture(params=[0, 1])
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in, at FlashInfer's log levels 0 (the decorator returns the function itself) and 1."""
    write_package(tmp_path, "flashinfer", {**FILES, "api_logging.py": MARKING.format(level=request.param)})
    monkeypatch.syspath_prepend(str(tmp_path))
    yield from imported(sys.modules, "flashinfer")


@pytest.fixture
def installed(heard: Heard, package: None) -> Iterator[LibraryTap]:
    tap = flashinfer.install(heard)
    yield tap
    tap.undo()


@pytest.fixture
def library(installed: LibraryTap) -> Any:
    return importlib.import_module("flashinfer")


@pytest.fixture
def decode(library: Any) -> Callable[..., Any]:
    return lambda **options: library.BatchDecodeWithPagedKVCacheWrapper(X, **options)


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.tensor([i]) for i in range(count)]


def plain(arguments: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name.startswith(prefix)}


def test_the_api_is_recorded_whatever_the_decorator_left_on_it(heard: Heard, library: Any) -> None:
    library.rmsnorm(X, X)
    library.norm.layernorm(X, weight=X)
    library.norm.without_source(X)
    assert heard.calls == [
        ("flashinfer::rmsnorm", {"input": X, "weight": X, "eps": 1e-6, "out": None}),
        ("flashinfer::layernorm", {"input": X, "weight": X}),
        ("flashinfer::without_source", {"x": X}),
    ]
    assert heard.flags == [(True, False)] * 3


def test_what_is_not_the_api_is_left_alone(heard: Heard, library: Any) -> None:
    module = library.decode.Module()
    module.plan(X), module.run(X), library.norm.untold(X), library.norm.helper(2)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(X)
    assert not wrapper.is_cuda_graph_enabled
    assert heard.calls == []


def test_a_run_is_told_of_its_plan_and_of_how_the_object_was_made(heard: Heard, decode: Any) -> None:
    indptr, indices, last = tensors(3)
    wrapper = decode(kv_layout="HND")
    wrapper.plan(indptr, indices, last_page_len=last)
    assert wrapper.run(X, X) is X
    planned = {"indptr": indptr, "indices": indices, "last_page_len": last, "num_qo_heads": 8, "window_left": -1}
    assert heard.calls[0] == ("flashinfer::BatchDecodeWithPagedKVCacheWrapper.plan", planned)
    operator, arguments = heard.calls[1]
    assert operator == "flashinfer::BatchDecodeWithPagedKVCacheWrapper.run"
    assert plain(arguments, "plan.") == {f"plan.{name}": value for name, value in planned.items()}
    assert plain(arguments, "init.") == {
        "init.kv_layout": "HND",
        "init.use_cuda_graph": False,
        "init.backend": "fa2",
    }
    assert list(arguments)[:4] == ["q", "paged_kv_cache", "out", "return_lse"]
    assert heard.flags == [(False, False), (True, False)]


def test_each_objects_run_is_told_of_its_own_latest_plan(heard: Heard, decode: Any) -> None:
    a, b, c, x = tensors(4)
    first, second = decode(), decode()
    first.plan(a, x, x)
    second.plan(b, x, x)
    first.run(X, X), second.run(X, X)
    first.begin_forward(c, x, x)
    first.run(X, X)
    runs = [arguments["plan.indptr"] for name, arguments in heard.calls if name.endswith(".run")]
    assert [id(value) for value in runs] == [id(a), id(b), id(c)]


def test_a_function_that_plans_for_an_object_counts_as_its_plan(heard: Heard, library: Any, decode: Any) -> None:
    indptr, indices, last = tensors(3)
    wrapper = decode()
    wrapper.plan(indptr, indices, last)
    library.fast_decode_plan(wrapper, last, indices)
    wrapper.run(X, X)
    assert heard.calls[1] == ("flashinfer::fast_decode_plan", {"indptr": last, "indices": indices})
    assert heard.flags[1] == (False, False)
    assert plain(heard.calls[2][1], "plan.") == {"plan.indptr": last, "plan.indices": indices}


def test_a_plan_made_before_the_window_opened_is_known_to_its_runs(heard: Heard, decode: Any) -> None:
    wrapper, (indptr, indices, last) = decode(), tensors(3)
    heard.on = False
    wrapper.plan(indptr, indices, last)
    heard.on = True
    wrapper.run(X, X)
    assert heard.operators == ["flashinfer::BatchDecodeWithPagedKVCacheWrapper.run"]
    assert heard.calls[0][1]["plan.indptr"] is indptr


def test_a_plan_that_fails_replaces_nothing(heard: Heard, decode: Any) -> None:
    wrapper, (indptr, indices, last) = decode(), tensors(3)
    wrapper.plan(indptr, indices, last)
    with pytest.raises(ValueError, match="heads"):
        wrapper.plan(last, last, last, num_qo_heads=-1)
    wrapper.run(X, X)
    assert heard.calls[-1][1]["plan.indptr"] is indptr
    assert (heard.left, heard.inside) == (3, 0)


def test_a_plans_tensors_live_no_longer_than_the_next_plan_or_the_object(heard: Heard, decode: Any) -> None:
    heard.on = False
    wrapper, (first, second) = decode(), tensors(2)
    ends = [weakref.ref(first), weakref.ref(second)]
    wrapper.plan(first, first, first)
    wrapper.plan(second, second, second)
    del first, second
    gc.collect()
    assert [end() is None for end in ends] == [True, False]
    del wrapper
    gc.collect()
    assert [end() is None for end in ends] == [True, True]


def test_the_other_ways_to_run_are_recorded_as_run(heard: Heard, library: Any, decode: Any) -> None:
    wrapper = decode()
    assert len(wrapper.run_return_lse(X, X)) == 2
    wrapper.forward(X, X)
    library.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(X).run(X, X, X, out=X)
    assert heard.operators == ["flashinfer::BatchDecodeWithPagedKVCacheWrapper.run"] * 3
    assert [arguments["return_lse"] for _, arguments in heard.calls] == [True, False, False]
    assert heard.calls[2][1]["args"] == [X]


def test_an_object_without_plans_runs(heard: Heard, library: Any) -> None:
    library.SegmentGEMMWrapper().run(X)
    assert heard.calls == [("flashinfer::SegmentGEMMWrapper.run", {"x": X})]


def test_a_submodule_imported_later_is_recorded_after_a_refresh(
    heard: Heard, library: Any, installed: LibraryTap
) -> None:
    comm = importlib.import_module("flashinfer.comm")
    installed.refresh()
    comm.allreduce(X)
    assert heard.operators == ["flashinfer::allreduce"]


def test_installing_twice_tells_each_call_once(heard: Heard, library: Any) -> None:
    second = flashinfer.install(heard)
    library.rmsnorm(X, X)
    second.undo()
    library.rmsnorm(X, X)
    assert (heard.operators, heard.failures) == (["flashinfer::rmsnorm"] * 2, [])


def test_a_flashinfer_imported_first_is_recorded_and_undone(heard: Heard, package: None) -> None:
    library = importlib.import_module("flashinfer")
    before = library.rmsnorm, vars(library.BatchDecodeWithPagedKVCacheWrapper)["run"]
    installed = flashinfer.install(heard)
    library.rmsnorm(X, X)
    installed.undo()
    library.rmsnorm(X, X)
    assert heard.operators == ["flashinfer::rmsnorm"]
    assert (library.rmsnorm, vars(library.BatchDecodeWithPagedKVCacheWrapper)["run"]) == before


@pytest.fixture
def unmarked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A version without the decorator, of this `__init__`."""

    def load(init: str) -> Any:
        def without(text: str) -> str:
            lines = text.splitlines()
            return "\n".join(line for line in lines if "flashinfer_api" not in line)

        files = {"__init__.py": init, "norm.py": without(NORM), "decode.py": without(DECODE)}
        write_package(tmp_path, "flashinfer", files)
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module("flashinfer")

    forget(sys.modules, "flashinfer")
    yield load
    forget(sys.modules, "flashinfer")


def test_without_the_decorator_what_the_package_exports_is_its_api(heard: Heard, unmarked: Any) -> None:
    installed = flashinfer.install(heard)
    library = unmarked(INIT.replace("import *", "import BatchDecodeWithPagedKVCacheWrapper"))
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(X)
    wrapper.plan(X, X, X)
    wrapper.run(X, X)
    library.rmsnorm(X, X)
    library.norm.untold(X)
    library.decode.SegmentGEMMWrapper().run(X)
    installed.undo()
    name = "flashinfer::BatchDecodeWithPagedKVCacheWrapper"
    assert heard.operators == [f"{name}.plan", f"{name}.run", "flashinfer::rmsnorm"]


def test_a_package_without_any_api_says_that_the_tap_is_off(heard: Heard, unmarked: Any) -> None:
    flashinfer.install(heard)
    unmarked("")
    assert heard.failures == [("flashinfer", "KcapError: no function to record in flashinfer")]


@pytest.mark.parametrize("workspace", [SimpleNamespace(world_size=4, rank=1), X])
def test_a_collective_tells_the_group_of_its_workspace(heard: Heard, library: Any, workspace: Any) -> None:
    library.norm.allreduce_fusion(X, workspace, 1)
    ((operator, arguments),) = heard.calls
    assert operator == "flashinfer::allreduce_fusion"
    assert arguments.get("group") == (None if workspace is X else "1 of 4")
