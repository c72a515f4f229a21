"""The Programs of all shards, folded: what the steps ran, in order, and how often."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from kcap.capture.folding import Fold
from kcap.capture.shards import Shard
from kcap.schemas.recording import PHASES, Count, Program, Step


@dataclass
class Batch:
    rank: int
    program: bytes
    phase: int
    tokens: int
    sequences: int
    times: int


class Programs:
    """The Programs of all shards, folded: equal ones of several ranks are one."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._calls: dict[bytes, list[bytes]] = {}
        self._counts: dict[bytes, Counter[tuple[int, int]]] = {}
        self._ended: dict[int, int] = {}
        self._keys: dict[tuple[int, int], bytes] = {}  # a shard's own program -> its key
        self.batches: list[Batch] = []
        for index, shard in enumerate(fold.shards):
            self._add(index, shard)

    def _add(self, index: int, shard: Shard) -> None:
        rank = int(shard.process.get("rank", 0))
        own: dict[int, list[int]] = {}
        for line in shard.lines.get("program", []):
            if all((index, call) in self._fold.of for call in line["calls"]):
                self._keys[index, line["id"]] = self._intern(index, line["calls"])
                own[line["id"]] = line["calls"]
        self._ended[index] = 0
        for line in shard.lines.get("batch", []):
            times = shard.batch_count(line["id"])
            self._ended[index] += times
            key = self._keys.get((index, line["program"]))
            if not times or key is None:
                continue
            self._counts[key][line["phase"], rank] += times
            self.batches.append(Batch(rank, key, line["phase"], line["tokens"], line["sequences"], times))
            for call in own[line["program"]]:
                self._fold.count(index, call, line["phase"], times)

    def _intern(self, index: int, calls: list[int]) -> bytes:
        signatures = [self._fold.of[index, call] for call in calls]
        key = hashlib.sha256(b"\n".join(signatures)).digest()
        self._calls.setdefault(key, signatures)
        self._counts.setdefault(key, Counter())
        return key

    def _ran(self) -> list[bytes]:
        return [key for key, counts in self._counts.items() if counts]

    def order(self) -> list[bytes]:
        """Every Call's signature in the order in which the Programs ran them."""
        return list(dict.fromkeys(call for key in self._ran() for call in self._calls[key]))

    def records(self, ids: dict[bytes, int]) -> list[Program]:
        return [
            Program(
                id=number,
                calls=[ids[call] for call in self._calls[key]],
                counts=[
                    Count(phase=PHASES[phase], rank=rank, count=times)
                    for (phase, rank), times in sorted(self._counts[key].items())
                ],
            )
            for number, key in enumerate(self._ran())
        ]

    def steps(self) -> list[Step]:
        numbers = {key: number for number, key in enumerate(self._ran())}
        out = []
        for index, shard in enumerate(self._fold.shards):
            for line in shard.lines.get("step", []):
                key = self._keys.get((index, line["program"]))
                if line["index"] >= self._ended[index] or key is None:
                    continue
                fields = {**line, "phase": PHASES[line["phase"]], "program": numbers.get(key)}
                out.append(Step.model_validate({**fields, "rank": int(shard.process.get("rank", 0))}))
        return sorted(out, key=lambda step: (step.rank, step.index))
