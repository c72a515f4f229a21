"""The requests of an offline recording: prompts from a file, or random ones of a given length."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from kcap.errors import FormatError

Prompt = str | list[int]


@dataclass(frozen=True)
class Workload:
    """What to ask of the engine. Without `prompts`: `num_prompts` random ones of `input_len` token ids, seeded.

    Every request generates `output_len` tokens, as in vLLM's own benchmarks (`--random-input-len`, `ignore_eos`).
    """

    num_prompts: int = 8
    input_len: int = 128
    output_len: int = 32
    prompts: list[Prompt] | None = None
    seed: int = 0

    def requests(self, vocabulary: int) -> list[Prompt]:
        if self.prompts is not None:
            return self.prompts
        draw = random.Random(self.seed)
        return [[draw.randrange(vocabulary) for _ in range(self.input_len)] for _ in range(self.num_prompts)]


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
