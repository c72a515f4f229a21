"""What BackendBench and tritonbench make of a line: both evaluate it as Python, with these names."""

from __future__ import annotations

import math

import torch
from torch.testing import make_tensor

from kcap.schemas.recording.dtypes import BY_WORD

WORDS = {word: getattr(torch, dtype.name) for word, dtype in BY_WORD.items()}


def backendbench_tensor(size, dtype, stride=None, device="cuda"):
    """As BackendBench's: on the CPU without a GPU; the memory of a strided tensor is made first."""
    device = "cpu" if device == "cuda" else device
    bounds = {"low": 0, "high": 1} if dtype.is_floating_point else {}
    if stride is None:
        return make_tensor(size, dtype=dtype, device=device, **bounds)
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return make_tensor(extent, dtype=dtype, device=device, **bounds).as_strided(size, stride)


def tritonbench_tensor(size, dtype, stride=None):
    """As tritonbench's: it has no device, and fills a strided tensor through its view."""
    if stride is None:
        return make_tensor(size, dtype=dtype, device="cpu")
    return torch.empty_strided(size, stride, dtype=dtype).copy_(make_tensor(size, dtype=dtype, device="cpu"))


def evaluate(text, tensor):
    text = text.strip().strip("'")
    for word in WORDS:
        text = text.replace(f"'{word}'", word)
    return eval(text, {"T": tensor, "th": torch, "torch": torch, "inf": math.inf, **WORDS})
