"""Why a Solution does not pass: what its driver reports, what outputs show, and times below the machine's floor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.protocol import Report
from kcap.bench.judge.input_pool import InputPool
from kcap.errors import KcapError
from kcap.replay.rebuild.memory import raw_bytes
from kcap.replay.roofline.ceilings import Ceilings, kept_ceilings, raised_ceilings
from kcap.replay.roofline.cost import cost_of_workload
from kcap.replay.roofline.floor import floor_us
from kcap.schemas.derive.cost import Cost
from kcap.schemas.results.outcome import Clocked, Status
from kcap.system.open_files import ensure_free_descriptors

STATUS_OF_CODE: dict[int, Status] = {
    protocol.RAISED: "RUNTIME_ERROR",
    protocol.NO_TENSOR: "RUNTIME_ERROR",
    protocol.COUNT: "RUNTIME_ERROR",
    protocol.SHAPE: "INCORRECT_SHAPE",
    protocol.DTYPE: "INCORRECT_DTYPE",
    protocol.DEVICE: "RUNTIME_ERROR",
    protocol.INPUT: "REWARD_HACK",
    protocol.DRIVER: "RUNTIME_ERROR",
    protocol.RESERVED: "REWARD_HACK",
}

CONSTANT = "its outputs do not depend on its inputs"
STALE = "it returned in a later invocation what it had computed for other inputs"
UNWRITTEN = "it left its outputs unwritten in a later invocation, though it had written them at first"


class Rejected(Exception):
    """The Solution does not pass."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def check_report(report: Report, wrong: Callable[[Status, str], Exception] = Rejected) -> None:
    """Rejected, or what `wrong` makes of it, where a run came to nothing."""
    if report.code == protocol.FINE:
        return
    words = "it {}" if report.code in (protocol.INPUT, protocol.RESERVED) else "{}"
    raise wrong(
        STATUS_OF_CODE.get(report.code, "REWARD_HACK"), words.format(report.text or "it reports what is not so")
    )


@dataclass
class SeenOutputs:
    """Fingerprints of outputs that were right or wrong, and of what would have been right."""

    right: dict[bytes, set[bytes]] = field(default_factory=dict)  # by output, the truths that it came with

    def add(self, outputs: bytes, truth: bytes) -> bool:
        """Note them; whether the same outputs were returned before, for inputs that have another truth."""
        truths = self.right.setdefault(outputs, set())
        truths.add(truth)
        return len(truths) > 1

    @property
    def constant(self) -> bool:
        """Whether there were several truths and one output alone."""
        return len(self.right) == 1 and len(next(iter(self.right.values()))) > 1


def fingerprint(tensors: Sequence[torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        raw = raw_bytes(tensor)
        digest.update((_summed(raw) if raw.is_cuda else raw).numpy())
    return digest.digest()


def _summed(raw: torch.Tensor) -> torch.Tensor:
    """Words by which bytes on a GPU are told from others: copying all of them takes longer than what is judged."""
    words = torch.nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)
    places = torch.arange(len(words), device=raw.device)
    return torch.stack([(words * (_mixed(places + start) | 1)).sum() for start in (1, len(words) + 1)]).cpu()


def _mixed(word: torch.Tensor) -> torch.Tensor:
    """Of int64, each bit depends on all bits of `word`: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    for bits, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        word = (word ^ (word >> bits & (1 << 64 - bits) - 1)) * factor
    return word ^ (word >> 31 & (1 << 33) - 1)


def is_unwritten(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether an output is still all that the driver filled it with."""
    return any(bool((raw_bytes(t) == 0xFF).all()) for t in outputs if t.numel())


FILES_TO_MEASURE = 8  # that it takes to start the process which measures
FindCeilings = Callable[[Mapping[str, Any]], Ceilings]


@dataclass
class Floors:
    """Of one machine (`environment`, as Outcomes have it). Ceilings are found at the first need; `sure`: measured
    twice, as they are before a time is refused, for the machine may have been busy.
    """

    environment: Mapping[str, Any]
    find: FindCeilings = kept_ceilings
    again: FindCeilings = raised_ceilings
    ceilings: Ceilings | None = None
    unknown: str = ""
    sure: bool = field(default=False, repr=False)
    costs: dict[tuple[str, str], list[Cost]] = field(default_factory=dict, repr=False)  # by Workload

    def check(self, drawn: InputPool, time: Clocked) -> float | None:
        """Microseconds that the invocations on `drawn` cannot go below, None where not known; Rejected, if `time` does.

        How much there is to do may depend on what rules make: the floor is that of the least of some.
        """
        costs = self._costs(drawn)
        floor = self._floor(costs, time)
        if floor is not None and time.median_us < floor and not self.sure:
            self._ask(self.again)
            self.sure = True
            floor = self._floor(costs, time)
        if floor is not None and time.median_us < floor:
            words = f"{time.median_us:.3g} µs is below the machine's floor of {floor:.3g} µs for it"
            raise Rejected("REWARD_HACK", words)
        return floor

    def _costs(self, drawn: InputPool) -> list[Cost]:
        """Of some invocations; none, where that of one is not known."""
        key = drawn.definition.name, drawn.draws.workload.uuid
        if key not in self.costs:
            every = [cost_of_workload(drawn.definition, inputs) for inputs in drawn.draws.examples()]
            known = [cost for cost in every if cost is not None]
            self.costs[key] = known if len(known) == len(every) else []
        return self.costs[key]

    def _floor(self, costs: Sequence[Cost], time: Clocked) -> float | None:
        if costs and self.ceilings is None and not self.unknown:
            self._ask(self.find)
        if not costs or self.ceilings is None:
            return None
        return min(floor_us(cost, self.ceilings, time.cache or "warm") for cost in costs)

    def _ask(self, how: FindCeilings) -> None:
        ensure_free_descriptors(FILES_TO_MEASURE)  # else what is lacking now would be unknown for good
        try:
            self.ceilings = how(self.environment)
        except KcapError as error:
            self.ceilings, self.unknown = None, str(error)
