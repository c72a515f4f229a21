"""The tap: what a Relax VM calls, and when its functions begin and end.

A VM tells an instrument of each kernel that it calls. Four things pass it by, and are wrapped: the kernels that the
paged cache is given when it is made, those that C++ takes from the library itself (`DIRECT`), what CUDA graphs
launch, and the begin and end of the VM's own functions, which `Steps` needs. C++ finds all of it by global functions of
TVM, so that an engine in C++ is seen like a program in Python.

Where the recorder is the native one, calls go to it from C++ (`native.cpp`). Without it Python is told of them all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kcap.capture.taps.cuda_graphs import CudaGraphs
from kcap.capture.taps.external import Externals, contained
from kcap.capture.taps.relax_vm.library import (
    CACHE_KERNELS,
    CREATE_CACHE,
    FIRST_CACHE_KERNEL,
    FIRST_ROPE,
    ROPE_CONSTANTS,
    Library,
    parameters,
)
from kcap.capture.taps.relax_vm.modules import module_of, native
from kcap.system import native_build

Function = Callable[..., Any]

LOAD = "ffi.Module.load_from_file.so"
LOAD_WORKER = "runtime.disco.load_vm_module"  # in a worker of tensor parallelism
RUN_OR_CAPTURE = "vm.builtin.cuda_graph.run_or_capture"  # with a VM, a function, its arguments, a number, a shape
INVOKE = "vm.builtin.invoke_closure"
EXECUTABLE = "vm_load_executable"
RECORDED = "kcap_recorded"  # what a module that stands for a VM has beside the VM's own functions
OF_EXECUTABLE = ("as_text", "as_python", "stats", "has_function")
OF_VM = (
    *("vm_initialization", "save_function", "invoke_closure", "invoke_stateful", "set_instrument"),
    *("get_output_arity", "get_output", "set_input", "set_input_with_param_module", "get_function_arity"),
    "get_function_param_name",
)
DIRECT = ("apply_logit_bias_inplace", "apply_penalty_inplace", "apply_bitmask_inplace")
HOST = ("vm.builtin.", "shape_func")  # how the names of what launches no kernel begin
NO_SYMBOL = "what the library calls it is not known"

MOST_HELD = 4096  # calls that wait for a step: an engine may embed tokens and never run them
OFF, RECORDING, HOLDING = range(3)  # Listening in native.cpp


@dataclass(frozen=True)
class Kernel:
    """As the recorder numbers it."""

    operator: int
    launch: int  # -1: not known


class Steps(Protocol):
    """What the adapter makes of a VM's functions."""

    def loaded(self, cuda: bool) -> None:
        """A VM was made; `cuda`: its library has kernels for NVIDIA GPUs."""

    def entered(self, function: str) -> None:
        """A function of a VM begins, called from outside."""

    def left(self, function: str) -> None:
        """It has ended, or raised."""

    def lost(self) -> None:
        """The tap failed: the step under way is not whole."""


@dataclass(eq=False)
class Graph:
    """Of a VM's `function`, which it keeps, so that no other has its address."""

    function: Any


