"""The requests of an offline recording, load by load: prompts from a file, or random ones of a given length."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.numbers import Numbers, listed
from kcap.errors import FormatError

Prompt = str | list[int]


@dataclass(frozen=True)
class Workload:
    """What to ask of the engine. Without `prompts`: `num_prompts` random ones of `input_len` token ids, seeded.

    Every request generates `output_len` tokens, as in vLLM's own benchmarks (`--random-input-len`, `ignore_eos`).
    Several `num_prompts` are loads that run one after another; `input_len` is one number for all, or one for each.
    """

    num_prompts: Numbers = 8
    input_len: Numbers = 128
    output_len: int = 32
    prompts: list[Prompt] | None = None
    seed: int = 0

    @property
    def sizes(self) -> list[list[int]]:
        """The length of each prompt, load by load."""
        if self.prompts is not None:
            return [[len(prompt) for prompt in self.prompts]]
        counts, lengths = listed(self.num_prompts), listed(self.input_len)
        each = lengths * len(counts) if len(lengths) == 1 else lengths
        return [[length] * count for count, length in zip(counts, each, strict=True)]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, generated ones too."""
        return max(map(max, self.sizes)) + self.output_len

    @property
    def largest(self) -> int:
        """Tokens of the largest load, generated ones too."""
        return max(sum(load) + len(load) * self.output_len for load in self.sizes)

    def loads(self, vocabulary: int) -> list[list[Prompt]]:
        """The requests of each load. None begins as one of an earlier load, which a prefix cache may still hold."""
        if self.prompts is not None:
            return [self.prompts]
        draw = random.Random(self.seed)
        loads: list[list[Prompt]] = []
        taken: set[int] = set()
        for load in self.sizes:
            prompts = [_drawn(draw, vocabulary, length, taken) for length in load]
            taken |= {prompt[0] for prompt in prompts}
            loads.append([*prompts])
        return loads


def _drawn(draw: random.Random, vocabulary: int, length: int, taken: set[int]) -> list[int]:
    """`taken`: token ids that the prompt does not begin with, unless they are all that there are."""
    prompt = [draw.randrange(vocabulary) for _ in range(length)]
    while prompt[0] in taken and len(taken) < vocabulary:
        prompt[0] = draw.randrange(vocabulary)
    return prompt


def read_prompts(path: Path) -> list[Prompt]:
    """Read a JSON-lines file: each line a string, a list of token ids, or an object with `prompt` or
    `prompt_token_ids`; FormatError with the line otherwise."""
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                prompts.append(_prompt(orjson.loads(line)))
            except ValueError as error:
                raise FormatError(f"{path}:{number}", str(error)) from None
    if not prompts:
        raise FormatError(str(path), "no prompt in it: one JSON string or list of token ids a line")
    return prompts


def _prompt(data: Any) -> Prompt:
    if isinstance(data, dict):
        data = data.get("prompt", data.get("prompt_token_ids"))
    if isinstance(data, str) and data:
        return data
    if isinstance(data, list) and data and all(type(token) is int and token >= 0 for token in data):
        return data
    raise ValueError('neither a text nor a list of token ids: write {"prompt": "…"} or {"prompt_token_ids": [1, 2]}')
