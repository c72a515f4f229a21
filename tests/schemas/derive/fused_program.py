"""Records compiled functions: `python fused_program.py DIRECTORY [cpu|cuda]` leaves a Recording there.

Each is what engines fuse: norms, gated activations, rotary embedding, and what a fragment is hard to read for (sizes,
parts of a split, buffers written in place, results nobody asked for by name).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kcap

D = 64
Function = Callable[..., Any]


def norm(x: Any, weight: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def add_norm(x: Any, residual: Any, weight: Any) -> Any:
    total = x + residual
    return norm(total, weight), total


def subtract_norm(x: Any, residual: Any, weight: Any) -> Any:
    total = x - 2 * residual
    return norm(total, weight), total


def silu_and_mul(x: Any) -> Any:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


def gelu_and_mul(x: Any) -> Any:
    half = x.shape[-1] // 2
    return F.gelu(x[..., :half], approximate="tanh") * x[..., half:]


def rotary(query: Any, cache: Any, positions: Any) -> Any:
    cos, sin = cache[positions].chunk(2, -1)
    first, second = query.view(query.shape[0], -1, D).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return first * cos - second * sin, second * cos + first * sin


def embedding_norm(ids: Any, table: Any, weight: Any) -> Any:
    return norm(F.embedding(ids, table), weight)


def in_order(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a - b) / (c.abs() + 1) - d * b, d - c


def after_matmul(x: Any, matrix: Any, residual: Any) -> Any:
    return torch.relu(x @ matrix - 3 * residual)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, (D,), weight, bias)


def in_place(x: Any, y: Any) -> Any:
    x.mul_(2).sub_(y)
    return x.sum(-1)


def quantize(x: Any) -> Any:
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def sizes(x: Any) -> Any:
    return x.reshape(x.shape[0] * 2, -1) * x.shape[0]


def half(*shape: int) -> Any:
    return torch.randn(*shape).bfloat16()


def full(*shape: int) -> Any:
    return torch.randn(*shape)


CASES: list[tuple[Function, tuple[Any, ...]]] = [
    (add_norm, (half(8, D), half(8, D), half(D))),
    (subtract_norm, (half(8, D), half(8, D), half(D))),
    (silu_and_mul, (half(8, 2 * D),)),
    (gelu_and_mul, (half(8, 2 * D),)),
    (rotary, (half(8, 4 * D), half(100, D), torch.randint(0, 100, (8,)))),
    (embedding_norm, (torch.randint(0, 100, (8,)), half(100, D), half(D))),
    (in_order, (full(8, D), full(8, D), full(8, D), full(8, D))),
    (after_matmul, (half(8, D), half(D, D), half(8, D))),
    (layer_norm, (half(8, D), half(D), half(D))),
    (in_place, (full(8, D), full(8, D))),
    (quantize, (half(8, D),)),
    (sizes, (full(8, D),)),
]
STATIC_TOO = (silu_and_mul, sizes)


def main(directory: Path, device: str) -> None:
    with torch.no_grad(), kcap.record(directory) as recorder:
        for function, arguments in CASES:
            for dynamic in (True, False) if function in STATIC_TOO else (True,):
                torch._dynamo.reset()
                compiled = torch.compile(function, dynamic=dynamic)
                with recorder.step("prefill"):
                    compiled(*(argument.to(device) for argument in arguments))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu")
