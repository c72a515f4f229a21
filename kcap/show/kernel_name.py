"""The names of GPU kernels, for people."""

from __future__ import annotations

import re

NAME_WIDTH = 72
_OPERATOR = re.compile(r"operator(->\*?|<=>|<<=?|>>=?|<=?|>=?)")
_ARGUMENTS = re.compile(r"(?<=[\w>…])\((?!anonymous namespace\)).*", re.DOTALL)


def shorten(kernel: str, width: int = NAME_WIDTH) -> str:
    """A kernel's name for a table: C++ without its result, its arguments and what is in `<…>`, where these balance."""
    name = _ARGUMENTS.sub("", _without_templates(kernel)).removeprefix("void ")
    return name if len(name) <= width else name[: width - 1] + "…"


def _without_templates(name: str) -> str:
    out, depth, position = [], 0, 0
    while position < len(name):
        operator = _OPERATOR.match(name, position)
        piece = operator[0] if operator else name[position]
        position += len(piece)
        if piece == "<":
            out += ["<…>"] * (depth == 0)
            depth += 1
        elif piece == ">":
            depth -= 1
            if depth < 0:
                return name
        elif depth == 0:
            out.append(piece)
    return "".join(out) if depth == 0 else name
