"""The Samples of all shards: which of them a Recording keeps, and the integer values they name."""

from __future__ import annotations

import bisect
import gzip
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, replace

import orjson
from safetensors.numpy import save

from kcap.capture.fold.calls import Fold
from kcap.capture.fold.programs import Programs
from kcap.capture.recorder.recorder import FIRST_COMPARED
from kcap.capture.shards.counts import STEPS
from kcap.capture.shards.lines import SampleLine, TensorContent
from kcap.schemas.recording.recording import PHASES, Sample, SampledTensor
from kcap.schemas.recording.values import Value, encode

SAMPLES_PER_CALL = 4
# Bytes of values in those that are drawn of a Call, a phase and a rank, unless one alone has more: tables of pages grow
# with a batch.
MOST_VALUES = 1 << 20


@dataclass(frozen=True)
class Candidate:
    """What one invocation held, by its shard's own `call`. `weight`: how many invocations it stands for.

    `drawn`: from all invocations; `compared`: for its step, which is like a profiled one. It may be both.
    """

    call: int
    step: int | None
    scalars: dict[str, Value]
    offsets: dict[str, int]
    tensors: dict[str, TensorContent]
    weight: float
    drawn: bool
    compared: bool

    @property
    def order(self) -> tuple[int, int]:
        return -1 if self.step is None else self.step, self.call

    @property
    def content(self) -> Hashable:
        """Equal for candidates that hold the same in one step (layers)."""
        scalars = orjson.dumps({path: encode(value) for path, value in self.scalars.items()})
        tensors = [
            (path, tensor.low, tensor.high, None if tensor.values is None else tensor.values.tobytes())
            for path, tensor in self.tensors.items()
        ]
        return self.step, scalars, *self.offsets.items(), *tensors

    def with_same(self, other: Candidate) -> Candidate:
        """Both as one: they hold the same."""
        weight, drawn, compared = self.weight + other.weight, self.drawn or other.drawn, self.compared or other.compared
        return replace(other, weight=weight, drawn=drawn, compared=compared)

    @property
    def nbytes(self) -> int:
        return sum(tensor.values.nbytes for tensor in self.tensors.values() if tensor.values is not None)


def merge_samples(fold: Fold, ids: dict[bytes, int], programs: Programs) -> tuple[list[Sample], dict[str, bytes]]:
    """At most SAMPLES_PER_CALL Samples a Call, phase and rank, spread over the steps, and the values they name; fewer
    where those are long.

    Profiled steps are not sampled: of a Call that only they ran in a phase, the scalars and offsets are known.
    """
    candidates: defaultdict[tuple[int, int, int], list[Candidate]] = defaultdict(list)
    for index, shard in enumerate(fold.shards):
        steps = shard.header(STEPS)
        counted = [line for line in shard.lines(SampleLine) if line.step is None or line.step < steps]
        latest = {(line.call, line.phase, line.slot): line for line in counted}
        lines = [*latest.values(), *_scalar_lines(fold, index, latest.values(), programs.profiled_calls(index))]
        drawn = Counter((line.call, line.phase) for line in lines if line.slot < FIRST_COMPARED)
        for line in lines:
            number = ids.get(fold.of.get((index, line.call), b""))
            if number is not None:
                scalars, offsets = fold.drifted(index, line.call)
                held = scalars | line.scalars, offsets | line.offsets, line.tensors
                compared = line.slot >= FIRST_COMPARED
                place = line.call, line.phase
                weight = 0.0 if compared else fold.invocations[index, *place] / drawn[place]
                candidate = Candidate(line.call, line.step, *held, weight, not compared, compared)
                candidates[number, line.phase, shard.rank].append(candidate)
    values: dict[str, bytes] = {}
    samples = [
        Sample(
            call=number, phase=PHASES[phase], rank=rank, step=chosen.step, scalars=chosen.scalars,
            offsets=chosen.offsets,
            tensors={path: _sampled_tensor(tensor, values) for path, tensor in chosen.tensors.items()},
            compared=not chosen.drawn,
        )
        for (number, phase, rank), held in sorted(candidates.items())
        for chosen in _chosen(held)
    ]  # fmt: skip
    return samples, values


def _scalar_lines(
    fold: Fold, index: int, sampled: Collection[SampleLine], profiled: set[tuple[int, int]]
) -> Iterator[SampleLine]:
    """A line for each call whose only values are the scalars that its fold leaves out.

    None beside those of `sampled` that hold tensors of the same Call: before an argument drifted the shard had it under
    other numbers, of which no tensors were kept. `profiled`: calls by the shard's own numbers, and the phases that
    profiled steps ran them in.
    """
    numbers = {(line.call, line.phase) for line in sampled}
    with_tensors = {(fold.of.get((index, line.call), b""), line.phase) for line in sampled if line.tensors}
    phases_by_call: defaultdict[int, set[int]] = defaultdict(set)
    for number, phase in profiled:
        phases_by_call[number].add(phase)
    for shard, number in fold.of:
        if shard != index or not any(fold.drifted(index, number)):
            continue
        counted = {phase for phase, _, _ in fold.counts.get(fold.of[shard, number], ())}
        for phase in sorted(counted | phases_by_call[number]):
            if (number, phase) not in numbers and (fold.of[shard, number], phase) not in with_tensors:
                yield SampleLine(t="sample", call=number, phase=phase, slot=0)


def _chosen(candidates: list[Candidate]) -> list[Candidate]:
    """A few of those drawn, and all to be compared; those that hold the same are one. Of those that are kept to be
    compared alone, `drawn` is False."""
    by_content: dict[Hashable, Candidate] = {}
    for candidate in candidates:
        content = candidate.content
        same = by_content.get(content)
        by_content[content] = candidate if same is None else same.with_same(candidate)
    ordered = sorted(by_content.values(), key=lambda candidate: candidate.order)
    drawn = [candidate for candidate in ordered if candidate.drawn] or ordered
    spread = {id(candidate) for candidate in _spread(drawn)}
    kept = (replace(candidate, drawn=id(candidate) in spread) for candidate in ordered)
    return [candidate for candidate in kept if candidate.drawn or candidate.compared]


def _spread(ordered: list[Candidate]) -> list[Candidate]:
    """SAMPLES_PER_CALL of them, or as many as MOST_VALUES has room for, in proportion to the invocations that each
    stands for, spread over the steps."""
    largest = sorted((candidate.nbytes for candidate in ordered), reverse=True)[:SAMPLES_PER_CALL]
    most = max(1, sum(size <= MOST_VALUES for size in itertools.accumulate(largest)))
    if len(ordered) <= most:
        return ordered
    reached = list(itertools.accumulate(candidate.weight for candidate in ordered))
    marks = [(i + 0.5) / most * reached[-1] for i in range(most)]
    return [ordered[i] for i in sorted({bisect.bisect_left(reached, mark) for mark in marks})]


def _sampled_tensor(tensor: TensorContent, values: dict[str, bytes]) -> SampledTensor:
    name = None
    if tensor.values is not None:
        content = gzip.compress(save({"value": tensor.values}), mtime=0)
        name = hashlib.sha256(content).hexdigest() + ".safetensors.gz"
        values[name] = content
    return SampledTensor(file=name, low=tensor.low, high=tensor.high)
