"""How the lines of the scripts' tables begin, by which check.py reads them."""

from __future__ import annotations


def mark(passed: bool) -> str:
    return "ok " if passed else "BAD"
