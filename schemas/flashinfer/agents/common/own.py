"""What only a Turn tells, kept whole in a field of kcap's own where a form lets others add some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agents import NO_TEXT, TURN, AgentTurns, describe, has_text
from kcap.schemas.recording.conversations import Message
from kcap.schemas.recording.turns import Turn, TurnAnswer, TurnMessage, Usage, conversation
from kcap.schemas.results.export_loss import LossLedger

ELSEWHERE = {"number", "requests", "messages", "answers", "usage", "model", "id"}  # what every form has a place for
FURTHER = ("chars", "reasoning_chars", "tools", "parts")  # of a TurnMessage, where its texts were not kept


def own_fields(turn: Turn) -> dict[str, Any]:
    """Members of `turn` that OpenAI's messages, usage, model and name do not tell."""
    return turn.model_dump(mode="json", exclude=ELSEWHERE, exclude_defaults=True)


def own_turn(
    number: int, own: Any, messages: Sequence[Message], answers: Sequence[tuple[Message, str]], usage: Usage | None,
    fields: Mapping[str, Any], place: str,
) -> Turn:  # fmt: skip
    """The Turn that was written with `own`; FormatError where that is not what it was.

    `messages`: the whole conversation; `answers`: each with how it ended; `fields`: the model and the engine's name.
    """
    if not isinstance(own, dict) or type(shared := own.get("shared", 0)) is not int or not 0 <= shared <= len(messages):
        raise FormatError(place, "kcap: must be what a Turn tells")
    try:
        new = [TurnMessage(**_members(message)) for message in messages[shared:]]
        every = [TurnAnswer(**{**_members(message), "finish": finish}) for message, finish in answers]
        turn = Turn(**{**own, **fields, "number": number, "usage": usage, "messages": new, "answers": every})
    except ValidationError as error:
        raise FormatError(place, f"kcap: {error.errors()[0]['msg']}") from None
    if turn.parent is not None and turn.parent >= number:
        raise FormatError(place, "kcap: parent: must be an earlier turn")
    return turn


def further(message: TurnMessage, members: Message) -> dict[str, Any]:
    """What of `message` its `members` in OpenAI's form do not tell."""
    described = describe(members)
    rest = {name: getattr(message, name) for name in FURTHER if getattr(message, name) != described.get(name)}
    return {name: value for name, value in rest.items() if value}


def _members(message: Message) -> dict[str, Any]:
    return describe(message) | {name: message[name] for name in FURTHER if name in message}


@dataclass(frozen=True)
class WholeTurn:
    """A turn with all messages that it sent, numbered among those that are written."""

    turn: Turn
    messages: list[TurnMessage]


CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")


def why_no_chat(messages: list[TurnMessage]) -> str:
    """Why `messages` are none of OpenAI's chat API with all their texts; "" where they are."""
    if not all(has_text(message) for message in messages):
        return NO_TEXT
    return "" if all(message.role in CHAT_ROLES for message in messages) else "a message of an unknown role"


def whole_turns(trace: AgentTurns, why_not: Callable[[list[TurnMessage]], str], losses: LossLedger) -> list[WholeTurn]:
    """The turns that a form can hold. `why_not`: of all messages of a turn and its answers, "" where they fit.

    One whose parent is not among them goes on with none.
    """
    numbers: dict[int, int] = {}
    turns: list[WholeTurn] = []
    for turn in trace.turns:
        messages = conversation(trace.turns, turn)
        if reason := why_not([*messages, *turn.answers]):
            losses.lose(TURN, reason, 1)
            continue
        if turn.number in trace.blocks:
            losses.reduce(TURN, "the blocks of its prompt", 1)
        numbers[turn.number] = number = len(turns)
        links: dict[str, Any] = {"number": number, "requests": []}
        if turn.parent not in numbers:
            links |= {"parent": None, "shared": 0, "messages": messages}
        else:
            links |= {"parent": numbers[turn.parent]}
        turns.append(WholeTurn(turn.model_copy(update=links), messages))
    return turns
