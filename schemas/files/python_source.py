"""Python text in a file is looked at, never run: `ast.parse` under bounds, and every failure a ValueError."""

from __future__ import annotations

import ast
import warnings
from typing import Literal

MAX_SOURCE = 1 << 19  # characters


def parse(source: str, mode: Literal["exec", "eval"] = "exec") -> ast.AST:
    """The syntax tree of `source`; ValueError says where it is no Python, or that it is too large or nested."""
    if len(source) > MAX_SOURCE:
        raise ValueError(f"longer than {MAX_SOURCE} characters")
    if "\0" in source:
        raise ValueError("no valid Python: it has a zero byte")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source, mode=mode)
    except SyntaxError as error:
        raise ValueError(f"no valid Python: {error.msg} (line {error.lineno})") from None
    except (RecursionError, MemoryError):
        raise ValueError("no valid Python: nested too deeply") from None


def function(source: str, name: str) -> ast.FunctionDef:
    """The plain function that `source` defines at its top level as `name`, the last if several; ValueError if none."""
    body = getattr(parse(source), "body", [])
    for node in reversed(body):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"defines no plain function {name} at its top level")


def check_positional(node: ast.FunctionDef, count: int) -> None:
    """ValueError unless `node` can be called with exactly `count` positional arguments."""
    arguments = node.args
    most = len(arguments.posonlyargs) + len(arguments.args)
    least = most - len(arguments.defaults)
    if any(default is None for default in arguments.kw_defaults):
        raise ValueError(f"{node.name} has a keyword-only parameter without a default, but is called by position")
    if count < least or (count > most and arguments.vararg is None):
        raise ValueError(f"{node.name} takes {least if count < least else most} parameters, but is given {count}")


def parameters(node: ast.FunctionDef) -> list[str]:
    """The names of the positional parameters of `node`, in order."""
    return [argument.arg for argument in node.args.posonlyargs + node.args.args]
