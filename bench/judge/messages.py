"""What the command, the judge, the fork server and candidates send one another as JSON. Nothing heavy is imported here.

The driver's binary messages are in `driver.protocol`.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict, final


class JudgeSession(TypedDict):
    """The command to a judge, once. A slot adds the last two. `memory`: bytes; `hidden`: folders."""

    root: NotRequired[str]
    threads: NotRequired[int | None]
    seconds: float
    timeout: float
    build_timeout: NotRequired[float]
    memory: NotRequired[int | None]
    hidden: NotRequired[list[str]]
    device: NotRequired[str]
    scratch: NotRequired[str]


class JudgeRequest(TypedDict):
    """The command to a judge: a Solution on a Workload. `definition`: JSON, whose order of inputs counts."""

    solution: dict[str, Any]
    file: str
    definition: str
    workload: dict[str, Any]


class SandboxLimits(TypedDict):
    """What a candidate's sandbox allows, as `SandboxSpec` has it."""

    folder: str
    memory: int | None
    disk: int
    processes: int
    hidden: list[str]
    cores: list[int]


@final
class StartRequest(TypedDict):
    """The judge to the fork server. `after`: an earlier candidate, whose build goes on."""

    sandbox: SandboxLimits
    after: int | None


@final
class Started(TypedDict):
    """The fork server's answer."""

    pid: int
    confined: list[str]


@final
class EndRequest(TypedDict):
    """The judge to the fork server. `gone`: it ends by itself, `keep`: and its scratch stays."""

    end: int
    gone: bool
    keep: bool


@final
class Ended(TypedDict):
    """The fork server's answer: how the candidate ended."""

    how: str


@final
class Refusal(TypedDict, total=False):
    """The fork server's answer to either: what the machine lacks for it, or another error."""

    lack: str
    error: str


class BuildReport(TypedDict, total=False):
    """A candidate to the judge: it is built, or that `failed`, with the end of the compiler's `log`."""

    built: bool
    failed: str
    log: str
