"""The messages of conversations: what a Turn says of one, and which conversation a request goes on with.

That is the one whose messages, with their answer, are the first of its own, told by a keyed hash of them, so that no
text is kept. It needs orjson only: a server may have no more.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kcap.schemas.flashinfer.openai.chat_stream import with_reasoning

MOST_PLACES = 1 << 17  # at which a turn may go on, two for each that was answered; the ones used last are kept
MOST_NAME = 256  # characters of a role, or of a tool's or an engine's name
Message = dict[str, Any]  # as OpenAI's chat API has it


@dataclass(frozen=True)
class Place:
    """Where a conversation stands after the turn `number`: its session, its place in it, `messages` so far."""

    number: int
    session: int
    turn: int
    messages: int


class Conversations:
    """Those of one process or file. `key`: of the hashes."""

    def __init__(self, key: str = "") -> None:
        self._key = key.encode()[:64]
        self._places: OrderedDict[bytes, Place] = OrderedDict()
        self._sessions = 0

    def __len__(self) -> int:
        return len(self._places)

    def forget(self) -> None:
        """That earlier turns may be gone on with."""
        self._places.clear()

    def begin(self, number: int, messages: Sequence[Message]) -> tuple[Place, Place | None]:
        """The place of the turn `number`, and that of the turn which it goes on with.

        A turn that sends the very messages of another, and no more, is a second try of that one: it goes on nothing.
        """
        parent = None
        for digest in self._digests(messages)[:-1]:
            if (place := self._places.get(digest)) is not None:
                self._places.move_to_end(digest)
                parent = place
        if parent is not None:
            return Place(number, parent.session, parent.turn + 1, len(messages)), parent
        self._sessions += 1
        return Place(number, self._sessions - 1, 0, len(messages)), None

    def remember(self, place: Place, messages: Sequence[Message], answer: Message | None) -> None:
        """That this turn may be gone on with: after its answer, or after its messages with another answer."""
        if not messages:
            return
        answered = [*messages, {"role": "assistant", **answer}] if answer is not None else list(messages)
        digests = self._digests(answered)
        for known in range(len(messages), len(answered) + 1):
            self._places[digests[known - 1]] = Place(place.number, place.session, place.turn, known)
            self._places.move_to_end(digests[known - 1])
        while len(self._places) > MOST_PLACES:
            self._places.popitem(last=False)

    def _digests(self, messages: Sequence[Message]) -> list[bytes]:
        """Of the first message, of the first two, and so on."""
        hashed = hashlib.blake2b(key=self._key, digest_size=16)
        digests = []
        for message in messages:
            hashed.update(_canonical(message) + b"\n")
            digests.append(hashed.digest())
        return digests


def _canonical(message: Message) -> bytes:
    """What of a message tells it from others, however a client writes the rest: no reasoning, no empty members."""
    calls = [[call.get("id"), *function_of(call)] for call in objects(message.get("tool_calls"))]
    return orjson.dumps([message.get("role"), message.get("content") or "", calls, message.get("tool_call_id") or ""])


def function_of(call: dict[str, Any]) -> tuple[Any, Any]:
    """The name and the arguments of a tool call; None where there are none."""
    function = call.get("function")
    return (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; none where it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in objects(content))
    return "" if content is None else str(content)


TEXTS, NAMES = ("content", "reasoning_content", "refusal"), ("name", "tool_call_id")  # of a message that is kept whole


def describe_message(message: Message, keep: Callable[[Any], Any] | None) -> dict[str, Any]:
    """A message as the members of a TurnMessage: its role, length, the tools that it calls, its other parts by kind.

    `keep`: its texts stay, as this returns them; None: they do not.
    """
    message = with_reasoning(message)
    content = message.get("content")
    parts = objects(content)
    texts = [content] if isinstance(content, str) else [part.get("text") for part in parts]
    kinds = Counter(_short(part.get("type")) for part in parts if part.get("type") != "text")
    described: dict[str, Any] = {
        "role": _short(message.get("role")),
        "chars": sum(len(text) for text in texts if isinstance(text, str)),
    }
    if isinstance(reasoning := message.get("reasoning_content"), str):
        described["reasoning_chars"] = len(reasoning)
    calls = objects(message.get("tool_calls"))
    if calls:
        described["tools"] = [_short(function_of(call)[0]) for call in calls]
    if kinds:
        described["parts"] = dict(kinds)
    if keep is not None:
        kept = {name: message[name] for name in TEXTS if message.get(name) is not None}
        kept |= {name: _short(message[name]) for name in NAMES if message.get(name) is not None}
        described |= keep(kept | ({"tool_calls": calls} if calls else {}))
    return described


def _short(value: Any) -> str:
    return str(value)[:MOST_NAME] if value is not None else ""


def describe_usage(usage: Any) -> dict[str, int] | None:
    """OpenAI's `usage` as the members of a Usage; None where there is none."""
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    counts = {
        "prompt": usage.get("prompt_tokens"),
        "generated": usage.get("completion_tokens"),
        "cached": details.get("cached_tokens") if isinstance(details, dict) else None,
    }
    return {name: count for name, count in counts.items() if type(count) is int and count >= 0}


PARAMETERS = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "n", "seed", "temperature", "top_p", "top_k"),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs"),
    "parallel_tool_calls",
)


def request_members(body: dict[str, Any]) -> dict[str, Any]:
    """What of a request to OpenAI's API is in a Turn: the model, parameters that are numbers, the names of tools."""
    functions = (tool.get("function") for tool in objects(body.get("tools")))
    return {
        "model": _short(body.get("model")),
        "stream": body.get("stream") is True,
        "parameters": {name: body[name] for name in PARAMETERS if isinstance(body.get(name), int | float)},
        "tools": [_short(function.get("name")) for function in functions if isinstance(function, dict)],
    }
