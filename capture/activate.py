"""What an engine process calls when it starts: hooks the engine if a session is on, does nothing otherwise.

`activate_NAME` is the plugin entry point for the adapter in `engines/NAME.py`; it runs in every process of the engine,
and may run twice. Imports the standard library, orjson and (once an engine runs) torch only.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

ENTRY = "activate_"
_active = False


def __getattr__(name: str) -> Callable[[], None]:
    if not name.startswith(ENTRY):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(activate, name.removeprefix(ENTRY))


def activate(name: str) -> None:
    """Hook the engine that the adapter `name` knows."""
    global _active
    path = os.environ.get("KCAP_SESSION")
    if _active or not path:
        return
    _active = True
    try:
        from kcap.capture import engines
        from kcap.capture.config import read_session
        from kcap.capture.window import Window

        window = Window(read_session(path))
        window.register()
        engines.find(name).hook(window)
    except Exception as error:
        print(f"kcap: not recording this process: {type(error).__name__}: {error}", file=sys.stderr)
