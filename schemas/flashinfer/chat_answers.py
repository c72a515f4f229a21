"""What an engine's `/v1/chat/completions` answered, as the Response of an agent trace: OpenAI's form.

vLLM and SGLang answer in OpenAI's form with fields of their own; the FlashInfer schema set asks for OpenAI's. The
reasoning stays, as `reasoning_content` (vLLM calls it `reasoning`); an empty list of tool calls is left out, as OpenAI
does; further fields are dropped and counted by their path (`choices.matched_stop`).

A streamed answer is server-sent events (WHATWG HTML, 9.2): one `chat.completion.chunk` each, then `[DONE]`. Pieces of
text and of arguments are joined, by the `index` of their tool call; `usage` comes in a chunk of its own, if asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import parse_json, reasons
from kcap.schemas.flashinfer.agent_trace import Response

ADAPTER = TypeAdapter(Response)
ANSWER_FIELDS = frozenset({"id", "created", "model", "choices", "usage", "service_tier", "system_fingerprint"})
CHOICE_FIELDS = frozenset({"index", "message", "logprobs", "finish_reason"})
MESSAGE_FIELDS = frozenset({"role", "content", "refusal", "annotations", "audio", "tool_calls", "reasoning_content"})
JOINED = ("content", "refusal", "reasoning_content")  # of a message: texts that arrive in pieces
DONE = b"[DONE]"
MOST_CALLS = 1024  # of one message, and choices of one answer: a stream cannot ask for more memory by a large index


def from_answer(answer: Any, place: str = "answer") -> tuple[Response, Counter[str]]:
    """An engine's `chat.completion` in OpenAI's form, and how often each dropped field was there.

    FormatError where it is none, an engine's error (`{"error": …}`) among them.
    """
    dropped: Counter[str] = Counter()
    if not isinstance(answer, dict):
        raise FormatError(place, "must be a JSON object, a chat.completion")
    if "choices" not in answer and "error" in answer:
        raise FormatError(place, f"the engine refused the request: {_error_text(answer['error'])}")
    kept = _keep(answer, ANSWER_FIELDS | {"object"}, "", dropped) | {"object": "chat.completion"}
    if isinstance(kept.get("choices"), list):
        kept["choices"] = [_choice(choice, dropped) for choice in kept["choices"]]
    try:
        return ADAPTER.validate_python(kept), dropped
    except ValidationError as error:
        raise FormatError(place, reasons(error, kept)[0]) from None


def _error_text(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _choice(choice: Any, dropped: Counter[str]) -> Any:
    if not isinstance(choice, dict):
        return choice
    kept = _keep(choice, CHOICE_FIELDS, "choices.", dropped)
    if isinstance(message := kept.get("message"), dict):
        kept["message"] = _message(message, dropped)
    return kept


def _message(message: dict[str, Any], dropped: Counter[str]) -> dict[str, Any]:
    message = _with_reasoning(message)
    kept = _keep(message, MESSAGE_FIELDS, "choices.message.", dropped)
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
    return kept


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with its reasoning under `reasoning_content`, if it has any; vLLM's versions differ in the name."""
    names = ("reasoning_content", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    others = {key: value for key, value in message.items() if key not in names}
    return others if reasoning is None else others | {"reasoning_content": reasoning}


def _keep(fields: dict[str, Any], names: frozenset[str], path: str, dropped: Counter[str]) -> dict[str, Any]:
    """Of `fields` those of `names`; others are counted unless they say nothing."""
    dropped.update(f"{path}{name}" for name, value in fields.items() if name not in names and value is not None)
    return {name: value for name, value in fields.items() if name in names}


def from_stream(content: bytes, place: str = "stream") -> tuple[Response, Counter[str]]:
    """The answer that the server-sent events in `content` are the pieces of; the rest as for `from_answer`.

    FormatError where an event is no chunk, or the stream broke off before its `[DONE]`. An engine that refuses a
    request answers with JSON instead of a stream: that is read as `from_answer` does.
    """
    if content.lstrip().startswith(b"{"):
        return from_answer(parse_json(content, TypeAdapter(dict[str, Any]), place), place)
    chunks, done = [], False
    for number, data in enumerate(events(content), 1):
        if data == DONE:
            done = True
            break
        try:
            chunks.append(orjson.loads(data))
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{place}: event {number}", error.msg) from None
    joined = join_chunks(chunks, place)
    if not done:
        raise FormatError(place, "broke off before its [DONE]")
    return from_answer(joined, place)


def events(content: bytes) -> Iterator[bytes]:
    """The data of each event, its lines joined; comments and other fields aside. An event ends with an empty line."""
    data: list[bytes] = []
    for line in content.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if not line and data:
            yield b"\n".join(data)
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))


def join_chunks(chunks: Iterable[Any], place: str = "stream") -> dict[str, Any]:
    """The `chat.completion` that `chunks` are the pieces of, an engine's own fields among them.

    FormatError names the chunk, counted from 1, that is none, or in which the engine reported an error.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for number, chunk in enumerate(chunks, 1):
        if isinstance(chunk, dict) and "error" in chunk:
            raise FormatError(f"{place}: event {number}", f"the engine ended it: {_error_text(chunk['error'])}")
        try:
            for piece in chunk["choices"]:
                _join_choice(choices.setdefault(_index(piece), {"index": piece["index"], "message": {}}), piece)
            _fill(answer, {key: value for key, value in chunk.items() if key != "choices"})
        except (AttributeError, KeyError, TypeError, ValueError):
            raise FormatError(f"{place}: event {number}", "is no chat.completion.chunk") from None
    for choice in choices.values():
        message = choice["message"]
        message.setdefault("content", None)
        if "tool_calls" in message:
            message["tool_calls"] = [call for _, call in sorted(message["tool_calls"].items())]
    return answer | {"choices": [choices[index] for index in sorted(choices)]}


def _index(piece: dict[str, Any]) -> int:
    index = piece["index"]
    if not isinstance(index, int) or not 0 <= index < MOST_CALLS:
        raise ValueError(index)
    return index


def _join_choice(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    delta = _with_reasoning(piece["delta"])
    message = choice["message"]
    for name in JOINED:
        if (text := delta.get(name)) is not None:
            message[name] = message.get(name, "") + text
    for part in delta.get("tool_calls") or ():
        _join_call(message.setdefault("tool_calls", {}).setdefault(_index(part), {}), part)
    _fill(message, {key: value for key, value in delta.items() if key not in (*JOINED, "tool_calls")})
    logprobs = (choice.get("logprobs") or {}, piece.get("logprobs") or {})
    joined = {key: (logprobs[0].get(key) or []) + (value or []) for key, value in logprobs[1].items()}
    _fill(choice, {key: value for key, value in piece.items() if key not in ("index", "delta", "logprobs")})
    if joined:
        choice["logprobs"] = joined


def _join_call(call: dict[str, Any], part: dict[str, Any]) -> None:
    function = call.setdefault("function", {"name": "", "arguments": ""})
    for name in function:
        function[name] += (part.get("function") or {}).get(name) or ""
    _fill(call, {key: value for key, value in part.items() if key not in ("index", "function")})
    call.setdefault("type", "function")


def _fill(fields: dict[str, Any], more: dict[str, Any]) -> None:
    """A later null takes nothing back: the last chunk of an answer has most of its fields null."""
    fields.update((key, value) for key, value in more.items() if value is not None or key not in fields)
