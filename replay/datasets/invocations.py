"""The inputs of each invocation of a Workload: drawn afresh by seed and number, cheaply, and so that they decide.

With standard normal numbers alone a row's root mean square is one, its mean zero and its log-sum-exp a constant: who
returns those passes without reading a row. So each row of a floating input is

    scale * (numbers + offset), and in half of the rows one outlier of up to half of the row's energy

where scale, offset and outlier are drawn for each row, the scale for the invocation, too; scale and offset also differ
between the sixteen parts of a long row, so that no part tells of the others. `numbers` are pieces of 128 bytes of a
pool in random order; with the scale none of them recurs. How far all that goes is a `Spread`. Inputs of a product have
no offset: a product of two means would exceed, and hide, all else. What a family's rule makes stays within the rule: it
is made for each invocation, or, where that takes long, in a number of variants for each seed. Integers of which nothing
is known are drawn for each invocation. What a Workload gives stays as it is.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kcap.replay.datasets.inputs import WorkloadInputs, draft_inputs, draw_tensor, make_inputs, read_given
from kcap.replay.rebuild.rebuild import SMALL_INTEGERS
from kcap.schemas.files.python_source import parse
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload

PIECE_BYTES = 128
POOL_ELEMENTS = 1 << 21
CHUNK_BYTES = 1 << 20  # of small inputs, filled for several invocations at once
SHORTEST_ROW = 16  # elements: what is shorter shares one scale with the rest of the tensor
SHORTEST_WITH_OUTLIER = 32
PARTS, LEAST_PARTED = 16, 512  # parts of a row that differ, and the elements of the shortest row that has them
CHEAP_RULE_S = 1e-4  # a rule that takes no longer is followed for each invocation
VARIANTS_S = 0.25  # of a seed, for rules that take longer
FEWEST_VARIANTS, MOST_VARIANTS = 4, 32

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Spread:
    """`octaves`: a row's scale and an invocation's are each between 2 to the power of minus and plus that.

    `offset`: the largest of a row, in units of its scale. `outlier`: the largest, in units of the row's norm.
    """

    octaves: float
    offset: float = 0.0
    outlier: float = 0.0


WIDE = Spread(1.0, 1.0, 0.7)
OF_PRODUCTS = Spread(0.5, 0.0, 0.5)
NARROW = Spread(0.125)  # so that no number of the pool recurs


def spreads_for(definition: Definition) -> tuple[Spread, ...]:
    """The spreads to try, widest first: the last suits every reference that is defined on standard normal numbers."""
    return (OF_PRODUCTS, NARROW) if contracts(definition.reference) else (WIDE, OF_PRODUCTS, NARROW)


CONTRACTIONS = frozenset(
    "matmul mm bmm mv dot vdot inner addmm addmv addbmm baddbmm einsum tensordot linear bilinear conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention".split()
)


def contracts(reference: str) -> bool:
    """Whether the source of a reference names a product that sums over an axis of its inputs."""
    for node in ast.walk(parse(reference)):
        match node:
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()):
                return True
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in CONTRACTIONS:
                return True
    return False


class InvocationDraws:
    """Of one Workload on `device`. `example` has the shapes, scalars and notes; raises what `make_inputs` does.

    The same seed and number give the same inputs for as long as this object lives, and not in another: its pool is
    drawn from `secret`.
    """

    def __init__(
        self,
        definition: Definition,
        workload: Workload,
        dataset: Dataset | None,
        secret: int,
        spread: Spread | None = None,
        device: str = "cpu",
        limit: int | None = None,
    ) -> None:
        self.definition, self.workload, self.device = definition, workload, device
        self.spread = spreads_for(definition)[0] if spread is None else spread
        self.example: WorkloadInputs = make_inputs(definition, workload, dataset, device, secret, limit)
        self._secret = secret
        self._given = read_given(definition, workload, dataset)
        self._pools: dict[str, torch.Tensor] = {}
        self._seed, self._variants = -1, dict[int, dict[str, torch.Tensor]]()

    @property
    def varied(self) -> bool:
        """Whether one invocation's inputs differ from the next's."""
        return any(origin != "given" for origin in self.example.origins.values())

    def draw(self, seed: int, number: int) -> list[Any]:
        """The inputs of invocation `number` of `seed`, in the Definition's order."""
        places = [
            torch.empty((1, *value.shape), dtype=value.dtype, device=self.device)
            if isinstance(value, torch.Tensor)
            else None
            for value in self.example.inputs
        ]
        self.fill(seed, number, places)
        filled = zip(places, self.example.inputs, strict=True)
        return [value if place is None else place[0] for place, value in filled]

    def fill(self, seed: int, first: int, places: Sequence[torch.Tensor | None]) -> None:
        """Fill `places` with the inputs of the invocations of `seed` from number `first` on.

        Each is [invocations, *shape of the input], with any stride of the first axis and the rest contiguous; None for
        a scalar, or an input that is not wanted.
        """
        for index, (name, place) in enumerate(zip(self.definition.inputs, places, strict=True)):
            if place is None or not place.numel():
                continue
            origin, dtype = self.example.origins[name], self.definition.inputs[name].dtype
            if origin == "given":
                place.copy_(self.example.inputs[index])
            elif origin == "ruled" and name not in self.example.free_integers:
                for offset in range(len(place)):
                    place[offset].copy_(self._variant(seed, first + offset)[name])
            elif dtype in ("float32", "float16", "bfloat16"):
                self._fill_floats(place, dtype, _stream(seed ^ self._secret, index), first)
            elif dtype.startswith("float"):
                raw = place.view(torch.uint8).view(len(place), -1)
                self._gather(raw, self._pool(dtype), _stream(seed ^ self._secret, index), first)
            else:
                for offset in range(len(place)):
                    _fill_integers(place[offset], dtype, [seed, self._secret, first + offset, index])

    def _fill_floats(self, place: torch.Tensor, dtype: str, stream: np.uint64, first: int) -> None:
        size = place[0].numel()
        chunk = max(CHUNK_BYTES // place[0].nbytes, 1)
        width = place.shape[-1] if place.dim() > 1 and place.shape[-1] >= SHORTEST_ROW else size
        for start in range(0, len(place), chunk):
            part = place[start : start + chunk].view(-1, size)
            target = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            self._gather(target, self._pool(dtype), stream, first + start)
            self._spread_rows(target.view(len(part), -1, width), _next(stream), first + start)
            if target is not part:
                part.copy_(target)

    def _gather(self, target: torch.Tensor, pool: torch.Tensor, stream: np.uint64, first: int) -> None:
        """Fill `target`, [invocations, elements], with pieces of `pool`, [pieces, elements of a piece]."""
        pieces, piece = -(-target.shape[1] // pool.shape[1]), pool.shape[1]
        indices = (_words(stream, first, len(target), pieces) >> np.uint64(33)) % np.uint64(len(pool))
        chosen = torch.from_numpy(indices.reshape(-1).astype(np.int64)).to(self.device)
        if target.is_contiguous() and target.shape[1] % piece == 0:
            torch.index_select(pool, 0, chosen, out=target.view(-1, piece))
        else:
            target.copy_(pool.index_select(0, chosen).view(len(target), -1)[:, : target.shape[1]])

    def _spread_rows(self, rows: torch.Tensor, stream: np.uint64, first: int) -> None:
        """Scale, move and pierce `rows`, [invocations, rows, elements], in place."""
        spread, (count, height, width) = self.spread, rows.shape
        size, place = _fractions(_words(stream, first, count, height))
        overall, _ = _fractions(_words(_next(stream), first, count, 1))
        scale = np.exp2(spread.octaves * 2 * (size + overall - 1))
        parts = PARTS if width >= LEAST_PARTED and width % PARTS == 0 else 1
        uneven, high = _fractions(_words(_next(_next(_next(stream))), first, count, height * parts))
        own = scale[..., None] * np.exp2(spread.octaves * (2 * uneven.reshape(count, height, parts) - 1))
        pieces = rows.view(count, height, parts, -1)
        pieces.mul_(self._column(own, rows))
        if spread.offset:
            moved = (2 * place[..., None] - 1) * scale[..., None] + (high.reshape(own.shape) - 0.5) * own
            pieces.add_(self._column(spread.offset * moved, rows))
        if spread.outlier and width >= SHORTEST_WITH_OUTLIER:
            words = _words(_next(_next(stream)), first, count, height).ravel()
            place, size = _fractions(words)
            value = np.sqrt(width) * spread.outlier * np.exp2(-2 * size) * scale.ravel()
            at = np.arange(len(words)) * width + (place * width).astype(np.int64)
            here = (words & np.uint64(2)).astype(bool)
            value, at = np.where(words & np.uint64(1), value, -value)[here].astype(np.float32), at[here]
            chosen = torch.from_numpy(at).to(self.device)
            rows.view(-1).index_copy_(0, chosen, torch.from_numpy(value).to(self.device, rows.dtype))

    def _column(self, values: npt.NDArray[np.float32], rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32))[..., None].to(self.device, rows.dtype)

    def _pool(self, dtype: str) -> torch.Tensor:
        """[pieces, elements of a piece]; of 8-bit floats their bytes."""
        if dtype not in self._pools:
            generator = torch.Generator(self.device).manual_seed(self._secret ^ len(self._pools) + 1)
            drawn = draw_tensor([POOL_ELEMENTS], dtype, generator)
            drawn = drawn if drawn.itemsize > 1 else drawn.view(torch.uint8)
            self._pools[dtype] = drawn.view(-1, PIECE_BYTES // drawn.itemsize)
        return self._pools[dtype]

    def _variant(self, seed: int, number: int) -> dict[str, torch.Tensor]:
        """What rules make for an invocation, by input."""
        count = self._variant_count
        key = int(_words(_stream(seed ^ self._secret, -1), number, 1, 1)[0, 0] % np.uint64(count)) if count else number
        if self._seed != seed or not count:
            self._seed = seed
            self._variants.clear()
        if key not in self._variants:
            self._variants[key] = self._made_by_rules(int(_stream(seed ^ self._secret, key)) >> 1)
        return self._variants[key]

    @cached_property
    def _variant_count(self) -> int:
        """For each seed; 0: one for each invocation."""
        self._made_by_rules(self._secret)
        began = time.perf_counter()
        self._made_by_rules(self._secret + 1)
        took = time.perf_counter() - began
        return 0 if took <= CHEAP_RULE_S else max(min(int(VARIANTS_S / took), MOST_VARIANTS), FEWEST_VARIANTS)

    def _made_by_rules(self, seed: int) -> dict[str, torch.Tensor]:
        """The example's, where these have other sizes: a cache that is trimmed to the pages in use."""
        ruled = [name for name, origin in self.example.origins.items() if origin == "ruled"]
        draft = draft_inputs(self.definition, self.workload, self._given, seed)
        if draft.axes != self.example.axes:
            by_name = dict(zip(self.definition.inputs, self.example.inputs, strict=True))
            return {name: by_name[name] for name in ruled}
        return {name: draft[name] for name in ruled}


def _fill_integers(place: torch.Tensor, dtype: str, key: list[int]) -> None:
    low, high = {"bool": (0, 1), "int8": (-128, 127)}.get(dtype, SMALL_INTEGERS)
    generator = np.random.Generator(np.random.PCG64([number & (1 << 64) - 1 for number in key]))
    place.copy_(torch.from_numpy(generator.integers(low, high + 1, tuple(place.shape), dtype=np.dtype(dtype))))


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(words: Words) -> Words:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014): each bit of each word depends on all of its bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _stream(seed: int, index: int) -> np.uint64:
    """Where the random numbers of one input begin."""
    words = np.array([seed & (1 << 64) - 1, index & (1 << 64) - 1], dtype=np.uint64)
    return np.uint64(_mix(_mix(words[:1]) + words[1:] * GOLDEN)[0])


def _next(stream: np.uint64) -> np.uint64:
    return np.uint64(_mix(np.array([stream]))[0])


def _words(stream: np.uint64, first: int, count: int, size: int) -> Words:
    """Random words, [count, size]: a row for each invocation from number `first` on."""
    rows = _mix(stream + np.arange(first, first + count, dtype=np.uint64) * GOLDEN)
    return _mix(rows[:, None] + np.arange(1, size + 1, dtype=np.uint64) * GOLDEN)


def _fractions(words: Words) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Two numbers of [0, 1) from each word, of its high bits; the lowest are left."""
    high, low = (words >> np.uint64(40)), (words >> np.uint64(16)) & np.uint64((1 << 24) - 1)
    return high.astype(np.float32) * np.float32(2**-24), low.astype(np.float32) * np.float32(2**-24)
