from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agent_trace import MCP, Conversation, LLMRequest, from_bytes, to_bytes

text = st.text()
calls = st.fixed_dictionaries(
    {
        "id": text,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": text, "arguments": text}),
    }
)
roles = st.sampled_from(["system", "user", "assistant", "tool"])
messages = st.fixed_dictionaries(
    {"role": roles, "content": text}, optional={"tool_calls": st.lists(calls), "tool_call_id": text}
)
choices = st.fixed_dictionaries(
    {"index": st.integers(0, 9), "message": messages},
    optional={"finish_reason": st.none() | text, "logprobs": st.none()},
)
responses = st.fixed_dictionaries({"model": text, "choices": st.lists(choices)}, optional={"usage": st.just({"n": 1})})
requests = st.fixed_dictionaries(
    {
        "type": st.just("llm_request"),
        "conversation": st.lists(messages, max_size=2),
        "response": responses,
        "model": text,
    },
    optional={"annotation": text},
)
tools = st.fixed_dictionaries(
    {
        "type": st.just("tool_call"),
        "tool_name": text,
        "arguments": st.dictionaries(text, st.none() | text | st.lists(st.booleans())),
        "result": text,
    },
    optional={"cli_output": text},
)
mcp = st.fixed_dictionaries({"type": st.just("mcp")}, optional={"server": text})
entries = st.lists(requests | tools | mcp, max_size=3)
conversations = st.fixed_dictionaries(
    {"model": text, "conversation": st.lists(messages)}, optional={"annotation": text}
)


@given(entries | conversations | st.lists(conversations, max_size=3))
def test_what_is_read_is_written_back_with_every_key(document: Any) -> None:
    assert orjson.loads(to_bytes(from_bytes(orjson.dumps(document)))) == document


@given(st.binary())
def test_arbitrary_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(FormatError):
        from_bytes(content)


def test_the_forms_are_told_apart() -> None:
    assert isinstance(from_bytes(b'{"model": "m", "conversation": []}'), Conversation)
    (short,) = from_bytes(b'[{"model": "m", "conversation": []}]')
    assert isinstance(short, Conversation)
    request = {"type": "llm_request", "model": "m", "conversation": [], "response": {"model": "m", "choices": []}}
    first, second = from_bytes(orjson.dumps([request, {"type": "mcp", "anything": 1}]))
    assert isinstance(first, LLMRequest)
    assert isinstance(second, MCP)


CALL = {"id": "1", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER = {  # of OpenAI's API, and of vLLM's
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_750_000_000,
    "model": "gpt-4o",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "refusal": "I cannot help with that.",
                "annotations": [],
                "audio": None,
                "reasoning_content": None,
                "tool_calls": [
                    {"id": "1", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}
IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
WRITTEN = [  # the set's own example has the second
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user"},
    {"role": "user", "name": "ann", "content": IMAGE},
    {"role": "assistant", "content": None, "refusal": "No."},
]


@pytest.mark.parametrize(
    "document",
    [
        {"model": "m", "conversation": WRITTEN},
        [{"type": "llm_request", "model": "m", "conversation": WRITTEN, "response": ANSWER}],
    ],
)
def test_real_messages_and_answers_are_read_and_written_as_they_are(document: Any) -> None:
    assert orjson.loads(to_bytes(from_bytes(orjson.dumps(document)))) == document


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([{"type": "chat"}], "^Agent Trace: 0: "),
        ([{}], "^Agent Trace: 0: "),
        ([{"type": "llm_request", "model": "m", "conversation": []}], r"0\.response: Field required"),
        ([{"type": "tool_call", "tool_name": "t", "arguments": "x", "result": ""}], r"0\.arguments: "),
        ({"model": "m", "conversation": [{"role": "robot", "content": ""}]}, r"conversation\.0\.role: "),
        ({"model": "m", "conversation": [{"role": "user", "content": 1}]}, r"conversation\.0\.content: "),
        ({"model": "m", "conversation": [], "response": {}}, "response: "),
        ({"model": 1, "conversation": []}, "model: "),
        ([{"model": "m", "conversation": []}, {"type": "mcp"}], r"1\.model: Field required"),
        (3, "Agent Trace: "),
    ],
)
def test_what_the_set_does_not_have_is_refused(document: Any, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        from_bytes(orjson.dumps(document))
