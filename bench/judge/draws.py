"""The inputs of a Workload for every invocation, in one pool of memory that is shared with candidates.

What is random has more content in the pool than one invocation takes. On the CPU that is put together from small pieces
of it in an order that nobody can tell before, each at most once; on a GPU it is one piece, which begins anywhere. What
a rule made (offsets, pages, experts) comes in several variants. What the Workload itself gives is the same each time.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kcap.bench.judge import wire
from kcap.bench.judge.wire import Content, Result
from kcap.bench.raw import raw_bytes
from kcap.bench.tolerance import RTOL
from kcap.replay.definitions.draw import draw, torch_dtype
from kcap.replay.definitions.inputs import Made, make_inputs
from kcap.replay.skip import Skip
from kcap.schemas.dataset import Dataset
from kcap.schemas.definition import Definition
from kcap.schemas.workload import Workload

ALIGN = 64
VARIANTS = 3
LEAST_SLACK, MOST_SLACK = 1 << 12, 1 << 22  # elements
SLACK_SHARE = 4  # of an input's elements, one in so many


@dataclass
class Draws:
    """`pool`: a sealed file in memory. `varied`: whether one invocation's inputs differ from the next's."""

    definition: Definition
    made: Made
    contents: list[Content]
    results: list[Result]
    pool: int
    size: int
    variants: int
    notes: list[str] = field(default_factory=list)

    @property
    def varied(self) -> bool:
        return self.variants > 1 or any(content.kind == wire.POOLED for content in self.contents)

    @property
    def bytes(self) -> int:
        """Of one set of inputs and outputs."""
        return self.given + sum(result.reserved for result in self.results)

    @property
    def given(self) -> int:
        """Bytes of one set of inputs."""
        return sum(int(value.nbytes) for value in self.made.inputs if isinstance(value, torch.Tensor))

    def close(self) -> None:
        os.close(self.pool)


@contextmanager
def draws(definition: Definition, workload: Workload, dataset: Dataset | None, limit: int | None) -> Iterator[Draws]:
    """Fresh inputs; raises what `make_inputs` does. They end with the context."""
    made = [make_inputs(definition, workload, dataset, "cpu", secrets.randbits(62), limit)]
    if "ruled" in made[0].origins.values():
        more = (
            make_inputs(definition, workload, dataset, "cpu", secrets.randbits(62), limit) for _ in range(VARIANTS - 1)
        )
        made += [one for one in more if one.axes == made[0].axes]
    drawn = _lay_out(definition, made)
    try:
        yield drawn
    finally:
        drawn.close()


def _lay_out(definition: Definition, made: list[Made]) -> Draws:
    pool = os.memfd_create("inputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        contents, size = _contents(pool, definition, made)
        return Draws(definition, made[0], contents, _results(definition, made[0]), pool, size, len(made))
    except BaseException:
        os.close(pool)
        raise


def _contents(pool: int, definition: Definition, made: list[Made]) -> tuple[list[Content], int]:
    """Write the content of all inputs to `pool`, and seal it; what the driver is told of them, and the bytes."""
    end, contents = 0, []
    for index, name in enumerate(definition.inputs):
        values = [one.inputs[index] for one in made]
        drawn = definition.inputs[name].dtype if made[0].origins[name] == "drawn" else None
        content, end = _place(pool, name, values, drawn, end)
        contents.append(content)
    os.ftruncate(pool, max(end, 1))
    fcntl.fcntl(pool, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return contents, max(end, 1)


def _place(pool: int, name: str, values: list[Any], drawn: str | None, end: int) -> tuple[Content, int]:
    """Write the content of one input at `end` of the pool; what the driver is told of it, and the new end.

    `drawn`: the dtype, in the Definition's words, of one that is random.
    """
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return wire.scalar(first), end
    dtype, shape = wire.word(first.dtype), tuple(first.shape)
    if drawn:
        slack = min(max(first.numel() // SLACK_SHARE, LEAST_SLACK), MOST_SLACK) if first.numel() else 0
        more = draw([slack], drawn, torch.Generator().manual_seed(secrets.randbits(62)))
        _write(pool, torch.cat([raw_bytes(first), raw_bytes(more)]), end)
        content = Content(wire.POOLED, 0, name, dtype, shape, end, slack)
        return content, _aligned(end + (first.numel() + slack) * first.itemsize)
    stride = _aligned(first.nbytes)
    for number, value in enumerate(values):
        _write(pool, value, end + number * stride)
    return Content(wire.FIXED, 0, name, dtype, shape, end, 0, stride), end + len(values) * stride


def _write(pool: int, tensor: torch.Tensor, offset: int) -> None:
    content = memoryview(raw_bytes(tensor).numpy())
    while content:
        done = os.pwrite(pool, content, offset)
        content, offset = content[done:], offset + done


def _results(definition: Definition, made: Made) -> list[Result]:
    results, end = [], 0
    for name, output in definition.outputs.items():
        dtype, shape = torch_dtype(output.dtype), definition.sizes(output.shape or (), made.axes)
        if dtype.is_floating_point and dtype not in RTOL:
            raise Skip(f"outputs.{name}: a Definition with outputs of {output.dtype} is not supported")
        reserved = _aligned(max(dtype.itemsize, 8 if dtype.is_floating_point else 1) * torch.Size(shape).numel())
        results.append(Result(name, dtype, tuple(shape), end, reserved))
        end += reserved
    return results


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
