"""A trace as a load: what is sent, when, and which tokens prompts without texts share."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from itertools import takewhile
from operator import eq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.capture.turns.load import CHAT, COMPLETIONS, main, requests_of
from kcap.capture.turns.load import Server as Target
from kcap.capture.turns.sender import Answer, Outcome, Request, Sender
from kcap.errors import CallError
from kcap.schemas.flashinfer.agents import AgentTurns, Asked, link
from kcap.schemas.recording.turns import Turn, TurnMessage, Usage


def turn(number: int, prompt: int = 40, generated: int = 5, **more: Any) -> Turn:
    message = TurnMessage(role="user", chars=9)
    usage = Usage(prompt=prompt, generated=generated)
    return Turn(**{"number": number, "session": number, "status": 200, "messages": [message], "usage": usage, **more})


class Server:
    """Answers each request after `seconds`; what it was asked, and when. `status` 0 breaks the connection."""

    models = b'{"data": [{"id": "served"}]}'

    def __init__(self, status: int = 200, seconds: float = 0.0, tls: ssl.SSLContext | None = None) -> None:
        self.status, self.seconds, self.tls = status, seconds, tls
        self.asked: list[tuple[float, str, Any]] = []
        self.under_way = self.most = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        path = head.split(" ")[1]
        if path == "/v1/models":
            self.write(writer, 200, self.models)
        else:
            self.asked.append((time.monotonic(), path, orjson.loads(body)))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(self.seconds)
            self.under_way -= 1
            if self.status:
                self.write(writer, self.status, b"{}" * 5000)
        await writer.drain()
        writer.close()

    def write(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        half = len(body) // 2
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:])) + b"0\r\n\r\n"
        writer.write(b"HTTP/1.1 %d OK\r\nTransfer-Encoding: chunked\r\n\r\n" % status + chunks)

    def serve(self, trace: AgentTurns, **options: Any) -> Outcome:
        async def run() -> Outcome:
            server = await asyncio.start_server(self.answer, "127.0.0.1", 0, ssl=self.tls)
            port = server.sockets[0].getsockname()[1]
            target = Target(f"{'https' if self.tls else 'http'}://127.0.0.1:{port}")
            outcome = await Sender(target.ask, **options).send(requests_of(trace))
            server.close()
            return outcome

        return asyncio.run(run())


def test_each_turn_follows_its_parent_and_the_time_of_its_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = turn(0, sent=10.0, ended=11.0), turn(1, sent=11.4, ended=12.0, session=0, parent=0, turn=1)
    slept, sleep = [], asyncio.sleep

    async def wait(seconds: float) -> None:
        slept.append((round(seconds, 6), len(server.asked)))
        await sleep(seconds)

    server = Server(seconds=0.1)
    monkeypatch.setattr("kcap.capture.turns.sender.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": wait}))
    outcome = server.serve(AgentTurns([first, second, turn(2, sent=10.2, ended=11.0)]))
    assert (outcome.answered, outcome.failures) == (3, [])
    assert [seconds for seconds, _ in slept] == [0.0, 0.2, 0.4], "at its time; after the answer, that of the tool"
    (began, *_), *_, (then, *_) = server.asked
    assert slept[2][1] >= 1 and then - began > 0.45


def test_speed_divides_waits_and_concurrency_bounds_sessions() -> None:
    turns = [turn(number, sent=100.0 * number) for number in range(6)]
    server = Server(seconds=0.05)
    server.serve(AgentTurns(turns), speed=10_000)
    assert server.asked[-1][0] - server.asked[0][0] < 60
    server = Server(seconds=0.05)
    server.serve(AgentTurns(turns), concurrency=2)
    assert server.most == 2 and len(server.asked) == 6


def test_a_turn_with_texts_is_sent_as_a_chat_with_the_recorded_answers() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "look"}}]
    request = {"model": "then", "tools": tools, "tool_choice": "required", "max_tokens": 900, "temperature": 0.5}
    fields = {"status": 200, "request": request, "usage": Usage(prompt=9, generated=7)}
    asked = [{"role": "user", "content": "Where?"}]
    answer = {"role": "assistant", "tool_calls": [call]}
    more = [*asked, answer, {"role": "tool", "tool_call_id": "c", "content": "Rome"}]
    server = Server()
    server.serve(AgentTurns(link([Asked(asked, answer, fields=fields), Asked(more, None, fields=fields)])))
    (_, path, first), (_, _, second) = server.asked
    assert path == CHAT
    assert (first["model"], first["max_tokens"], first["ignore_eos"], first["tool_choice"]) == (
        "served",
        7,
        True,
        "none",
    )
    assert (first["tools"], first["temperature"]) == (tools, 0.5)
    sent = [{key: value for key, value in message.items() if value is not None} for message in second["messages"]]
    assert sent == more


def sent(trace: AgentTurns, answer: Any = lambda number: ()) -> tuple[list[list[int]], Outcome]:
    """The prompts of made-up tokens, by turn; `answer`: the tokens of each one's answer."""
    prompts: dict[int, list[int]] = {}

    async def ask(request: Request, prompt: list[int] | None) -> Answer:
        assert prompt is not None
        prompts[request.number] = prompt
        return Answer(tokens=answer(request.number))

    outcome = asyncio.run(Sender(ask, speed=1e3).send(requests_of(trace)))
    return [prompts[number] for number in sorted(prompts)], outcome


