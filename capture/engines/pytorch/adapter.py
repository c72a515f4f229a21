"""Any PyTorch program: `kcap record -o DIR -- python my_inference.py`.

A step is a call of an outermost `torch.nn.Module`, to its end or to the exception that ends it: what ran, ran. Where
that is a transformers model, its arguments tell the phase, and inside `generate` a step goes on until the next begins,
so that sampling is of the step before it. The window opens at the first step: what the program calls outside steps from
then on counts as phase `other`. `kcap.step()` marks steps where there is no module. An engine of its own plugin that
the program starts takes the process over.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from types import ModuleType
from typing import Any

from kcap.capture.engines import Framework, Start, adapters
from kcap.capture.engines.pytorch import marks
from kcap.capture.engines.pytorch.shapes import OTHER, Generation, facts, shape
from kcap.capture.hooks.imports import when_imported
from kcap.capture.window.hooking import Around, contained, wrap
from kcap.capture.window.window import StepShape, Window

FRAMEWORK = Framework("PyTorch", "torch", ("torch",), pip=("install torch",))


OFFLINE = None


GENERATE = "transformers.generation.utils"


DYNAMO = "torch._dynamo.eval_frame"


def arguments(start: Start) -> dict[str, Any]:
    """None of its own: a program starts itself."""
    return dict(start.given)


def hook(window: Window) -> None:
    """Hook every module's call, and transformers' `generate` when it is imported."""
    import torch

    steps = Steps(window)
    marks.steps = steps
    atexit.register(steps.say_if_none_ran)
    os.register_at_fork(after_in_child=steps.forget)
    call = _hook_modules(torch, steps)
    when_imported(GENERATE, contained(window, functools.partial(_hook_generate, steps=steps)))
    when_imported(DYNAMO, contained(window, lambda module: _hook_dynamo(module, window, call)))


def _hook_modules(torch: Any, steps: Steps) -> Any:
    """Replace `Module.__call__`, which `steps.leave` undoes. Inside a step, it costs the try of a lock. While one
    thread generates, other threads' modules run in no step.

    Dynamo takes what it finds when it is imported, later, for PyTorch's own `__call__`, and traces past it.
    """
    kind = torch.nn.Module
    original, is_compiling = kind.__call__, torch.compiler.is_compiling

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or ((generation := steps.generation) is not None and generation.thread != get_ident()):
            return original(self, *args, **kwargs)
        if not (lock := steps.lock).acquire(False):
            if (opening := steps.opening) is not None:
                opening.wait(lock)
            return original(self, *args, **kwargs)
        began = None
        try:
            began = steps.begin(self, args, kwargs)
            return original(self, *args, **kwargs)
        finally:
            try:
                steps.end(began)
            finally:
                lock.release()

    def leave() -> None:
        if kind.__call__ is call:
            kind.__call__ = original

    steps.leave = leave
    kind.__call__ = call
    return call


def _hook_generate(module: ModuleType, steps: Steps) -> None:
    wrap(module.GenerationMixin, "generate", steps.generate)


TAP = "steps"


NONE_RAN = "no torch.nn.Module was called: bracket the program's work in `with kcap.step():`"


def _hook_dynamo(dynamo: ModuleType, window: Window, call: Any) -> None:
    skip_frames(dynamo, window, call)
    wrap(dynamo.OptimizedModule, "_initialize", functools.partial(_without_call, call))


def _without_call(call: Any, original: Around, compiled: Any) -> Any:
    """A compiled module is a module, whose call begins the step. What it compiles is PyTorch's own `__call__`, as
    without kcap: torch saves that function with what it compiled ahead of time.
    """
    module: Any = compiled._orig_mod
    kind: Any = type(module)
    if kind.__call__ is not call:
        return original()
    vars(module)["__call__"] = call.__wrapped__.__get__(module)
    try:
        return original()
    finally:
        del vars(module)["__call__"]


def skip_frames(dynamo: Any, window: Window, call: Any) -> None:
    """Have dynamo compile neither the frame of `call` nor those that `undisturbed` makes, but what they call."""
    skip = getattr(dynamo, "skip_code", None)
    if skip is None:
        window.tap_failed(TAP, RuntimeError("this PyTorch may compile kcap's own frames: such calls begin no step"))
        return
    for function in (call, Steps.begin):
        skip(function.__code__)


def undisturbed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing that `method` calls is compiled, should it run inside a compiled function's call."""

    @functools.wraps(method)
    def run(*args: Any) -> Any:
        from torch._C._dynamo.eval_frame import set_eval_frame

        prior = set_eval_frame(None)
        try:
            return method(*args)
        finally:
            set_eval_frame(prior)

    return run


