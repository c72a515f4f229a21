"""Clocks: the host's for CPU operators, CUDA graphs and CUDA events for GPU ones."""

from __future__ import annotations
