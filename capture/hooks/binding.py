"""The arguments of a call by name, in the order of the function's signature, defaults filled in."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Pairs = list[tuple[str, Any]]

MISSING = inspect.Parameter.empty
OPENING, CLOSING = tuple("[({<"), tuple("])}>")
_SPLIT = re.compile(r"""'[^']*'|"[^"]*"|->|[\[({<,\])}>]""")


@dataclass(frozen=True)
class Binder:
    """Names the arguments of one function's calls; without a known signature they are `arg0`, `arg1` ….

    It checks nothing: a call that does not fit the signature fails in the function itself.
    """

    positional: tuple[str, ...] = ()
    rest: str | None = None
    defaults: tuple[tuple[str, Any], ...] = ()
    known: bool = False

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pairs:
        if not self.known:
            return [*zip(_numbered(len(args)), args, strict=True), *kwargs.items()]
        positional_count = min(len(args), len(self.positional))
        pairs: Pairs = list(zip(self.positional, args, strict=False))
        if len(args) > positional_count:
            pairs.append((self.rest or "args", list(args[positional_count:])))
        left = dict(kwargs)
        for name, default in self.defaults[positional_count:]:
            value = left.pop(name, default)
            if value is not MISSING:
                pairs.append((name, value))
        return pairs + list(left.items()) if left else pairs

    @property
    def takes_self(self) -> bool:
        """Whether the first parameter is named `self`."""
        return self.positional[:1] == ("self",)


@functools.cache
def _numbered(count: int) -> list[str]:
    return [f"arg{i}" for i in range(count)]


def binder(function: Callable[..., Any]) -> Binder:
    """The Binder of a Python function, or of a pybind11 one by the first line of its documentation."""
    try:
        return _from_parameters(list(inspect.signature(function).parameters.values()))
    except (TypeError, ValueError):
        return _from_documentation(function)


def _from_parameters(parameters: list[inspect.Parameter]) -> Binder:
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Binder(
        positional=tuple(p.name for p in named if p.kind != p.KEYWORD_ONLY),
        rest=next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None),
        defaults=tuple((p.name, p.default) for p in named),
        known=True,
    )


def _from_documentation(function: Callable[..., Any]) -> Binder:
    """`name(a: torch.Tensor, recipe: tuple[int, int] | None = None) -> None`, as pybind11 writes it."""
    first = (getattr(function, "__doc__", None) or "").strip().partition("\n")[0]
    name, _, text = first.partition("(")
    if name != getattr(function, "__name__", ""):
        return Binder()
    parameters = [_parameter(part) for part in _parts(text) if part not in ("*", "/")]
    if not all(name.isidentifier() for name, _ in parameters):
        return Binder()
    return Binder(tuple(name for name, _ in parameters), None, tuple(parameters), True)


def _parts(text: str) -> Iterator[str]:
    """What stands between the commas, up to the parenthesis that closes."""
    depth = start = 0
    for match in _SPLIT.finditer(text):
        mark, at_end = match.group(), match.group() == ")" and not depth
        if at_end or (mark == "," and not depth):
            if text[start : match.start()].strip():
                yield text[start : match.start()].strip()
            start = match.end()
        if at_end:
            return
        depth += (mark in OPENING) - (mark in CLOSING)


def _parameter(part: str) -> tuple[str, Any]:
    declared, _, default = part.partition("=")
    try:
        value = ast.literal_eval(default.strip()) if default else MISSING
    except (ValueError, SyntaxError):
        value = MISSING  # such as `torch.float32`: left out unless given
    return declared.partition(":")[0].strip(), value
