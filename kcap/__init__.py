"""kcap records the operator calls that a running inference engine really makes, and replays them as benchmarks.

>>> import kcap
>>> with kcap.record("out.kcap"):      # any PyTorch program
...     model(inputs)
>>> recording = kcap.load("out.kcap")
>>> recording.calls[0].operator
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "record", "step"]

if TYPE_CHECKING:
    from kcap.capture.marks import step
    from kcap.capture.session import record
    from kcap.schemas.recording import load

_LAZY = {"load": "kcap.schemas.recording", "record": "kcap.capture.session", "step": "kcap.capture.marks"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kcap' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
