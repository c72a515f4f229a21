"""OpenAI's Responses API as its chat API: typed items as messages, the last event of a stream as an answer.

Items: `message`, `reasoning`, `function_call`, `function_call_output`. Reasoning, a text and tool calls in a row are
one message. Source: OpenAI's API reference, `responses/create` and `responses-streaming`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from kcap.errors import FormatError
from kcap.schemas.flashinfer.openai.chat_stream import error_text
from kcap.schemas.recording.conversations import Message, objects, text_of

TEXTS = ("input_text", "output_text", "text")
ENDS = ("response.completed", "response.incomplete", "response.failed")  # events with the whole answer
PARAMETERS = {"max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p"}  # by the chat's names
ITEMS = ("input", "instructions")  # of a request


def request_messages(request: dict[str, Any], losses: Counter[str]) -> list[Message]:
    """The messages that a request sends. `losses` counts items that are none."""
    given, instructions = request.get("input"), request.get("instructions")
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else objects(given)
    first = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    return [*first, *item_messages(items, losses)]


def chat_request(request: dict[str, Any]) -> dict[str, Any]:
    """`request` without its messages; its tools and the length of its answer as a chat has them."""
    body = {key: value for key, value in request.items() if key not in ITEMS}
    if "max_output_tokens" in body:
        body["max_tokens"] = body.pop("max_output_tokens")
    if isinstance(body.get("tools"), list):
        body["tools"] = [_chat_tool(tool) for tool in objects(body["tools"])]
    return body


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def chat_answer(response: dict[str, Any], losses: Counter[str]) -> dict[str, Any]:
    """`response` with `choices`, of which it has one, and `usage`, as a chat's answer has them."""
    messages = item_messages(objects(response.get("output")), losses) or [_assistant(None, None)]
    reason = response.get("incomplete_details")
    finish = (reason.get("reason") if isinstance(reason, dict) else None) or response.get("status")
    choice = {"index": 0, "message": messages[0], "finish_reason": finish}
    answer = {"id": response.get("id"), "model": response.get("model"), "choices": [choice]}
    usage = response.get("usage")
    return answer | ({"usage": chat_usage(usage)} if isinstance(usage, dict) else {})


def chat_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Counts of tokens, by the chat's names."""
    counts = {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")}
    return counts | {"prompt_tokens_details": usage.get("input_tokens_details")}


def last_response(events: Iterable[Any], place: str = "stream") -> dict[str, Any]:
    """The whole answer, which the last event of a stream has. FormatError where there is none, or an error instead."""
    for number, event in enumerate(events, 1):
        event = event if isinstance(event, dict) else {}
        if event.get("type") == "error" or "error" in event:
            reason = error_text(event.get("error", event))
            raise FormatError(f"{place}: event {number}", f"the engine ended it: {reason}")
        if event.get("type") in ENDS and isinstance(event.get("response"), dict):
            response: dict[str, Any] = event["response"]
            return response
    raise FormatError(place, "broke off before its last event")


def item_messages(items: Iterable[dict[str, Any]], losses: Counter[str]) -> list[Message]:
    """The messages that `items` are; `losses` counts those that are none."""
    messages: list[Message] = []
    reasoning: str | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning = (reasoning or "") + "".join(_reasoning(item))
        elif kind == "function_call":
            last = messages[-1] if messages and messages[-1]["role"] == "assistant" and reasoning is None else None
            if last is None:
                last = _assistant(None, reasoning)
                messages.append(last)
                reasoning = None
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            last.setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            call = {} if item.get("call_id") is None else {"tool_call_id": item["call_id"]}
            messages.append({"role": "tool", "content": text_of(item.get("output")), **call})
        elif kind == "message":
            messages.append(_message(item, reasoning))
            reasoning = None
        else:
            losses[f"an item {str(kind)[:80]}"] += 1
    return messages


def _reasoning(item: dict[str, Any]) -> Iterator[str]:
    """Its texts: OpenAI sends a summary, engines the whole."""
    for part in objects(item.get("summary")) or objects(item.get("content")):
        yield str(part.get("text", ""))


def _assistant(content: Any, reasoning: str | None) -> Message:
    told = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": content, **told}


def _message(item: dict[str, Any], reasoning: str | None) -> Message:
    content, role = item.get("content"), str(item.get("role", "user"))
    if isinstance(content, list):
        texts = [str(part.get("text", "")) for part in objects(content) if part.get("type") in TEXTS]
        others = [part for part in objects(content) if part.get("type") not in TEXTS]
        content = "".join(texts) if texts else None
        if others:
            content = [*({"type": "text", "text": text} for text in texts), *others]
    return _assistant(content, reasoning) if role == "assistant" else {"role": role, "content": content}
