"""What a run is doing, shown while it lasts: on a terminal one line that is redrawn, elsewhere a line now and then."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kcap.capture.session import GATE_ENDING, REGISTERED_ENDING, Session
from kcap.capture.shards.counts import steps_so_far, window_over
from kcap.system.redact import redact_command

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

EVERY = 30.0  # seconds between two lines of one phase, where there is no terminal
TAIL = 4096  # bytes at the end of a log that its last line is looked for in
SPINNER = 2  # columns
LONGEST = 160  # characters of a line where no terminal says how wide it is
TERMINAL_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
PROCESS = r"\([^()]*pid=\d+\)"
WARNED_SOURCE = re.compile(  # Python shows a warning's line of code below it
    rf"(?m)^((?:{PROCESS} ?)*/.*:\d+: \w*Warning: .*\n)(?:{PROCESS} ?)*  .*$"
)
LOG_HEAD = re.compile(  # as vLLM and SGLang write it: processes, level, time, place
    rf"(?:{PROCESS} *)*(?:(?:DEBUG|INFO|WARNING|ERROR) +[\d:. -]+(?:\[[^\]]*\] *)?|\[\d{{4}}-[^\]]*\] *)?"
)


@dataclass(frozen=True)
class Phase:
    """`name`: of what is being done; `detail`: what changes of it (steps recorded), and makes no other phase."""

    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.detail}" if self.detail else self.name


def engine_phase(session: Session) -> Phase:
    """What the engine does, by what its processes left in the session's directory."""
    directory = Path(session.directory)
    if doing := session.doing:
        return Phase(doing)
    count = steps_so_far(directory)[1]
    steps = f"{count} step{'' if count == 1 else 's'}"
    if window_over(directory):
        return Phase("all is recorded, the engine ends", steps) if session.records else Phase("the engine ends")
    if any(directory.glob(f"*{GATE_ENDING}")):
        if not session.records:
            return Phase("the engine runs")
        return Phase("recording" if session.opens else "the window is closed", steps)
    return Phase("loading the engine" if any_registered(session) else "starting the engine")


def last_phase(session: Session) -> Phase:
    """Once the engine has ended."""
    return Phase("writing the Recording" if session.records else "reading what was measured")


def any_registered(session: Session) -> bool:
    """Whether any process of the engine had kcap in it."""
    return bool(registered_adapters(session))


def registered_adapters(session: Session) -> set[str]:
    """The adapters of the processes that have kcap in them."""
    return {path.read_text() for path in Path(session.directory).glob(f"*{REGISTERED_ENDING}")}


@dataclass
class Progress:
    """Shows the phase, the seconds since the start, and the last line of `log`, unless that is shown already (None).

    `status`: of the terminal that it is drawn on; None where standard error is none.
    """

    log: Path | None
    status: Status | None
    began: float = field(default_factory=time.monotonic)
    phase: Phase = Phase("starting")
    _shown: tuple[str, float] = ("", 0.0)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def show(self, phase: Phase) -> None:
        """Call this several times a second."""
        self.phase = phase
        if self.status is not None:
            self.status.update(self.cut_line(self.status.console.width - SPINNER))
        elif phase.name != self._shown[0] or self.seconds - self._shown[1] > EVERY:
            self._shown = (phase.name, self.seconds)
            click.echo(f"kcap: {self.cut_line(LONGEST)}", err=True)

    def cut_line(self, width: int) -> Text:
        """The seconds, the phase, the engine's last line, in at most `width` columns."""
        from rich.text import Text

        last = last_line(self.log) if self.log else ""
        line = Text(f"{self.seconds:.0f} s, {self.phase}{': ' if last else ''}{last}")
        line.truncate(width, overflow="ellipsis")
        return line


class Silence(Progress):
    """Shows nothing: a program draws on the same terminal."""

    def show(self, phase: Phase) -> None:
        self.phase = phase


@contextmanager
def shown_progress(log: Path | None) -> Iterator[Progress]:
    """A `Progress`; on a terminal its line is gone when it is over."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Progress(log, None)
        return
    with console.status("") as status:
        yield Progress(log, status)


def last_line(log: Path) -> str:
    """What an engine has written last, without terminal codes, secrets and what stands before the message."""
    try:
        with log.open("rb") as file:
            file.seek(max(file.seek(0, 2) - TAIL, 0))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    text = WARNED_SOURCE.sub(r"\1", TERMINAL_CODES.sub("", text))
    lines = (_printable(line) for line in reversed(re.split(r"[\r\n]+", text)))
    return next((redact_command([line])[0] for line in lines if line), "")


def _printable(line: str) -> str:
    return "".join(filter(str.isprintable, LOG_HEAD.sub("", line.expandtabs(1), count=1))).strip()
