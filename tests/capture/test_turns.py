"""What a server is asked and answers, seen by kcap's middleware: nothing changed, turns joined, no text kept."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcap.capture.fold.turns import by_turn, merge_turns
from kcap.capture.session import SESSION_VARIABLE, Session
from kcap.capture.turns import log, middleware
from kcap.capture.turns.middleware import TurnRecorder
from kcap.schemas.recording import conversations
from kcap.schemas.recording.recording import Request
from kcap.schemas.recording.turns import Turn, conversation, tools_of

REAL = Path(__file__).parents[1] / "data" / "chat_answers"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
JSON, STREAM = b"application/json", b"text/event-stream; charset=utf-8"
NAMES = ("role", "content", "tool_calls", "function", "name", "message", "delta", "index", "text", "type", "error")
ITEMS = ("input", "output", "response", "id")
SECRET = "sk-0123456789abcdef"


class Server:
    """`answers`: of each request a status, a content type, and the pieces of the body; the last may be an exception."""

    def __init__(self, *answers: tuple[int, bytes, list[Any]]) -> None:
        self.answers = list(answers)
        self.received: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.received.append(body)
        status, kind, pieces = self.answers.pop(0)
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        for piece in pieces:
            if isinstance(piece, BaseException):
                raise piece
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


Ask = Callable[..., list[bytes]]


def ask(app: Any, body: bytes, path: str = CHAT, cut: int = 100) -> list[bytes]:
    """What the client gets."""
    return asyncio.run(exchanged(app, body, path, cut))


async def exchanged(app: Any, body: bytes, path: str = CHAT, cut: int = 100) -> list[bytes]:
    pieces = [body[start : start + cut] for start in range(0, len(body), cut)] or [b""]
    waiting = [{"type": "http.request", "body": p, "more_body": p is not pieces[-1]} for p in pieces]
    got: list[bytes] = []

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            got.append(message["body"])

    await app({"type": "http", "method": "POST", "path": path}, receive, send)
    return got


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    return started(tmp_path / "shards", monkeypatch)


def started(directory: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Session:
    session = Session(str(directory), agent_trace=True, hash_key="a key", **more)
    session.write()
    monkeypatch.setenv(SESSION_VARIABLE, str(session.file))
    monkeypatch.setattr(middleware, "ExchangeSender", log.TurnLog)  # in this process, without the way to another
    return session


def turns_of(session: Session, requests: Iterable[Request] = ()) -> list[Turn]:
    turns, notes = merge_turns(Path(session.directory), list(requests))
    assert notes == []
    return turns


def question(*messages: dict[str, Any], **more: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": list(messages), "max_tokens": 64, **more})


USER = {"role": "user", "content": "What is the weather in Rome?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


def real(name: str) -> tuple[int, bytes, list[Any]]:
    content = (REAL / name).read_bytes()
    if name.endswith(".json"):
        return 400 if name.startswith("refused") else 200, JSON, [content]
    return 200, STREAM, [content[start : start + 97] for start in range(0, len(content), 97)]


@pytest.mark.parametrize("name", sorted(path.name for path in REAL.glob("*.json") if path.stem != "refused"))
def test_a_streamed_answer_is_the_same_turn_as_a_whole_one(session: Session, name: str) -> None:
    stream = name.replace(".json", ".sse")
    if not (REAL / stream).exists():
        pytest.skip("no stream of it was recorded")
    app = TurnRecorder(Server(real(name), real(stream)))
    for one in (name, stream):
        assert b"".join(ask(app, question(USER))) == (REAL / one).read_bytes()
    whole, streamed = turns_of(session)
    assert [len(turn.answers) for turn in (whole, streamed)] == [len(whole.answers)] * 2
    assert whole.id and whole.id == orjson.loads((REAL / name).read_bytes())["id"]
    usage = orjson.loads((REAL / name).read_bytes())["usage"]
    assert whole.usage is not None
    assert (whole.usage.prompt, whole.usage.generated) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert not whole.unread and not streamed.unread and not streamed.aborted


def test_what_the_client_and_the_server_get_is_what_they_sent(session: Session) -> None:
    answer = real("plain.sse")
    server = Server(answer)
    got = ask(TurnRecorder(server), question(USER, stream=True))
    assert server.received == [question(USER, stream=True)]
    assert got == [*answer[2], b""], "piece by piece"


def talk(app: Any, server: Server, *answers: str) -> list[dict[str, Any]]:
    """A conversation: each answer is sent back, with a tool's result or another question."""
    messages = [{"role": "system", "content": "You help."}, USER]
    for name in answers:
        server.answers.append(real(name))
        ask(app, question(*messages, tools=[TOOL]))
        message = dict(orjson.loads((REAL / name).read_bytes())["choices"][0]["message"])
        messages.append({key: value for key, value in message.items() if value is not None})
        calls = message.get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in calls]
        messages += [] if calls else [{"role": "user", "content": "And tomorrow?"}]
    return messages


