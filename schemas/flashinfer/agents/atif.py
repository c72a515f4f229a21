"""ATIF 1.7, the Agent Trajectory Interchange Format of Harbor: one JSON document a session, steps in turn order.

    {"schema_version": "ATIF-v1.7", "session_id": "0", "agent": {"name": "kcap", …}, "steps": [{"step_id": 1, …}]}

Source: ATIF 1.7 (the package `atif`). A step is a system's or user's message, or an answer with its tool calls, their
results (`observation`) and its tokens (`metrics`). It has one line of turns: where a session branches, each branch is a
trajectory of its own, and what another one has already is marked as copied (`is_copied_context`). Several may be read
at once, as a list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agents import (
    TURN,
    AgentTurns,
    Asked,
    Form,
    answer_of,
    form,
    link,
    openai_message,
    unheld,
)
from kcap.schemas.flashinfer.agents.common.own import WholeTurn, whole_turns, why_no_chat
from kcap.schemas.recording.conversations import Message, function_of, objects, text_of
from kcap.schemas.recording.turns import Turn, TurnMessage, Usage
from kcap.schemas.results.export_loss import LossLedger

VERSION = "ATIF-v1.7"
SOURCES = {"system": "system", "developer": "system", "user": "user"}
METRICS = {"prompt": "prompt_tokens", "generated": "completion_tokens", "cached": "cached_tokens"}


@form("atif")
class ATIF(Form):
    def reads(self, document: Any) -> bool:
        first = document[0] if isinstance(document, list) and document else document
        return isinstance(first, dict) and str(first.get("schema_version", "")).startswith("ATIF")

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{place}:{error.lineno}:{error.colno}", error.msg) from None
        trajectories = document if isinstance(document, list) else [document]
        return AgentTurns(link(asked for one in trajectories for asked in _asked(one, place, losses)))

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        turns = whole_turns(trace, why_no_chat, losses)
        gone_on = {whole.turn.parent for whole in turns if _goes_on_with_its_answer(whole, turns)}
        last = [whole for whole in turns if whole.turn.number not in gone_on]
        for whole in turns:
            _count_losses(whole, losses)
        names = [f"session-{whole.turn.session}" for whole in last]
        again = [
            f"{name}-{whole.turn.number}" if names.count(name) > 1 else name
            for name, whole in zip(names, last, strict=True)
        ]
        order: list[int] = []  # of turns, as they are written
        files = {name: _document(turns, whole, order) for name, whole in zip(again, last, strict=True)}
        if moved := sum(number != place for place, number in enumerate(order)):
            losses.reduce(TURN, "its place among other sessions and branches", moved)
        return files


def _goes_on_with_its_answer(whole: WholeTurn, turns: list[WholeTurn]) -> bool:
    """Whether the answer of the turn before it is among its messages, and not another one."""
    parent = whole.turn.parent
    return parent is not None and whole.turn.shared > len(turns[parent].messages)


def _count_losses(whole: WholeTurn, losses: LossLedger) -> None:
    turn, messages = whole.turn, [*whole.messages, *whole.turn.answers]
    if unheld(turn, "model", "usage", "sent"):
        losses.reduce(TURN, "parameters, tools, the end and the engine's name of it", 1)
    if len(turn.answers) != 1:
        losses.reduce(TURN, "other answers than one", 1)
    if any(answer.finish for answer in turn.answers):
        losses.reduce(TURN, "why it ended", 1)
    if any(isinstance(message.content, list) or message.refusal or message.name for message in messages):
        losses.reduce(TURN, "parts that are no text, refusals and names", 1)
    if any(message.content is None or message.tool_calls == [] for message in messages):
        losses.reduce(TURN, "that a message has no content, rather than an empty one", 1)
    for call in (call for message in messages for call in message.tool_calls or ()):
        if orjson.dumps(_arguments(call)).decode() != function_of(call)[1] or not isinstance(call.get("id"), str):
            losses.reduce(TURN, "how the arguments of a tool call are written", 1)
            break


def _document(turns: list[WholeTurn], last: WholeTurn, order: list[int]) -> bytes:
    """The trajectory that ends with the turn `last`; its turns that are not in `order` yet are added to it."""
    lineage = [last]
    while _goes_on_with_its_answer(lineage[-1], turns):
        lineage.append(turns[lineage[-1].turn.parent or 0])
    new = {len(whole.messages): whole for whole in reversed(lineage) if whole.turn.number not in order}
    order += [whole.turn.number for whole in new.values()]
    numbered = [{"step_id": number, **step} for number, step in enumerate(_steps(last, new), 1)]
    agent = {"name": "kcap", "version": "1", **({"model_name": last.turn.model} if last.turn.model else {})}
    document = {"schema_version": VERSION, "session_id": str(last.turn.session), "agent": agent, "steps": numbered}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"


def _steps(last: WholeTurn, new: dict[int, WholeTurn]) -> Iterator[dict[str, Any]]:
    """The steps of all messages and answers; results of tools are in the step that called them.

    `new`: the turns that no other trajectory has, by the place of their answer; other answers are copied context.
    """
    answer = answer_of(last.turn)
    every: list[TurnMessage] = [*last.messages, *([answer] if answer else [])]
    step: dict[str, Any] = {}
    for place, message in enumerate(every):
        members = openai_message(message)
        if message.role == "tool" and step.get("source") == "agent":
            results = step.setdefault("observation", {"results": []})["results"]
            known = {call["tool_call_id"] for call in step.get("tool_calls", [])}
            source = {"source_call_id": message.tool_call_id} if message.tool_call_id in known else {}
            results.append({**source, "content": text_of(members.get("content"))})
            continue
        if step:
            yield step
        step = _step(members, _facts(new[place].turn) if place in new else {"is_copied_context": True})
    if step:
        yield step


def _facts(turn: Turn) -> dict[str, Any]:
    """Of the step of its answer."""
    facts: dict[str, Any] = {"model_name": turn.model} if turn.model else {}
    if turn.sent:
        facts["timestamp"] = datetime.fromtimestamp(turn.sent, UTC).isoformat()
    if usage := turn.usage.model_dump(exclude_none=True) if turn.usage else {}:
        facts["metrics"] = {METRICS[name]: count for name, count in usage.items()}
    return facts


def _step(message: Message, facts: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return {"source": SOURCES.get(message["role"], "user"), "message": text_of(message.get("content"))}
    step: dict[str, Any] = {"source": "agent", "message": text_of(message.get("content")), **facts}
    if message.get("reasoning_content") is not None:
        step["reasoning_content"] = message["reasoning_content"]
    if calls := objects(message.get("tool_calls")):
        step["tool_calls"] = [
            {
                "tool_call_id": str(call.get("id")),
                "function_name": str(function_of(call)[0]),
                "arguments": _arguments(call),
            }
            for call in calls
        ]
    return step


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    """As the object that ATIF asks for; a text that is none stands under `arguments`."""
    text = function_of(call)[1]
    try:
        arguments = orjson.loads(text) if isinstance(text, str) else text
    except orjson.JSONDecodeError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def _asked(trajectory: Any, place: str, losses: Counter[str]) -> Iterator[Asked]:
    """A turn for each answer of a model in a trajectory, and in those of its subagents."""
    if not isinstance(trajectory, dict) or not isinstance(trajectory.get("steps"), list):
        raise FormatError(place, "a trajectory is an object with a list of steps")
    agent = trajectory.get("agent")
    model = str(agent.get("model_name") or "") if isinstance(agent, dict) else ""
    messages: list[Message] = []
    for number, step in enumerate(trajectory["steps"], 1):
        where = f"{place}: step {number}"
        if not isinstance(step, dict) or step.get("source") not in ("system", "user", "agent"):
            raise FormatError(where, "source: must be system, user or agent")
        message = _message(step)
        asked = step["source"] == "agent" and not step.get("is_copied_context")
        if asked and messages and step.get("llm_call_count") != 0:
            yield Asked(list(messages), message, fields=_fields(step, model, where))
        elif asked:
            losses["an agent's step that asks no model"] += 1
        messages.append(message)
        messages += _results(step)
    for subagent in objects(trajectory.get("subagent_trajectories")):
        yield from _asked(subagent, place, losses)


def _message(step: dict[str, Any]) -> Message:
    content = step.get("message")
    text = content if isinstance(content, str) else "".join(str(p.get("text") or "") for p in objects(content))
    message: Message = {"role": "assistant" if step["source"] == "agent" else step["source"], "content": text}
    if isinstance(step.get("reasoning_content"), str):
        message["reasoning_content"] = step["reasoning_content"]
    if calls := objects(step.get("tool_calls")):
        message["tool_calls"] = [
            {
                "id": str(call.get("tool_call_id")),
                "type": "function",
                "function": {
                    "name": str(call.get("function_name")),
                    "arguments": orjson.dumps(call.get("arguments")).decode(),
                },
            }
            for call in calls
        ]
    return message


def _results(step: dict[str, Any]) -> Iterator[Message]:
    observation = step.get("observation")
    for result in objects(observation.get("results")) if isinstance(observation, dict) else ():
        content = result.get("content")
        text = content if isinstance(content, str) else "".join(str(p.get("text") or "") for p in objects(content))
        call = result.get("source_call_id")
        yield {"role": "tool", "content": text} | ({} if call is None else {"tool_call_id": str(call)})


def _fields(step: dict[str, Any], model: str, place: str) -> dict[str, Any]:
    metrics = step.get("metrics")
    fields: dict[str, Any] = {"model": str(step.get("model_name") or model), "status": 200}
    if isinstance(metrics, dict):
        counts = {name: metrics[key] for name, key in METRICS.items() if metrics.get(key) is not None}
        if any(type(count) is not int or not 0 <= count < 1 << 48 for count in counts.values()):
            raise FormatError(place, "metrics: must be counts")
        fields["usage"] = Usage(**counts)
    if (timestamp := step.get("timestamp")) is not None:
        try:
            fields["sent"] = max(0.0, datetime.fromisoformat(timestamp).timestamp())
        except (TypeError, ValueError, OverflowError):
            raise FormatError(place, "timestamp: must be ISO 8601") from None
    return fields
