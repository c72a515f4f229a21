"""TVM's Relax VM: each kernel of a model library is a call, `tvm::NAME.ID`, where ID comes from the library.

A VM tells an instrument of each kernel that it calls. Three things pass it by, and are wrapped: the kernels that the
paged cache is given when it is made, those that C++ takes from the library itself (`DIRECT`), and the begin and end of
the VM's own functions, which `Steps` needs. C++ finds all of it by global functions of TVM, so that an engine in C++ is
seen like a program in Python.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kcap.capture.taps.external import Externals, contained
from kcap.system import native_build

Function = Callable[..., Any]

LOAD = "ffi.Module.load_from_file.so"
LOAD_WORKER = "runtime.disco.load_vm_module"  # in a worker of tensor parallelism
CREATE_CACHE = "vm.builtin.paged_attention_kv_cache_create"
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

PAGES = ("page_table_indptr", "page_table_values", "length_info", "k_rope_pos_offset", "q_rope_position")
ROPE = ("rotary_mode", "rope_scale", "rope_theta", "sm_scale")
PREFILL = ("q", "q_indptr", "pages", *PAGES, "output", "lse", "causal", *ROPE)
DECODE = ("q", "pages", *PAGES, "output", "lse", *ROPE)
TREE_MASK = ("tree_mn_indptr", "tree_mask")
# The cache's kernels and their parameters, as `tvm.relax.frontend.nn.llm.kv_cache` (0.27) builds them; empty: arg0 ….
CACHE_KERNELS: Mapping[str, tuple[str, ...]] = {
    "transpose_append_mha": ("pages", "k", "v", "position_map"),
    "transpose_append_mla": ("pages", "kv", "position_map"),
    "attention_prefill_ragged": (
        *("q", "q_indptr", "k", "v", "kv_indptr", "q_rope_position", "k_rope_pos_offset", "output", "lse", "causal"),
        *ROPE,
    ),
    "attention_prefill": PREFILL,
    "attention_decode": DECODE,
    "attention_prefill_sliding_window": PREFILL,
    "attention_decode_sliding_window": DECODE,
    "attention_prefill_with_tree_mask_paged_kv": (),
    "attention_prefill_with_tree_mask": (),
    "mla_prefill": (),
    "merge_inplace": ("v", "s", "v_other", "s_other"),
    "split_rotary": ("qkv", "position_map", "q", "k", "v", "apply_rope"),
    "copy_single_page": (),
    "debug_get_kv": (),
    "compact_copy": (),
}
FIRST_CACHE_KERNEL = 13  # their place among the arguments of CREATE_CACHE


class Steps(Protocol):
    """What the adapter makes of a VM's functions."""

    def loaded(self) -> None:
        """A VM was made."""

    def entered(self, function: str) -> None:
        """A function of a VM begins, called from outside."""

    def left(self, function: str) -> None:
        """It has ended, or raised."""

    def lost(self) -> None:
        """The tap failed: the step under way is not whole."""


