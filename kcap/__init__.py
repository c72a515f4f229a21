"""kcap records the operator calls that a running inference engine really makes, and replays them as benchmarks.

>>> import kcap
>>> with kcap.record("out.kcap"):      # any PyTorch program
...     model(inputs)
>>> recording = kcap.load("out.kcap")
>>> recording.calls[0].operator
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kcap.version import __version__

if TYPE_CHECKING:
    from kcap.capture.controller.in_process import record
    from kcap.capture.engines.pytorch.marks import step
    from kcap.schemas.recording.recording import load

__all__ = ["__version__", "load", "record", "step"]


_LAZY = {
    "load": "kcap.schemas.recording.recording",
    "record": "kcap.capture.controller.in_process",
    "step": "kcap.capture.engines.pytorch.marks",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kcap' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
