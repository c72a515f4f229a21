"""The FlashInfer schema set's agent trace: both forms are read, and it is written as a list of `llm_request` entries.

    [{"type": "llm_request", "model": "m", "conversation": [messages…], "response": {"choices": […], "usage": {…}}}]

A response may have further fields: one of them, `kcap`, has what else a Turn tells; messages without texts tell
their lengths. Where each entry has it, the turns are read as they were.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import ValidationError

from kcap.schemas.flashinfer import agent_trace
from kcap.schemas.flashinfer.agent_trace import Choice, Conversation, LLMRequest, Message, Response
from kcap.schemas.flashinfer.agents import (
    AgentTurns,
    Asked,
    Form,
    form,
    link,
    openai_message,
    openai_usage,
    usage_of,
)
from kcap.schemas.flashinfer.agents.common.own import further, own_fields, own_turn, whole_turns
from kcap.schemas.recording.turns import Turn, TurnMessage
from kcap.schemas.results.export_loss import LossLedger

ROLES = ("system", "user", "assistant", "tool")  # that the set has
OWN = "kcap"  # the field of a response for what only a Turn has


@form("agent-trace")
class AgentTraceForm(Form):
    def reads(self, document: Any) -> bool:
        first = document[0] if isinstance(document, list) and document else document
        return isinstance(first, dict) and ("conversation" in first or "type" in first) and "conversations" not in first

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        trace = agent_trace.from_bytes(content, place)
        items = trace if isinstance(trace, list) else [trace]
        requests = [item for item in items if isinstance(item, LLMRequest)]
        losses.update(
            f"{item.type}: its result is in the next request's messages"
            for item in items
            if not isinstance(item, LLMRequest | Conversation)
        )
        if requests and all(OWN in (request.response.model_extra or {}) for request in requests):
            return AgentTurns([_own(number, request, place) for number, request in enumerate(requests)])
        asked: list[Asked] = []
        for item in items:
            if isinstance(item, Conversation):
                asked += _answers(item)
            elif isinstance(item, LLMRequest):
                asked.append(_asked(item))
        return AgentTurns(link(asked))

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        turns = whole_turns(trace, _why_not, losses)
        entries: list[agent_trace.Entry] = [_entry(whole.turn, whole.messages) for whole in turns]
        return {"trace": agent_trace.to_bytes(entries)}


def _why_not(messages: list[TurnMessage]) -> str:
    if any(message.role not in ROLES for message in messages):
        return f"a message's role is none of {', '.join(ROLES)}"
    try:
        [_message(message) for message in messages]
    except ValidationError:
        return "a tool call without an id, a name or arguments"
    return ""


def _answers(item: Conversation) -> list[Asked]:
    """A turn for each answer in a whole conversation."""
    messages = [message.model_dump(mode="json") for message in item.conversation]
    return [
        Asked(messages[:place], message, fields={"model": item.model, "status": 200})
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and place
    ]


def _asked(item: LLMRequest) -> Asked:
    extra = item.response.model_extra or {}
    fields: dict[str, Any] = {"model": item.model, "status": 200, "usage": usage_of(extra.get("usage"))}
    fields |= {"id": name} if isinstance(name := extra.get("id"), str) else {}
    messages = [message.model_dump(mode="json") for message in item.conversation]
    choices = [(c.message.model_dump(mode="json"), c.finish_reason or "") for c in item.response.choices]
    first, finish = choices[0] if choices else (None, "")
    return Asked(messages, first, finish, choices[1:], fields)


def _own(number: int, item: LLMRequest, place: str) -> Turn:
    """A Turn that was written as an entry."""
    extra = item.response.model_extra or {}
    messages = [message.model_dump(mode="json") for message in item.conversation]
    answers = [(choice.message.model_dump(mode="json"), choice.finish_reason or "") for choice in item.response.choices]
    fields = {"model": item.model, "id": extra.get("id", "")}
    usage = usage_of(extra.get("usage"))
    return own_turn(number, extra[OWN], messages, answers, usage, fields, f"{place}: {number}: response")


def _entry(turn: Turn, messages: list[TurnMessage]) -> LLMRequest:
    response: dict[str, Any] = {"model": turn.model, "id": turn.id, OWN: own_fields(turn)}
    response |= {"usage": openai_usage(turn.usage)} if turn.usage else {}
    choices = [
        Choice(index=index, message=_message(answer), finish_reason=answer.finish or None)
        for index, answer in enumerate(turn.answers)
    ]
    return LLMRequest(
        model=turn.model,
        conversation=[_message(message) for message in messages],
        response=Response(choices=choices, **response),
    )


def _message(message: TurnMessage) -> Message:
    """With its lengths, where its texts were not kept."""
    members = openai_message(message)
    return Message(**members, **further(message, members))
