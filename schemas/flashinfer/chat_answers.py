"""What an engine's `/v1/chat/completions` answered, as the Response of an agent trace: OpenAI's form.

vLLM and SGLang answer in OpenAI's form with fields of their own; the FlashInfer schema set asks for OpenAI's. The
reasoning stays, as `reasoning_content` (vLLM calls it `reasoning`); an empty list of tool calls is left out, as OpenAI
does; further fields are dropped and counted by their path (`choices.matched_stop`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import parse_json, reasons
from kcap.schemas.flashinfer.agent_trace import Response
from kcap.schemas.flashinfer.openai.chat_stream import DONE, error_text, events, join_chunks, with_reasoning

ADAPTER = TypeAdapter(Response)
ANSWER_FIELDS = frozenset({"id", "created", "model", "choices", "usage", "service_tier", "system_fingerprint"})
CHOICE_FIELDS = frozenset({"index", "message", "logprobs", "finish_reason"})
MESSAGE_FIELDS = frozenset({"role", "content", "refusal", "annotations", "audio", "tool_calls", "reasoning_content"})


def from_answer(answer: Any, place: str = "answer") -> tuple[Response, Counter[str]]:
    """An engine's `chat.completion` in OpenAI's form, and how often each dropped field was there.

    FormatError where it is none, an engine's error (`{"error": …}`) among them.
    """
    dropped: Counter[str] = Counter()
    if not isinstance(answer, dict):
        raise FormatError(place, "must be a JSON object, a chat.completion")
    if "choices" not in answer and "error" in answer:
        raise FormatError(place, f"the engine refused the request: {error_text(answer['error'])}")
    kept = _keep(answer, ANSWER_FIELDS | {"object"}, "", dropped) | {"object": "chat.completion"}
    if isinstance(kept.get("choices"), list):
        kept["choices"] = [_choice(choice, dropped) for choice in kept["choices"]]
    try:
        return ADAPTER.validate_python(kept), dropped
    except ValidationError as error:
        raise FormatError(place, reasons(error, kept)[0]) from None


def _choice(choice: Any, dropped: Counter[str]) -> Any:
    if not isinstance(choice, dict):
        return choice
    kept = _keep(choice, CHOICE_FIELDS, "choices.", dropped)
    if isinstance(message := kept.get("message"), dict):
        kept["message"] = _message(message, dropped)
    return kept


def _message(message: dict[str, Any], dropped: Counter[str]) -> dict[str, Any]:
    message = with_reasoning(message)
    kept = _keep(message, MESSAGE_FIELDS, "choices.message.", dropped)
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
    return kept


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
