"""A whole Program replayed: the kernels of one step or captured graph, in their order."""

from __future__ import annotations
