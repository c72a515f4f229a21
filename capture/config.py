"""What a recording session is told, handed from `kcap record` to every engine process through one file."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

SESSION_VARIABLE = "KCAP_SESSION"


@dataclass(frozen=True)
class Session:
    """A session's configuration; `directory` is where its processes leave their shards."""

    directory: str
    framework: str | None = None
    model: str | None = None
    steps: int | None = None  # close the window for good after this many
    window: str = "auto"  # auto: open after the engine's warm-up; manual: when it is asked for
    warmup_steps: int = 0  # steps that do not count at each opening of the window
    keep_tokens: bool = False
    check_coverage: bool = False  # profile some steps first, and attribute their kernels
    recorder: str = "auto"  # auto, native or python
    layers_model: int | None = None
    engine_arguments: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    client: list[str] = field(default_factory=list)  # that the command is recorded under
    part: str = ""  # ends the name of a shard, where an engine began in a process that was recorded already
    fail: str = ""  # fault injection: "load", or the number of calls after which the recorder fails

    @property
    def file(self) -> Path:
        return Path(self.directory) / "session.json"

    @property
    def stop_file(self) -> Path:
        """Its existence asks every process to close its window."""
        return Path(self.directory) / "stop"

    @property
    def window_file(self) -> Path:
        """Holds "open" or "closed" once the window was asked to (see `kcap.capture.windows`)."""
        return Path(self.directory) / "window"

    @property
    def opens(self) -> bool:
        """Whether the window is open, for a process that starts now."""
        try:
            return self.window_file.read_text() == "open"
        except FileNotFoundError:
            return self.window == "auto"

    @property
    def pause_file(self) -> Path:
        """While it exists, no process records."""
        return Path(self.directory) / "pause"

    @property
    def profile_file(self) -> Path:
        """While it exists, steps run under the profiler and do not count (see `check_coverage`)."""
        return Path(self.directory) / "profile"

    def shard(self) -> Path:
        """This process's shard, without its ending."""
        return Path(self.directory) / f"{socket.gethostname()}-{os.getpid()}{self.part}"

    def write(self) -> None:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.file.write_bytes(orjson.dumps(asdict(self)))
        if self.check_coverage and not self.command:
            self.profile_file.touch(mode=0o600)


def read_session(path: str | os.PathLike[str]) -> Session:
    return Session(**orjson.loads(Path(path).read_bytes()))
