"""What of the GPU's time each request of a Recording had: an estimate, as a batch computes for all of its requests.

    attention        by context: pairs of a new token of the request and a token that it attends to, of the step's pairs
    all other work   by tokens: the request's new tokens, of the step's

The steps that the Recording lists are shared out one by one, each by its own Program. What the others took is known as
a sum, by their Programs' counts: it goes to the requests by the tokens that they have beyond the listed steps, at what
a token cost in those, apart for tokens of prompts and others. So the shares of all requests and what no request
accounts for (steps of phase `other`, calls between steps) add up to the time of all calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kcap.schemas.recording.recording import Call, Recording, Step
from kcap.show.gain import CallTime

NO_FAMILY = "(none)"
BY_CONTEXT = "attention"
RULE = (
    "a request's share of a step is an estimate: of attention by context (pairs of tokens), of all else by new tokens"
)
PARTS = ("computed", "decoded")  # tokens of the prompt, and those after it

Families: TypeAlias = Mapping[str, float]  # microseconds by family
Sums: TypeAlias = defaultdict[str, float]


@dataclass
class RequestTime:
    """Microseconds: `steps_us` of the steps that the request was in, whole; `us` its share of them, by family."""

    steps_us: float = 0.0
    us: Sums = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class RequestTimes:
    """`requests`: in the order of the Recording's. `none_us`: by family what no request accounts for.

    `total_us`: of all calls; `listed`: of `steps` so many are listed; `untimed`: invocations without a time.
    """

    requests: list[RequestTime]
    none_us: Families
    total_us: float
    listed: int
    steps: int
    untimed: int


def request_times(recording: Recording, times: Mapping[int, CallTime], families: Mapping[int, str]) -> RequestTimes:
    """Of the ranks that have requests. `times` and `families`: of Calls, by id."""
    return _Attribution(recording, times, families).result()


class _Attribution:
    def __init__(self, recording: Recording, times: Mapping[int, CallTime], families: Mapping[int, str]) -> None:
        self._recording, self._times, self._families = recording, times, families
        self._ranks = {request.rank for request in recording.requests}
        self._shares = [RequestTime() for _ in recording.requests]
        self._left = [Counter({part: getattr(request, part) for part in PARTS}) for request in recording.requests]
        self._steps_left = [request.prefills + request.decodes for request in recording.requests]
        self._listed_tokens: Sums = _sums()  # by part, of all requests
        self._listed_us: dict[str, Sums] = {part: _sums() for part in PARTS}  # by part, then family
        self._rest: Sums = _sums()  # by family, of steps with requests: what is not shared out yet
        self._none: Sums = _sums()
        self._program_us: dict[tuple[int, str], Sums] = {}
        self._inside = _sums()  # by family, of all steps

    def result(self) -> RequestTimes:
        self._add_programs()
        listed = [step for step in self._recording.steps if step.rank in self._ranks and step.program is not None]
        for step in listed:
            self._share_out(step)
        self._share_out_rest()
        untimed = self._add_outside()
        total = sum(self._none.values()) + sum(sum(share.us.values()) for share in self._shares)
        steps = sum(batch.get("steps", 0) for batch in self._recording.metadata.batches)
        return RequestTimes(self._shares, self._none, total, len(listed), steps, untimed)

    def _us(self, program: int, phase: str) -> Sums:
        """By family, of one step in `phase` that ran the Program."""
        if (program, phase) not in self._program_us:
            us: Sums = _sums()
            for call in self._recording.ran(self._recording.program(program)):
                if call.kind == "kernel" and call.work and call.id in self._times:
                    us[self._family(call)] += self._times[call.id].us.get(phase, 0.0)
            self._program_us[program, phase] = us
        return self._program_us[program, phase]

    def _family(self, call: Call) -> str:
        return self._families.get(call.id, NO_FAMILY)

    def _add_programs(self) -> None:
        for program in self._recording.programs:
            for count in program.counts if program.kind == "step" else ():
                if count.rank in self._ranks:
                    us = self._us(program.id, count.phase)
                    _add(self._none if count.phase == "other" else self._rest, us, count.count)
                    _add(self._inside, us, count.count)

    def _share_out(self, step: Step) -> None:
        """A listed step, among the requests that its line names."""
        assert step.program is not None
        if step.phase == "other":
            return
        us = self._us(step.program, step.phase)
        _add(self._rest, us, -1)
        listed = list(zip(step.requests, step.queries, step.lengths, strict=False))
        pairs = [new * (length - new) + new * (new + 1) / 2 for _, new, length in listed]
        every = sum(pairs) * step.sequences / max(len(listed), 1) or 1.0
        left = _sums()
        _add(left, us)
        for (place, new, length), own in zip(listed, pairs, strict=True):
            parts = {True: own / every, False: new / (step.tokens or 1)}
            share = {family: time * parts[family == BY_CONTEXT] for family, time in us.items()}
            self._give(place, new, length, share)
            self._shares[place].steps_us += sum(us.values())
            _add(left, share, -1)
        _add(self._rest if step.sequences > len(listed) > 0 else self._none, left)

    def _give(self, place: int, new: int, length: int, share: Families) -> None:
        """A request's share of a listed step, in which it had `new` tokens and `length` with them."""
        _add(self._shares[place].us, share)
        self._steps_left[place] -= 1
        of_prompt = max(0, min(length, self._recording.requests[place].prompt) - (length - new))
        for part, tokens in zip(PARTS, (of_prompt, new - of_prompt), strict=True):
            self._left[place][part] -= tokens
            self._listed_tokens[part] += tokens
            _add(self._listed_us[part], share, tokens / max(new, 1))

    def _share_out_rest(self) -> None:
        """What the steps took that are not listed, by the tokens that each request has in them."""
        unknown = unnamed_tokens(self._recording)
        for family, time in self._rest.items():
            prices = {part: self._price(part, family) for part in PARTS}
            weights = [sum(max(left[part], 0) * prices[part] for part in PARTS) for left in self._left]
            every = sum(weights) + unknown * prices["decoded"]
            if every <= 0 or time <= 0:
                self._none[family] += time
                continue
            for share, weight in zip(self._shares, weights, strict=True):
                if weight:
                    share.us[family] += time * weight / every
            self._none[family] += time * unknown * prices["decoded"] / every
        self._add_whole_steps()

    def _add_whole_steps(self) -> None:
        """Of steps that are not listed: as long as a listed one of the same request or, without any, of all."""
        means = [share.steps_us for share in self._shares]
        counts = [
            request.prefills + request.decodes - left
            for request, left in zip(self._recording.requests, self._steps_left, strict=True)
        ]
        overall = sum(means) / max(sum(counts), 1)
        for share, count, left in zip(self._shares, counts, self._steps_left, strict=True):
            share.steps_us += max(left, 0) * (share.steps_us / count if count else overall)

    def _price(self, part: str, family: str) -> float:
        """Microseconds of a token of `part` in the listed steps."""
        tokens, us = self._listed_tokens[part], self._listed_us[part][family]
        if not tokens:
            tokens = sum(self._listed_tokens.values())
            us = sum(self._listed_us[other][family] for other in PARTS)
        return us / tokens if tokens else 1.0

    def _add_outside(self) -> int:
        """What ran between steps is no request's; how many invocations have no time."""
        every: Sums = _sums()
        untimed = 0
        for call in self._recording.kernels():
            for count in (count for count in call.counts if count.rank in self._ranks):
                time = self._times.get(call.id)
                us = time.us.get(count.phase) if time else None
                untimed += count.count if us is None else 0
                every[self._family(call)] += (us or 0.0) * count.count
        for family, time_of_all in every.items():
            self._none[family] += max(0.0, time_of_all - self._inside[family])
        return untimed


def step_tokens(recording: Recording) -> int:
    """New tokens of all steps in which requests run."""
    batches = [batch for batch in recording.metadata.batches if batch.get("phase") != "other"]
    return sum(batch.get("tokens", 0) * batch.get("steps", 0) for batch in batches)


def unnamed_tokens(recording: Recording) -> int:
    """Those of them that are of steps which name no requests."""
    return max(0, step_tokens(recording) - sum(request.tokens for request in recording.requests))


def _sums() -> Sums:
    return defaultdict(float)


def _add(sums: Sums, us: Families, times: float = 1) -> None:
    for family, time in us.items():
        sums[family] += time * times
