"""A plain Python file that has `run` at its top level, and names its Definition in a comment.

    # definition: rmsnorm_h4096

The older set's code schema is such a file, too: there, `run` always takes the outputs after the inputs.
"""

from __future__ import annotations

import ast
import re

from kcap.bench.solutions import Form, SolutionText, find_definition, form, may_bind, validated_solution
from kcap.errors import FormatError
from kcap.schemas.files.python_source import check_positional, function, parse
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.flashinfer.solution import Solution

NAMED = re.compile(r"^[ \t]*#[ \t]*definition:[ \t]*(\S.*?)[ \t]*$", re.IGNORECASE | re.MULTILINE)
UNNAMED = "names no Definition: write '# definition: NAME' above its first statement, or pass --definition NAME"
AUTHOR = "local"


@form(".py")
class PythonFile(Form):
    def definition(self, solution_text: SolutionText) -> str | None:
        """By the comment, else the default, else by the file's own name."""
        named = NAMED.search(_head(solution_text.text))
        if named:
            return named[1]
        own = solution_text.stem if solution_text.stem in solution_text.definitions else None
        return solution_text.default or own

    def read(self, solution_text: SolutionText) -> Solution:
        try:
            run = _run_of(solution_text.text)
            name = self.definition(solution_text)
            if name is None:
                raise FormatError(solution_text.file, UNNAMED)
            definition = find_definition(solution_text, name)
            writes = run is not None and writes_outputs(run, definition)
        except ValueError as error:
            raise FormatError(solution_text.file, str(error)) from None
        return from_source(solution_text, name, solution_text.file, solution_text.text, destination_passing=writes)


def _run_of(source: str) -> ast.FunctionDef | None:
    """Its function `run`; None where something else has that name, which then returns its outputs. ValueError if
    nothing has.
    """
    try:
        return function(source, "run")
    except ValueError:
        if not may_bind(source, "run"):
            raise
        return None


def _head(source: str) -> str:
    """`source` up to its first statement that is no docstring."""
    try:
        body = getattr(parse(source), "body", [])
    except ValueError:
        return ""
    first = body[1:2] if body and _is_text(body[0]) else body[:1]
    line = min(
        (node.lineno for statement in first for node in (statement, *getattr(statement, "decorator_list", ()))),
        default=None,
    )
    return "\n".join(source.splitlines()[: line - 1 if line else None])


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def writes_outputs(run: ast.FunctionDef, definition: Definition) -> bool:
    """Whether `run` takes the outputs after the inputs, rather than the inputs alone; ValueError if neither."""
    inputs, outputs = len(definition.inputs), len(definition.outputs)
    try:
        check_positional(run, inputs)
    except ValueError as error:
        try:
            check_positional(run, inputs + outputs)
        except ValueError:
            reason = f"{error}: {definition.name} has {inputs} inputs, and {outputs} outputs that may follow them"
            raise ValueError(reason) from None
        return True
    return False


def from_source(
    solution_text: SolutionText, definition: str, path: str, code: str, destination_passing: bool
) -> Solution:
    """The Solution whose one source is `code`, named as the file is."""
    spec = {
        "language": "triton" if _imports_triton(code) else "python",
        "target_hardware": ["any"],
        "entry_point": f"{path}::run",
        "destination_passing_style": destination_passing,
    }
    sources = [{"path": path, "content": code}]
    return validated_solution(
        solution_text,
        {"name": solution_text.stem, "definition": definition, "author": AUTHOR, "spec": spec, "sources": sources},
    )


def _imports_triton(code: str) -> bool:
    for node in ast.walk(parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == "triton" for name in names):
            return True
    return False