class RelaxVM:
    """Replaces TVM's global functions until `uninstall`. A call between `hold` and `release` waits for its step."""

    name = "relax_vm"

    def __init__(self, listener: Externals, graphs: CudaGraphs, steps: Steps) -> None:
        self.on = True
        self._listener, self._graphs, self._steps = listener, graphs, steps
        self._globals: dict[str, Any] = {}
        self._native: Any = None
        self._kernels: dict[tuple[str, str, int], Kernel] = {}
        self._library: Library | None = None  # the one that was loaded last
        self._rope: dict[str, dict[str, float]] = {}  # by library's file: what its cache's kernel has compiled in
        self._held: list[tuple[Kernel, list[Any]]] | None = None
        self._launches: list[Graph] = []  # held like calls
        self._capturing = False  # without C++: one thread
        self._captured: dict[tuple[int, int, tuple[int, ...]], Graph] = {}  # by function, its number, its shape

    def failed(self, tap: str, error: BaseException) -> None:
        self._held, self._launches = None, []
        self._listen(OFF)
        self._listener.failed(tap, error)
        self._steps.lost()

    def install(self) -> None:
        """Needs tvm, imported."""
        import tvm_ffi

        for name, around in ((LOAD, self._load), (LOAD_WORKER, self._load_worker), (CREATE_CACHE, self._create_cache)):
            if tvm_ffi.get_global_func(name, allow_missing=True) is not None:
                self.around_global(name, around)

    def around_global(self, name: str, around: Function) -> None:
        """Have TVM's global function `name` call `around(original, …)`; ValueError where there is none."""
        import tvm_ffi

        original = self._globals[name] = tvm_ffi.get_global_func(name)

        def replacement(*args: Any) -> Any:
            return around(original, *args) if self.on else original(*args)

        tvm_ffi.register_global_func(name, replacement, override=True)

    def uninstall(self) -> None:
        """The wrapped functions that C++ holds stay, and call the originals."""
        import tvm_ffi

        self.on = False
        self._listen(OFF)
        while self._globals:
            name, original = self._globals.popitem()
            tvm_ffi.register_global_func(name, original, override=True)

    def refresh(self) -> None:
        """Nothing comes later: VMs are seen when they are made."""

    def health(self) -> tuple[str, str]:
        if not self.on:
            return "failed", ""
        if self._library is None:
            return "absent", "no Relax VM was made"
        return "ok", f"{len(self._kernels)} kernels"

    @property
    def holding(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        """Keep the calls from now on, with their arguments, until `release`."""
        self._held, self._launches = [], []
        self._listen(HOLDING)

    def release(self) -> None:
        """Tell of the calls kept, as of the step that has begun."""
        held, self._held = self._held, None
        for kernel, values in held or ():
            self._listener.launched(kernel.operator, kernel.launch, values)
        self._listen(RECORDING)
        launches, self._launches = self._launches, []
        for graph in launches:
            self._graphs.launch(graph)

    def _listen(self, to: int) -> None:
        if self._native is not None:
            self._native["listen"](to)

    # Making and wrapping VMs.

    @contained
    def _hook_graphs(self) -> None:
        """TVM's runtime for CUDA may come after TVM, but before the first library that needs it."""
        import tvm_ffi

        if RUN_OR_CAPTURE not in self._globals and tvm_ffi.get_global_func(RUN_OR_CAPTURE, allow_missing=True):
            self.around_global(RUN_OR_CAPTURE, self._run_or_capture)

    def _load(self, original: Function, *args: Any) -> Any:
        self._hook_graphs()
        library = original(*args)
        return self._executable(library, str(args[0])) or library

    @contained
    def _executable(self, module: Any, path: str) -> Any:
        """What stands for a `module` that holds a VM's executable; None for any other."""
        if not module.implements_function(EXECUTABLE):
            return None
        text, make = module["as_text"](), module[EXECUTABLE]

        def load() -> Any:
            vm = make()
            return self.vm(vm, Path(path), text) or vm

        own = {name: module[name] for name in OF_EXECUTABLE if module.implements_function(name)}
        return module_of({EXECUTABLE: load, **own})

    def _load_worker(self, original: Function, *args: Any) -> Any:
        self._hook_graphs()
        vm = original(*args)
        self._instrument(vm, Path(str(args[0])), "")
        return vm

    @contained
    def vm(self, vm: Any, path: Path, text: str) -> Any:
        """A module that stands for `vm`, made from the library at `path` with the bytecode `text`, and tells of its
        calls; None where `vm` is such a module already."""
        if vm.implements_function(RECORDED) or (library := self._instrument(vm, path, text)) is None:
            return None
        functions: dict[str, Function] = {name: vm[name] for name in OF_VM if vm.implements_function(name)}
        for name in library.functions:
            functions[name] = self._entered(name, vm[name])
        for name in DIRECT:
            if vm.implements_function(name, True):
                functions[name] = self._wrapped(name, vm.get_function(name, True))
        module = module_of({RECORDED: lambda: None, **functions})
        for imported in vm.imports:
            module.import_module(imported)
        return module

    @contained
    def _instrument(self, vm: Any, path: Path, text: str) -> Library | None:
        import tvm_ffi

        library = self._library = Library(self._listener.library(path.read_bytes()), text)
        self._steps.loaded(any(code.kind == "cuda" for imported in vm.imports for code in imported.imports))
        if recorder := self._listener.recorder_library:
            try:
                self._native = native(recorder)
            except native_build.Unavailable as error:
                self._listener.note(f"calls of the Relax VM were recorded by Python: {error}")
        if self._native is None:
            vm["set_instrument"](tvm_ffi.convert(functools.partial(self._called, library)))
        else:
            vm["set_instrument"](self._native["instrument"](list(HOST), functools.partial(self._identify, library)))
            self._listen(RECORDING)
        return library

    def _called(self, library: Library, function: Any, name: str, before: bool, result: Any, *args: Any) -> None:
        if before and self._listener.listening and not name.startswith(HOST):
            self._tell(library, str(name), args)

    def _entered(self, name: str, function: Function) -> Function:
        if self._native is not None:
            around: Function = self._native["around"]
            wrapped: Function = around(
                function, functools.partial(self._entering, name), functools.partial(self._leaving, name)
            )
            return wrapped

        def call(*args: Any) -> Any:
            self._entering(name)
            try:
                return function(*args)
            finally:
                self._leaving(name)

        return call

    @contained
    def _entering(self, name: str) -> None:
        self._steps.entered(name)

    @contained
    def _leaving(self, name: str) -> None:
        self._steps.left(name)

    def _create_cache(self, original: Function, *args: Any) -> Any:
        return original(*(self._with_kernels_wrapped(args) or args))

    @contained
    def _with_kernels_wrapped(self, args: tuple[Any, ...]) -> list[Any] | None:
        """A kernel is given as a function, as `[kernel]`, as `["tirx", kernel]` or as `["flashinfer", run, plan]`."""
        import tvm_ffi

        if self._library is None:  # a VM from memory made it
            return None
        constants = zip(ROPE_CONSTANTS, args[FIRST_ROPE:], strict=False)
        self._rope[self._library.file] = {name: float(x) for name, x in constants if isinstance(x, int | float)}
        wrapped = list(args)
        for place, name in zip(range(FIRST_CACHE_KERNEL, len(args)), CACHE_KERNELS, strict=False):
            given = args[place]
            if isinstance(given, tvm_ffi.Function):
                wrapped[place] = self._wrapped(name, given, of_cache=True)
            elif isinstance(given, tvm_ffi.Array) and len(given) > 1 and isinstance(given[0], str):
                wrapped[place] = [given[0], self._wrapped(name, given[1], given[0] == "tirx"), *given[2:]]
            elif isinstance(given, tvm_ffi.Array) and len(given) and isinstance(given[0], tvm_ffi.Function):
                wrapped[place] = [self._wrapped(name, given[0], of_cache=True), *given[1:]]
        return wrapped

    def _run_or_capture(self, original: Function, *args: Any) -> Any:
        run = self._as_graph(*args)
        return original(*args) if run is None else original(args[0], run, *args[2:])

    @contained
    def _as_graph(self, vm: Any, function: Any, args: Any, number: int, *shape: Any) -> Function | None:
        """`function` for TVM to run, at first twice: the second time as it captures it. Later it launches the graph."""
        import tvm_ffi

        invoke, passes = tvm_ffi.get_global_func(INVOKE), itertools.count()
        key = function.__chandle__(), int(number), tuple(map(int, shape[0])) if shape else ()

        def run(*inner: Any) -> Any:
            body = functools.partial(invoke, vm, function, *inner)
            if next(passes) == 0 or not self.on:
                return body()
            graph = Graph(function)
            self._set_capturing(True)
            try:
                result = self._graphs.capture(graph, self._stream(inner) or 0, body)
            finally:
                self._set_capturing(False)
            self._captured[key] = graph
            return result

        graph = self._captured.get(key)
        if graph is not None and self.holding:
            self._launches += [graph] if len(self._launches) < MOST_HELD else []
        elif graph is not None:
            self._graphs.launch(graph)
        return run

    @contained
    def _stream(self, args: tuple[Any, ...]) -> int:
        """The stream on which these arguments are captured; 0 if unknown."""
        import tvm_ffi

        devices = (arg.device for arg in args if isinstance(arg, tvm_ffi.Tensor))
        return next((tvm_ffi.get_raw_stream(device) for device in devices if device.type == "cuda"), 0)

    def _set_capturing(self, to: bool) -> None:
        self._capturing = to
        if self._native is not None:
            self._native["capturing"](to)

    def _wrapped(self, name: str, function: Function, of_cache: bool = False) -> Any:
        import tvm_ffi

        assert self._library is not None
        if self._native is not None:
            ask = functools.partial(self._identify, self._library, of_cache=of_cache)
            return self._native["kernel"](function, name, ask)

        library = self._library

        def kernel(*args: Any) -> Any:
            if self._listener.listening:
                self._tell(library, name, args, of_cache)
            return function(*args)

        return tvm_ffi.convert(kernel)

    @contained
    def _tell(self, library: Library, name: str, args: tuple[Any, ...], of_cache: bool = False) -> None:
        kernel = self._kernel(library, name, len(args), of_cache)
        values = [_value(arg) for arg in args]
        if self._held is not None and not self._capturing:
            self._held += [(kernel, values)] if len(self._held) < MOST_HELD else []
        else:
            self._listener.launched(kernel.operator, kernel.launch, values)

    @contained
    def _identify(self, library: Library, name: str, arguments: int, of_cache: bool = False) -> list[int]:
        """For C++: the numbers of a Kernel."""
        kernel = self._kernel(library, str(name), arguments, of_cache)
        return [kernel.operator, kernel.launch]

    def _kernel(self, library: Library, name: str, arguments: int, of_cache: bool) -> Kernel:
        key = (name, library.file, arguments)
        if key not in self._kernels:
            symbol = library.cache_symbols.get(name) if of_cache else name
            fields: dict[str, Any] = {"function": symbol or name}
            fields |= {"kernel": library.file} if symbol else {"unread": NO_SYMBOL}
            if of_cache and name == "split_rotary":
                fields["constexprs"] = self._rope.get(library.file, {})
            launch = self._listener.launch({"language": "tvm", **fields})
            names = parameters(name if of_cache else "", arguments)
            operator = self._listener.operator(library.operator(name), names)
            self._kernels[key] = Kernel(operator, -1 if launch is None else launch)
        return self._kernels[key]


def _value(arg: Any) -> Any:
    """An argument as the recorder takes it: tensors share their memory, other objects of TVM's go by their type."""
    import torch

    if hasattr(arg, "__dlpack__"):
        try:
            return torch.from_dlpack(arg.__dlpack__())  # a capsule asks no stream to wait, and takes half the time
        except (BufferError, RuntimeError, TypeError, ValueError):  # a type that torch lacks
            pass
    return arg if isinstance(arg, bool | int | float | str | None) else type(arg).__name__
