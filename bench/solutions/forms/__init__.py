"""The forms that a Solution is written in: one file each, its Form registered under the file's suffix."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import PurePath
from typing import Any

import orjson
from pydantic import ValidationError

from kcap.errors import FormatError
from kcap.schemas.definition import Definition
from kcap.schemas.jsonfile import reasons
from kcap.schemas.solution import Solution

FORMS: list[tuple[str, Form]] = []


@dataclass(frozen=True)
class Given:
    """A file's name and text, the Definitions that there are by name, and the one of a file that names none."""

    file: str
    text: str
    definitions: Mapping[str, Definition]
    default: str | None

    @property
    def stem(self) -> str:
        return PurePath(self.file).stem

    @cached_property
    def document(self) -> dict[str, Any]:
        """The JSON object that the text is; {} if it is none."""
        try:
            document = orjson.loads(self.text)
        except ValueError:  # what of it is no JSON, or no Unicode
            return {}
        return document if isinstance(document, dict) else {}

    def word(self, key: str) -> str | None:
        """The string that the JSON object has under `key`, if it has one."""
        return found if isinstance(found := self.document.get(key), str) else None


class Form:
    """Reads files of one form. `name` and `definition` are what is told when `read` refuses: they never raise."""

    def claims(self, given: Given) -> bool:
        """Whether a file of this form's suffix is of this form: of one suffix, exactly one form is."""
        return True

    def name(self, given: Given) -> str:
        return given.stem

    def definition(self, given: Given) -> str | None:
        raise NotImplementedError

    def read(self, given: Given) -> Solution:
        """The Solution; FormatError with the reason if there is none."""
        raise NotImplementedError


def form(suffix: str) -> Callable[[type[Form]], type[Form]]:
    """Register a Form for files that end in `suffix`."""

    def register(kind: type[Form]) -> type[Form]:
        FORMS.append((suffix, kind()))
        return kind

    return register


@cache
def _load() -> None:
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{module}")


def suffixes() -> frozenset[str]:
    """What ends the name of a file that may be a Solution."""
    _load()
    return frozenset(suffix for suffix, _ in FORMS)


def form_of(given: Given) -> Form:
    """The Form of a file whose suffix is among `suffixes`."""
    _load()
    return next(one for suffix, one in FORMS if given.file.endswith(suffix) and one.claims(given))


def known(given: Given, name: str) -> Definition:
    """The Definition `name`; FormatError with names that are near if there is none."""
    if found := given.definitions.get(name):
        return found
    near = difflib.get_close_matches(name, given.definitions, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "kcap show lists those that there are"
    raise FormatError(given.file, f"there is no Definition {name!r}: {hint}")


def made(given: Given, document: Mapping[str, Any]) -> Solution:
    """The Solution that `document` is; FormatError with the first thing that is wrong."""
    try:
        return Solution.model_validate(document)
    except ValidationError as error:
        raise FormatError(given.file, reasons(error, document)[0]) from None
