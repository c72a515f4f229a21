"""The mechanism under the library taps: wrappers, names of arguments, and the places where functions are replaced."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import inspect
import pickle
import sys
import threading
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from library_calls import Heard, imported, write_package

from kcap.capture.hooks.binding import binder
from kcap.capture.hooks.patching import MARK
from kcap.capture.taps.libraries.library import Calls, LibraryTap, wrap

X = torch.ones(2)
SOURCE = """
import functools

def double(x, times=2):
    return x * times

def inner(x):
    return x + 1

again = double
thrice = functools.partial(double, times=3)

class Base:
    def run(self, x, scale=1.0):
        return x * scale
    forward = run
    run_twice = functools.partialmethod(run, scale=2.0)

class Child(Base):
    pass
"""


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`kcaplib` with `ops`, re-exported by the package and imported by `kcapuser`; `late` is imported by nobody."""
    files = {"__init__.py": "from kcaplib.ops import *", "ops.py": SOURCE, "late.py": "def late(x):\n    return x"}
    write_package(tmp_path, "kcaplib", files)
    user = "from kcaplib import double as mine\nfrom kcapuser import bound\nlate = None"
    bound = "import functools, kcaplib\nfixed = functools.partial(kcaplib.double, times=3)"
    write_package(tmp_path, "kcapuser", {"__init__.py": user, "bound.py": bound})
    monkeypatch.syspath_prepend(str(tmp_path))
    yield from imported(sys.modules, "kcaplib", "kcapuser")


def tap(heard: Heard) -> LibraryTap:
    """Records every function and method that a module of `kcaplib` defines."""

    def find(module: types.ModuleType, calls: Calls) -> Iterator[tuple[Any, str, Any]]:
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", "") != module.__name__:
                continue
            if isinstance(value, types.FunctionType):
                yield module, name, wrap(value, f"lib::{value.__name__}", calls)
            elif isinstance(value, type) and "run" in vars(value):
                yield value, "run", wrap(vars(value)["run"], f"lib::{name}.run", calls)

    return LibraryTap("lib", ["kcaplib"], heard, find)


def load(name: str) -> Any:
    return importlib.import_module(name)


# ---- wrappers ----


def test_a_wrapper_tells_every_argument_by_name_with_defaults_filled_in(heard: Heard) -> None:
    def kernel(a: Any, /, b: Any, c: int = 3, *rest: Any, d: str = "nk", **more: Any) -> str:
        return "result"

    assert wrap(kernel, "lib::kernel", Calls("lib", heard))(X, 2, 4, 5, 6, e=7) == "result"
    assert heard.calls == [("lib::kernel", {"a": X, "b": 2, "c": 4, "rest": [5, 6], "d": "nk", "e": 7})]
    assert list(heard.calls[0][1]) == ["a", "b", "c", "rest", "d", "e"]
    assert (heard.left, heard.inside) == (1, 0)


def test_arguments_keep_the_order_of_the_signature_when_given_by_keyword() -> None:
    names = binder(lambda a, b, c=3: None)
    assert names.by_name((1,), {"c": 5, "b": 2}) == {"a": 1, "b": 2, "c": 5}


def test_a_call_without_a_tensor_launches_nothing_and_is_not_recorded(heard: Heard) -> None:
    function = wrap(lambda x: x, "lib::f", Calls("lib", heard))
    assert (function(3), function([(1, X)])) == (3, [(1, X)])
    assert len(heard.calls) == 1


def test_a_listener_that_does_not_listen_is_asked_once_and_told_nothing(heard: Heard) -> None:
    heard.on = False
    assert wrap(lambda x: x, "lib::f", Calls("lib", heard))(X) is X
    assert (heard.asked, heard.calls, heard.left) == (1, [], 0)


def test_no_leave_follows_a_call_that_was_not_recorded(heard: Heard) -> None:
    heard.records = False
    wrap(lambda x: x, "lib::f", Calls("lib", heard))(X)
    assert (heard.calls, heard.left) == ([], 0)