def test_a_turn_goes_on_with_the_one_whose_messages_it_repeats(session: Session) -> None:
    server = Server()
    app = TurnRecorder(server)
    messages = talk(app, server, "required.json", "plain.json", "plain.json")
    talk(app, server, "named.json")
    first, second, third, other = turns_of(session)
    assert [(t.session, t.turn, t.parent) for t in (first, second, third, other)] == [
        (0, 0, None),
        (0, 1, 0),
        (0, 2, 1),
        (1, 0, None),
    ]
    assert tools_of(first) == ["get_weather"] and first.tools == ["get_weather"]
    assert [message.role for message in second.messages] == ["tool"]
    assert second.shared == 3
    assert [m.role for m in conversation(turns_of(session), third)] == [m["role"] for m in messages[:-2]]


def test_a_client_may_write_an_answer_without_text_in_another_way(session: Session) -> None:
    """OpenAI's own has `content: null` beside tool calls, and more members that say nothing."""
    message = orjson.loads((REAL / "required.json").read_bytes())["choices"][0]["message"]
    (call,) = message["tool_calls"]
    again = {"role": "assistant", "content": message["content"] or None, "tool_calls": [call], "audio": None}
    app = TurnRecorder(Server(real("required.json"), real("plain.json")))
    ask(app, question(USER))
    ask(app, question(USER, again, {"role": "tool", "tool_call_id": call["id"], "content": "sun"}))
    assert [turn.parent for turn in turns_of(session)] == [None, 0]
    assert turns_of(session)[1].shared == 2


def test_no_text_is_kept_unless_it_is_asked_for_and_then_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = {"role": "user", "content": f"My key is {SECRET}, and the magic word is xyzzy."}
    kept = {}
    for keep in (False, True):
        session = started(tmp_path / str(keep), monkeypatch, keep_text=keep)
        ask(TurnRecorder(Server(real("required.json"))), question(user, tools=[TOOL]))
        (turn,) = turns_of(session)
        kept[keep] = turn.line()
        assert turn.messages[0].chars == len(user["content"])
        files = [path.read_bytes() for path in Path(session.directory).iterdir() if path.name != "session.json"]
        assert all(SECRET.encode() not in content for content in files)
        assert any(b"xyzzy" in content for content in files) == keep
    assert b"Rome" not in kept[False] and b"arguments" in kept[True]


def test_a_refused_request_tells_its_status_and_kind_and_no_text(session: Session) -> None:
    ask(TurnRecorder(Server(real("refused.json"))), question(USER))
    (turn,) = turns_of(session)
    assert (turn.status, turn.error, turn.answers) == (400, "BadRequestError", [])
    assert b"max_tokens=" not in turn.line()


class Gone(Exception):
    pass


