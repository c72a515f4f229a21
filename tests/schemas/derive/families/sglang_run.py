"""Runs SGLang's own operator classes, in an environment that has it: `python sglang_run.py FILE`.

Into FILE, by torch.save, goes a list of what a Recording holds of each call, by name, what it returned, and what a new
object returns that was made of that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kcap.capture.taps.fused import Arguments
from kcap.replay.rebuild.operators import resolve_class
from kcap.schemas.recording.recording import Argument, Call

Given = tuple[Any, tuple[Any, ...]]  # the object of the class, and what its forward is given
SIZES = [(1, 64), (7, 128), (33, 1024), (5, 4096)]


class Named:
    """The recorder's part that numbers operators: it keeps the names of the arguments."""

    names: Sequence[str] = ()

    def operator(self, name: str, arguments: Sequence[str], work: bool = True, region: bool = False) -> int:
        self.names = arguments
        return 0


def ran(operator: Any, args: tuple[Any, ...]) -> tuple[str, dict[str, Any], Any, Any]:
    """The region's name, its arguments as they are recorded, and what the class returned, twice."""
    name, named = f"sglang_op::{type(operator).__name__}", Named()
    _, values = Arguments.of(name, operator.forward_native, operator).call(named, operator, args, {})
    held = {key: kept(value) for key, value in zip(named.names, values, strict=True)}
    returned = operator.forward_native(*args)
    return name, held, returned, resolve_class(Call(id=0, operator=name, args=as_arguments(held))).call(*held.values())


def as_arguments(held: dict[str, Any]) -> list[Argument]:
    return [Argument(name=name) for name in held]


def kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def norms() -> Iterator[Given]:
    from sglang.srt.layers.layernorm import Gemma3RMSNorm, GemmaRMSNorm, RMSNorm

    for dtype in (torch.bfloat16, torch.float32):
        for rows, hidden in SIZES:
            x, residual = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype)
            cast = RMSNorm(hidden, eps=1e-5, cast_x_before_out_mul=True)
            for operator in (RMSNorm(hidden, eps=1e-5), cast, GemmaRMSNorm(hidden), Gemma3RMSNorm(hidden)):
                operator = operator.to(dtype).requires_grad_(False)
                operator.weight.copy_(randn(hidden))
                yield operator, (x,)
                yield operator, (x, residual)
    yield RMSNorm(128).to(torch.bfloat16).requires_grad_(False), (randn(5, 48, 128)[:, :32],)


def activations() -> Iterator[Given]:
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul

    for rows, hidden in SIZES:
        for operator in (SiluAndMul(), GeluAndMul("tanh"), GeluAndMul("none")):
            yield operator, (randn(rows, 2 * hidden),)


def ropes() -> Iterator[Given]:
    from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding

    for neox in (True, False):
        for tokens, heads, kv, size, rot in [(1, 4, 2, 64, 64), (7, 8, 1, 128, 64), (33, 32, 8, 128, 128)]:
            shared = (size, rot, 300, 10000, neox, torch.bfloat16)
            projected = randn(tokens, (heads + 2 * kv) * size).split([heads * size, kv * size, kv * size], dim=1)
            for operator in (RotaryEmbedding(*shared), Llama3RotaryEmbedding(*shared, 8.0, 1.0, 4.0, 256)):
                yield operator, (torch.randint(0, 300, (tokens,)), *projected[:2])
    scaled = LinearScalingRotaryEmbedding(64, 64, 300, 10000, True, [4.0], torch.bfloat16)
    yield scaled, (torch.arange(5), randn(5, 4, 64), randn(5, 2, 64))


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        cases = [ran(*given) for of in (norms, activations, ropes) for given in of()]
    torch.save(cases, sys.argv[1])
