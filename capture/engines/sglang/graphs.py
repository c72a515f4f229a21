"""What SGLang knows of a CUDA graph that it captures: its padded tokens, and whether it is a whole forward."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kcap.capture.hooks.imports import when_imported
from kcap.capture.window.hooking import Around, contained, wrap
from kcap.capture.window.window import Window

PACKAGE = "sglang.srt.model_executor.runner_backend"
BACKENDS = {
    "full_cuda_graph_backend": ("FullCudaGraphBackend", "full"),
    "breakable_cuda_graph_backend": ("BreakableCudaGraphBackend", "piecewise"),
    "tc_piecewise_cuda_graph_backend": ("TcPiecewiseCudaGraphBackend", "piecewise"),
}
TOKENS_OF_A_REQUEST = ("captured_req_width", "num_tokens_per_req", "num_tokens_per_bs")  # of a decode runner, by age


def hook_graphs(window: Window, tell_groups: Callable[[], None]) -> None:
    """Have the tap of CUDA graphs ask SGLang's backends; `tell_groups` runs before each capture."""
    captures = Captures()

    def describe() -> dict[str, Any]:
        tell_groups()
        return captures.known

    window.taps.graphs.describe = describe
    for module, (name, scope) in BACKENDS.items():
        hook = functools.partial(_hook_backend, name=name, scope=scope, captures=captures)
        when_imported(f"{PACKAGE}.{module}", contained(window, hook))


def _hook_backend(module: ModuleType, name: str, scope: str, captures: Captures) -> None:
    def made(original: Around, backend: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        captures.belongs(backend, args[0] if args else kwargs.get("cuda_graph_runner"))

    def capture(original: Around, backend: Any, *args: Any, **kwargs: Any) -> Any:
        key = args[0] if args else kwargs.get("shape_key")
        with captures.of(key, backend, scope):
            return original(*args, **kwargs)

    kind = getattr(module, name)
    if "__init__" in vars(kind):
        wrap(kind, "__init__", made)
    wrap(kind, "capture_one", capture)


class Captures:
    """The capture that each thread is in, and the runner that each backend captures for."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._runners: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    @property
    def known(self) -> dict[str, Any]:
        """`size` (tokens) and `scope` of the graph that is being captured, as far as known."""
        return getattr(self._local, "known", {})

    def belongs(self, backend: Any, runner: Any) -> None:
        """`backend` was made for `runner`, which not every release lets it keep."""
        if runner is not None:
            self._runners[backend] = weakref.ref(runner)

    def of(self, key: Any, backend: Any, scope: str) -> _Capture:
        """A context in which `backend` captures the graphs of `key`."""
        size, runner = getattr(key, "size", key), self._runners.get(backend, lambda: None)()
        tokens = {"size": size * _tokens(runner)} if isinstance(size, int) else {}
        return _Capture(self._local, {**tokens, "scope": scope})


class _Capture:
    def __init__(self, local: threading.local, known: dict[str, Any]) -> None:
        self._local, self._known = local, known

    def __enter__(self) -> None:
        self._local.known = self._known

    def __exit__(self, *exception: object) -> None:
        self._local.known = {}


def _tokens(runner: Any) -> int:
    """A decode runner counts requests, a prefill runner tokens."""
    counts = (getattr(runner, name, None) for name in TOKENS_OF_A_REQUEST)
    return next((tokens for tokens in counts if isinstance(tokens, int)), 1)
