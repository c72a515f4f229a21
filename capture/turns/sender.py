"""Sends the requests of a trace, each after the one that it goes on with and the time between them, and awaits answers.

A prompt of made-up tokens is made when it is sent, for it may go on with an answer that did not exist before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

TOKENS = range(10, 250)  # that every vocabulary has
SHOWN = 5  # failures


@dataclass(frozen=True)
class MadeUpPrompt:
    """A prompt of `length` tokens that begins as others with the same first `blocks`, of `size` tokens each.

    `of_answer`: how many tokens of the answer of the turn that it goes on with follow that turn's prompt in it.
    """

    blocks: Sequence[int]
    size: int
    length: int
    of_answer: int = 0


@dataclass(frozen=True)
class Request:
    """What to send for a turn. `wait`: seconds after the answer of `parent` or, of a first turn, after the start.

    `body` has `messages`, or `prompt` has what is made up; `tokens`: of the answer.
    """

    number: int
    parent: int | None
    wait: float
    body: dict[str, Any]
    tokens: int
    prompt: MadeUpPrompt | None = None


@dataclass(frozen=True)
class Load:
    """What an engine without a server is asked, as `kcap record --model … --workload` hands it over, in JSON."""

    requests: Sequence[Request]
    speed: float = 1.0
    concurrency: int | None = None

    @classmethod
    def of(cls, members: dict[str, Any]) -> Load:
        """Of what `dataclasses.asdict` made of it."""
        prompts = [MadeUpPrompt(**r["prompt"]) if r["prompt"] else None for r in members["requests"]]
        pairs = zip(members["requests"], prompts, strict=True)
        return cls(**{**members, "requests": [Request(**{**r, "prompt": prompt}) for r, prompt in pairs]})

    def send(self, ask: Ask) -> Awaitable[Outcome]:
        return Sender(ask, self.speed, self.concurrency).send(self.requests)


@dataclass(frozen=True)
class Answer:
    """`failure`: why there is none. `tokens`: their ids, where the engine told them."""

    failure: str = ""
    tokens: Sequence[int] = ()


@dataclass
class Outcome:
    """What came of a load: how many were answered, and the first reasons why others were not.

    `untold`: answers whose tokens the engine did not tell, though a prompt was to go on with them.
    """

    answered: int = 0
    failures: list[str] = field(default_factory=list)
    untold: int = 0

    def reasons(self) -> Iterator[str]:
        """A line for each thing that is not as it should be; of failures the first ones."""
        yield from self.failures[:SHOWN]
        if self.untold:
            yield f"{self.untold:,} answers' token ids are not known: the prompts that go on with them have others"


Ask = Callable[[Request, "list[int] | None"], Awaitable[Answer]]  # the second: the tokens of a made-up prompt
Sent = tuple[list[int], Sequence[int]]  # a made-up prompt and its answer


def report_outcome(outcome: Outcome, requests: int) -> None:
    """Say on standard error what came of a load; SystemExit where not all were answered."""
    print(f"kcap: {outcome.answered:,} of {requests:,} turns answered", file=sys.stderr)
    for line in outcome.reasons():
        print(f"kcap: {line}", file=sys.stderr)
    if outcome.failures:
        raise SystemExit(1)


class Sender:
    """`speed` divides every wait; `concurrency`: most sessions at a time, which then begin as soon as one has ended."""

    def __init__(self, ask: Ask, speed: float = 1.0, concurrency: int | None = None) -> None:
        self._ask, self._speed, self._concurrency = ask, speed, concurrency
        self._prompts = _Prompts()
        self.outcome = Outcome()

    async def send(self, requests: Sequence[Request]) -> Outcome:
        """All of them; returns when the last is answered."""
        after: dict[int, list[Request]] = defaultdict(list)
        for request in requests:
            if request.parent is not None:
                after[request.parent].append(request)
        first = sorted((r for r in requests if r.parent is None), key=lambda request: request.wait)
        slots = asyncio.Semaphore(self._concurrency or len(first) or 1)

        async def session(request: Request) -> None:
            async with slots:
                await self._turn(request, 0.0 if self._concurrency else request.wait, None, after)

        await asyncio.gather(*(session(request) for request in first))
        return self.outcome

    async def _turn(self, request: Request, wait: float, before: Sent | None, after: dict[int, list[Request]]) -> None:
        """A turn, and then those that go on with it."""
        await asyncio.sleep(wait / self._speed)
        prompt = None if request.prompt is None else self._prompts.of(request.number, request.prompt, before)
        try:
            answer = await self._ask(request, prompt)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            answer = Answer(f"{type(error).__name__}: {error}")
        later = after[request.number]
        if answer.failure:
            self.outcome.failures.append(f"turn {request.number}: {answer.failure}")
        else:
            self.outcome.answered += 1
            wanted = any(one.prompt is not None and one.prompt.of_answer for one in later)
            self.outcome.untold += wanted and not answer.tokens
        sent = None if prompt is None else (prompt, answer.tokens)
        await asyncio.gather(*(self._turn(one, one.wait, sent, after) for one in later))


class _Prompts:
    """Makes up prompts. What one of them has of an answer, others with the same blocks have, too."""

    def __init__(self) -> None:
        self._sent: dict[int, list[int]] = {}  # a block that is not as it was made up -> its tokens

    def of(self, number: int, prompt: MadeUpPrompt, before: Sent | None) -> list[int]:
        """That of the turn `number`."""
        size = prompt.size
        tokens = [token for block in prompt.blocks for token in self._block(block, size)][: prompt.length]
        tokens += _made_up(-1 - number, prompt.length - len(tokens))
        if before is not None and prompt.of_answer:
            known = [*before[0], *before[1][: prompt.of_answer]][: prompt.length]
            if tokens[: len(known)] != known:
                tokens[: len(known)] = known
                for start, block in zip(range(0, len(known), size), prompt.blocks, strict=False):
                    sent = tokens[start : start + size]
                    self._sent.setdefault(block, [*sent, *_made_up(block, size)[len(sent) :]])
        return tokens

    def _block(self, block: int, size: int) -> Sequence[int]:
        tokens = self._sent.get(block)
        return _made_up(block, size) if tokens is None else tokens


@lru_cache(maxsize=1 << 14)
def _made_up(seed: int, length: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.choice(TOKENS) for _ in range(length))


def chat_tokens(tokenizer: Any, body: dict[str, Any]) -> list[int]:
    """The prompt of the chat `body`, by the tokenizer's own template. ValueError where it has none."""
    messages = [_with_arguments(message) for message in body["messages"]]
    ids = tokenizer.apply_chat_template(messages, tools=body.get("tools"), add_generation_prompt=True, tokenize=True)
    return list(ids["input_ids"] if hasattr(ids, "keys") else ids)


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """With the arguments of its tool calls as objects, as templates take them and servers hand them over."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        with contextlib.suppress(orjson.JSONDecodeError):
            function["arguments"] = orjson.loads(str(function.get("arguments") or "{}"))
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message