BLOCKS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None)
@given(blocks=BLOCKS, size=st.sampled_from([16, 128]), cut=st.integers(0, 15))
def test_made_up_prompts_share_what_the_recorded_ones_shared(blocks: list[list[int]], size: int, cut: int) -> None:
    turns = [turn(number, prompt=len(of) * size - cut, api="completion") for number, of in enumerate(blocks)]
    trace = AgentTurns(turns, dict(enumerate(blocks)), size)
    prompts, _ = sent(trace)
    assert [len(prompt) for prompt in prompts] == [of.usage.prompt for of in turns if of.usage]
    for one, first in zip(prompts, blocks, strict=True):
        for other, second in zip(prompts, blocks, strict=True):
            same = len(list(takewhile(bool, map(eq, first, second))))
            shared = len(list(takewhile(bool, map(eq, one, other))))
            assert shared >= min(same * size, len(one), len(other))
            assert shared // size <= same, "no whole block more"


def test_without_blocks_the_turns_of_a_session_share_their_beginning() -> None:
    turns = [turn(0, 100), turn(1, 150, session=0, parent=0, turn=1), turn(2, 100)]
    prompts, outcome = sent(AgentTurns(turns), lambda number: [number] * 5)
    assert prompts[1][:100] == prompts[0] and prompts[2][:16] != prompts[0][:16]
    assert prompts[1][100:105] == [0] * 5, "the answer before it, in the room that there is"
    assert (outcome.answered, outcome.untold) == (3, 0)
    server = Server()
    assert server.serve(AgentTurns(turns)).untold == 1, "it tells no ids"
    assert [path for _, path, _ in server.asked] == [COMPLETIONS] * 3


def test_a_prompt_goes_on_with_the_answer_as_far_as_the_cache_had_it() -> None:
    """The block at the end of the prompt before has another number, and whoever has it later has its tokens."""
    hit = {"session": 0, "parent": 0, "turn": 1}
    turns = [turn(0, 40, 30), turn(1, usage=Usage(prompt=90, cached=64, generated=9), **hit)]
    turns += [
        turn(2, usage=Usage(prompt=120, cached=96, generated=9), session=0, parent=1, turn=2),
        turn(3, 95, 9, sent=50.0),
    ]
    blocks = {0: [0, 1, 2], 1: [0, 1, 3, 4, 5, 6], 2: [0, 1, 3, 4, 5, 7, 8, 9], 3: [0, 1, 3, 4, 10, 11]}
    prompts, _ = sent(AgentTurns(turns, blocks, 16), lambda number: [1000 + number] * 30)
    first, second, third, other = prompts
    assert second[:64] == first + [1000] * 24 and 1000 not in second[64:]
    assert third[:96] == second + [1001] * 6 and 1001 not in third[96:]
    assert other[:64] == second[:64] and other[64:80] != second[64:80]
    assert [len(prompt) for prompt in prompts] == [40, 90, 120, 95]


def test_what_was_refused_or_given_up_is_not_sent_again() -> None:
    turns = [turn(0, status=400), turn(1, aborted=True), turn(2, parent=1)]
    (request,) = requests_of(AgentTurns(turns))
    assert (request.number, request.parent) == (2, None)


def test_a_prompt_of_unknown_length_is_refused() -> None:
    with pytest.raises(CallError, match="neither texts nor the number"):
        requests_of(AgentTurns([turn(0, usage=None)]))


@pytest.mark.parametrize("status", [503, 0])
def test_a_server_that_fails_is_said_and_the_other_turns_are_sent(status: int) -> None:
    outcome = Server(status).serve(AgentTurns([turn(0), turn(1, parent=0, session=0, turn=1)]))
    assert outcome.answered == 0 and len(outcome.failures) == 2


@pytest.mark.parametrize("content", [b"{}", b'{"data": []}', b'{"data": ["a"]}', b"[1]", b'{"data": [{}]}', b"ok"])
def test_a_server_that_names_no_model_is_told_of(content: bytes) -> None:
    server = Server()
    server.models = content
    outcome = server.serve(AgentTurns([turn(0)]))
    assert outcome.failures == [f"turn 0: /v1/models names no model: {content.decode()}"]
    assert server.asked == []


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """One of 127.0.0.1 that nobody else has signed, and a server's context with it."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("no openssl")
    key, file = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([openssl, "req", "-x509", *words, "-keyout", key, "-out", file], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file, key)
    return file, context


def test_a_server_with_tls_is_asked_if_its_certificate_is_trusted(
    certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, context = certificate
    (failure,) = Server(tls=context).serve(AgentTurns([turn(0)])).failures
    assert "certificate verify failed" in failure
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    server = Server(tls=context)
    assert server.serve(AgentTurns([turn(0)])).answered == 1 and len(server.asked) == 1


def test_a_file_that_is_no_trace_ends_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert main([str(tmp_path / "x.json"), "--url", "http://127.0.0.1:1"]) == 2
    assert "no agent trace that kcap knows" in capsys.readouterr().err
