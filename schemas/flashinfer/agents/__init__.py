"""Agent traces in the forms of other tools: one file each, its Form registered under the file's name with dashes.

All are read into Turns, as a Recording has them (`kcap.schemas.recording.turns`), and written from them. What a form
cannot hold is counted where it is written, and what it has no Turn for where it is read.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from kcap.errors import CallError, FormatError
from kcap.schemas.recording.conversations import Conversations, Message, describe_message, describe_usage
from kcap.schemas.recording.recording import Recording, load
from kcap.schemas.recording.turns import Turn, TurnAnswer, TurnMessage, Usage, conversation, read_turns
from kcap.schemas.results.export_loss import LossLedger
from kcap.system.registry import Registry, plugin_names

FORMS: Registry[str, Form] = Registry("form of an agent trace")
TURN = "turn"  # what a loss counts
NO_TEXT = "its texts were not kept (kcap record --agent-trace --keep-text)"


@dataclass(frozen=True)
class AgentTurns:
    """Turns, each numbered by its place. `blocks`: of a turn's prompt, by its number, as in a Request."""

    turns: list[Turn]
    blocks: Mapping[int, list[int]] = field(default_factory=dict)
    block_size: int = 0


class Form:
    """One form. `suffix`: of its files."""

    suffix = ".json"

    def reads(self, document: Any) -> bool:
        """Whether `document`, the whole of a file or its first line, is of this form."""
        raise NotImplementedError

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        """FormatError where `content` is none; `losses` counts what no Turn has."""
        raise NotImplementedError

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        """The files, by their names without `suffix`."""
        raise NotImplementedError


def form(name: str) -> Callable[[type[Form]], type[Form]]:
    """Register a Form under `name`."""

    def register(kind: type[Form]) -> type[Form]:
        FORMS.add(name, kind())
        return kind

    return register


def forms() -> list[str]:
    """The name of every form: that of its file, with dashes."""
    return sorted(name.replace("_", "-") for name in plugin_names(__name__))


def find_form(name: str) -> Form:
    """The Form `name`, one of `forms()`."""
    importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return FORMS[name]


def turns_in(path: Path) -> tuple[AgentTurns, Counter[str]]:
    """The turns of a Recording, or in a file of any form, and what of the file was left out."""
    return (of_recording(load(path)), Counter()) if path.is_dir() else read_trace(path)


def read_trace(path: Path) -> tuple[AgentTurns, Counter[str]]:
    """The turns in a file of any form, and what was left out; CallError where it has none of them."""
    content = path.read_bytes()
    document = _document(content)
    losses: Counter[str] = Counter()
    for name in forms():
        if document is not None and find_form(name).reads(document):
            return find_form(name).read(content, str(path), losses), losses
    raise CallError(f"{path}: no agent trace that kcap knows (it reads {', '.join(forms())})")


def _document(content: bytes) -> Any:
    """The whole of a file, or its first line; None where it is no JSON."""
    for part in (content.lstrip().partition(b"\n")[0], content):
        try:
            document = orjson.loads(part)
        except orjson.JSONDecodeError:
            continue
        if isinstance(document, dict | list):
            return document
    return None


def of_recording(recording: Recording) -> AgentTurns:
    """The turns of a Recording, with the blocks of their prompts; CallError where it has none."""
    turns = read_turns(recording.path)
    if not turns:
        raise CallError(f"{recording.path}: tells of no turns (kcap record --agent-trace keeps them)")
    requests = recording.requests
    blocks = {turn.number: requests[turn.requests[0]].blocks for turn in turns if turn.requests}
    known = {number: of_turn for number, of_turn in blocks.items() if of_turn}
    return AgentTurns([_with_usage(turn, recording) for turn in turns], known, recording.metadata.block_size or 0)


def _with_usage(turn: Turn, recording: Recording) -> Turn:
    """A server tells its tokens only where it was asked to: else they are those of its requests."""
    ran = [recording.requests[place] for place in turn.requests]
    if not ran:
        return turn
    counted = Usage(prompt=ran[0].prompt, cached=ran[0].cached, generated=sum(request.generated for request in ran))
    told = turn.usage.model_dump(exclude_none=True) if turn.usage is not None else {}
    return turn.model_copy(update={"usage": counted.model_copy(update=told)})


