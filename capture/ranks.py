"""Which ranks a session's shards are of: where each stands in the engine, its steps, and whether it ended in order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from kcap.capture.programs import Programs
from kcap.capture.shards import CLOSED, LOOSE_STEPS, Shard
from kcap.schemas.ranks import REPLICA, Rank
from kcap.schemas.recording import PHASES


def ranks_of(shards: Sequence[Shard], programs: Programs) -> list[Rank]:
    """One for each rank that recorded, in order; the processes of one rank are one."""
    steps = _steps(shards, programs)
    found: dict[int, Rank] = {}
    for shard in shards:
        if shard.process:
            made = _rank(shard, steps[rank_of(shard)])
            known = found.get(made.rank)
            ended = made.ended and (known is None or known.ended)
            found[made.rank] = made.model_copy(update={"ended": ended, **({"pid": known.pid} if known else {})})
    return _alone([found[number] for number in sorted(found)])


def rank_of(shard: Shard) -> int:
    return int(shard.process.get("rank", 0))


def _rank(shard: Shard, steps: Counter[str]) -> Rank:
    rank = rank_of(shard)
    groups = {line["name"]: _numbered(line["ranks"], line["rank"], rank) for line in shard.lines.get("group", [])}
    return Rank(
        rank=rank,
        pid=int(shard.process.get("pid", 0)),
        places={**shard.process.get("places", {}), **{name: group.index(rank) for name, group in groups.items()}},
        groups=groups,
        steps={phase: times for phase, times in sorted(steps.items()) if times},
        ended=bool(shard.header(CLOSED)),
    )


def _numbered(ranks: list[int], place: int, rank: int) -> list[int]:
    """A group's ranks as they count in the whole engine, in which this one, at `place` in the group, is `rank`."""
    return [one - ranks[place] + rank for one in ranks]


def _alone(ranks: list[Rank]) -> list[Rank]:
    """Without the replica's number where there is one replica."""
    if any(rank.places.get(REPLICA) for rank in ranks):
        return ranks
    return [
        rank.model_copy(update={"places": {name: n for name, n in rank.places.items() if name != REPLICA}})
        if REPLICA not in rank.groups
        else rank
        for rank in ranks
    ]


def _steps(shards: Sequence[Shard], programs: Programs) -> dict[int, Counter[str]]:
    steps: dict[int, Counter[str]] = defaultdict(Counter)
    for batch in programs.batches:
        steps[batch.rank][PHASES[batch.phase]] += batch.times
    for shard in shards:
        for phase, name in enumerate(PHASES):
            steps[rank_of(shard)][name] += shard.header(LOOSE_STEPS + phase)
    return steps


def first_ranks(ranks: Sequence[Rank]) -> list[int]:
    """The lowest rank of each replica: the ranks of one replica all run the same steps."""
    first: dict[int, int] = {}
    for rank in ranks:
        first.setdefault(rank.places.get(REPLICA, 0), rank.rank)
    return list(first.values())
