"""What a kernel of inductor's must move at least, by the ATen operators that it stands for.

Its outputs are wanted whole. An operator of which all is wanted wants all of what it certainly reads: slices and parts
of a tensor add up to it, and of a table's rows, or of `where`'s two sides, nothing is certain.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kcap.replay.datasets.reference import compile_reference
from kcap.replay.roofline.sweeps import sweeps_all
from kcap.schemas.derive.cost import Cost
from kcap.schemas.derive.fragment.reference import FragmentReference, Port, reference_of
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call

VIEWS = frozenset(
    "view reshape _unsafe_view permute transpose t unsqueeze squeeze expand alias detach clone _to_copy"
    " convert_element_type".split()
)
INDEXED = {"index": 1, "embedding": 1, "gather": 2, "where": 0}  # which argument is certainly read


def cost_of_fused(call: Call, recording: Recording) -> Cost | None:
    """The bytes of one invocation; None where nothing says which operators `call`'s kernel stands for."""
    reference = reference_of(call, recording)
    if not isinstance(reference, FragmentReference):
        return None
    try:
        shares = read_shares(reference)
    except Exception:  # what torch's operators raise for arguments that no kernel had
        return None
    read = int(sum(share * _bytes(port) for share, port in zip(shares, reference.inputs, strict=True)))
    dtype = next((port.dtype for port in reference.inputs if BY_NAME[port.dtype].kind == "float"), "")
    return Cost(read + sum(map(_bytes, reference.outputs)), read, 0, dtype)


def _bytes(port: Port) -> int:
    return math.prod(port.shape) * int(_dtype(port).itemsize)


def _dtype(port: Port) -> torch.dtype:
    return torch_dtype(port.dtype, ValueError)


def read_shares(reference: FragmentReference) -> list[float]:
    """Of each input of the reference, the least share of its elements that its outputs are made from."""
    inputs = [torch.empty(port.shape, dtype=_dtype(port), device="meta") for port in reference.inputs]
    run = compile_reference(reference.source, "fused")
    with _Trace() as trace, torch.no_grad():
        outputs = run(*inputs)
    wanted = _Wanted(tree_leaves(outputs))
    for operation in reversed(trace.operations):
        wanted.add(operation)
    return [wanted.share(value) for value in inputs]


@dataclass(frozen=True)
class _Operation:
    """One call: its operator's name without namespace and overload, and with them, its arguments and its result."""

    base: str
    name: str
    args: tuple[Any, ...]
    result: Any


class _Trace(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        base = function.overloadpacket.__name__
        overload = f"{function.namespace}::{base}.{function._overloadname}"
        self.operations.append(_Operation(base, overload, tuple(args), result))
        return result


class _Wanted:
    """What is wanted of each tensor: all, or parts along a dimension."""

    def __init__(self, whole: Iterable[Any]) -> None:
        self._whole = {id(value) for value in whole}
        self._parts: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))

    def share(self, value: torch.Tensor) -> float:
        if id(value) in self._whole:
            return 1.0
        lengths = [_union(parts) / max(value.shape[dim], 1) for dim, parts in self._parts[id(value)].items()]
        return max(lengths, default=0.0)

    def add(self, operation: _Operation) -> None:
        """What `operation` takes, if all of its result is wanted. It is given in the reverse order of the calls."""
        base, args, result = operation.base, operation.args, operation.result
        if base in ("split", "split_with_sizes", "chunk", "unbind"):
            return self._add_pieces(args[0], args[2] if len(args) > 2 else 0, result, keep=base != "unbind")
        if not all(self.share(value) == 1.0 for value in tree_leaves(result)):
            return
        if base == "slice":
            given = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
            dim = int(given[0])
            start, end, step = slice(*given[1:]).indices(args[0].shape[dim])
            if step == 1:
                self._want_part(args[0], dim, start, end)
        elif base == "select":
            index = args[2] % args[0].shape[args[1]]
            self._want_part(args[0], args[1], index, index + 1)
        elif base in INDEXED:
            self._want_whole(args[INDEXED[base]])
        elif base in VIEWS or (operation.name.startswith("aten::") and sweeps_all(operation.name)):
            self._want_whole(args)

    def _add_pieces(self, value: torch.Tensor, dim: int, pieces: Iterable[torch.Tensor], keep: bool) -> None:
        start = 0
        for piece in pieces:
            end = start + (piece.shape[dim] if keep else 1)
            if self.share(piece) == 1.0:
                self._want_part(value, dim, start, end)
            start = end

    def _want_whole(self, values: Any) -> None:
        self._whole |= {id(value) for value in tree_leaves(values) if isinstance(value, torch.Tensor)}

    def _want_part(self, value: torch.Tensor, dim: int, start: int, end: int) -> None:
        self._parts[id(value)][dim % value.dim()].append((start, end))


def _union(parts: Iterable[tuple[int, int]]) -> int:
    """How many numbers the intervals hold together."""
    length, reached = 0, 0
    for start, end in sorted(parts):
        length += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return length
