"""What `kcap bench` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcap.bench import sandbox
from kcap.bench.judge.messages import JudgeSession
from kcap.replay.jobs import Choice

GIB = 1 << 30
SPREADS = 3  # of inputs, that a reference is tried on at most
SLACK_S = 60.0  # what the judge itself may take beside the processes that it starts


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """`seconds`: sampling of one Solution on one Workload. `timeout`, `build_timeout`: seconds at most, of a Solution
    on one Workload and of its build. `memory`: GiB of a Solution's process."""

    device: str | None = None
    seconds: float = 0.1
    timeout: float = 60.0
    build_timeout: float = 300.0
    memory: float | None = None
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class Options(JudgeOptions):
    """`workloads`: of a Definition at most."""

    path: Path
    solutions: Path
    output: Path
    definition: str | None = None
    globs: tuple[str, ...] = ()
    workloads: int | None = None
    executor: str = "local"
    measurements: Path | None = None
    trust: bool = False
    resume: bool = False
    force: bool = False

    @property
    def choice(self) -> Choice:
        return Choice(self.globs)

    @property
    def limit_s(self) -> float:
        """Seconds after which a judge that has not answered is taken for dead: it bounds each of its waits itself.

        A Solution's process is started twice at most, its reference's, which has three times as long, four times. Each
        has a first run, which may take as long as a build; a reference's on each spread of inputs that is tried.
        """
        builds, first_runs = 2 + 4, 2 + 4 * SPREADS
        return (builds + first_runs) * self.build_timeout + (2 + 4 * 3 * SPREADS) * self.timeout + SLACK_S

    def session(self, root: Path) -> JudgeSession:
        """What a judge worker is told first, but for its device and its scratch folder."""
        return {
            "root": str(root),
            "threads": self.threads,
            "seconds": self.seconds,
            "timeout": self.timeout,
            "build_timeout": self.build_timeout,
            "memory": None if self.memory is None else int(self.memory * GIB),
            "hidden": [str(folder) for folder in self._hidden(root)],
        }

    def _hidden(self, root: Path) -> list[Path]:
        """Folders that no Solution may see into. Not all of a dataset: a Python environment may lie beside it."""
        inside = [root / name for name in ("definitions", "workloads", "blob", "solutions", "traces")]
        recording = [self.path.resolve()] if (self.path / "recording.json").exists() else []
        solutions = [self.solutions.resolve()] if sandbox.may_hide(self.solutions) else []
        return [folder for folder in (self.output.resolve(), *solutions, *recording, *inside) if folder.is_dir()]

    def as_fields(self) -> dict[str, Any]:
        """What bench.json keeps."""
        names = ("definition", "globs", "workloads", "seconds", "timeout", "build_timeout", "memory", "executor")
        return {"solutions": str(self.solutions), **{name: getattr(self, name) for name in names}}
