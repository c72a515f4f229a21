"""What a sandbox is asked to be, what its processes share while they set it up, and which of its features hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class SandboxSpec:
    """Limits of one candidate; sizes in bytes."""

    folder: Path  # its scratch: its working directory, and the only place it may write
    memory: int | None  # private memory over what the process starts with; None where CUDA reserves address space
    disk: int  # what it may write, in the scratch and to shared memory each
    processes: int  # threads and processes at most
    hidden: tuple[Path, ...] = ()  # files and folders whose content it must not see
    cores: tuple[int, ...] = ()  # processors that it may use, and cannot leave; none: all
    keep: tuple[int, ...] = ()  # descriptors that stay open: every other above 2 is closed
    printed: int = 1 << 20  # how much of its stdout and stderr reaches the log
    control: int | None = None  # the keeper's end of a socket by which it runs and stands still (see `keeper`)


@dataclass(frozen=True)
class SandboxSetup:
    """A sandbox being set up. `report` and `ended` are the writing ends of pipes to the process that asked for it."""

    spec: SandboxSpec
    body: Callable[[], None]
    log: int
    features: Features
    report: int
    ended: int
    asker: int  # process that asked
    spaces: tuple[int, int] | None  # user and mount namespace of an earlier sandbox, whose scratch goes on
    inherited: tuple[str, ...]  # features that come with those


@dataclass
class Features:
    """Kept while a sandbox is set up: every feature is tried, and one that this machine refuses is left out."""

    without: frozenset[str] = frozenset()
    held: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, step: Callable[[], object]) -> bool:
        """Whether `step` went well and `name` now holds; an OSError is its refusal, with the reason."""
        if name in self.without:
            self.refused[name] = "switched off"
            return False
        try:
            step()
        except OSError as error:
            self.refused[name] = error.strerror or str(error)
            return False
        self.held.append(name)
        return True

    def holds(self, *names: str) -> bool:
        """Whether any of `names` holds."""
        return any(name in self.held for name in names)
