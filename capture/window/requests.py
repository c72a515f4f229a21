"""What the counted steps computed for each request: totals that are exact, however few steps the shard lists.

A decode step costs one count of its requests' names, which C does; only those that prefill are looked at one by one.
A request is a line of the shard when its first step has ended, and again, with its totals, when the engine says that
it has finished or the window closes: of a process that is killed, those that had not finished have no totals. One that
runs in no counted step has no number, and no line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

from kcap.capture.turns.blocks import BlockHashes
from kcap.capture.window.step import StepShape

MAX_REQUESTS = 1 << 16  # with a line of their own; further ones are added up in one
LONGEST_NAME = 256
REST_EVERY = 1024  # further requests, after which their line is written again


@dataclass(slots=True)
class Totals:
    """A request's tokens and steps, as in `kcap.schemas.recording.records.Request`; decode steps of one token aside."""

    prompt: int
    cached: int
    generates: bool = True
    tokens: Sequence[int] | None = None  # the prompt's, until it has a line
    number: int = -1  # by which the shard's lines name it; -1: none yet
    first: int = -1  # its first counted step; -1: none yet
    computed: int = 0
    decoded: int = 0
    again: int = 0
    generated: int = 0
    prefills: int = 0
    decodes: int = 0
    reached: int = 0  # tokens that have been computed, found ones among them; decode steps of one token aside
    drafts: int = 0  # of the last step, as far as it is not known whether they were accepted
    follows: int = 0  # the tokens before the next step if none of them was; decode steps of one token aside
    returned: int | None = None  # tokens that the engine gave back, once it has told

    def add(self, before: int, new: int, single: int) -> None:
        """A step computed `new` tokens after `before`; it ran in `single` decode steps of one token already.

        Tokens beyond those that exist are drafts. How many were accepted is told by the `before` of the next step; of a
        request's last step nothing tells it.
        """
        accepted = before - (self.follows + single)
        self.generated += accepted if 0 < accepted <= self.drafts else 0
        generated, after = self.generated + single, before + new
        sampled = self.generates and after >= self.prompt + generated
        drafts = min(new - 1, after - self.prompt - generated) if sampled and before >= self.prompt else 0
        of_prompt = max(0, min(after, self.prompt) - before)
        reached = max(self.reached, self.prompt + generated - 1 if generated else 0)
        self.again += max(0, min(after, reached) - before)
        self.reached = max(after - drafts, reached)
        self.computed += of_prompt
        self.decoded += new - of_prompt
        self.prefills += before < self.prompt
        self.decodes += before >= self.prompt
        self.generated += sampled
        self.drafts, self.follows = drafts, after - drafts - single


class Requests:
    """The requests of a process. `write` puts a line into its shard."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.blocks: BlockHashes | None = None  # where the tokens of prompts are told by their blocks
        self._write = write
        self._totals: dict[str, Totals] = {}
        self._single: Counter[str] = Counter()  # decode steps of one token, of each request
        self._numbers = self._finished = 0  # given; requests without a line of their own
        self._rest: Counter[str] = Counter()

    def begin(
        self, name: str, prompt: int, cached: int, generates: bool = True, tokens: Sequence[int] | None = None
    ) -> None:
        """The engine runs a request for the first time: its prompt's tokens, and how many of them a cache had.

        One that it knows has been interrupted, and goes on. `tokens`: those of the prompt, where they are known.
        """
        known = self._totals.get(name)
        if known is None or known.prompt != prompt:
            self.finish(name)
            self._totals[name] = Totals(prompt, min(cached, prompt), generates, tokens if self.blocks else None)

    def numbers(self, names: list[str]) -> list[int]:
        """By which the lines of steps name requests."""
        return [self._recorded(name).number for name in names]

    def add(self, shape: StepShape, index: int) -> None:
        """The step `index` has ended, and counts."""
        names, queries = shape.requests, shape.queries
        alone = range(len(names))  # those that are looked at
        of_prefills = sum(queries[place] for place in shape.prefilling)
        if shape.tokens - of_prefills == len(names) - len(shape.prefilling):
            self._single.update(names)
            for place in shape.prefilling:
                self._single[names[place]] -= 1
            alone = shape.prefilling  # type: ignore[assignment]
        for place in alone:
            name, new = names[place], queries[place]
            totals = self._recorded(name)
            if totals.first < 0:
                totals.first = index
                self._write_line(name, totals, 0)
            totals.add(shape.lengths[place] - new, new, self._single[name])

    def _recorded(self, name: str) -> Totals:
        """A request of a counted step. One that began before anyone looked has no prompt that is known."""
        if name not in self._totals:
            self.begin(name, 0, 0)
        totals = self._totals[name]
        if totals.number < 0:
            self._give_number(totals)
        return totals

    def _give_number(self, totals: Totals) -> None:
        totals.number, self._numbers = self._numbers, self._numbers + 1
        if totals.tokens and self.blocks is not None and totals.number < MAX_REQUESTS:
            line = {"number": totals.number, "size": self.blocks.size, "blocks": self.blocks.of(totals.tokens)}
            self._write(orjson.dumps({"t": "prompt", **line}))
        totals.tokens = None

    def tell_returned(self, name: str, tokens: int) -> None:
        """The engine gives back a request's `tokens`; what was or will be sampled beyond them it throws away."""
        totals = self._totals.get(name)
        if totals is not None and totals.returned is None:
            totals.returned = tokens

    def finish(self, name: str) -> None:
        """The engine is done with a request; one that ran in no counted step leaves nothing."""
        totals, single = self._totals.pop(name, None), self._single.pop(name, 0)
        if totals is None or (totals.first < 0 and not single):
            return
        if self._write_totals(name, totals, single):
            return
        self._finished += 1
        if self._finished % REST_EVERY == 1:
            self._write_rest()

    def close(self) -> None:
        """Write what has not finished; another thread may still be in a step."""
        for name, totals in dict(self._totals).items():
            single = self._single[name]
            if totals.first >= 0 or single:
                self._write_totals(name, totals, single)
        self._totals, self._single = {}, Counter()
        if self._rest:
            self._write_rest()

    def _write_totals(self, name: str, totals: Totals, single: int) -> bool:
        """Whether the request has a line of its own; else it is added to the others without one."""
        if totals.number < 0:
            self._give_number(totals)
        if totals.returned is not None:
            totals.generated = min(totals.generated, totals.returned - single)
        if totals.number < MAX_REQUESTS:
            self._write_line(name, totals, single)
            return True
        self._rest.update(_members(totals, single) | {"requests": 1})
        return False

    def _write_line(self, name: str, totals: Totals, single: int) -> None:
        if totals.number < MAX_REQUESTS:
            identity = {"t": "request", "number": totals.number, "id": name[:LONGEST_NAME]}
            first = {"first": totals.first} if totals.first >= 0 else {}
            self._write(orjson.dumps(identity | first | _members(totals, single)))

    def _write_rest(self) -> None:
        self._write(orjson.dumps({"t": "request", "number": MAX_REQUESTS, **self._rest}))


def _members(totals: Totals, single: int) -> dict[str, int]:
    """What adds up over requests, with `single` decode steps of one token."""
    return {
        "prompt": totals.prompt,
        "cached": totals.cached,
        "computed": totals.computed,
        "decoded": totals.decoded + single,
        "again": totals.again,
        "generated": totals.generated + single,
        "prefills": totals.prefills,
        "decodes": totals.decodes + single,
    }
