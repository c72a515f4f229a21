from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agent_trace import Response
from kcap.schemas.flashinfer.chat_answers import from_answer, from_stream
from kcap.schemas.flashinfer.openai.chat_stream import events

REAL = Path(__file__).parents[2] / "data" / "chat_answers"
STREAMS = sorted(path for path in REAL.glob("*.sse") if path.stem != "refused")
OURS_ALONE = {"stop_reason", "token_ids", "routed_experts", "matched_stop"}  # engines' fields that OpenAI has not


def as_json(response: Response) -> Any:
    return response.model_dump(mode="json")


def as_stream(chunks: list[Any], newline: bytes = b"\n") -> bytes:
    lines = [b"data: " + orjson.dumps(chunk) for chunk in chunks]
    return b"".join(line + newline * 2 for line in [*lines, b"data: [DONE]"])


def of_client(parsed: Any) -> Any:
    """What OpenAI's client library made of an answer, without nulls and what only an engine has."""
    return without_nulls(parsed.model_dump(mode="json"))


def without_nulls(value: Any) -> Any:
    """Without what the client adds, too: a call's `index` in a stream, the empty list of calls, `parsed`."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: without_nulls(item) for key, item in value.items() if item is not None and key not in OURS_ALONE}
    if "function" in kept:
        kept.pop("index", None)
        kept["function"].pop("parsed_arguments", None)
    return {key: item for key, item in kept.items() if (key, item) != ("tool_calls", [])}


@pytest.mark.parametrize("path", sorted(path for path in REAL.glob("*.json") if path.stem != "refused"), ids=str)
def test_a_real_answer_is_what_openais_client_parses(path: Path) -> None:
    chat = pytest.importorskip("openai.types.chat", reason="openai is not installed")
    answer = orjson.loads(path.read_bytes())
    foreign = ("prompt_logprobs", "kv_transfer_params", "ec_transfer_params")
    parsed = chat.ChatCompletion.model_validate({k: v for k, v in answer.items() if k not in foreign})
    response, _ = from_answer(answer)
    assert without_nulls(as_json(response)) == of_client(parsed)


@pytest.mark.parametrize("path", STREAMS, ids=str)
def test_a_real_stream_is_joined_as_openais_client_joins_it(path: Path) -> None:
    streaming = pytest.importorskip("openai.lib.streaming.chat", reason="openai is not installed")
    chat = pytest.importorskip("openai.types.chat", reason="openai is not installed")
    state = streaming.ChatCompletionStreamState()
    for data in events(path.read_bytes()):
        if data != b"[DONE]":
            state.handle_chunk(chat.ChatCompletionChunk.model_validate_json(data))
    response, _ = from_stream(path.read_bytes())
    assert without_nulls(as_json(response)) == of_client(state.current_completion_snapshot)


def test_what_only_the_engine_has_is_counted() -> None:
    answer = orjson.loads((REAL / "named.json").read_bytes())
    answer["choices"][0]["matched_stop"] = 2
    answer["choices"][0]["message"]["reasoning"] = "It rains."
    response, dropped = from_answer(answer)
    assert dropped == {"choices.stop_reason": 1, "choices.matched_stop": 1}
    assert as_json(response)["choices"][0]["message"]["reasoning_content"] == "It rains."


@pytest.mark.parametrize("name", ["refused.json", "refused.sse"])
def test_a_refused_request_tells_why(name: str) -> None:
    with pytest.raises(FormatError, match="the engine refused the request: max_tokens=100000 cannot"):
        from_stream((REAL / name).read_bytes())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (STREAMS[0].read_bytes().removesuffix(b"data: [DONE]\n\n"), r"broke off before its \[DONE\]"),
        (b"data: {}\n\ndata: [DONE]\n\n", "event 1: is no chat.completion.chunk"),
        (b"data: {\n\ndata: [DONE]\n\n", "event 1: "),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "event 1: the engine ended it: out of memory"),
        (as_stream([{"choices": [{"index": 1 << 40, "delta": {}}]}]), "event 1: is no chat.completion.chunk"),
        (b"data: [DONE]\n\n", "model: Field required"),
    ],
)
def test_a_malformed_stream_tells_where(content: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        from_stream(content)


def test_a_later_null_takes_nothing_back() -> None:
    ends = [{"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": end}]} for end in ("stop", None)]
    response, _ = from_stream(as_stream([{"model": "m", "usage": {"prompt_tokens": 1}, **ends[0]}, ends[1]]))
    assert response.choices[0].finish_reason == "stop"


pieces = st.lists(st.text(min_size=1), min_size=1, max_size=4)
calls = st.fixed_dictionaries({"id": st.text(min_size=1), "name": st.text(min_size=1), "arguments": pieces})
choices = st.fixed_dictionaries({"content": pieces, "calls": st.lists(calls, max_size=3), "finish": st.text()})


def split(index: int, choice: Any) -> list[Any]:
    """The deltas of one choice: first the role, then its text, then each call's head and arguments, then the end."""
    deltas: list[Any] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in choice["content"]]
    for number, call in enumerate(choice["calls"]):
        head = {"index": number, "id": call["id"], "type": "function", "function": {"name": call["name"]}}
        deltas.append({"tool_calls": [head]})
        deltas += [{"tool_calls": [{"index": number, "function": {"arguments": a}}]} for a in call["arguments"]]
    ends = [None] * (len(deltas) - 1) + [choice["finish"]]
    return [{"index": index, "delta": d, "finish_reason": end} for d, end in zip(deltas, ends, strict=True)]


def whole(index: int, choice: Any) -> Any:
    functions = [{"name": call["name"], "arguments": "".join(call["arguments"])} for call in choice["calls"]]
    message = {"role": "assistant", "content": "".join(choice["content"])}
    if functions:
        ids = [call["id"] for call in choice["calls"]]
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": function} for id, function in zip(ids, functions, strict=True)
        ]
    return {"index": index, "message": message, "finish_reason": choice["finish"]}


@given(st.lists(choices, min_size=1, max_size=3), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data())
def test_a_stream_cut_anywhere_is_joined_to_the_answer(answer: list[Any], newline: bytes, data: st.DataObject) -> None:
    queues = [split(index, choice) for index, choice in enumerate(answer)]
    chunks = []
    while any(queues):  # the choices arrive interleaved, each in its order
        queue = data.draw(st.sampled_from([queue for queue in queues if queue]))
        chunks.append({"id": "1", "model": "m", "choices": [queue.pop(0)]})
    chunks.append({"id": "1", "model": "m", "choices": [], "usage": {"prompt_tokens": 3}})
    response, dropped = from_stream(as_stream(chunks, newline))
    expected = [whole(index, choice) for index, choice in enumerate(answer)]
    written = as_json(response)
    assert (written["choices"], written["usage"], dropped) == (expected, {"prompt_tokens": 3}, {})
    again, dropped = from_answer(written)
    assert (again, dropped) == (response, {})


values = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text()
keys = st.sampled_from(
    ["choices", "index", "delta", "message", "tool_calls", "function", "content", "logprobs", "error"]
)
documents = st.recursive(values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5))


@given(st.binary() | documents.map(lambda document: as_stream([document])))
def test_arbitrary_streams_are_read_or_refused(content: bytes) -> None:
    try:
        from_stream(content)
    except FormatError:
        return


@given(documents)
def test_arbitrary_answers_are_read_or_refused(document: Any) -> None:
    try:
        from_answer(document)
    except FormatError:
        return
