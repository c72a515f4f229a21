"""The arguments of a call by name, in the order of the function's signature, defaults filled in."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Named = tuple[tuple[str, ...], Sequence[Any]]  # the arguments of a call, in order: their names, and as many values

MISSING = inspect.Parameter.empty
OPENING, CLOSING = tuple("[({<"), tuple("])}>")
_SPLIT = re.compile(r"""'[^']*'|"[^"]*"|->|[\[({<,\])}>]""")


def named(arguments: Mapping[str, Any]) -> Named:
    return tuple(arguments), tuple(arguments.values())


@dataclass(frozen=True)
class Binder:
    """Names the arguments of one function's calls; without a known signature they are `arg0`, `arg1` ….

    It checks nothing: a call that does not fit the signature fails in the function itself. Of one without keywords,
    names and defaults are found by how many arguments it has.
    """

    positional: tuple[str, ...] = ()
    rest: str | None = None
    defaults: tuple[tuple[str, Any], ...] = ()
    known: bool = False
    _without_keywords: dict[int, Named] = field(default_factory=dict, compare=False)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
        if kwargs or (self.known and len(args) > len(self.positional)):
            return named(self.by_name(args, kwargs))
        if len(args) not in self._without_keywords:
            names, values = named(self.by_name(args, {}))
            self._without_keywords[len(args)] = names, values[len(args) :]
        names, defaults = self._without_keywords[len(args)]
        return names, (*args, *defaults)

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The same as a dict."""
        if not self.known:
            return {**{f"arg{i}": value for i, value in enumerate(args)}, **kwargs}
        positional_count = min(len(args), len(self.positional))
        arguments = dict(zip(self.positional, args, strict=False))
        if len(args) > positional_count:
            arguments[self.rest or "args"] = list(args[positional_count:])
        for name, default in self.defaults[positional_count:]:
            value = kwargs.get(name, default)
            if value is not MISSING:
                arguments[name] = value
        for name, value in kwargs.items():
            arguments.setdefault(name, value)
        return arguments

    def of_method(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Without the object that comes first."""
        return dict(itertools.islice(self.by_name(args, kwargs).items(), 1, None))

    @property
    def takes_self(self) -> bool:
        """Whether the first parameter is named `self`."""
        return self.positional[:1] == ("self",)


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
