"""The inputs of each invocation of a Workload: drawn afresh by seed and number, cheaply, and so that they decide.

With standard normal numbers alone a row's root mean square is one, its mean zero and its log-sum-exp a constant: who
returns those passes without reading a row. So each row of a floating input is

    scale * (numbers + offset), and in half of the rows one outlier of up to half of the row's energy

where scale, offset and outlier are drawn for each row, the scale for the invocation, too; scale and offset also differ
between the sixteen parts of a long row, so that no part tells of the others. `numbers` are pieces of 128 bytes of a
pool in random order; with the scale none of them recurs. How far all that goes is a `Spread`. Inputs of a product have
no offset: a product of two means would exceed, and hide, all else. What a family's rule makes stays within the rule: it
is made for each invocation, or, where that takes long, in a number of variants for each seed. Integers of which nothing
is known are drawn for each invocation, from a range that differs by row: words where the reference takes them apart by
shifts, to 1000 where it has no floats, else to 7. What a Workload gives stays as it is.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kcap.errors import KcapError
from kcap.replay.datasets.inputs import (
    WorkloadInputs,
    definition_dtype,
    draft_inputs,
    draw_tensor,
    make_inputs,
    read_given,
)
from kcap.replay.datasets.spreads import Spread, spreads_for, within_axes
from kcap.replay.rebuild.rebuild import OF_BOOLS, SMALL_INTEGERS, IntegerRange
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.system import native_build

WIDE_FLOATS = ("float32", "float16", "bfloat16")
PIECE_BYTES = 128
POOL_ELEMENTS = 1 << 21
SHORTEST_ROW = 16  # elements: what is shorter shares one scale with the rest of the tensor
SHORTEST_WITH_OUTLIER = 32
PARTS, LEAST_PARTED = 16, 512  # parts of a row that differ, and the elements of the shortest row that has them
CHEAP_RULE_S = 1e-4  # a rule that takes no longer is followed for each invocation
VARIANTS_S = 0.25  # of a seed, for rules that take longer
FEWEST_VARIANTS, MOST_VARIANTS, MOST_OF_RULES_ALONE = 4, 32, 256


class InvocationDraws:
    """Of one Workload. `example` has the shapes, scalars and notes; raises what `make_inputs` does.

    The same seed and number give the same inputs in this process, for the same secret: it says which of the process's
    normal numbers are added up to those of a pool, and is in every stream.
    """

    def __init__(
        self,
        definition: Definition,
        workload: Workload,
        dataset: Dataset | None,
        secret: int,
        spread: Spread | None = None,
        limit: int | None = None,
    ) -> None:
        self.definition, self.workload = definition, workload
        spread = spreads_for(definition)[0] if spread is None else spread
        integers = within_axes(spread.integers, {**workload.axes, **definition.const_axes}.values())
        self.spread = replace(spread, integers=integers)
        self.example: WorkloadInputs = make_inputs(
            definition, workload, dataset, "cpu", secret, limit, self.spread.integers
        )
        self._secret = secret
        self._given = read_given(definition, workload, dataset)
        self._pools: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._on_device: dict[int, torch.Tensor] = {}  # of a GPU: what a Workload gives, by its place
        self._stacked: dict[str, torch.Tensor] = {}  # on a GPU, by input: what rules made for a seed
        self._seed, self._variants = -1, dict[int, dict[str, torch.Tensor]]()

    @property
    def varied(self) -> bool:
        """Whether one invocation's inputs differ from the next's."""
        return any(origin != "given" for origin in self.example.origins.values())

    @property
    def distinct(self) -> int | None:
        """How many invocations of a seed, one after another, have inputs unlike each other's; None: all."""
        return self._variant_count or None if self.varied and self._by_rules_alone else None

    @property
    def scalable(self) -> list[str]:
        """The inputs that `multiply` takes."""
        origins = self.example.origins
        return [
            name
            for name, tensor in self.definition.inputs.items()
            if origins[name] == "drawn" and tensor.dtype in WIDE_FLOATS
        ]

    def multiply(self, name: str, factor: float) -> None:
        """Make the numbers of an input so many times what they are without a factor."""
        self.spread = replace(self.spread, factors={**self.spread.factors, name: factor})

    def examples(self, count: int = 5) -> Iterator[dict[str, Any]]:
        """Inputs by name, of `count` invocations where rules make some: these are new, the others the example's."""
        by_name = dict(zip(self.definition.inputs, self.example.inputs, strict=True))
        yield by_name
        for number in range(1, count if "ruled" in self.example.origins.values() else 1):
            yield by_name | self._made_by_rules(self._secret + number)

    def draw(self, seed: int, number: int, device: torch.device | str = "cpu") -> list[Any]:
        """The inputs of invocation `number` of `seed`, in the Definition's order."""
        places = [
            torch.empty((1, *value.shape), dtype=value.dtype, device=device)
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
        a scalar, or an input that is not wanted. On a GPU the numbers are others than on the CPU.
        """
        for index, (name, place) in enumerate(zip(self.definition.inputs, places, strict=True)):
            if place is None or not place.numel():
                continue
            origin, dtype = self.example.origins[name], self.definition.inputs[name].dtype
            if origin == "given":
                place.copy_(self._given_for(index, place.device))
            elif origin == "ruled" and name not in self.example.free_integers:
                self._fill_by_rule(place, name, seed, first)
            elif dtype in WIDE_FLOATS:
                self._fill_floats(place, dtype, _stream(seed ^ self._secret, index), first)
                if (factor := self.spread.factors.get(name, 1.0)) != 1.0:
                    most = torch.finfo(place.dtype).max
                    place.mul_(factor).clamp_(-most, most)
            elif dtype.startswith("float"):
                self._fill_bytes(place, dtype, _stream(seed ^ self._secret, index), first)
            else:
                self._fill_free_integers(place, name, seed, first, index)

    def _fill_free_integers(self, place: torch.Tensor, name: str, seed: int, first: int, index: int) -> None:
        """Of which nothing is known. Quantized factors of a product have no mean, either."""
        dtype = self.definition.inputs[name].dtype
        span, width = self._range(name, dtype), _width(place)
        by_row = None if dtype == "int8" and not self.spread.offset else width
        if place.is_cuda:
            stream = _stream(seed ^ self._secret, index)
            _device_draws().fill_integers(place.view(len(place), -1), span, stream, first, by_row)
            return
        for offset, target in enumerate(place):
            _fill_integers(target, span, [seed, self._secret, first + offset, index], by_row)

    def _range(self, name: str, dtype: str) -> IntegerRange:
        if dtype == "bool":
            return OF_BOOLS
        limits = np.iinfo(dtype)
        of_input = self.spread.integers.get(name, SMALL_INTEGERS)
        low, high = (limits.min, limits.max) if dtype == "int8" else of_input
        return max(low, int(limits.min)), min(high, int(limits.max))

    def _given_for(self, index: int, device: torch.device) -> torch.Tensor:
        value: torch.Tensor = self.example.inputs[index]
        if device.type == "cpu":
            return value
        if index not in self._on_device:
            self._on_device[index] = value.to(device)
        return self._on_device[index]

    def _fill_by_rule(self, place: torch.Tensor, name: str, seed: int, first: int) -> None:
        if not place.is_cuda:
            for offset in range(len(place)):
                place[offset].copy_(self._variant(seed, first + offset)[name])
            return
        chosen = place.new_empty((len(place), 1), dtype=torch.int64)
        count = min(self._variant_count or MOST_VARIANTS, MOST_VARIANTS)  # more would take longer than what they serve
        _device_draws().fill_integers(chosen, (0, count - 1), _stream(seed ^ self._secret, -1), first)
        place.copy_(self._variants_on_device(seed, name, count, place.device)[chosen.view(-1)])

    def _variants_on_device(self, seed: int, name: str, count: int, device: torch.device) -> torch.Tensor:
        """[variants, *shape of the input]."""
        made = [self._variant_of(seed, key) for key in range(count)]
        if name not in self._stacked:
            self._stacked[name] = torch.stack([variant[name] for variant in made]).to(device)
        return self._stacked[name]

    def _fill_floats(self, place: torch.Tensor, dtype: str, stream: int, first: int) -> None:
        size, width = place[0].numel(), _width(place)
        parts = PARTS if width >= LEAST_PARTED and width % PARTS == 0 else 1
        pool, spread = self._pool(dtype, place.device), self.spread
        widest = spread.octaves, spread.offset, spread.outlier
        if place.is_cuda:
            row = width, parts, SHORTEST_WITH_OUTLIER
            _device_draws().fill_floats(place.view(len(place), -1), pool, widest, row, stream, first)
            return
        _library().kcap_fill_floats(
            ctypes.c_void_p(place.data_ptr()),
            ctypes.c_uint64(place.stride(0) * place.itemsize),
            ctypes.c_uint64(first),
            ctypes.c_uint64(len(place)),
            place.itemsize * 8,
            dtype == "bfloat16",
            struct.pack("=QQQ", pool.data_ptr(), *pool.shape),
            struct.pack("=fff", *widest),
            struct.pack("=QQQQ", size // width, width, parts, SHORTEST_WITH_OUTLIER),
            ctypes.c_uint64(stream),
        )

    def _fill_bytes(self, place: torch.Tensor, dtype: str, stream: int, first: int) -> None:
        """Fill `place` with pieces of 8-bit floats as they are."""
        pool, raw = self._pool(dtype, place.device), place.view(torch.uint8).view(len(place), -1)
        if place.is_cuda:
            _device_draws().fill_pieces(raw, pool, stream, first)
            return
        pieces = -(-raw.shape[1] // pool.shape[1])
        for offset, target in enumerate(raw):
            chosen = np.random.Generator(np.random.PCG64([stream, first + offset])).integers(0, len(pool), pieces)
            target.copy_(pool.index_select(0, torch.from_numpy(chosen)).view(-1)[: len(target)])

    def _pool(self, dtype: str, device: torch.device) -> torch.Tensor:
        """[pieces, elements of a piece], numbers of `dtype` in float32; of 8-bit floats their bytes."""
        key = dtype, device
        if key not in self._pools:
            generator = torch.Generator().manual_seed(self._secret ^ len(self._pools) + 1)
            if dtype in WIDE_FLOATS:
                starts = torch.randint(POOL_ELEMENTS, (2,), generator=generator).tolist()
                first, second = (row[at:][:POOL_ELEMENTS] for row, at in zip(_numbers(), starts, strict=True))
                wide = (first + second).to(definition_dtype(dtype)).float()
            else:
                wide = draw_tensor([POOL_ELEMENTS], dtype, generator).view(torch.uint8)
            self._pools[key] = wide.view(-1, PIECE_BYTES // definition_dtype(dtype).itemsize).to(device)
        return self._pools[key]

    def _variant(self, seed: int, number: int) -> dict[str, torch.Tensor]:
        """What rules make for an invocation, by input."""
        count = self._variant_count
        if not count:
            self._variants.clear()
        return self._variant_of(seed, number % count if count else number)

    def _variant_of(self, seed: int, key: int) -> dict[str, torch.Tensor]:
        if self._seed != seed:
            self._seed = seed
            self._variants.clear()
            self._stacked.clear()
        if key not in self._variants:
            self._variants[key] = self._made_by_rules(_stream(seed ^ self._secret, key) >> 1)
        return self._variants[key]

    @cached_property
    def _variant_count(self) -> int:
        """For each seed; 0: one for each invocation."""
        self._made_by_rules(self._secret)
        began = time.perf_counter()
        self._made_by_rules(self._secret + 1)
        took = time.perf_counter() - began
        most = MOST_OF_RULES_ALONE if self._by_rules_alone else MOST_VARIANTS
        return 0 if took <= CHEAP_RULE_S else max(min(int(VARIANTS_S / took), most), FEWEST_VARIANTS)

    @cached_property
    def _by_rules_alone(self) -> bool:
        example = self.example
        return all(origin != "drawn" and name not in example.free_integers for name, origin in example.origins.items())

    def _made_by_rules(self, seed: int) -> dict[str, torch.Tensor]:
        """The example's, where these have other sizes: a cache that is trimmed to the pages in use."""
        ruled = [name for name, origin in self.example.origins.items() if origin == "ruled"]
        draft = draft_inputs(self.definition, self.workload, self._given, seed)
        if draft.axes != self.example.axes:
            by_name = dict(zip(self.definition.inputs, self.example.inputs, strict=True))
            return {name: by_name[name] for name in ruled}
        return {name: draft[name] for name in ruled}


def prepare_draws(device: str) -> None:
    """Compile what draws on a GPU; KcapError where that cannot be."""
    try:
        _device_draws().fill_integers(torch.empty((1, 1), dtype=torch.int32, device=device), SMALL_INTEGERS, 0, 0)
    except Exception as error:
        first, _, _ = str(error).partition("\n")
        raise KcapError(f"inputs cannot be drawn on {device}, which takes Triton and a C compiler: {first}") from None


def _device_draws() -> Any:
    """kcap.replay.datasets.device_draws, which is of no use without a GPU."""
    from kcap.replay.datasets import device_draws

    return device_draws


@cache
def _library() -> ctypes.CDLL:
    """native_build.Unavailable where it cannot be built."""
    return ctypes.CDLL(str(native_build.build([Path(__file__).with_name("float_draws.cpp")])))


@cache
def _numbers() -> torch.Tensor:
    """Two rows that only this process knows: the sum of a number of each is standard normal, as those of a pool are."""
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    return torch.randn(2, 2 * POOL_ELEMENTS, generator=generator).mul_(0.5**0.5)


def _width(place: torch.Tensor) -> int:
    """Elements of a row of [invocations, *shape]."""
    size, last = place[0].numel(), int(place.shape[-1])
    return last if place.dim() > 1 and last >= SHORTEST_ROW else size


def _fill_integers(place: torch.Tensor, span: IntegerRange, key: list[int], width: int | None) -> None:
    """As `device_draws.fill_integers` does, of other words."""
    generator = np.random.Generator(np.random.PCG64([number & (1 << 64) - 1 for number in key]))
    (low, high), size = span, place.numel()
    count, dtype = high - low + 1, np.dtype(np.uint8) if place.dtype == torch.bool else place.numpy().dtype
    if width is None:
        values = generator.integers(low, high, size, dtype, endpoint=True)
    else:
        moves = generator.integers(0, count // 4 + 1, (2, size // width, 1))
        word = np.uint8 if dtype.itemsize == 1 else np.uint16 if count <= 1 << 16 else np.uint32
        bits = 8 * np.dtype(word).itemsize
        wide = generator.integers(0, (1 << bits) - 1, (size // width, width), word, endpoint=True)
        wide = wide.astype(f"u{bits // 4}")
        wide *= (count - moves.sum(0)).astype(wide.dtype)
        wide >>= bits
        values = wide.astype(dtype)
        values += (low + moves[0]).astype(dtype)
    drawn = torch.from_numpy(values).view(place.shape)
    place.copy_(drawn > OF_BOOLS[1] // 2 if place.dtype == torch.bool else drawn)


@lru_cache(maxsize=64)
def _stream(seed: int, index: int) -> int:
    """Where the random numbers of one input begin."""
    return int(np.random.SeedSequence([seed & (1 << 64) - 1, index & (1 << 64) - 1]).generate_state(1, np.uint64)[0])
