"""The pieces of a streamed `/v1/chat/completions` answer, joined. It needs orjson only, so that a server can have it.

A streamed answer is server-sent events (WHATWG HTML, 9.2): one `chat.completion.chunk` each, then `[DONE]`. Pieces of
text and of arguments are joined, by the `index` of their tool call; `usage` comes in a chunk of its own, if asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kcap.errors import FormatError

JOINED = ("content", "refusal", "reasoning_content")  # of a message: texts that arrive in pieces
DONE = b"[DONE]"
MOST_CALLS = 1024  # of one message, and choices of one answer: a stream cannot ask for more memory by a large index


def error_text(error: Any) -> str:
    """What an engine says in the `error` of an answer or of a chunk."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with its reasoning under `reasoning_content`, if it has any; vLLM's versions differ in the name."""
    names = ("reasoning_content", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    others = {key: value for key, value in message.items() if key not in names}
    return others if reasoning is None else others | {"reasoning_content": reasoning}


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
            raise FormatError(f"{place}: event {number}", f"the engine ended it: {error_text(chunk['error'])}")
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
    delta = with_reasoning(piece["delta"])
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
