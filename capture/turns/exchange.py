"""A Turn of the bytes of one request and its answer: OpenAI's chat and text completions and its Responses API, whole or
streamed.

Without texts, unless they are asked for; then secrets in them are redacted. What cannot be read is said, not raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from kcap.errors import FormatError
from kcap.schemas.flashinfer.openai.chat_stream import DONE, events, join_chunks
from kcap.schemas.flashinfer.openai.responses import chat_answer, chat_request, last_response, request_messages
from kcap.schemas.recording.conversations import (
    MOST_NAME,
    describe_message,
    describe_usage,
    objects,
    request_members,
)
from kcap.system.redact import redact_text

CHAT, COMPLETION, RESPONSES = "chat", "completion", "responses"
APIS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSES}


@dataclass
class Exchange:
    """What went by: seconds since the epoch, the status, and the bytes; `complete`: the answer ended in order.

    `dropped`: the bytes were too many to keep.
    """

    api: str
    sent: float
    first: float | None = None
    ended: float = 0.0
    status: int | None = None
    streamed: bool = False
    complete: bool = False
    dropped: bool = False
    request: bytearray = field(default_factory=bytearray)
    answer: bytearray = field(default_factory=bytearray)

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return len(self.request) + len(self.answer)

    def drop(self) -> None:
        """Keep none of its bytes."""
        self.dropped, self.request, self.answer = True, bytearray(), bytearray()


@dataclass(frozen=True)
class Asked:
    """A request's members, as a chat has them. `messages`: of a text completion none; `prompts`: of one, their lengths.

    `untold`: what it sent that is no message of a chat.
    """

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    prompts: list[int] = field(default_factory=list)
    untold: Sequence[str] = ()


def read_request(exchange: Exchange) -> Asked:
    """FormatError where it is none that this API takes."""
    try:
        body = orjson.loads(bytes(exchange.request))
    except orjson.JSONDecodeError as error:
        raise FormatError("request", error.msg) from None
    if not isinstance(body, dict):
        raise FormatError("request", "must be a JSON object")
    if exchange.api == RESPONSES:
        untold = Counter[str]()
        return Asked(chat_request(body), request_messages(body, untold), untold=sorted(untold))
    messages = body.get("messages") if exchange.api == CHAT else []
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise FormatError("request", "messages: must be a list of objects")
    return Asked(body, messages, _prompt_lengths(body.get("prompt")) if exchange.api == COMPLETION else [])


def _prompt_lengths(prompt: Any) -> list[int]:
    """Characters, or tokens where they are given."""
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return [len(one) for one in (prompt if several else [prompt]) if isinstance(one, str | list)]


def read_answer(exchange: Exchange) -> dict[str, Any]:
    """The answer as a chat's whole one: `choices` with a `message` each. FormatError where it is none, or broke off."""
    content = bytes(exchange.answer)
    if exchange.streamed:
        answer = _joined(content, exchange.api)
    else:
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise FormatError("answer", error.msg) from None
    if not isinstance(answer, dict):
        raise FormatError("answer", "must be a JSON object")
    if exchange.api == RESPONSES:
        return chat_answer(answer, Counter())
    if exchange.api == COMPLETION:
        answer["choices"] = [_as_chat(choice) for choice in objects(answer.get("choices"))]
    return answer


def _as_chat(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "message": {"role": "assistant", "content": choice.get("text")}}


def _joined(content: bytes, api: str) -> dict[str, Any]:
    chunks, done = _chunks(content)
    if api == RESPONSES:
        return last_response(chunks, "answer")
    answer = join_chunks([_with_deltas(chunk) for chunk in chunks] if api == COMPLETION else chunks, "answer")
    if not done:
        raise FormatError("answer", "broke off before its [DONE]")
    if api == COMPLETION:
        for choice in answer["choices"]:
            choice["text"] = choice["message"]["content"]
    return answer


def _chunks(content: bytes) -> tuple[list[Any], bool]:
    """The document of each event, and whether the stream says that it is done."""
    chunks: list[Any] = []
    for number, data in enumerate(events(content), 1):
        if data == DONE:
            return chunks, True
        try:
            chunks.append(orjson.loads(data))
        except orjson.JSONDecodeError as error:
            raise FormatError(f"answer: event {number}", error.msg) from None
    return chunks, False


def _with_deltas(chunk: Any) -> Any:
    """A text completion's chunk in the form of a chat's."""
    if not isinstance(chunk, dict):
        return chunk
    choices = [{**choice, "delta": {"content": choice.get("text")}} for choice in objects(chunk.get("choices"))]
    return {
        **chunk,
        "choices": [{k: v for k, v in choice.items() if k not in ("text", "logprobs")} for choice in choices],
    }


def _name(value: Any) -> str:
    return str(value)[:MOST_NAME] if value is not None else ""


def _clean(value: Any) -> Any:
    """Every text in `value` without secrets."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return {key: _clean(item) for key, item in value.items()} if isinstance(value, dict) else value


def _describe(message: dict[str, Any], keep_text: bool) -> dict[str, Any]:
    return describe_message(message, _clean if keep_text else None)


def describe_request(asked: Asked, messages: Sequence[dict[str, Any]], keep_text: bool) -> dict[str, Any]:
    """Members of a Turn. `messages`: of those that it sent, the new ones."""
    body = asked.body
    described = [_describe(message, keep_text) for message in messages]
    described += [{"role": "prompt", "chars": length} for length in asked.prompts]
    kept = {"request": _clean({key: value for key, value in body.items() if key != "messages"})} if keep_text else {}
    return kept | request_members(body) | {"messages": described}


def engine_name(exchange: Exchange) -> str:
    """By which the engine answers of a request; "" where it has not yet, or not so."""
    content = bytes(exchange.answer)
    data = next(events(content[: content.find(b"\n\n") + 2]), b"{}") if exchange.streamed else content
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        return ""
    if isinstance(answer, dict) and exchange.streamed and exchange.api == RESPONSES:
        answer = answer.get("response")
    return _name(answer.get("id")) if isinstance(answer, dict) else ""


def describe_answer(answer: dict[str, Any], keep_text: bool) -> dict[str, Any]:
    """Members of a Turn: each choice, and the tokens that the engine counted."""
    described: dict[str, Any] = {"answers": [_choice(c, keep_text) for c in objects(answer.get("choices"))]}
    if (usage := describe_usage(answer.get("usage"))) is not None:
        described["usage"] = usage
    return described


def _choice(choice: dict[str, Any], keep_text: bool) -> dict[str, Any]:
    message = choice.get("message")
    described = _describe(message if isinstance(message, dict) else {}, keep_text)
    return described | {"finish": _name(choice.get("finish_reason"))}


def error_kind(exchange: Exchange) -> str:
    """What kind of error the engine answered with: no text of it, which may hold the request's."""
    try:
        answer = orjson.loads(bytes(exchange.answer))
    except orjson.JSONDecodeError:
        return ""
    error = answer.get("error", answer) if isinstance(answer, dict) else {}
    return _name(error.get("type") or error.get("code")) if isinstance(error, dict) else ""
