"""What stands in for arguments that no Sample holds: the sequences of a step that ran the Call, sampled routing.

A Call that only profiled steps ran has no Sample: copies would be among their kernels. And what a graph keeps in memory
of its own is in no Sample either. But steps.jsonl and coverage.jsonl list the new tokens and the context of each
sequence, from which query starts, lengths and positions follow exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from kcap.replay.jobs import SAME_CONTEXT, BatchFields
from kcap.schemas.derive.bound_call import BoundCall, ReplayRule, bind_call, replay_rule_for
from kcap.schemas.derive.families import REFUSALS
from kcap.schemas.recording.operators import base_of
from kcap.schemas.recording.recording import Call, Recording, Sample, Step
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import StepCoverage

QUERY_STARTS = frozenset({"cu_seqlens_q", "query_start_loc", "query_start_len", "qo_indptr"})
LENGTHS = frozenset({"seqused_k", "seq_lens", "seqlens_k", "b_seqlen"})
POSITIONS = frozenset({"positions"})
OF_SEQUENCES = QUERY_STARTS | LENGTHS


@dataclass(frozen=True)
class StepBatch:
    """The new tokens and the context of each sequence of a step. `rows`: how many rows its tensors of tokens may have,
    which a graph pads."""

    queries: torch.Tensor
    lengths: torch.Tensor
    rows: frozenset[int]

    @classmethod
    def of(cls, step: Step | StepCoverage) -> StepBatch | None:
        """None where the step does not list its sequences."""
        return cls.of_fields({"queries": step.queries, "lengths": step.lengths, "padded": step.padded})

    @classmethod
    def of_fields(cls, fields: BatchFields) -> StepBatch | None:
        queries, lengths = fields["queries"], fields["lengths"]
        if not lengths or len(queries) != len(lengths):
            return None
        rows = frozenset({sum(queries), fields["padded"] or 0} - {0})
        return cls(torch.tensor(queries), torch.tensor(lengths), rows)

    def differs(self, lengths: torch.Tensor) -> bool:
        """Whether `lengths` are those of other work, by the tokens that they hold together."""
        held = float(self.lengths.sum())
        return abs(float(lengths.sum()) - held) > SAME_CONTEXT * held

    def values(self, name: str, size: int) -> torch.Tensor | None:
        """The `size` values of an argument called `name`, those after the sequences as an engine pads them."""
        if name in QUERY_STARTS and size > len(self.queries):
            starts = torch.nn.functional.pad(self.queries.cumsum(0), (1, 0))
            return torch.cat((starts, starts[-1:].expand(size - len(starts))))
        values = self.lengths if name in LENGTHS else self._positions() if name in POSITIONS else None
        if values is None or size < len(values):
            return None
        return torch.nn.functional.pad(values, (0, size - len(values)))

    def _positions(self) -> torch.Tensor:
        """Of each token in its sequence, whose last one is new."""
        ends = self.queries.cumsum(0)
        return torch.arange(int(ends[-1])) + (self.lengths - ends).repeat_interleave(self.queries)


class StepBatches:
    """The batches of a Recording's steps, by the Calls that they ran.

    `meant`: that of the step which is replayed, where it is known; a Sample's own step of much the same context goes
    before it.
    """

    def __init__(self, recording: Recording | None) -> None:
        self._recording = recording
        self.meant: StepBatch | None = None

    def fill(self, bound: BoundCall, call: Call, sample: Sample | None) -> None:
        """Give values to the query starts, lengths and positions of `bound` that have none, and to those of a Sample
        with another context than the step that is meant.

        None to those of other tokens, an encoder's, which are told by the rows of its tensors, or by the lengths of a
        Sample that are not those of its own step: the keys of cross attention.
        """
        names = {path: _name(bound, path) for path, _ in bound.tensors()}
        wanted = {
            path: (names[path], spec.shape[0])
            for path, spec in bound.integers()
            if len(spec.shape) == 1 and names[path] in OF_SEQUENCES | POSITIONS
        }
        recorded = [bound.contents[path] for path in wanted if names[path] in LENGTHS and path in bound.contents]
        own = self._own_batch(sample)
        other = self.meant is not None and any(map(self.meant.differs, recorded))
        other = other and not (own is not None and any(map(own.differs, recorded)))
        missing = wanted if other else {path: wanted[path] for path in wanted if path not in bound.contents}
        batch = self.meant if other else self._batch(call, sample) if missing else None
        rows = {spec.shape[0] for path, spec in bound.tensors() if spec.shape and names[path] not in OF_SEQUENCES}
        if batch is None or not rows & batch.rows:
            return
        for path, (name, size) in missing.items():
            if (values := batch.values(name, size)) is not None:
                bound.contents[path] = values

    def _batch(self, call: Call, sample: Sample | None) -> StepBatch | None:
        """Of the Sample's own step; of one that ran the Call where there is no Sample with tensors to contradict it."""
        if (batch := self._own_batch(sample)) is not None:
            return batch
        if sample is not None and sample.tensors:
            return None
        return self.meant or self._by_call.get(call.id)

    def _own_batch(self, sample: Sample | None) -> StepBatch | None:
        return None if sample is None else self._by_step.get((sample.rank, sample.step))

    @cached_property
    def _by_step(self) -> dict[tuple[int, int | None], StepBatch]:
        """By rank and index, those of the counted steps."""
        steps = self._recording.steps if self._recording else []
        return {(step.rank, step.index): batch for step in steps if (batch := StepBatch.of(step)) is not None}

    @cached_property
    def _by_call(self) -> dict[int, StepBatch]:
        """Of each Call the batch of the first step that ran it, profiled ones before counted ones."""
        by_call: dict[int, StepBatch] = {}
        for step in self._steps():
            if (batch := StepBatch.of(step)) is not None and self._recording and step.program is not None:
                for call in self._recording.ran(self._recording.program(step.program)):
                    by_call.setdefault(call.id, batch)
        return by_call

    def _steps(self) -> Iterator[Step | StepCoverage]:
        if self._recording is not None:
            profiled = self._recording.path / coverage.FILE
            yield from coverage.read(profiled) if profiled.exists() else ()
            yield from self._recording.steps


def sampled_routing(recording: Recording) -> dict[int, torch.Tensor]:
    """For a number of experts, how often each was chosen in the sampled batch of the most tokens: int64 [experts].

    Of one batch in one layer, for layers prefer other experts, and their sum would look as if none were preferred.
    """
    routing: dict[int, torch.Tensor] = {}
    for sample in recording.drawn_samples:
        call = recording.calls[sample.call]
        rule = replay_rule_for(base_of(call.operator))
        if type(rule).chosen_experts is ReplayRule.chosen_experts:
            continue
        try:
            chosen = rule.chosen_experts(bind_call(call, sample, None, recording.value))
        except REFUSALS:  # its own Call fails
            continue
        if chosen is not None and chosen.sum() > routing.get(len(chosen), torch.zeros(1)).sum():
            routing[len(chosen)] = chosen
    return routing


def _name(bound: BoundCall, path: str) -> str:
    return (bound.holder(path).name or "").lower().removesuffix("_ptr")