class Opening:
    """The window's opening by the first step. Other threads wait for it with their modules, so that none is missed."""

    PATIENCE, POLL = 30.0, 0.01  # seconds: a thread that waits may hold what the opening needs, as an import's lock

    def __init__(self) -> None:
        self.thread: int | None = None  # that opens it
        self._over = threading.Event()

    def wait(self, lock: threading.Lock) -> None:
        """While another thread holds the `lock` of steps, which it does before it opens the window."""
        deadline = time.monotonic() + self.PATIENCE
        while self.thread != get_ident() and lock.locked() and time.monotonic() < deadline:
            if self._over.wait(self.POLL):
                return

    def __enter__(self) -> None:
        self.thread = get_ident()  # as of `kcap.step()`, too

    def __exit__(self, *_: object) -> None:
        self._over.set()


class Steps:
    """One step at a time: `lock` is held through it, and other threads' modules run in no step."""

    def __init__(self, window: Window) -> None:
        self._window: Window | None = window
        self.lock = threading.Lock()
        self.leave: Callable[[], None] = lambda: None
        self.generation: Generation | None = None
        self.opening: Opening | None = Opening()
        self._opened: Window | None = None

    @undisturbed
    def begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Window | None:
        """The window that the step is in, None where it is not recorded."""
        if self.opening is not None:
            self.opening.thread = get_ident()
        if _capturing():
            return None
        return self._begin(lambda window: self._shape(window, module, args, kwargs), lambda: facts(module))

    def _begin(self, of_step: Callable[[Window], StepShape], of_process: Callable[[], dict[str, Any]]) -> Window | None:
        try:
            window = self._ready(of_process)
            return window if window is not None and window.begin(of_step(window)) else None
        except Exception as error:
            if self._window is not None:
                self._window.failed(error)
            return None

    def _ready(self, of_process: Callable[[], dict[str, Any]]) -> Window | None:
        """The window, opened at the first step."""
        with self.opening or nullcontext():
            self._window = self._window and self._window.current()
            if self._window is not None and self._opened is not self._window:
                self._opened = self._window
                self._open(self._window, of_process)
            self.opening = None
        if self._window is None or not self._window.following:
            self.leave()
            return None
        return self._window

    def _open(self, window: Window, of_process: Callable[[], dict[str, Any]]) -> None:
        if left_out := engine_left_out():
            window.tap_absent(TAP, left_out)
        else:
            window.start(loose=True, **of_process())

    def _shape(self, window: Window, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepShape:
        try:
            return shape(module, args, kwargs, self.generation)
        except Exception as error:
            window.tap_failed(TAP, error)
            return OTHER

    @undisturbed
    def end(self, window: Window | None) -> None:
        """Inside `generate` the step goes on until the next one begins."""
        if window is not None and self.generation is None:
            window.end()

    def generate(self, original: Around, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.generation is not None or self.lock.locked():
            return original(*args, **kwargs)  # a draft model's, or part of a module's step
        self.generation = Generation.of(model, args, kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            self.generation = None
            self.end(self._window)

    @contextmanager
    def mark(self, shape: StepShape) -> Iterator[None]:
        """The program's own mark of a step: part of another that it is inside, and none beside another thread's."""
        lock = self.lock
        if not lock.acquire(False):
            if (opening := self.opening) is not None:
                opening.wait(lock)
            yield
            return
        began = None
        try:
            began = self._begin(lambda window: shape, lambda: facts(None))
            yield
        finally:
            if began is not None:
                began.end()
            lock.release()

    def forget(self) -> None:
        """In a forked child: the step under way is the parent's, and who began it here too gives back its own lock."""
        self.lock, self.generation, self.opening = threading.Lock(), None, Opening()

    def say_if_none_ran(self) -> None:
        """At the process's exit."""
        if self._opened is None and self._window is not None and self._window.current() is self._window:
            self._window.tap_absent(TAP, NONE_RAN)


def _capturing() -> bool:
    """What is called while a CUDA graph is captured is the graph's."""
    import torch

    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def engine_left_out() -> str:
    """Why an engine that this process imported has not taken it over, where a setting keeps kcap out of it."""
    from kcap.capture.engines import excluding_setting

    imported = [engine.FRAMEWORK for engine in adapters().values() if engine.FRAMEWORK.package in sys.modules]
    settings = {framework.name: excluding_setting(framework.name) for framework in imported}
    return "; ".join(f"{setting} leaves kcap out of {name}" for name, setting in settings.items() if setting)
