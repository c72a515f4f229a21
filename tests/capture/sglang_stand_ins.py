"""Stand-ins of SGLang's batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class Mode(SimpleNamespace):
    def is_decode(self) -> bool:
        return self.name == "DECODE"


def batch(mode: str, queries: list[int], lengths: list[int]) -> Any:
    """A `ForwardBatch`. In decode SGLang lists no new tokens."""
    return SimpleNamespace(
        forward_mode=Mode(name=mode),
        batch_size=len(lengths),
        input_ids=torch.zeros(sum(queries)),
        seq_lens_cpu=torch.tensor(lengths),
        extend_seq_lens_cpu=None if mode in ("DECODE", "TARGET_VERIFY") else queries,
    )


def request(name: str, cached: int = 0, prompt: int = 32) -> Any:
    known = {"origin_input_ids": [7] * prompt, "output_ids": [], "finished_reason": None}
    return SimpleNamespace(rid=name, cached_tokens=cached, **known)


def scheduled(mode: str, *requests: Any, decoding: tuple[Any, ...] = ()) -> Any:
    """A `ScheduleBatch`."""
    return SimpleNamespace(forward_mode=Mode(name=mode), reqs=[*requests, *decoding], decoding_reqs=list(decoding))
