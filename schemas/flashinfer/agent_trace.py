"""The FlashInfer schema set's Agent Trace: what an agent that writes kernels asked, was answered, and called.

Source: the FlashInfer schema set, which has two forms: its examples are objects with a `conversation`, alone or in a
list, its draft of the whole schema a list of entries that each have a `type`. All are read, and written as they were.
Of OpenAI's messages and responses it considers some fields; the others (`refusal`, `annotations`, `name`, an engine's
`reasoning_content`) pass. A message may lack `content`, as in the set's own example; by OpenAI's API it may be null or
a list of parts. Of an `mcp` entry the set fixes the type alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from kcap.schemas.files.jsonfile import dump_json, parse_json
from kcap.schemas.files.strict_model import Size, StrictModel

Role = Literal["system", "user", "assistant", "tool"]


class FunctionCall(StrictModel):
    """The function that is called; `arguments` is a JSON document in a string, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(StrictModel):
    """A call that a message asks for; further fields pass."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(StrictModel):
    """One message of a conversation, in OpenAI's format; further fields pass."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Choice(StrictModel):
    """One answer of the model; further fields pass."""

    model_config = ConfigDict(extra="allow")

    index: Size
    message: Message
    finish_reason: str | None = None


class Response(StrictModel):
    """What the model returned; further fields pass."""

    model_config = ConfigDict(extra="allow")

    model: str
    choices: list[Choice]


class Conversation(StrictModel):
    """The short form: a model's whole conversation, its answers among the messages."""

    model: str
    annotation: str | None = None
    conversation: list[Message]


class LLMRequest(StrictModel):
    """A request to a model: the conversation that it was sent, and its response."""

    type: Literal["llm_request"] = "llm_request"
    conversation: list[Message]
    response: Response
    model: str
    annotation: str | None = None


class ToolExecution(StrictModel):
    """A tool that ran: its arguments by name, its result and what it printed."""

    type: Literal["tool_call"] = "tool_call"
    tool_name: str
    arguments: dict[str, Any]
    result: str
    cli_output: str | None = None


class MCP(StrictModel):
    """An interaction by the Model Context Protocol, whose fields the set leaves open."""

    model_config = ConfigDict(extra="allow")

    type: Literal["mcp"] = "mcp"


Entry: TypeAlias = Annotated[LLMRequest | ToolExecution | MCP, Field(discriminator="type")]
AgentTrace: TypeAlias = Conversation | list[Conversation] | list[Entry]


def _form(trace: Any) -> str:
    """Which form `trace` has, as JSON or read; a list has that of its first item."""
    if not isinstance(trace, list):
        return "object"
    first = trace[0] if trace else None
    is_conversation = isinstance(first, dict) and "conversation" in first and "type" not in first
    return "conversations" if is_conversation or isinstance(first, Conversation) else "entries"


_TAGGED = (
    Annotated[Conversation, Tag("object")]
    | Annotated[list[Conversation], Tag("conversations")]
    | Annotated[list[Entry], Tag("entries")]
)
ADAPTER: TypeAdapter[AgentTrace] = TypeAdapter(Annotated[_TAGGED, Discriminator(_form)])


def from_bytes(content: bytes, place: str = "Agent Trace") -> AgentTrace:
    """The Agent Trace in `content`, in either form; FormatError names what is wrong in `place`."""
    return parse_json(content, ADAPTER, place)


def to_bytes(trace: AgentTrace) -> bytes:
    """The JSON document of `trace`, indented, in the form that it has."""
    return dump_json(ADAPTER.dump_python(trace, mode="json"))


def read(path: Path) -> AgentTrace:
    """The Agent Trace in `path`; FormatError if it has a field too many, too few or of the wrong kind."""
    return from_bytes(path.read_bytes(), str(path))


def write(path: Path, trace: AgentTrace) -> None:
    """Write `trace`."""
    path.write_bytes(to_bytes(trace))
