"""The content of rebuilt arguments: standard normal numbers in the recorded dtype, recorded values, drawn indices.

Large buffers repeat one block of numbers.
"""

from __future__ import annotations

import torch

from kcap.replay.bind import Bound
from kcap.replay.layout import Target, compact, key_of, tensor, torch_dtype
from kcap.replay.memory import Key
from kcap.replay.skip import Skip
from kcap.schemas.dtypes import BY_NAME

BLOCK = 1 << 22  # elements drawn for a large buffer; the rest are copies
UNIT = frozenset({"multinomial", "bernoulli", "binary_cross_entropy", "binary_cross_entropy_backward"})  # take 0..1


def fill_floats(bound: Bound, target: Target, buffers: dict[Key, torch.Tensor]) -> None:
    """Fill every storage that holds floats, once; then booleans, tensor by tensor."""
    unit = bound.namespace == "aten" and bound.base in UNIT
    done: set[Key] = set()
    specs = [(spec, key_of(spec, target), BY_NAME[spec.dtype].kind) for _, spec in bound.tensors()]
    for spec, key, kind in specs:
        if kind in ("float", "complex") and key not in done:
            done.add(key)
            draw(buffers[key], spec.dtype, unit)
    for spec, key, kind in specs:
        if kind == "bool" and spec.numel:
            write(tensor(spec, buffers[key]), torch.randint(0, 2, compact(spec), dtype=torch.bool))


def draw(buffer: torch.Tensor, dtype: str, unit: bool = False) -> None:
    """Overwrite the whole buffer (bytes) with random numbers of `dtype`; `unit` takes them from [0, 1)."""
    low, high = {"float4_e2m1fn_x2": (0, 256), "float8_e8m0fnu": (120, 131)}.get(dtype, (0, 0))  # e8m0: 127 is 2**0
    if high:
        size = (min(BLOCK, len(buffer)),)
        repeat(buffer, torch.randint(low, high, size, dtype=torch.uint8, device=buffer.device))
        return
    cells = _real_view(buffer, dtype)
    block = torch.rand if unit else torch.randn
    repeat(cells, block(min(BLOCK, len(cells)), device=cells.device).to(cells.dtype))


def _real_view(buffer: torch.Tensor, dtype: str) -> torch.Tensor:
    """`buffer` as real numbers: a complex number is two of them."""
    halves = {"complex32": torch.float16, "complex64": torch.float32, "complex128": torch.float64}
    return buffer.view(halves.get(dtype) or torch_dtype(dtype))


def repeat(cells: torch.Tensor, block: torch.Tensor) -> None:
    """Fill the flat `cells` with copies of `block`."""
    for start in range(0, len(cells), len(block)):
        part = cells[start : start + len(block)]
        part.copy_(block[: len(part)])


def fill_integers(bound: Bound, target: Target, buffers: dict[Key, torch.Tensor]) -> None:
    """Write the decided values; a tensor larger than its values (unused rows were not kept) is zero elsewhere."""
    for path, spec in bound.integers():
        if (values := bound.contents.get(path)) is None:
            continue
        write(tensor(spec, buffers[key_of(spec, target)]), values)


def write(made: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` into the leading part of `made`, element by element where strides repeat (stride 0)."""
    if values.numel() == 1 and made.numel() >= 1:
        values = values.reshape([1] * made.dim())
    if values.dim() != made.dim():
        raise Skip(f"the recorded values have shape {list(values.shape)}, the tensor {list(made.shape)}")
    single = [1 if step == 0 else n for n, step in zip(made.shape, made.stride(), strict=True)]
    cut = [min(a, b) for a, b in zip(single, values.shape, strict=True)]
    region = made
    for dim, n in enumerate(cut):
        region = region.narrow(dim, 0, n)
        values = values.narrow(dim, 0, n)
    region.copy_(values)
