"""A trace as a load: sends its turns to a server, each after the turn that it goes on with and the time between them.

    python -m kcap.capture.turns.load TRACE --url http://127.0.0.1:8000 [--speed 1] [--concurrency N]

TRACE is a Recording with turns, or a file of any form that kcap reads. A turn whose texts were kept is sent as a chat,
with the recorded answers before it, so that its prompt is the same. Of one without texts the tokens are made up, as
many as it had, and two prompts share those that theirs shared, by their blocks or, where there are none, by their
session; what a prompt had of the answer before it is the live one's. Every answer has as many tokens as the recorded
one; none is ended by a grammar or a tool's call.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.turns.blocks import BLOCK
from kcap.capture.turns.sender import Answer, MadeUpPrompt, Request, Sender, report_outcome
from kcap.errors import CallError, KcapError
from kcap.schemas.flashinfer.agents import AgentTurns, texts_of, turns_in
from kcap.schemas.recording.conversations import objects
from kcap.schemas.recording.turns import Turn, Usage

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
DEFAULT_ANSWER = 64  # tokens, where the trace does not tell
SENT_ANEW = (
    *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "n"),
    *("stop", "tool_choice", "response_format"),  # what ends an answer before it has its length
)


def requests_of(trace: AgentTurns) -> list[Request]:
    """One for each turn that the engine answered; the others were refused, or the client went away.

    CallError where one can be neither sent as it was nor made up.
    """
    sent = [turn for turn in trace.turns if turn.status in (200, None) and not turn.aborted]
    numbers = {turn.number for turn in sent}
    start = min((turn.sent for turn in sent), default=0.0)
    requests = []
    for turn in sent:
        parent = trace.turns[turn.parent] if turn.parent in numbers and turn.parent is not None else None
        wait = max(0.0, turn.sent - (parent.ended if parent else start))
        body, prompt = _body(trace, turn), None
        if body is None:
            body, prompt = {"temperature": 0}, _made_up(trace, turn, parent)
        tokens = (turn.usage.generated if turn.usage else None) or DEFAULT_ANSWER
        requests.append(Request(turn.number, parent.number if parent else None, wait, body, tokens, prompt))
    return requests


def _body(trace: AgentTurns, turn: Turn) -> dict[str, Any] | None:
    """Of a chat; None where its texts were not kept."""
    messages = texts_of(trace, turn)
    if messages is None:
        return None
    request = turn.request or turn.parameters
    if turn.api == "responses":  # sent as a chat, which has fewer members
        functions = [tool for tool in objects(request.get("tools")) if "function" in tool]
        request = turn.parameters | ({"tools": functions} if functions else {})
    kept = {name: value for name, value in request.items() if name not in SENT_ANEW}
    return {**kept, **({"tool_choice": "none"} if "tools" in kept else {}), "messages": messages}


def _made_up(trace: AgentTurns, turn: Turn, parent: Turn | None) -> MadeUpPrompt:
    """CallError where the length of the turn's prompt is not known."""
    usage = turn.usage
    if usage is None or usage.prompt is None:
        raise CallError(f"turn {turn.number} of the trace has neither texts nor the number of its prompt's tokens")
    blocks, size = trace.blocks.get(turn.number), trace.block_size
    if blocks is None:
        blocks, size = [(turn.session << 32) + place for place in range(-(-usage.prompt // BLOCK))], BLOCK
    return MadeUpPrompt(blocks, size, usage.prompt, _of_answer(usage, parent.usage if parent else None))


def _of_answer(usage: Usage, before: Usage | None) -> int:
    """Tokens of the answer before it that a prompt goes on with: those that the cache had or, where that is not known,
    all, if there is room for them."""
    if before is None or before.prompt is None or before.generated is None or usage.prompt is None:
        return 0
    room = (usage.prompt if usage.cached is None else usage.cached) - before.prompt
    if usage.cached is None and room < before.generated:
        return 0
    return max(0, min(room, before.generated))


class Server:
    """A server of OpenAI's API at `url`; with https its certificate must be one that OpenSSL trusts."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or (443 if self._tls else 80)
        self._model: str | None = None

    async def ask(self, request: Request, prompt: list[int] | None) -> Answer:
        """OSError, ValueError or IncompleteReadError where the connection breaks."""
        if self._model is None:
            status, content = await self._ask("GET", MODELS, b"")
            self._model = _first_model(content) if status == 200 else ""
            if self._model is None:
                return Answer(f"{MODELS} names no model: {content[:200].decode(errors='replace')}")
        body = {"model": self._model, **request.body, "max_tokens": request.tokens, "ignore_eos": True}
        if prompt is not None:
            body |= {"prompt": prompt, "return_token_ids": True}
        status, content = await self._ask("POST", CHAT if prompt is None else COMPLETIONS, orjson.dumps(body))
        if status != 200:
            return Answer(f"{status} {content[:200].decode(errors='replace')}")
        return Answer(tokens=[] if prompt is None else _tokens(content))

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """One request of HTTP/1.1 on a connection of its own: the status and the body."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=1 << 20)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            status, headers = _head(await reader.readuntil(b"\r\n\r\n"))
            content = await reader.read(-1)
        finally:
            writer.close()
        return status, b"".join(_chunks(content)) if "chunked" in headers.get("transfer-encoding", "") else content


def _first_of(content: bytes, member: str) -> dict[str, Any]:
    """The first object of the list that an answer has as `member`; empty in an answer of another form."""
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {}
    return next(iter(objects(answer.get(member)) if isinstance(answer, dict) else []), {})


def _first_model(content: bytes) -> str | None:
    name = _first_of(content, "data").get("id")
    return name if isinstance(name, str) else None


def _tokens(content: bytes) -> list[int]:
    """The ids of an answer's tokens, where the server tells them."""
    ids = _first_of(content, "choices").get("token_ids")
    return ids if isinstance(ids, list) and all(type(token) is int for token in ids) else []


def _head(content: bytes) -> tuple[int, dict[str, str]]:
    line, *lines = content.decode("latin-1").split("\r\n")
    pairs = (header.partition(":") for header in lines if header)
    return int(line[len("HTTP/1.1 ") :][:3]), {name.lower(): value.strip() for name, _, value in pairs}


def _chunks(content: bytes) -> Iterator[bytes]:
    while content:
        size, _, rest = content.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        yield rest[:length]
        content = rest[length + 2 :] if length else b""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m kcap.capture.turns.load")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--concurrency", type=int)
    args = parser.parse_args(words)
    try:
        requests = requests_of(turns_in(args.trace)[0])
    except KcapError as error:
        print(f"kcap: {error}", file=sys.stderr)
        return error.exit_code
    outcome = asyncio.run(Sender(Server(args.url).ask, args.speed, args.concurrency).send(requests))
    report_outcome(outcome, len(requests))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