def test_a_call_that_is_not_recorded_is_not_described(heard: Heard) -> None:
    """It is, for the most part, a library's own detail, and costs next to nothing."""

    def describe(*_: Any) -> Any:
        raise AssertionError

    double = wrap(lambda x: x * 2, "lib::double", Calls("lib", heard), describe, detail=True)
    outer = wrap(lambda x: double(x) + 1, "lib::outer", Calls("lib", heard))
    assert outer(X).tolist() == [3, 3]
    heard.records = False
    assert double(X).tolist() == [2, 2]
    assert heard.operators == ["lib::outer"] and not heard.failures


def test_an_exception_of_the_function_passes_through_and_the_call_is_left(heard: Heard) -> None:
    def kernel(x: Any) -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        wrap(kernel, "lib::kernel", Calls("lib", heard))(X)
    assert (heard.operators, heard.inside, heard.failures) == (["lib::kernel"], 0, [])


def test_a_call_that_does_not_fit_the_signature_fails_as_without_kcap(heard: Heard) -> None:
    function = wrap(lambda a: a, "lib::f", Calls("lib", heard))
    with pytest.raises(TypeError, match="positional"):
        function(X, X)
    assert heard.failures == []


@pytest.mark.parametrize("part", ["describe", "enter", "leave"])
def test_a_failure_of_kcap_switches_the_tap_off_and_the_function_runs_once(heard: Heard, part: str) -> None:
    ran = []
    calls = Calls("lib", heard)

    def describe(args: Any, kwargs: Any) -> Any:
        raise RuntimeError("broken")

    def fails() -> None:
        raise RuntimeError("broken")

    if part == "enter":
        heard.breaks = RuntimeError("broken")
    if part == "leave":
        heard.leave = fails  # type: ignore[method-assign]
    function = wrap(lambda x: ran.append(x) or "result", "lib::f", calls, describe if part == "describe" else None)
    assert [function(X), function(X)] == ["result", "result"]
    assert len(ran) == 2
    assert heard.failures == [("lib", "RuntimeError: broken")]
    assert len(heard.calls) == (part == "leave")


def test_generators_and_coroutines_are_left_alone(heard: Heard) -> None:
    def generator(x: Any) -> Iterator[Any]:
        yield x

    async def coroutine(x: Any) -> Any:
        return x

    async def stream(x: Any) -> AsyncIterator[Any]:
        yield x

    for function in (generator, coroutine, stream):
        assert wrap(function, "lib::f", Calls("lib", heard)) is function
    assert asyncio.run(coroutine(X)) is X


def test_a_wrapper_looks_like_its_function(heard: Heard) -> None:
    def kernel(a: int, b: str = "x") -> None:
        """Its help."""

    kernel.fi_trace = "kept"  # type: ignore[attr-defined]
    wrapper = wrap(kernel, "lib::kernel", Calls("lib", heard))
    assert (wrapper.__name__, wrapper.__doc__, wrapper.fi_trace) == ("kernel", "Its help.", "kept")
    assert inspect.signature(wrapper) == inspect.signature(kernel)
    assert wrap(wrapper, "lib::kernel", Calls("lib", heard)) is wrapper


