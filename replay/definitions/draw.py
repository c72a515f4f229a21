"""Tensors of which nothing is known, drawn as FlashInfer-Bench draws them (0.1.2, `bench/utils.py`, `_rand_tensor`).

Standard normal numbers; for 8 bits cut at -2 and 2 and cast. Where it cannot draw float4_e2m1 (torch has no cast),
any byte is two of its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kcap.replay import layout
from kcap.schemas.dtypes import BY_NAME

BLOCK = 1 << 24  # elements held in float32 at a time
PACKED = {"float4_e2m1": "float4_e2m1fn_x2"}  # FlashInfer-Bench's name, torch's name: two numbers a byte
MOST = 2.0


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a Definition's; Skip if this torch has none."""
    return layout.torch_dtype(PACKED.get(name, name))


def bits(name: str) -> int:
    """The bits of one element of a Definition's dtype, as torch counts elements."""
    return BY_NAME[PACKED.get(name, name)].bits


def draw(shape: Sequence[int], name: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor of dtype `name` on the generator's device, of content that does not matter."""
    dtype, device = torch_dtype(name), generator.device
    match name:
        case "float32" | "float16" | "bfloat16":
            return torch.randn(tuple(shape), dtype=dtype, device=device, generator=generator)
        case "float4_e2m1":
            return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, device=device, generator=generator).view(
                dtype
            )
        case "bool":
            return torch.randint(0, 2, tuple(shape), dtype=dtype, device=device, generator=generator)
        case "int8":
            return torch.randint(-128, 128, tuple(shape), dtype=dtype, device=device, generator=generator)
    return _cast(torch.empty(tuple(shape), dtype=dtype, device=device), generator)


def _cast(made: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    for part in made.view(-1).split(BLOCK):
        part.copy_(torch.randn(part.shape, device=made.device, generator=generator).clamp_(-MOST, MOST))
    return made
