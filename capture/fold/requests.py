"""The requests of all shards: those of the first rank of each replica, whose other ranks run the same ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kcap.capture.shards.lines import PromptLine, RequestLine
from kcap.capture.shards.reader import Shard
from kcap.capture.window.requests import MAX_REQUESTS
from kcap.schemas.recording.recording import Request


class Requests:
    """`records`: one for each request, in the order in which the engine began them."""

    def __init__(self, shards: Sequence[Shard], ranks: Collection[int]) -> None:
        self.records: list[Request] = []
        self.block_size: int | None = None
        self._blocks: dict[int, int] = {}  # a hash -> its number in the Recording
        self._places: dict[tuple[int, int], int] = {}  # a shard's own request -> its place among the records
        for index, shard in enumerate(shards):
            if shard.process and shard.rank in ranks:
                last = {line.number: line for line in shard.lines(RequestLine)}
                prompts = {line.number: line for line in shard.lines(PromptLine)}
                for number in sorted(last):
                    self._places[index, number] = len(self.records)
                    self.records.append(self._record(last[number], shard.rank, prompts.get(number)))

    def places(self, index: int, numbers: Sequence[int]) -> list[int]:
        """The places of a step's requests, by the shard's own numbers; none where one of them has no line."""
        places = [self._places.get((index, min(number, MAX_REQUESTS))) for number in numbers]
        return [place for place in places if place is not None] if None not in places else []

    def _record(self, line: RequestLine, rank: int, prompt: PromptLine | None) -> Request:
        blocks: list[int] = []
        if prompt is not None:
            self.block_size = prompt.size
            blocks = [self._blocks.setdefault(block, len(self._blocks)) for block in prompt.blocks]
        return Request(rank=rank, blocks=blocks, **line.model_dump(exclude={"t", "number"}))
