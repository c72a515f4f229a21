from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from kcap.schemas.flashinfer.chat_answers import from_answer

Run = Callable[..., Any]
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Of a real answer that calls a tool, the tool's run, and an MCP interaction."""
    response, _ = from_answer(orjson.loads((DATA / "chat_answers" / "required.json").read_bytes()))
    question = [{"role": "user", "content": "What is the weather?"}]
    request = {"type": "llm_request", "model": "m", "conversation": question, "annotation": "[red]\x1b[1m"}
    tool = {"type": "tool_call", "tool_name": "get_weather", "arguments": {"city": "Rome"}, "result": "sun"}
    path = tmp_path / "trace.json"
    path.write_bytes(orjson.dumps([request | {"response": response.model_dump()}, tool, {"type": "mcp"}]))
    return path


def test_turns_are_listed_with_their_tools_and_tokens(trace: Path, kcap: Run) -> None:
    turns = orjson.loads(kcap("show", trace, "--json").out)["turns"]
    usage = orjson.loads((DATA / "chat_answers" / "required.json").read_bytes())["usage"]
    assert [turn["type"] for turn in turns] == ["llm_request", "tool_call", "mcp"]
    assert [turn["tools"] for turn in turns] == [["get_weather"], ["get_weather"], []]
    assert turns[0]["messages"] == 1
    assert (turns[0]["prompt_tokens"], turns[0]["completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def test_the_table_has_no_text_of_messages_and_no_control_characters(trace: Path, kcap: Run) -> None:
    shown = kcap("show", trace).out
    assert "[red]" in shown
    assert "\x1b" not in shown
    assert "weather?" not in shown


def test_each_answer_in_a_list_of_conversations_is_a_turn(tmp_path: Path, kcap: Run) -> None:
    messages = [{"role": role, "content": ""} for role in ("user", "assistant", "tool", "assistant")]
    path = tmp_path / "trace.json"
    path.write_bytes(orjson.dumps([{"model": "m", "conversation": messages}] * 2))
    shown = orjson.loads(kcap("show", path, "--json", "--top", 3).out)
    assert [(turn["item"], turn["messages"]) for turn in shown["turns"]] == [(0, 1), (0, 3), (1, 1)]
    assert shown["more"] == 1


def test_a_broken_trace_tells_where(tmp_path: Path, kcap: Run) -> None:
    path = tmp_path / "trace.json"
    path.write_text('[{"type": "chat"}]')
    ran = kcap("show", path)
    assert ran.code == 1
    assert "trace.json: 0: " in ran.err
