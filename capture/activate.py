"""What an engine process calls when it starts: hooks the engine if a session is on, does nothing otherwise.

`activate_NAME` is the plugin entry point for the adapter `NAME` in `engines`; it runs in every process of the engine,
and may run twice. A framework that loads no plugins is hooked when its package is imported. The first engine keeps the
process, whatever is imported later; PyTorch, which engines import, has it until one comes. Imports the standard
library, orjson and (once an engine runs) torch only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcap.capture.window.window import Window

ENTRY = "activate_"
IMPORTED = {  # packages of frameworks that load no plugins, and their adapters
    "torch": "pytorch",
    "tvm": "mlc",
    "tensorrt_llm": "trtllm",
}
WINDOW = "kcap.capture.window.window:Window"
YIELDING = "pytorch"  # the adapter that any other takes the process from
_name: str | None = None  # the adapter that has this process
_window: Window | None = None


def __getattr__(name: str) -> Callable[[], None]:
    if not name.startswith(ENTRY):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(activate, name.removeprefix(ENTRY))


def follow_imports() -> None:
    """Hook the frameworks that load no plugins, once they are imported."""
    from kcap.capture.hooks.imports import when_imported

    for package, name in IMPORTED.items():
        when_imported(package, functools.partial(_imported, name))


def _imported(name: str, module: ModuleType) -> None:
    """An adapter whose package programs import for other things, too, has a `claim` that finds out when it is used."""
    if not os.environ.get("KCAP_SESSION"):
        return
    from kcap.capture import engines

    claim = getattr(engines.find(name), "claim", None)
    activate(name) if claim is None else claim(functools.partial(activate, name))


def _is_over(session: str) -> bool:
    """Whether this is a daemon that outlived the session, or what it started."""
    try:
        os.stat(session)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def activate(name: str) -> None:
    """Hook the engine that the adapter `name` knows."""
    global _name
    session = os.environ.get("KCAP_SESSION")
    if not session or _name == name or _name not in (None, YIELDING):
        return
    if name == YIELDING and _is_over(session):
        return
    _name = name
    try:
        from kcap.capture import engines

        engines.find(name).hook(_own_window(name))
    except Exception as error:
        print(f"kcap: not recording this process: {type(error).__name__}: {error}", file=sys.stderr)
        with contextlib.suppress(Exception):
            from kcap.capture.session import Session, failure_line

            Session(os.path.dirname(session)).note(failure_line("window", error))


def _own_window(name: str) -> Window:
    """The window of this process. What a program recorded before its engine began is a shard of its own."""
    global _window
    begun = _window is not None and _window.following and name != YIELDING
    if _window is None or _window.inherited or begun:
        from kcap.capture.session import read_session

        session = read_session(os.environ["KCAP_SESSION"])
        window_class = pkgutil.resolve_name(session.extension.get("window", WINDOW))
        if begun and _window is not None:
            _window.close()
            session = replace(session, part=f"-{name}")
        elif _window is not None:
            _window.taps.uninstall()
        else:
            session = session.after_another()
        _window = window_class(session)
        _window.current = functools.partial(window_of, name)
        _window.register(name)
    return _window


def window_of(name: str) -> Window | None:
    """The window of this process, for the adapter `name`; None where another has it."""
    return _own_window(name) if _name == name else None
