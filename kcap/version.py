"""The version of kcap, apart from the package's face so that any part of it may read it."""

from __future__ import annotations

__version__ = "0.1.0"
