"""A judge in a process of its own, and what it says of the sandboxes that it opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMESPACES = ("user namespace", "mount namespace", "pid namespace", "network namespace", "ipc namespace")


@dataclass
class Report:
    """One sandbox, after its end."""

    held: list[str]
    refused: dict[str, str]
    ended: str
    late: bool  # it ran until it was ended
    log: str
    seconds: float
    pid: int
    processes: list[int]
    before: list[Any] = field(repr=False)
    after: list[Any] = field(repr=False)

    def left_nothing(self) -> bool:
        """No process, and the judge has as many descriptors, children and mounts as before."""
        return not self.processes and self.before == self.after


class SandboxError(Exception):
    """The sandbox could not be opened."""


class Judge:
    """`user` is who judges, None the tests' own; a `light` judge has imported no torch."""

    def __init__(self, folder: Path, user: int | None = None, light: bool = False) -> None:
        self.folder = folder
        self.user = user
        options = [str(user)] if user else ["light"] if light else []
        command = [sys.executable, str(Path(__file__).with_name("sandbox_server.py")), *options]
        environment = {**os.environ, "KCAP_CAGE_TEST": uuid.uuid4().hex}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.pid = self.process.pid

    def sandbox(self, body: str, *arguments: object, without: tuple[str, ...] = (), **more: Any) -> Report:
        """Run `body` for at most `seconds` in a sandbox; `sandbox` replaces limits. The judge must live on."""
        limits = {"folder": str(self.folder), **more.pop("sandbox", {})}
        request = {"body": body, "args": arguments, "sandbox": limits, "without": without, **more}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the judge died: {self.process.wait()}"
        said = json.loads(line)
        if "error" in said:
            raise SandboxError(said["error"])
        return Report(**said)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(20) == 0
