"""What an engine process calls when it starts: hooks the engine if a session is on, does nothing otherwise.

Imports the standard library, orjson and (once an engine runs) torch only.
"""

from __future__ import annotations

import importlib
import os
import sys

_active = False


def activate_vllm() -> None:
    """vLLM's plugin entry point (`vllm.general_plugins`); it runs in every vLLM process, and may run twice."""
    _activate("vllm")


def activate_sglang() -> None:
    """SGLang's plugin entry point (`sglang.srt.plugins`); it runs in the main, scheduler and detokenizer processes."""
    _activate("sglang")


def _activate(engine: str) -> None:
    global _active
    path = os.environ.get("KCAP_SESSION")
    if _active or not path:
        return
    _active = True
    try:
        from kcap.capture.config import read_session
        from kcap.capture.window import Window

        window = Window(read_session(path))
        window.register()
        importlib.import_module(f"kcap.capture.engines.{engine}").hook(window)
    except Exception as error:
        print(f"kcap: not recording this process: {type(error).__name__}: {error}", file=sys.stderr)
