"""A candidate: a Solution, or a Definition's reference, under the driver, with a Workload open."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kcap.bench.judge import handed, wire
from kcap.bench.judge.draws import Draws
from kcap.bench.judge.failures import Ended, NoGraph
from kcap.bench.judge.handed import Handed
from kcap.bench.judge.process import Process
from kcap.bench.judge.shared import Shared
from kcap.bench.judge.wire import Answer, Layout

SLOTS_BYTES = 256 << 20  # of outputs that are kept at a time
MOST_INVOCATIONS = 4096
SETS_BYTES = 256 << 20
FEWEST_SETS, MOST_SETS = 3, 8


@dataclass
class Candidate(Process):
    """`graphs`: on a GPU its batches are captured. `handed`: makes its inputs, where they are large and on the CPU."""

    destination: bool = False
    graphs: bool = True
    sets: int = 0
    shared: Shared | None = None
    handed: Handed | None = None
    drawn: Draws | None = field(default=None, repr=False)

    def open(self, drawn: Draws, sets: int | None = None) -> None:
        """Make `drawn` the Workload that it runs, with `sets` sets of inputs that take turns (None: a few)."""
        again = self.drawn is drawn
        self.forget()
        self.spent = self.spent if again else 0.0
        handing = self.limits.gpu is None and handed.handed(drawn)
        self.sets = sets or (handed.sets(drawn) if handing else usual_sets(drawn))
        slot = sum(result.reserved for result in drawn.results) or 64
        layout = Layout(slot, max(min(SLOTS_BYTES // slot, MOST_INVOCATIONS), self.sets), MOST_INVOCATIONS)
        self.shared, self.drawn = Shared.made(layout), drawn
        flags = wire.DESTINATION * self.destination + wire.GRAPHS * self.graphs + wire.HANDED * handing
        sizes = drawn.size, drawn.variants, self.sets
        content = wire.opening(drawn.contents, drawn.results, layout, *sizes, flags, self.limits.threads)
        if handing:
            self.handed = Handed.made(content, drawn)
        answer = self.ask(content, [self.shared.descriptor, *([] if handing else [drawn.pool])])
        if answer.code != wire.FINE:
            raise Ended(answer.text)

    @property
    def most(self) -> int:
        """Invocations at a time: the outputs of all of them are kept, so that none knows whether it is looked at."""
        assert self.shared is not None
        kept = min(self.shared.layout.slots, MOST_INVOCATIONS)
        return min(kept, self.sets) if self.handed else kept

    def run(
        self, seed: int, count: int, first: int = 0, upcast: int = 0, keep: Sequence[int] = (), empty: bool = False
    ) -> Answer:
        """`count` invocations with the inputs of `seed`, numbered from `first`; NoGraph if they cannot be captured.

        `keep`: those whose outputs are wanted, counted from 0: this process alone knows. On the CPU it copies them
        at once, on a GPU when they are delivered. `upcast`: floating ones are in float64. `empty`: the driver does
        all that it does for them but the calls, on the CPU.
        """
        assert self.shared is not None and self.drawn is not None
        self.shared.prepare(keep, self.drawn.results, upcast != 0)
        take = (lambda: None) if self.limits.gpu else self.shared.take
        content = wire.running(first, count, seed, upcast, empty)
        if self.handed and count:
            places, descriptor = self.handed.fill(seed, first, count)
            answer = self.ask(content + places, [descriptor], take)
        else:
            answer = self.ask(content, at_once=take)
        if answer.code == wire.NO_GRAPH and self.graphs and self.limits.gpu:
            raise NoGraph(self, answer.text)
        return answer

    def deliver(self, numbers: Sequence[int]) -> Answer:
        """Whether the inputs of these invocations of the last run, counted from 0, are as they were; on a GPU, their
        outputs.
        """
        assert self.shared is not None
        answer = self.ask(wire.delivering(numbers), at_once=self.shared.take)
        changed = self.handed.changed(list(numbers)) if self.handed and answer.code == wire.FINE else None
        if changed is None:
            return answer
        assert self.drawn is not None
        return replace(answer, code=wire.INPUT, text=f"changed its input {self.drawn.contents[changed].name}")

    def replaced(self) -> Answer:
        """Which watched names are no longer what they were."""
        return self.ask(wire.checking())

    def times_ns(self, count: int) -> list[int]:
        """Of each of the last `count` invocations, by the driver's clock."""
        assert self.shared is not None
        return self.shared.times_ns(count)

    def outputs(self, number: int) -> list[torch.Tensor]:
        """Those of invocation `number` of the last run, which was to be kept, delivered."""
        assert self.shared is not None
        return self.shared.outputs[number]

    def forget(self) -> None:
        held = self.shared, self.handed
        self.shared = self.handed = self.drawn = None
        for one in held:
            if one is not None:
                one.close()


def usual_sets(drawn: Draws) -> int:
    """Of inputs, where the driver fills them."""
    return max(min(SETS_BYTES // max(drawn.bytes, 1), MOST_SETS), FEWEST_SETS)


def fresh_seed() -> int:
    return secrets.randbits(63)