class RelaxVM:
    """Replaces TVM's global functions until `uninstall`. A call between `hold` and `release` waits for its step."""

    name = "relax_vm"

    def __init__(self, listener: Externals, steps: Steps) -> None:
        self.on = True
        self._listener, self._steps = listener, steps
        self._globals: dict[str, Any] = {}
        self._kept: list[Any] = []  # what C++ has the address of
        self._numbers = itertools.count()
        self._operators: dict[tuple[str, str, int], int] = {}
        self._library = ""  # digits of the library that was loaded last
        self._held: list[tuple[int, list[Any]]] | None = None

    def failed(self, tap: str, error: BaseException) -> None:
        self._held = None
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
        while self._globals:
            name, original = self._globals.popitem()
            tvm_ffi.register_global_func(name, original, override=True)

    def refresh(self) -> None:
        """Nothing comes later: VMs are seen when they are made."""

    def health(self) -> tuple[str, str]:
        if not self.on:
            return "failed", ""
        if not self._library:
            return "absent", "no Relax VM was made"
        return "ok", f"{len(self._operators)} kernels"

    @property
    def holding(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        """Keep the calls from now on, with their arguments, until `release`."""
        self._held = []

    def release(self) -> None:
        """Tell of the calls kept, as of the step that has begun."""
        held, self._held = self._held, None
        for operator, values in held or ():
            self._listener.launched(operator, -1, values)

    # Making and wrapping VMs.

    def _load(self, original: Function, *args: Any) -> Any:
        library = original(*args)
        return self._executable(library, str(args[0])) or library

    @contained
    def _executable(self, library: Any, path: str) -> Any:
        """What stands for a `library` that holds a VM's executable; None for any other."""
        if not library.implements_function(EXECUTABLE):
            return None
        digits = _digits(path)
        make, text = library[EXECUTABLE], library["as_text"]()

        def load() -> Any:
            vm = make()
            return self.vm(vm, digits, text) or vm

        own = {name: library[name] for name in OF_EXECUTABLE if library.implements_function(name)}
        return self._module({EXECUTABLE: load, **own})

    def _load_worker(self, original: Function, *args: Any) -> Any:
        vm = original(*args)
        self._instrument(vm, _digits(str(args[0])))
        return vm

    @contained
    def vm(self, vm: Any, digits: str, text: str) -> Any:
        """A module that stands for `vm` and tells of its calls; None where `vm` is such a module already."""
        if vm.implements_function(RECORDED):
            return None
        self._instrument(vm, digits)
        functions: dict[str, Function] = {name: vm[name] for name in OF_VM if vm.implements_function(name)}
        for name in re.findall(r"^@(\S+?):", text, re.MULTILINE):
            functions[name] = self._entered(name, vm[name])
        for name in DIRECT:
            if vm.implements_function(name, True):
                functions[name] = self._kernel(name, vm.get_function(name, True), ())
        module = self._module({RECORDED: lambda: None, **functions})
        for imported in vm.imports:
            module.import_module(imported)
        return module

    @contained
    def _instrument(self, vm: Any, digits: str) -> None:
        self._library = digits
        import tvm_ffi

        called = tvm_ffi.convert(functools.partial(self._called, digits))
        self._kept.append(called)
        set_instrument = vm["set_instrument"]
        try:
            failed = _filter().kcap_instrument(
                ctypes.c_void_p(set_instrument.__chandle__()), ctypes.c_void_p(called.__chandle__())
            )
        except native_build.Unavailable:
            failed = 1
        if failed:
            set_instrument(called)
        self._steps.loaded()

    def _called(self, digits: str, function: Any, name: str, before: bool, result: Any, *args: Any) -> None:
        if before and self._listener.listening and not name.startswith(HOST):
            self._tell(digits, str(name), args, ())

    def _entered(self, name: str, function: Function) -> Function:
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
        return original(*(self._wrapped(args) or args))

    @contained
    def _wrapped(self, args: tuple[Any, ...]) -> list[Any]:
        """A kernel is given as a function, as `["tirx", kernel]` or as `["flashinfer", run, plan]`."""
        import tvm_ffi

        wrapped = list(args)
        places = range(FIRST_CACHE_KERNEL, len(args))
        for place, (name, parameters) in zip(places, CACHE_KERNELS.items(), strict=False):
            given = args[place]
            if isinstance(given, tvm_ffi.Function):
                wrapped[place] = self._kernel(name, given, parameters)
            elif isinstance(given, tvm_ffi.Array) and len(given) > 1 and isinstance(given[0], str):
                named = parameters if given[0] == "tirx" else ()
                wrapped[place] = [given[0], self._kernel(name, given[1], named), *given[2:]]
        return wrapped

    def _kernel(self, name: str, function: Function, parameters: tuple[str, ...]) -> Any:
        import tvm_ffi

        digits = self._library

        def kernel(*args: Any) -> Any:
            if self._listener.listening:
                self._tell(digits, name, args, parameters)
            return function(*args)

        return tvm_ffi.convert(kernel)

    @contained
    def _tell(self, digits: str, name: str, args: tuple[Any, ...], parameters: tuple[str, ...]) -> None:
        key = (name, digits, len(args))
        operator = self._operators.get(key)
        if operator is None:
            names = parameters if len(parameters) == len(args) else [f"arg{i}" for i in range(len(args))]
            label = f"tvm::{re.sub(r'[^A-Za-z0-9_]', '_', name)}.{digits}"
            operator = self._operators[key] = self._listener.operator(label, names)
        values = [_value(arg) for arg in args]
        if self._held is not None:
            self._held.append((operator, values))
        else:
            self._listener.launched(operator, -1, values)

    def _module(self, functions: Mapping[str, Function]) -> Any:
        """A module of TVM's with these functions: they are symbols of a system library of their own."""
        import tvm_ffi

        prefix = f"kcap{os.getpid()}_{next(self._numbers)}_"
        register = tvm_ffi.LIB.TVMFFIEnvModRegisterSystemLibSymbol
        for name, function in functions.items():
            converted = tvm_ffi.convert(function)
            call = _symbol(converted.__chandle__())
            self._kept += [converted, call]
            register(f"__tvm_ffi_{prefix}{name}".encode(), ctypes.cast(call, ctypes.c_void_p))
        return tvm_ffi.system_lib(prefix)


def _digits(library: str) -> str:
    """By which the kernels of a library's file are told from another's."""
    return hashlib.sha256(Path(library).read_bytes()).hexdigest()[:8]


@functools.cache
def _filter() -> ctypes.CDLL:
    """What keeps from Python that nothing is launched; native_build.Unavailable where it cannot be built."""
    from tvm_ffi import libinfo

    folders = (libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    source = Path(__file__).with_suffix(".cpp")
    library = native_build.build([source], [*(f"-I{folder}" for folder in folders), libinfo.find_libtvm_ffi()])
    return ctypes.CDLL(str(library))


class Word(ctypes.Structure):
    """`TVMFFIAny` of tvm-ffi's C interface: 16 bytes."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("word", ctypes.c_int64))


SYMBOL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(Word))


def _symbol(handle: int) -> Any:
    """A C function that calls the tvm-ffi Function of `handle`."""
    import tvm_ffi

    call = tvm_ffi.LIB.TVMFFIFunctionCall

    def symbol(_: Any, args: Any, count: int, result: Any) -> int:
        return int(call(ctypes.c_void_p(handle), ctypes.c_void_p(args), ctypes.c_int32(count), result))

    return SYMBOL(symbol)


def _value(arg: Any) -> Any:
    """An argument as the recorder takes it: tensors share their memory, other objects of TVM's go by their type."""
    import torch

    if hasattr(arg, "__dlpack__"):
        try:
            return torch.from_dlpack(arg.__dlpack__())  # a capsule asks no stream to wait, and takes half the time
        except (BufferError, RuntimeError, TypeError, ValueError):  # a type that torch lacks
            pass
    return arg if isinstance(arg, bool | int | float | str | None) else type(arg).__name__