def test_a_client_that_goes_away_leaves_a_turn_that_says_so(session: Session) -> None:
    content = (REAL / "plain.sse").read_bytes()
    app = TurnRecorder(Server((200, STREAM, [content[:900], Gone()]), real("plain.json")))
    with pytest.raises(Gone):
        ask(app, question(USER))
    ask(app, question(USER))
    gone, whole = turns_of(session)
    assert gone.aborted and gone.unread == "answer: broke off before its [DONE]".removeprefix("answer: ")
    assert gone.id == orjson.loads(content[6 : content.index(b"\n")])["id"], "by which its request is found"
    assert not whole.aborted and whole.session != gone.session


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'data: {"choices": 3}\n\ndata: [DONE]\n\n', "is no chat.completion.chunk"),
        (b"data: {half\n\n", "event 1"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "the engine ended it"),
        (b"", "broke off"),
    ],
)
def test_a_malformed_stream_reaches_the_client_and_is_said(session: Session, content: bytes, reason: str) -> None:
    got = ask(TurnRecorder(Server((200, STREAM, [content]))), question(USER))
    assert b"".join(got) == content
    (turn,) = turns_of(session)
    assert turn.unread
    assert reason in turn.unread or reason == "event 1"


def test_text_completions_are_turns_too(session: Session) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    answer = {"id": "cmpl-1", "choices": [{"index": 0, "text": "a b", "finish_reason": "length"}], "usage": usage}
    chunks = [{"id": "cmpl-2", "choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("a ", "b")]
    stream = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    app = TurnRecorder(Server((200, JSON, [orjson.dumps(answer)]), (200, STREAM, [stream])))
    for prompt in ("one two three", [[1, 2, 3], [4]]):
        ask(app, orjson.dumps({"model": "m", "prompt": prompt}), COMPLETIONS)
    requests = [Request(id="cmpl-1-0-0123abcd"), Request(id="cmpl-2-0-00000000"), Request(id="cmpl-2-1-11111111")]
    whole, streamed = turns_of(session, requests)
    assert [message.chars for message in whole.messages + streamed.messages] == [13, 3, 1]
    assert whole.usage is not None and (whole.usage.cached, whole.usage.generated) == (1, 2)
    assert [answer.chars for answer in whole.answers + streamed.answers] == [3, 3]
    assert (whole.requests, streamed.requests) == ([0], [1, 2])


RAIN = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Does it rain?"}]}
FUNCTION = {"type": "function", "name": "get_weather", "strict": True, "parameters": {"type": "object"}}


def responses(*items: dict[str, Any], **more: Any) -> bytes:
    return orjson.dumps({"model": "m", "instructions": "Be brief.", "input": list(items), "tools": [FUNCTION], **more})


@pytest.mark.parametrize("name", ["plain", "required"])
def test_a_response_is_a_turn_whole_and_streamed(session: Session, name: str) -> None:
    openai = pytest.importorskip("openai")
    contents = [(REAL / "responses" / f"{name}.{ending}").read_bytes() for ending in ("json", "sse")]
    app = TurnRecorder(Server((200, JSON, [contents[0]]), (200, STREAM, [contents[1]])))
    for stream in (False, True):
        ask(app, responses(RAIN, max_output_tokens=9, stream=stream), RESPONSES)
    told = [contents[0], contents[1].rpartition(b"data: ")[2].strip()]
    whole = [
        openai.types.responses.Response.model_validate(orjson.loads(text).get("response", orjson.loads(text)))
        for text in told
    ]
    turns = turns_of(session, [Request(id=f"{response.id}_0-0123abcd") for response in whole])
    for number, (turn, response) in enumerate(zip(turns, whole, strict=True)):
        assert (turn.id, turn.unread, turn.requests, turn.parameters) == (response.id, "", [number], {"max_tokens": 9})
        assert (turn.tools, [message.role for message in turn.messages]) == (["get_weather"], ["system", "user"])
        assert tools_of(turn) == [item.name for item in response.output if item.type == "function_call"]
        assert turn.usage is not None and turn.usage.prompt == response.usage.input_tokens
        assert turn.usage.generated == response.usage.output_tokens
        assert turn.answers[0].finish == ("completed" if name == "required" else "max_output_tokens")


def test_items_that_come_again_are_the_same_conversation(session: Session) -> None:
    content = (REAL / "responses" / "required.json").read_bytes()
    app = TurnRecorder(Server((200, JSON, [content]), (200, JSON, [content])))
    calls = orjson.loads(content)["output"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "no"} for call in calls]
    ask(app, responses(RAIN), RESPONSES)
    ask(app, responses(RAIN, *calls, *results, {"type": "web_search_call"}), RESPONSES)
    first, second = turns_of(session)
    assert (second.session, second.parent, second.turn) == (first.session, 0, 1)
    assert [message.role for message in second.messages] == ["tool"] * len(calls)
    assert (first.unread, second.unread) == ("", "not told: an item web_search_call")


def test_a_streamed_response_that_breaks_off_is_said(session: Session) -> None:
    content = (REAL / "responses" / "plain.sse").read_bytes()
    cut = content[: content.rindex(b"event: ")]
    ask(TurnRecorder(Server((200, STREAM, [cut]))), responses(RAIN), RESPONSES)
    (turn,) = turns_of(session)
    assert turn.unread == "broke off before its last event" and turn.id.startswith("resp_")


def test_several_answers_to_one_request_are_joined_with_all_of_its_requests(session: Session) -> None:
    ask(TurnRecorder(Server(real("two.json"))), question(USER, n=2))
    name = orjson.loads((REAL / "two.json").read_bytes())["id"]
    (turn,) = turns_of(session, [Request(id=f"{n}_{name}-0123abcd") for n in range(2)])
    assert turn.requests == [0, 1] and len(turn.answers) == 2


def test_a_request_is_of_the_turn_with_the_longest_name() -> None:
    names = ["chatcmpl-task-1-0ab1", "chatcmpl-task-1-2-0ab1"]
    places = by_turn([Request(id=name) for name in names], {"chatcmpl-task-1", "chatcmpl-task-1-2", "chatcmpl-task"})
    assert places == {"chatcmpl-task-1": [0], "chatcmpl-task-1-2": [1]}


def test_what_is_under_way_is_bounded_and_the_client_is_served(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "MOST_BYTES", 1000)
    app = TurnRecorder(Server(real("named.sse"), real("plain.json")))
    assert b"".join(ask(app, question(USER))) == (REAL / "named.sse").read_bytes()
    ask(app, question(USER))
    dropped, kept = turns_of(session)
    assert "too many bytes" in dropped.unread and not kept.unread
    assert app._bytes == 0


def test_conversations_that_may_be_gone_on_with_are_bounded(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MOST_PLACES", 4)
    app = TurnRecorder(Server(*[real("plain.json")] * 10))
    for number in range(10):
        ask(app, question({"role": "user", "content": str(number)}))
    assert app._log is not None and len(app._log._conversations) == 4


def test_a_session_takes_few_bytes_of_a_servers_memory(session: Session) -> None:
    """Two turns each, the second of which goes on with the first: 10,000 sessions take some 10 MB."""
    sessions, answer = 1_000, real("plain.json")
    server = Server(*[answer] * (2 * sessions))
    app = TurnRecorder(server)
    known = orjson.loads(answer[2][0])["choices"][0]["message"]
    tracemalloc.start()
    loop = asyncio.new_event_loop()
    for number in range(sessions):
        first = {"role": "user", "content": str(number)}
        for messages in ([first], [first, known, USER]):
            loop.run_until_complete(exchanged(app, question(*messages)))
            server.received.clear()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    loop.close()
    assert peak < 2048 * sessions
    turns = turns_of(session)
    assert [len(turns), turns[-1].session, turns[-1].turn] == [2 * sessions, sessions - 1, 1]


def test_a_client_that_reads_slowly_holds_the_server_back_and_has_one_turn(session: Session) -> None:
    """The next piece is made when the client has taken the last one, as without kcap."""
    events: list[str] = []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", STREAM)]})
        for piece in real("plain.sse")[2]:
            events.append("made")
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        return {"type": "http.request", "body": question(USER)}

    async def send(message: Any) -> None:
        if message.get("body"):
            await asyncio.sleep(0.001)
            events.append("taken")

    asyncio.run(TurnRecorder(server)({"type": "http", "method": "POST", "path": CHAT}, receive, send))
    assert events == ["made", "taken"] * (len(events) // 2) and len(events) > 4
    (turn,) = turns_of(session)
    assert turn.status == 200 and not turn.aborted and turn.answers[0].chars
    assert turn.first is not None and turn.ended - turn.first >= 0.001 * (len(events) // 2 - 1)


@pytest.mark.parametrize("ending", ["answered", "gone"])
def test_a_turn_ends_with_its_answer_or_client_and_not_with_the_servers_own_tasks(
    session: Session, ending: str
) -> None:
    """SGLang's server waits for two seconds after each streamed answer, and may be killed meanwhile."""
    left: list[Turn] = []
    messages: list[Any] = [{"type": "http.request", "body": question(USER)}, {"type": "http.disconnect"}]
    pieces = real("plain.sse")[2]

    async def server(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", STREAM)]})
        await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
        if ending == "answered":
            await send({"type": "http.response.body", "body": b""})
        await receive()
        left.extend(turns_of(session))
        await send({"type": "http.response.body", "body": b"and what nobody reads"})

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    asyncio.run(TurnRecorder(server)({"type": "http", "method": "POST", "path": CHAT}, receive, send))
    (turn,) = left
    assert turns_of(session) == left
    assert turn.ended >= turn.sent and turn.aborted == (ending == "gone") and turn.id


def test_a_full_disk_ends_the_trace_and_not_the_server(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log.TurnLog, "add", full)
    app = TurnRecorder(Server(real("plain.json"), real("plain.json")))
    for _ in range(2):
        assert b"".join(ask(app, question(USER))) == (REAL / "plain.json").read_bytes()
    (notes,) = Path(session.directory).glob("*.notes")
    assert b"No space left" in notes.read_bytes()


def test_a_reason_that_could_not_be_written_leaves_room_for_the_next(session: Session) -> None:
    (Path(session.directory) / log.NOTES).touch()  # as a full disk leaves it
    for reason in ("first", "second"):
        log.note_failure(session, OSError(reason))
    assert (Path(session.directory) / log.NOTES).read_bytes().count(b"OSError") == 1
    assert b"first" in (Path(session.directory) / log.NOTES).read_bytes()


def test_outside_a_recording_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SESSION_VARIABLE, raising=False)
    assert b"".join(ask(TurnRecorder(Server(real("plain.json"))), question(USER))) == (REAL / "plain.json").read_bytes()


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES + ITEMS), inner, max_size=4),
    max_leaves=8,
)
CHOICES = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), max_size=2)
BODIES = st.one_of(
    st.just(question(USER)),
    st.binary(max_size=60),
    VALUES.map(orjson.dumps),
    st.fixed_dictionaries({"messages": CHOICES | VALUES, "tools": VALUES, "prompt": VALUES, "input": VALUES}).map(
        orjson.dumps
    ),
)
ANSWERS = st.one_of(
    st.binary(max_size=60),
    VALUES.map(orjson.dumps),
    st.fixed_dictionaries({"choices": CHOICES | VALUES, "usage": VALUES, "id": VALUES}).map(orjson.dumps),
    st.fixed_dictionaries({"type": st.just("response.completed"), "response": VALUES, "output": VALUES}).map(
        orjson.dumps
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=BODIES,
    answer=ANSWERS,
    streamed=st.booleans(),
    path=st.sampled_from([CHAT, COMPLETIONS, RESPONSES]),
    keep=st.booleans(),
)
def test_whatever_goes_by_is_passed_on_and_leaves_one_turn(
    session: Session, body: bytes, answer: bytes, streamed: bool, path: str, keep: bool
) -> None:
    for old in Path(session.directory).glob("*.turns"):
        old.unlink()
    if streamed:
        answer = b"data: " + answer + b"\n\ndata: [DONE]\n\n"
    app = TurnRecorder(Server((200, STREAM if streamed else JSON, [answer])))
    assert app._log is not None
    app._log._keep_text = keep
    assert b"".join(ask(app, body, path)) == answer
    assert app._log is not None, "nothing was raised"
    assert len(turns_of(session)) == 1