def test_calls_of_threads_do_not_mix(heard: Heard) -> None:
    ready = threading.Barrier(4)

    def kernel(x: Any) -> int:
        ready.wait(20)
        return heard.inside

    function, depths = wrap(kernel, "lib::kernel", Calls("lib", heard)), []
    threads = [threading.Thread(target=lambda: depths.append(function(X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (depths, heard.left, len(heard.calls)) == ([1] * 4, 4, 4)


def test_a_compiler_sees_through_a_wrapper_and_guards_on_nothing_of_it(heard: Heard) -> None:
    function = wrap(lambda x: x * 2, "lib::f", Calls("lib", heard))
    compiled = torch.compile(lambda x: function(x) + 1, backend="eager", fullgraph=True)
    torch._dynamo.reset()
    heard.on = False
    compiled(X)
    heard.on = True
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert compiled(X).tolist() == [3, 3]
    assert heard.calls == []


# ---- names of arguments where there is no signature ----


class Extension:
    """Like a pybind11 function: no signature, its parameters in the first line of the documentation."""

    __signature__ = "none"
    __name__ = "fp8_gemm_nt"

    def __init__(self, documentation: str) -> None:
        self.__doc__ = documentation

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def test_the_parameters_of_a_pybind_function_come_from_its_documentation() -> None:
    names = binder(
        Extension(
            "fp8_gemm_nt(a: tuple[torch.Tensor, torch.Tensor], d: torch.Tensor, c: torch.Tensor | None = None, "
            "recipe: Optional[Tuple[int, int]] = None, compiled_dims: str = 'n,k', dtype: object = torch.int32) -> None"
        )
    )
    assert names.by_name((1,), {"d": 2}) == {"a": 1, "d": 2, "c": None, "recipe": None, "compiled_dims": "n,k"}


@pytest.mark.parametrize("text", ["", "No parameters here", "other(a: int) -> None", "fp8_gemm_nt(*args, **kwargs)"])
def test_without_a_readable_signature_arguments_are_numbered(text: str) -> None:
    assert binder(Extension(text)).by_name((1, 2), {"k": 3}) == {"arg0": 1, "arg1": 2, "k": 3}


def test_a_pybind_function_without_parameters_has_none() -> None:
    assert binder(Extension("fp8_gemm_nt() -> int"))((), {}) == ((), ())


# ---- where functions are replaced ----


@pytest.mark.usefixtures("package")
def test_reexports_aliases_and_partials_are_recorded_too(heard: Heard) -> None:
    tap(heard)
    lib = load("kcaplib")
    assert lib.double is lib.again is lib.ops.double
    lib.again(X)
    lib.thrice(X)
    assert heard.calls == [("lib::double", {"x": X, "times": 2}), ("lib::double", {"x": X, "times": 3})]


@pytest.mark.usefixtures("package")
def test_a_consumer_that_imported_the_function_first_is_recorded(heard: Heard) -> None:
    user = load("kcapuser")
    tap(heard)
    user.mine(X)
    user.bound.fixed(X)
    assert heard.operators == ["lib::double", "lib::double"]


@pytest.mark.usefixtures("package")
def test_methods_are_recorded_through_subclasses_aliases_and_partial_methods(heard: Heard) -> None:
    tap(heard)
    child = load("kcaplib").Child()
    assert child.run(X).tolist() == [1, 1]
    assert child.run_twice(X).tolist() == [2, 2]
    child.forward(X)
    assert [(name, arguments["scale"]) for name, arguments in heard.calls] == [
        ("lib::Base.run", 1.0),
        ("lib::Base.run", 2.0),
        ("lib::Base.run", 1.0),
    ]


@pytest.mark.usefixtures("package")
def test_installing_twice_records_once(heard: Heard) -> None:
    first, second = tap(heard), tap(heard)
    load("kcaplib").double(X)
    first.refresh()
    second.refresh()
    load("kcaplib").double(X)
    assert (len(heard.calls), heard.failures) == (2, [])


@pytest.mark.usefixtures("package")
def test_a_module_imported_later_is_recorded_after_a_refresh(heard: Heard) -> None:
    installed = tap(heard)
    load("kcaplib")
    late = load("kcaplib.late")
    late.late(X)
    assert heard.operators == []
    installed.refresh()
    late.late(X)
    assert heard.operators == ["lib::late"]


@pytest.mark.usefixtures("package")
def test_a_name_that_a_consumer_filled_later_is_recorded_after_a_refresh(heard: Heard) -> None:
    installed, user = tap(heard), load("kcapuser")
    installed.refresh()
    user.late = load("kcaplib.late").late
    installed.refresh()
    user.late(X)
    assert heard.operators == ["lib::late"]


@pytest.mark.usefixtures("package")
def test_an_import_that_failed_halfway_does_not_switch_the_tap_off(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tap(heard)
    monkeypatch.setitem(sys.modules, "kcaplib.part", types.ModuleType("kcaplib.part"))
    installed.refresh()
    load("kcaplib").double(X)
    assert (heard.operators, heard.failures) == (["lib::double"], [])


@pytest.mark.usefixtures("package")
def test_a_refresh_looks_at_no_module_again_when_nothing_was_imported(heard: Heard) -> None:
    looked: list[str] = []

    def find(module: types.ModuleType, calls: Calls) -> Iterator[tuple[Any, str, Any]]:
        looked.append(module.__name__)
        if module.__name__ == "kcaplib.ops":
            yield module, "double", wrap(module.double, "lib::double", calls)

    installed = LibraryTap("lib", ["kcaplib"], heard, find)
    load("kcaplib")
    before = list(looked)
    installed.refresh()
    assert looked == before == ["kcaplib", "kcaplib.ops"]


@pytest.mark.usefixtures("package")
def test_undo_restores_every_place(heard: Heard) -> None:
    lib, user = load("kcaplib"), load("kcapuser")
    places = [(holder, dict(vars(holder))) for holder in (lib, lib.ops, user, lib.Base)]
    installed = tap(heard)
    assert hasattr(user.mine, MARK)
    held = user.mine
    installed.undo()
    held(X)
    for holder, before in places:
        assert {name: id(value) for name, value in vars(holder).items()} == {
            name: id(value) for name, value in before.items()
        }
    assert heard.calls == []


@pytest.mark.usefixtures("package")
def test_a_wrapped_function_can_be_pickled(heard: Heard) -> None:
    tap(heard)
    lib = load("kcaplib")
    assert pickle.loads(pickle.dumps(lib.double)) is lib.double


@pytest.mark.usefixtures("package")
def test_a_package_in_which_nothing_is_found_says_so(heard: Heard) -> None:
    installed = LibraryTap("lib", ["kcaplib"], heard, lambda module, calls: [])
    load("kcaplib")
    assert heard.failures == [("lib", "KcapError: no function to record in kcaplib")]
    installed.refresh()
    assert len(heard.failures) == 1


@pytest.mark.usefixtures("package")
def test_a_finder_that_fails_does_not_break_the_import(heard: Heard) -> None:
    def find(module: types.ModuleType, calls: Calls) -> Any:
        raise RuntimeError("broken")

    LibraryTap("lib", ["kcaplib"], heard, find)
    assert load("kcaplib").double(X).tolist() == [2, 2]
    assert heard.failures == [("lib", "RuntimeError: broken")]


@pytest.mark.usefixtures("package")
def test_a_lazy_module_is_not_loaded_by_the_walk(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    monkeypatch.setitem(sys.modules, "kcaplazy", Lazy("kcaplazy"))
    tap(heard)
    load("kcaplib").double(X)
    assert (heard.operators, heard.failures) == (["lib::double"], [])


@pytest.mark.usefixtures("package")
def test_a_module_without_a_table_of_names_is_left_alone(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cffi's libraries, which `cryptography` puts among the modules."""

    class Library:
        __slots__ = ()

        @property
        def __class__(self) -> Any:  # type: ignore[override]
            return types.ModuleType

    monkeypatch.setitem(sys.modules, "kcap_cffi.lib", Library())  # type: ignore[arg-type]
    tap(heard)
    load("kcaplib").double(X)
    assert (heard.operators, heard.failures) == (["lib::double"], [])


def test_a_function_and_its_wrapper_can_be_collected(heard: Heard) -> None:
    gone = []

    class Big:
        def __del__(self) -> None:
            gone.append(True)

    function = wrap(functools.partial(lambda big, x: x, Big()), "lib::f", Calls("lib", heard))
    function(X)
    heard.calls.clear()
    del function
    gc.collect()
    assert gone == [True]