@dataclass(frozen=True)
class Asked:
    """A request with its answer as other forms have them: OpenAI's messages. `fields`: further ones of the Turn.

    `others`: further answers to the same request, each with how it ended. `begins`: it goes on with none before it.
    """

    messages: Sequence[Message]
    answer: Message | None = None
    finish: str = ""
    others: Sequence[tuple[Message, str]] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    begins: bool = False


def link(asked: Iterable[Asked]) -> list[Turn]:
    """The turns, each linked to the one whose conversation it goes on with."""
    conversations = Conversations()
    turns = []
    for number, one in enumerate(asked):
        if one.begins:
            conversations.forget()
        place, parent = conversations.begin(number, one.messages)
        conversations.remember(place, one.messages, one.answer)
        links: dict[str, Any] = {"parent": parent.number, "shared": parent.messages} if parent else {}
        new = one.messages[parent.messages if parent else 0 :]
        every = [] if one.answer is None else [(one.answer, one.finish), *one.others]
        answers = [TurnAnswer(**{**describe(answer), "finish": finish}) for answer, finish in every]
        turns.append(
            Turn(
                number=number, session=place.session, turn=place.turn, **links,
                messages=[TurnMessage(**describe(message)) for message in new], answers=answers, **one.fields,
            )
        )  # fmt: skip
    return turns


def describe(message: Message) -> dict[str, Any]:
    """The members of a TurnMessage, with its texts."""
    return describe_message(message, lambda texts: texts)


def usage_of(usage: Any) -> Usage | None:
    """OpenAI's `usage`; None where there is none."""
    counts = describe_usage(usage)
    return None if counts is None else Usage(**counts)


def openai_usage(usage: Usage) -> dict[str, Any]:
    """As OpenAI's chat API has it."""
    counts = {"prompt_tokens": usage.prompt, "completion_tokens": usage.generated}
    known: dict[str, Any] = {name: count for name, count in counts.items() if count is not None}
    return known if usage.cached is None else known | {"prompt_tokens_details": {"cached_tokens": usage.cached}}


def openai_message(message: TurnMessage) -> Message:
    """As OpenAI's chat API has it."""
    names = ("content", "reasoning_content", "refusal", "tool_calls", "name", "tool_call_id")
    members = {name: getattr(message, name) for name in names}
    return {"role": message.role, "content": None} | {k: v for k, v in members.items() if v is not None}


def has_text(message: TurnMessage) -> bool:
    """Whether its texts were kept, or it has none."""
    return message.content is not None or message.tool_calls is not None or not (message.chars or message.tools)


LINKS = {"number", "session", "turn", "parent", "shared", "requests", "messages", "answers"}


def unheld(turn: Turn, *held: str) -> bool:
    """Whether `turn` tells of more than its messages and answers, than that it was answered, and than `held`."""
    told = turn.model_dump(exclude_defaults=True, exclude=LINKS)
    usual = {name for name, value in (("status", 200), ("api", "chat")) if told.get(name) == value}
    return bool(told.keys() - usual - set(held)) or turn.status != 200


def texts_of(trace: AgentTurns, turn: Turn) -> list[Message] | None:
    """All messages that `turn` sent; None where one's texts were not kept, or it was no chat."""
    messages = conversation(trace.turns, turn)
    if not messages or not all(has_text(message) and message.role != "prompt" for message in messages):
        return None
    return [openai_message(message) for message in messages]


def turns_with_texts(
    trace: AgentTurns, turns: Iterable[Turn], losses: LossLedger
) -> Iterator[tuple[Turn, list[Message]]]:
    """Each of `turns` with all messages that it sent; `losses` counts those whose texts were not kept."""
    for turn in turns:
        messages = texts_of(trace, turn)
        if messages is None:
            losses.lose(TURN, NO_TEXT, 1)
            continue
        yield turn, messages


def answer_of(turn: Turn) -> TurnAnswer | None:
    """Its first answer."""
    return turn.answers[0] if turn.answers else None


def json_lines(lines: Iterable[Any]) -> bytes:
    """One document a line."""
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def read_json_lines(content: bytes, place: str) -> list[Any]:
    """The document of each line that is not empty; FormatError names the line that is none."""
    documents = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                documents.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise FormatError(f"{place}:{number}:{error.colno}", error.msg) from None
    return documents


def whole(value: Any, place: str) -> int:
    """`value` where it is a count; FormatError where it is none."""
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise FormatError(place, "must be a whole number, from 0")
    return value
