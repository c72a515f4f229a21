"""MLC-LLM, and any program that runs a Relax VM of TVM from a library: `kcap record -o DIR -- mlc_llm serve …`.

With a paged cache, a step begins with `embed` and ends where the next one begins, so that sampling is of the step
before. `kv_state_begin_forward` tells its sequences: a mixed step runs as `batch_prefill`, so the phase is taken
from them and not from the function's name. Where there is no cache, each call of a VM's function is a step of phase
`other`. The window opens when the first VM is made; until then the process is PyTorch's, as of any program that imports
TVM for something else.

Tried with apache-tvm 0.27, on a GPU too: its VM, loader and paged cache, without MLC-LLM's own engine, which no package
index has. In workers of tensor parallelism kernels are hooked as TVM's source has it; that was not tried.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from kcap.capture.engines import Framework, Server, Start
from kcap.capture.hooks.imports import when_imported
from kcap.capture.taps.external import contained as contained_method
from kcap.capture.taps.relax_vm.tap import EXECUTABLE, LOAD, LOAD_WORKER, RelaxVM
from kcap.capture.window.hooking import Around, contained
from kcap.capture.window.window import StepShape, Window

FRAMEWORK = Framework(
    "MLC-LLM",
    "mlc_llm",
    ("mlc-llm", "mlc-llm-nightly", "mlc-llm-cpu", "mlc-llm-nightly-cpu"),
    elsewhere="its project's own wheels: MLC-LLM is not on PyPI",
    servers=(Server(("mlc_llm", "serve"), 8000, "/v1/models"),),
    untried="its own engine not yet run: tried with the Relax VM and the paged cache of apache-tvm 0.27",
)
OFFLINE = None

EMBED = "embed"
CACHE = "vm.builtin.kv_state_"  # how the names of the functions that change its sequences begin


def arguments(start: Start) -> dict[str, Any]:
    """None of its own: only a COMMAND can be recorded."""
    return dict(start.given)


def claim(activate: Callable[[], None]) -> None:
    """Have `activate` called when the first VM is loaded, and the VM loaded as what that hooked has it."""
    import tvm_ffi

    originals = {
        name: original
        for name in (LOAD, LOAD_WORKER)
        if (original := tvm_ffi.get_global_func(name, allow_missing=True)) is not None
    }

    def load(name: str, *args: Any) -> Any:
        if name == LOAD and not (library := originals[name](*args)).implements_function(EXECUTABLE):
            return library
        for loader, original in originals.items():
            tvm_ffi.register_global_func(loader, original, override=True)
        activate()
        return tvm_ffi.get_global_func(name)(*args)

    for name in originals:
        tvm_ffi.register_global_func(name, functools.partial(load, name), override=True)


def hook(window: Window) -> None:
    """Put the tap into TVM when it is imported; tvm-ffi's own would see the VM's functions as kernels."""
    when_imported("tvm", contained(window, lambda module: hook_vm(module, window)))


def hook_vm(module: ModuleType, window: Window) -> None:
    """Hook the VM's steps, the cache's sequences and the kernels."""
    steps = VmSteps(window)
    tap = steps.tap = RelaxVM(window.taps.externals, window.taps.graphs, steps)
    window.taps.add(tap, instead_of="tvm_ffi")
    for name in ("begin_forward", "add_sequence", "remove_sequence", "fork_sequence", "popn"):
        tap.around_global(CACHE + name, functools.partial(_noting, getattr(steps, name)))


class VmSteps:
    """Steps by the sequences of the paged cache; `lengths` holds each one's tokens in it."""

    name = "relax_vm"

    def __init__(self, window: Window) -> None:
        self.on = True
        self.tap: RelaxVM | None = None
        self.lengths: dict[tuple[int, int], int] = {}
        self._window = window
        self._cached = False  # a cache has sequences
        self._depth = 0
        self._ends = False

    def failed(self, tap: str, error: BaseException) -> None:
        self._window.tap_failed(tap, error)
        self._window.discard()

    def loaded(self, cuda: bool) -> None:
        import torch

        if cuda and torch.cuda.is_available():
            torch.cuda.init()  # it shares TVM's context: which GPU it is, its clock, and waiting for it come from torch
        if engine := sys.modules.get("mlc_llm"):
            name, version = FRAMEWORK.name, str(getattr(engine, "__version__", ""))
        else:
            name, version = "TVM", metadata.version("apache-tvm")
        self._window.start(framework=name, framework_version=version)
        if engine:
            self._window.note(f"{FRAMEWORK.name}: {FRAMEWORK.untried}")
        if not self._ends:
            self._ends = True
            atexit.register(self._window.end)  # the last step has no next one; registered later, it runs before `close`

    def entered(self, function: str) -> None:
        self._depth += 1
        if self._depth > 1 or self.tap is None:
            return
        if not self._cached:
            self._window.begin(StepShape("other", [], []))
        elif function == EMBED and not self.tap.holding:
            self._window.end()
            self.tap.hold()

    def left(self, function: str) -> None:
        self._depth -= 1
        if self._depth or self._cached:
            return
        self._window.discard() if function.startswith("create_") else self._window.end()

    def lost(self) -> None:
        self.on = False
        self._window.discard()

    @contained_method
    def begin_forward(self, cache: Any, sequences: Any, lengths: Any, *rest: Any) -> None:
        queries = [int(length) for length in lengths]
        places = [_place(cache, sequence) for sequence in sequences]
        before = [self.lengths.get(place, 0) for place in places]
        after = [old + new for old, new in zip(before, queries, strict=True)]
        self.lengths.update(zip(places, after, strict=True))
        self._window.begin(StepShape(phase(queries, before), queries, after))
        if self.tap is not None:
            self.tap.release()

    @contained_method
    def add_sequence(self, cache: Any, sequence: int) -> None:
        self._cached, self.lengths[_place(cache, sequence)] = True, 0

    @contained_method
    def remove_sequence(self, cache: Any, sequence: int) -> None:
        self.lengths.pop(_place(cache, sequence), None)

    @contained_method
    def fork_sequence(self, cache: Any, parent: int, child: int, *place: int) -> None:
        whole = self.lengths.get(_place(cache, parent), 0)
        self.lengths[_place(cache, child)] = int(place[0]) if place and place[0] >= 0 else whole

    @contained_method
    def popn(self, cache: Any, sequence: int, tokens: int) -> None:
        place = _place(cache, sequence)
        self.lengths[place] = max(0, self.lengths.get(place, 0) - int(tokens))


def _noting(note: Around, original: Around, *args: Any) -> Any:
    note(*args)
    return original(*args)


def _place(cache: Any, sequence: Any) -> tuple[int, int]:
    """A sequence in one of a process's caches: a draft model has another."""
    return int(cache.__chandle__()), int(sequence)


def phase(queries: list[int], before: list[int]) -> str:
    """Of a step, from each sequence's new tokens and those that the cache held before: one token more is decode."""
    decodes = [new == 1 and old > 0 for new, old in zip(queries, before, strict=True)]
    if all(decodes):
        return "decode"
    return "mixed" if any(decodes) else "prefill"
