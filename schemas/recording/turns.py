"""The turns of a Recording: what a server was asked and answered, of `kcap record --agent-trace`, one a line.

    turns.jsonl   in the order in which they were sent; texts only where they were asked for (--keep-text)

A turn names the one that it goes on with (`parent`), and lists the messages that this had not: the whole conversation
is that of the parent, its answer, and these.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, FiniteFloat

from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.recording.records import Record, Step

FILE = "turns.jsonl"
Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Key = TypeVar("Key", bound=Hashable)
Seconds = Annotated[FiniteFloat, Field(ge=0)]


class TurnPart(Record):
    """Part of a Turn's line."""

    def line(self) -> bytes:
        raise TypeError(f"a {type(self).__name__} is part of a Turn's line")


class TurnMessage(TurnPart):
    """A message: who wrote it, its characters, the names of the tools that it calls, its other parts by their type.

    `role` is `prompt` for the prompt of a text completion. `content` and what follows are there with --keep-text only,
    as OpenAI's API has them.
    """

    role: str
    chars: Count = 0
    reasoning_chars: Count = 0
    tools: list[str] = []
    parts: dict[str, Count] = {}
    content: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None


class TurnAnswer(TurnMessage):
    """One choice of an answer, and why it ended."""

    role: str = "assistant"
    finish: str = ""


class Usage(TurnPart):
    """Tokens as the engine counted them; None where it does not tell."""

    prompt: Count | None = None
    cached: Count | None = None
    generated: Count | None = None


class Turn(Record):
    """One request to a server and its answer.

    `number`: its line. `session`, `turn`: which conversation it is of, and its place in it. `parent`: the turn that it
    goes on with, of whose conversation its first `shared` messages are. `id`: the engine's name for it; `requests`: the
    lines of requests.jsonl that it ran as. `sent`, `first`, `ended`: seconds since the epoch, of the request, the first
    bytes of the answer, and its end. `status`: HTTP's; `error`: the kind of error that the engine answered. `aborted`:
    the client went away, or the server broke off. `unread`: why the request or its answer is not told. `request`: what
    was sent beside the messages, with --keep-text only.
    """

    number: int = Field(ge=0)
    session: int = Field(default=0, ge=0)
    turn: int = Field(default=0, ge=0)
    parent: int | None = Field(default=None, ge=0)
    shared: Count = 0
    id: str = ""
    requests: list[int] = []
    api: Literal["chat", "completion", "responses"] = "chat"
    model: str = ""
    sent: Seconds = 0.0
    first: Seconds | None = None
    ended: Seconds = 0.0
    status: int | None = None
    error: str = ""
    aborted: bool = False
    unread: str = ""
    stream: bool = False
    parameters: dict[str, float | int | bool] = {}
    tools: list[str] = []
    request: dict[str, Any] = {}
    messages: list[TurnMessage] = []
    answers: list[TurnAnswer] = []
    usage: Usage | None = None


def read_turns(path: Path) -> list[Turn]:
    """The turns of the Recording `path`; none where it was made without --agent-trace."""
    file = path / FILE
    return list(read_lines(file, Turn)) if file.exists() else []


def write_turns(path: Path, turns: Sequence[Turn]) -> None:
    """Write `turns` into the Recording `path`."""
    with (path / FILE).open("wb") as file:
        file.writelines(turn.line() for turn in turns)


def tools_of(turn: Turn) -> list[str]:
    """The tools that its answer calls, in order."""
    return [name for answer in turn.answers[:1] for name in answer.tools]


def kind_of(turn: Turn) -> str:
    """How it ended: `calls get_weather`, else why its answer did: `stop`, `refused 400`, `client went away`."""
    if turn.aborted:
        return "client went away"
    if turn.status != 200:
        return f"refused {turn.status} {turn.error}".rstrip()
    if tools := tools_of(turn):
        return f"calls {', '.join(tools)}"
    return turn.answers[0].finish if turn.answers else ""


def programs_by(steps: Iterable[Step], keys: Mapping[int, Collection[Key]]) -> defaultdict[Key, Counter[int]]:
    """Of each key, how many of `steps` ran which Program with one of its requests in them.

    `keys`: those of each request, by its line.
    """
    ran: defaultdict[Key, Counter[int]] = defaultdict(Counter)
    for step in steps:
        if step.program is not None:
            for key in {key for request in step.requests for key in keys.get(request, ())}:
                ran[key][step.program] += 1
    return ran


def conversation(turns: Sequence[Turn], turn: Turn) -> list[TurnMessage]:
    """All messages that `turn` sent: those of the turns before it with their answers, then its own.

    An answer that the client did not send again is left out.
    """
    lineage = [turn]
    while (parent := lineage[-1].parent) is not None and parent < lineage[-1].number:
        lineage.append(turns[parent])
    messages: list[TurnMessage] = []
    for earlier, later in zip(reversed(lineage[1:]), reversed(lineage[:-1]), strict=True):
        messages += earlier.messages
        if later.shared > len(messages):
            messages += earlier.answers[:1]
        messages = messages[: later.shared]
    return [*messages, *turn.messages]
