"""Runs first in every Python process of a recorded COMMAND: `kcap record` puts its folder first on PYTHONPATH.

Has kcap hook PyTorch once the process imports it, then runs the sitecustomize that this one stands before.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys


def _follow(session: str) -> None:
    """Leave a mark beside the session's file, by which `kcap record` tells why it recorded nothing."""
    try:
        from kcap.capture.activate import follow_imports

        follow_imports()
        mark = "followed"
    except ImportError:  # kcap is not in this interpreter's environment
        mark = "lacks-kcap"
    with contextlib.suppress(OSError), open(f"{os.path.dirname(session)}/{os.getpid()}.{mark}", "w") as file:
        file.write(sys.executable)


def _next() -> None:
    """Leave the path, and the module's name, as they were without this file."""
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("KCAP_SESSION"):
    _follow(os.environ["KCAP_SESSION"])
_next()
