"""What `kcap show` says of an agent trace: its turns in order, with the tools that each asked for and its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from kcap.schemas.flashinfer.agent_trace import AgentTrace, Conversation, Entry, LLMRequest, Message, ToolExecution
from kcap.schemas.validation.report import printable
from kcap.show.console import plain_table


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One answer of a model, or a tool or MCP interaction that the trace lists by itself.

    `item`: its conversation's or entry's place in the trace, from 0. `messages`: those that the model was sent.
    `tools`: names of what the answer calls, or of the tool that ran. Tokens None: the trace does not tell.
    """

    item: int
    type: str
    model: str = ""
    messages: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str = ""
    tools: tuple[str, ...] = ()
    annotation: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def turn_rows(trace: AgentTrace) -> list[TurnRow]:
    """One row an answer of a model, in the trace's order; of several choices to one request, the first."""
    items: Sequence[Conversation | Entry] = trace if isinstance(trace, list) else [trace]
    return [row for number, item in enumerate(items) for row in _rows(number, item)]


def _rows(number: int, item: Conversation | Entry) -> Iterator[TurnRow]:
    if isinstance(item, Conversation):
        for place, message in enumerate(item.conversation):
            if message.role == "assistant":
                yield TurnRow(
                    number, "llm_request", item.model, place, tools=_tools(message), annotation=item.annotation or ""
                )
    elif isinstance(item, LLMRequest):
        yield _request_row(number, item)
    elif isinstance(item, ToolExecution):
        yield TurnRow(number, item.type, tools=(item.tool_name,))
    else:
        yield TurnRow(number, item.type)


def _request_row(number: int, request: LLMRequest) -> TurnRow:
    usage = _object((request.response.model_extra or {}).get("usage"))
    choice = request.response.choices[0] if request.response.choices else None
    return TurnRow(
        number,
        request.type,
        request.model,
        len(request.conversation),
        _count(usage.get("prompt_tokens")),
        _count(_object(usage.get("prompt_tokens_details")).get("cached_tokens")),
        _count(usage.get("completion_tokens")),
        (choice.finish_reason or "") if choice else "",
        _tools(choice.message) if choice else (),
        request.annotation or "",
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


def _tools(message: Message) -> tuple[str, ...]:
    return tuple(call.function.name for call in message.tool_calls or ())


def turn_table(rows: Sequence[TurnRow]) -> Table:
    """The rows for `print_table`; `·` stands for what the trace does not tell. No message's text is in it."""
    table = plain_table(
        ("item", "messages", "prompt", "cached", "generated"), ("type", "model", "finish", "tools", "annotation")
    )
    for row in rows:
        counts = (row.messages, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
        texts = (row.type, row.model, row.finish_reason, ", ".join(row.tools), row.annotation)
        cells = [str(row.item), *("·" if count is None else f"{count:,}" for count in counts)]
        table.add_row(*cells, *(Text(printable(text)) for text in texts))
    return table
