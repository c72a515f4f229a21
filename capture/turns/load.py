"""A trace as a load: sends its turns to a server, each after the turn that it goes on with and the time between them.

    python -m kcap.capture.turns.load TRACE --url http://127.0.0.1:8000 [--speed 1] [--concurrency N]

TRACE is a Recording with turns, or a file of any form that kcap reads. A turn whose texts were kept is sent as a chat,
with the recorded answers before it, so that its prompt is the same. Of one without texts the tokens are made up, as
many as it had, and two prompts share those that theirs shared, by their blocks or, where there are none, by their
session. Every answer has as many tokens as the recorded one; none is ended by a grammar or a tool's call.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.turns.blocks import BLOCK
from kcap.errors import CallError, KcapError
from kcap.schemas.flashinfer.agents import AgentTurns, texts_of, turns_in
from kcap.schemas.recording.conversations import objects
from kcap.schemas.recording.turns import Turn

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
TOKENS = range(10, 250)  # that every vocabulary has
DEFAULT_ANSWER = 64  # tokens, where the trace does not tell
SENT_ANEW = (
    *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "n"),
    *("stop", "tool_choice", "response_format"),  # what ends an answer before it has its length
)


@dataclass(frozen=True)
class Request:
    """What to send for a turn. `wait`: seconds after the answer of `parent` or, of a first turn, after the start."""

    number: int
    parent: int | None
    wait: float
    path: str
    body: dict[str, Any]


@dataclass
class Outcome:
    """What came of a load: how many were answered, and the first reasons why others were not."""

    answered: int = 0
    failures: list[str] = field(default_factory=list)


def requests_of(trace: AgentTurns) -> list[Request]:
    """One for each turn that the engine answered; the others were refused, or the client went away."""
    sent = [turn for turn in trace.turns if turn.status in (200, None) and not turn.aborted]
    numbers = {turn.number for turn in sent}
    start = min((turn.sent for turn in sent), default=0.0)
    tokens = _MadeUpTokens(trace)
    requests = []
    for turn in sent:
        parent = trace.turns[turn.parent] if turn.parent in numbers and turn.parent is not None else None
        before = parent.ended if parent else start
        path, body = _body(trace, turn, tokens)
        requests.append(
            Request(turn.number, parent.number if parent else None, max(0.0, turn.sent - before), path, body)
        )
    return requests


def _body(trace: AgentTurns, turn: Turn, tokens: _MadeUpTokens) -> tuple[str, dict[str, Any]]:
    generated = turn.usage.generated if turn.usage else None
    wanted = {"max_tokens": generated or DEFAULT_ANSWER, "ignore_eos": True}
    messages = texts_of(trace, turn)
    if messages is not None:
        request = turn.request or turn.parameters
        if turn.api == "responses":  # sent as a chat, which has fewer members
            functions = [tool for tool in objects(request.get("tools")) if "function" in tool]
            request = turn.parameters | ({"tools": functions} if functions else {})
        kept = {name: value for name, value in request.items() if name not in SENT_ANEW}
        chosen = {"tool_choice": "none"} if "tools" in kept else {}
        return CHAT, {**kept, **chosen, "messages": messages, **wanted}
    return COMPLETIONS, {"prompt": tokens.of(turn), "temperature": 0, **wanted}


class _MadeUpTokens:
    """Prompts of made-up tokens that share as many with each other as the trace's do."""

    def __init__(self, trace: AgentTurns) -> None:
        self._trace = trace
        self._prompts: dict[int, int] = {}  # of a turn, where there are no blocks: the tokens that it goes on from

    def of(self, turn: Turn) -> list[int]:
        """CallError where the length of the turn's prompt is not known."""
        length = turn.usage.prompt if turn.usage else None
        if length is None:
            raise CallError(f"turn {turn.number} of the trace has neither texts nor the number of its prompt's tokens")
        blocks, size = self._trace.blocks.get(turn.number), self._trace.block_size
        if blocks is None:
            blocks, size = [(turn.session << 32) + place for place in range(-(-length // BLOCK))], BLOCK
        prompt = [token for block in blocks for token in _block(block, size)][:length]
        return prompt + _block(-1 - turn.number, length - len(prompt))


@cache
def _block(number: int, size: int) -> list[int]:
    draw = random.Random(number)
    return [draw.choice(TOKENS) for _ in range(size)]


class Sender:
    """Sends requests to the server at `url`. `speed`: divides every wait; `concurrency`: most sessions at a time, which
    then begin as soon as one has ended."""

    def __init__(self, url: str, speed: float = 1.0, concurrency: int | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._speed, self._concurrency = speed, concurrency
        self.outcome = Outcome()

    async def send(self, requests: list[Request]) -> Outcome:
        """All of them; returns when the last is answered."""
        status, content = await self._ask("GET", MODELS, b"")
        model = orjson.loads(content)["data"][0]["id"] if status == 200 else ""
        after: dict[int, list[Request]] = defaultdict(list)
        for request in requests:
            if request.parent is not None:
                after[request.parent].append(request)
        first = [request for request in requests if request.parent is None]
        slots = asyncio.Semaphore(self._concurrency or len(first) or 1)

        async def session(request: Request) -> None:
            async with slots:
                await self._turn(request, 0.0 if self._concurrency else request.wait, model, after)

        await asyncio.gather(*(session(request) for request in sorted(first, key=lambda request: request.wait)))
        return self.outcome

    async def _turn(self, request: Request, wait: float, model: str, after: dict[int, list[Request]]) -> None:
        """A turn, and then those that go on with it."""
        await asyncio.sleep(wait / self._speed)
        try:
            status, content = await self._ask("POST", request.path, orjson.dumps({"model": model, **request.body}))
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            status, content = 0, f"{type(error).__name__}: {error}".encode()
        if status == 200:
            self.outcome.answered += 1
        else:
            self.outcome.failures.append(f"turn {request.number}: {status} {content[:200].decode(errors='replace')}")
        await asyncio.gather(*(self._turn(later, later.wait, model, after) for later in after[request.number]))

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """One request of HTTP/1.1 on a connection of its own: the status and the body."""
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
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


def _head(content: bytes) -> tuple[int, dict[str, str]]:
    line, *lines = content.decode("latin-1").split("\r\n")
    pairs = (header.partition(":") for header in lines if header)
    return int(line.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}


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
    began = time.monotonic()
    outcome = asyncio.run(Sender(args.url, args.speed, args.concurrency).send(requests))
    seconds = time.monotonic() - began
    print(f"kcap: {outcome.answered:,} of {len(requests):,} turns answered in {seconds:.1f} s", file=sys.stderr)
    for failure in outcome.failures[:5]:
        print(f"kcap: {failure}", file=sys.stderr)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
