"""A listener that keeps what it is told, and packages made of text: for the tests of the library taps."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kcap.capture.hooks.binding import Named


class Heard:
    """Keeps each call; `inside` counts the calls that a thread has begun and not ended, `launched` has the
    launch of each call."""

    def __init__(self) -> None:
        self.on = True
        self.records = True
        self.breaks: Exception | None = None
        self.asked = 0
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.flags: list[tuple[bool, bool]] = []
        self.failures: list[tuple[str, str]] = []
        self.launches: list[dict[str, Any]] = []
        self.launched: list[dict[str, Any] | None] = []
        self.libraries: list[bytes] = []
        self._depth = threading.local()
        self.left = 0

    @property
    def listening(self) -> bool:
        self.asked += 1
        return self.on

    def may_record(self, detail: bool) -> bool:
        return self.records and not (detail and self.inside)

    def enter(
        self,
        operator: str,
        arguments: Named,
        work: bool = True,
        detail: bool = False,
        launch: int = -1,
    ) -> bool:
        if self.breaks:
            raise self.breaks
        assert self.may_record(detail)
        self._depth.value = self.inside + 1
        self.calls.append((operator, dict(zip(*arguments, strict=True))))
        self.flags.append((work, detail))
        self.launched.append(self.launches[launch] if launch >= 0 else None)
        return True

    def leave(self) -> None:
        self._depth.value = self.inside - 1
        self.left += 1

    def launch(self, fields: dict[str, Any]) -> int:
        self.launches.append(fields)
        return len(self.launches) - 1

    def library(self, content: bytes) -> str:
        self.libraries.append(content)
        return f"{hashlib.sha256(content).hexdigest()}.so"

    def group(self, size: int, rank: int) -> str:
        return f"{rank} of {size}"

    def failed(self, tap: str, error: BaseException) -> None:
        self.failures.append((tap, f"{type(error).__name__}: {error}"))

    @property
    def inside(self) -> int:
        return getattr(self._depth, "value", 0)

    @property
    def operators(self) -> list[str]:
        return [operator for operator, _ in self.calls]


def write_package(root: Path, name: str, files: dict[str, str]) -> None:
    """A package of these modules under `root`."""
    for path, text in {"__init__.py": "", **files}.items():
        file = root / name.replace(".", "/") / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def forget(modules: dict[str, Any], *names: str) -> None:
    """Take packages out of `sys.modules`."""
    for module in [module for module in modules if module.split(".")[0] in names]:
        del modules[module]


def imported(modules: dict[str, Any], *names: str) -> Iterator[None]:
    """As a fixture's body: packages of these names are not imported, and afterwards those are that were before."""
    before = {name: module for name, module in modules.items() if name.split(".")[0] in names}
    forget(modules, *names)
    yield
    forget(modules, *names)
    modules.update(before)
