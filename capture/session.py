"""What `kcap record` hands to the processes that it starts, in files: the Session, and an offline engine's Workload.

Every process of the engine reads the Session. The Workload is the requests of an offline recording, load by load.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from kcap.errors import CallError, kind_and_text
from kcap.system.redact import redact_arguments, redact_command

SESSION_VARIABLE = "KCAP_SESSION"
RECORDERS = ("auto", "native", "python")


@dataclass(frozen=True)
class Session:
    """A session's configuration; `directory` is where its processes leave their shards."""

    directory: str
    framework: str | None = None
    model: str | None = None
    output: str = ""  # the Recording that will be written
    steps: int | None = None  # close the window for good after this many
    window: str = "auto"  # auto: open after the engine's warm-up; manual: when it is asked for
    warmup_steps: int = 0  # steps that do not count at each opening of the window
    keep_tokens: bool = False
    agent_trace: bool = False  # keep what a server was asked and answered, and the blocks of prompts' tokens
    keep_text: bool = False  # with the texts of messages
    hash_key: str = ""  # of the hashes by which texts and tokens are compared, random
    check_coverage: bool = False  # profile some steps first, and attribute their kernels
    recorder: str = "auto"  # one of RECORDERS
    layers_model: int | None = None
    engine_arguments: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    client: list[str] = field(default_factory=list)  # that the command is recorded under
    extension: dict[str, Any] = field(
        default_factory=dict
    )  # `window`: the class of the processes' Windows; what it needs
    plan: dict[str, Any] = field(default_factory=dict)  # what the Recording says of the Solutions in the engine
    part: str = ""  # ends the name of a shard, where an engine began in a process that was recorded already
    fail: str = ""  # fault injection: "load", or the number of calls after which the recorder fails

    @property
    def records(self) -> bool:
        """Whether there will be a Recording: an engine may run with a plan alone."""
        return self.window != "manual" or not self.extension

    @property
    def file(self) -> Path:
        return Path(self.directory) / "session.json"

    @property
    def stop_file(self) -> Path:
        """Its existence asks every process to close its window."""
        return Path(self.directory) / "stop"

    @property
    def window_file(self) -> Path:
        """Holds "open" or "closed" once the window was asked to (see `kcap.capture.controller.window_control`)."""
        return Path(self.directory) / "window"

    @property
    def opens(self) -> bool:
        """Whether the window is open, for a process that starts now."""
        try:
            return self.window_file.read_text() == "open"
        except FileNotFoundError:
            return self.window == "auto"

    @property
    def doing_file(self) -> Path:
        return Path(self.directory) / "doing"

    @property
    def doing(self) -> str:
        """What the engine is doing before its window opens, as its adapter knows ("loading weights"); "" if unknown."""
        try:
            return self.doing_file.read_text()
        except OSError:
            return ""

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

    def shard_file(self, ending: str) -> Path:
        """The file of this process's shard with this ending."""
        stem = self.shard()
        return stem.with_name(stem.name + ending)  # a host's name may have dots

    def after_another(self) -> Session:
        """With a shard of its own, where another program, which this process ran before, has left one: `exec`."""
        session, number = self, 1
        while session.shard_file(".jsonl").exists():
            session.shard_file(GATE_ENDING).unlink(missing_ok=True)
            number += 1
            session = replace(self, part=f"{PROGRAM}{number}")
        return session

    def note(self, line: dict[str, str]) -> None:
        """Append a line to this process's notes, which are there without a recorder, too; OSError on a full disk."""
        with self.shard_file(".notes").open("ab") as file:
            file.write(orjson.dumps(line) + b"\n")

    def write(self) -> None:
        """CallError where it holds what JSON cannot: bytes that are not UTF-8, a number of more than 64 bits."""
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fields = asdict(self)
        for name in ("output", *fields):  # the directory is named after it
            try:
                orjson.dumps(fields[name])
            except orjson.JSONEncodeError as error:
                words = isinstance(fields[name], list)  # a command's or a client's
                said = redact_command(fields[name]) if words else redact_arguments(fields)[name]
                raise CallError(f"{name.replace('_', ' ')}: {said!a} cannot be recorded: {error}") from None
        self.file.write_bytes(orjson.dumps(fields))
        if self.check_coverage and not self.command:
            self.profile_file.touch(mode=0o600)


def read_session(path: str | os.PathLike[str]) -> Session:
    return Session(**orjson.loads(Path(path).read_bytes()))


def failure_line(tap: str, error: BaseException) -> dict[str, str]:
    """The line of a tap that failed: the Recording is partial."""
    return {"t": "tap", "name": tap, "status": "failed", "detail": kind_and_text(error)}


PROGRAM = "-program"  # in the name of a shard: of the second program and later ones of one process
GATE_ENDING = ".gate"  # of the file by which a process is steered
PROFILE_ENDING = ".trace.json"
REGISTERED_ENDING = ".registered"  # of a file that names the adapter of a process, from its start on


Numbers = int | Sequence[int]


def as_list(numbers: Numbers) -> list[int]:
    return [numbers] if isinstance(numbers, int) else list(numbers)


Prompt = str | list[int]


@dataclass(frozen=True)
class Workload:
    """What to ask of the engine. Without `prompts`: `num_prompts` random ones of `input_len` token ids, seeded.

    Every request generates `output_len` tokens, as in vLLM's own benchmarks (`--random-input-len`, `ignore_eos`).
    Several `num_prompts` are loads that run one after another; `input_len` is one number for all, or one for each.
    """

    num_prompts: Numbers = 8
    input_len: Numbers = 128
    output_len: int = 32
    prompts: list[Prompt] | None = None
    seed: int = 0

    @property
    def sizes(self) -> list[list[int]]:
        """The length of each prompt, load by load."""
        if self.prompts is not None:
            return [[len(prompt) for prompt in self.prompts]]
        counts, lengths = as_list(self.num_prompts), as_list(self.input_len)
        each = lengths * len(counts) if len(lengths) == 1 else lengths
        return [[length] * count for count, length in zip(counts, each, strict=True)]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, generated ones too."""
        return max(map(max, self.sizes)) + self.output_len

    @property
    def largest(self) -> int:
        """Tokens of the largest load, generated ones too."""
        return max(sum(load) + len(load) * self.output_len for load in self.sizes)

    def loads(self, vocabulary: int) -> list[list[Prompt]]:
        """The requests of each load. None begins as one of an earlier load, which a prefix cache may still hold."""
        if self.prompts is not None:
            return [self.prompts]
        draw = random.Random(self.seed)
        loads: list[list[Prompt]] = []
        taken: set[int] = set()
        for load in self.sizes:
            prompts = [_random_prompt(draw, vocabulary, length, taken) for length in load]
            taken |= {prompt[0] for prompt in prompts}
            loads.append([*prompts])
        return loads


def _random_prompt(draw: random.Random, vocabulary: int, length: int, taken: set[int]) -> list[int]:
    """`taken`: token ids that the prompt does not begin with, unless they are all that there are."""
    prompt = [draw.randrange(vocabulary) for _ in range(length)]
    while prompt[0] in taken and len(taken) < vocabulary:
        prompt[0] = draw.randrange(vocabulary)
    return prompt
