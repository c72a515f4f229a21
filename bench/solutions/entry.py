"""Whether a Solution's sources have the function that it names: looked at, never run."""

from __future__ import annotations

import ast
import symtable
import warnings

from kcap.errors import FormatError
from kcap.schemas.python_source import parse
from kcap.schemas.solution import Solution

IN_PYTHON = frozenset({"python", "triton", "tilelang"})


def check_entry(solution: Solution, place: str) -> None:
    """FormatError if a Python source cannot have the entry point; what a compiler makes is for the build to say."""
    if solution.spec.language not in IN_PYTHON:
        return
    file, name = solution.spec.entry_file, solution.spec.entry_function
    if not file.endswith(".py"):
        raise FormatError(
            place, f"spec.entry_point: {file} is no .py file, but the language is {solution.spec.language}"
        )
    source = next(source.content for source in solution.sources if source.path == file)
    try:
        there = binds(source, name)
    except ValueError as error:
        raise FormatError(place, f"{file}: {error}") from None
    if not there:
        raise FormatError(place, f"spec.entry_point: {file} defines no {name}")


def binds(source: str, name: str) -> bool:
    """Whether the top level of `source` may bind `name`: as a function or otherwise. ValueError if it is no Python."""
    tree = parse(source)
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree)):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            symbol = symtable.symtable(source, "<source>", "exec").lookup(name)
    except KeyError:
        return False
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no valid Python: {error}") from None
    return symbol.is_assigned() or symbol.is_imported()
