"""The Calls of a Program ready to run: each rebuilt once, its weights and caches once for each of its invocations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kcap.replay import memory
from kcap.replay.inputs import Inputs
from kcap.replay.job import SEED
from kcap.replay.layout import Target
from kcap.replay.program.activations import Activations, Place
from kcap.replay.program.weights import shrink
from kcap.replay.rebuild import Decided, Rebuilder
from kcap.replay.roles import kept
from kcap.replay.roofline.calls import cost_of
from kcap.replay.runner import size_of, touched_by, verdict, written
from kcap.replay.timing.rotation import cold_sets
from kcap.schemas.recording import Call, Sample

ROOM = 0.5  # of the free memory, for all sets but the first


@dataclass
class Part:
    """One Call of the Program, `count` times in it. `failed`: what a Measurement says of one that does not run."""

    call: Call
    count: int
    target: Target
    decided: Decided | None = None
    sets: list[Inputs] = field(default_factory=list)
    moved: frozenset[memory.Key] = frozenset()
    places: dict[memory.Key, Place] = field(default_factory=dict)
    restored: list[memory.Key] = field(default_factory=list)
    failed: dict[str, Any] | None = None
    turn: int = 0

    def run(self) -> None:
        """One invocation, each time on the next set."""
        self.call_on(self.next())

    def next(self) -> Inputs:
        """The set whose turn it is."""
        self.turn += 1
        return self.sets[(self.turn - 1) % len(self.sets)]

    def call_on(self, inputs: Inputs) -> Any:
        """One invocation on `inputs`; what the operator returns."""
        assert self.decided is not None
        return self.decided.operator.call(*inputs.args, **inputs.kwargs)

    @property
    def set_bytes(self) -> int:
        """Of one more set: its weights and caches."""
        return sum(len(self.sets[0].buffers[key]) for key in self.moved)

    @property
    def touched(self) -> int:
        """Of these, what one invocation can reach."""
        assert self.decided is not None
        reached = touched_by(self.decided, cost_of(self.call, self.decided))
        return size_of(self.moved, self.sets[0], reached).touched


class Parts:
    """The Calls of one Program. `activations` are shared by all of them, unless `shared` is False."""

    def __init__(
        self,
        rebuilder: Rebuilder,
        counts: Mapping[int, int],
        samples: Mapping[int, int | None],
        shared: bool = True,
    ) -> None:
        assert rebuilder.recording is not None
        torch.manual_seed(SEED)
        self.rebuilder, self.recording = rebuilder, rebuilder.recording
        self.target: Target = rebuilder.target
        self.activations, self.shared = Activations(), shared
        self.all = {number: self._part(number, count, samples.get(number)) for number, count in counts.items()}
        for part, sets in self._shares().items():
            self._clone(self.all[part], sets)

    @property
    def good(self) -> dict[int, Part]:
        return {number: part for number, part in self.all.items() if part.failed is None}

    @property
    def bytes(self) -> int:
        """Of all inputs that were made."""
        return sum({id(b): len(b) for p in self.good.values() for s in p.sets for b in s.buffers.values()}.values())

    def _part(self, number: int, count: int, line: int | None) -> Part:
        part = Part(self.recording.calls[number], count, self.target)
        sample = None if line is None else self.recording.samples[line]
        self._guarded(part, partial(self._build, part, sample))
        return part

    def _build(self, part: Part, sample: Sample | None) -> None:
        decided = part.decided = self.rebuilder.decide(part.call, sample, cut=True)
        part.moved = kept(decided.bound, self.target)
        part.restored = written(decided.operator, decided.bound, decided.rule, self.target)
        if self.shared:
            part.places = self.activations.places(decided.bound, self.target, part.moved)
        given = {key: self.activations.buffer(place) for key, place in part.places.items()}
        part.sets = [self.rebuilder.build(decided, given)]
        shrink(decided.bound, self.target, part.sets[0].buffers, part.moved)

    def _guarded(self, part: Part, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            part.failed, part.sets = verdict(error, self.target), []

    def _shares(self) -> dict[int, int]:
        """How many sets each Call gets: one for each invocation, or, for want of memory, what keeps them cold."""
        wanted = {number: part.count for number, part in self.good.items() if part.moved}
        needed = sum((sets - 1) * self.all[number].set_bytes for number, sets in wanted.items())
        if needed <= ROOM * memory.free(self.target.device):
            return wanted
        return {number: min(sets, self._least(self.all[number])) for number, sets in wanted.items()}

    def _least(self, part: Part) -> int:
        if not self.target.device.startswith("cuda"):
            return 1
        return cold_sets(part.touched, self.target.device)

    def _clone(self, part: Part, sets: int) -> None:
        """`sets` of them, or as many as there is room for."""
        assert part.decided is not None
        for _ in range(sets - 1):
            if part.set_bytes > ROOM * memory.free(self.target.device):
                return
            part.sets.append(self.rebuilder.clone(part.decided, part.sets[0], part.moved))
