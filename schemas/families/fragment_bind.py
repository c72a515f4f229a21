"""Which argument of a recorded launch is which buffer of the kernel's graph fragment.

The wrapper's call names its buffers, and the fragment says which of them are whose. Where it does not (a wrapper that
was compiled without kcap), inductor's order decides: it numbers `in_ptr`s as their buffers are first read and
`out_ptr`s as they are first written (`torch._inductor.codegen.common.KernelArgs`), and so go the fragment's lines;
shapes and dtypes have to agree, and what more than one order fits is left open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from kcap.schemas.families.fragment_nodes import Nodes
from kcap.schemas.families.fragment_text import Fragment, Layout
from kcap.schemas.families.fragment_values import FragmentError, Size, size_of
from kcap.schemas.records import Call
from kcap.schemas.values import TensorSpec

MOST_ORDERS = 500
_POINTER = re.compile(r"(in|out|in_out)_ptr(\d+)", re.ASCII)


@dataclass(frozen=True)
class Pointer:
    """An argument: its name and path in the Call's, its tensor, whether it is read or written, the wrapper's name."""

    name: str
    path: str
    tensor: TensorSpec
    kind: str
    buffer: str | None

    @property
    def read(self) -> bool:
        return self.kind != "out"

    @property
    def written(self) -> bool:
        return self.kind != "in"


@dataclass
class Binding:
    """Pointers by the name of what they hold before (`reads`) and after (`writes`), and the sizes that symbols have."""

    reads: dict[str, Pointer] = field(default_factory=dict)
    writes: dict[str, Pointer] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)


def pointers(call: Call, fragment: Fragment) -> list[Pointer]:
    """The tensor arguments of `call`; FragmentError if one is none that inductor gives its fused kernels."""
    found = []
    names = fragment.call if len(fragment.call) >= len(call.args) else []
    for index, argument in enumerate(call.args):
        if isinstance(argument.value, TensorSpec):
            name = argument.name or ""
            match = _POINTER.fullmatch(name)
            if match is None:
                raise FragmentError(f"its argument '{argument.name}' is no buffer of the fragment's")
            buffer = names[index] if index < len(names) else None
            found.append(Pointer(name, str(index), argument.value, match[1], buffer))
    return found


def bind(call: Call, nodes: Nodes) -> Binding:
    """Which of `call`'s arguments is which buffer; FragmentError where that is not certain."""
    binding, fragment = Binding(), nodes.fragment
    arguments = pointers(call, fragment)
    reading = [one for one in arguments if one.read]
    writing = [one for one in arguments if one.written]
    before = {one.path: one.buffer and (fragment.reused.get(one.buffer, one.buffer)) for one in writing}
    for pointer in reading:
        _name(binding.reads, nodes.given, fragment, pointer, before.get(pointer.path, pointer.buffer))
    for pointer in writing:
        _name(binding.writes, fragment.writes, fragment, pointer, pointer.buffer)
    layouts = {name: _layout(nodes, name) for name in (*nodes.given, *fragment.writes)}
    _unify(binding.symbols, [(layouts[n], p.tensor) for n, p in (*binding.reads.items(), *binding.writes.items())])
    _order(binding.reads, nodes.given, reading, layouts, binding.symbols, "reads", whole=True)
    _order(binding.writes, fragment.writes, writing, layouts, binding.symbols, "writes", whole=False)
    _agree(binding, layouts)
    return binding


def _name(
    into: dict[str, Pointer], names: Iterable[str], fragment: Fragment, pointer: Pointer, buffer: str | None
) -> None:
    same = [name for name in names if fragment.buffer(name) == buffer]
    if len(same) == 1 and same[0] not in into:
        into[same[0]] = pointer


def _layout(nodes: Nodes, name: str) -> Layout | None:
    operation = nodes.fragment.operations.get(name)
    return nodes.fragment.reads.get(name) or (operation.layout if operation else None)


def _order(
    into: dict[str, Pointer],
    names: Iterable[str],
    given: list[Pointer],
    layouts: Mapping[str, Layout | None],
    symbols: dict[str, int],
    verb: str,
    whole: bool,
) -> None:
    """Give the pointers that no name told the buffers that are left, in their order; `whole`: all of them."""
    bound = {pointer.path for pointer in into.values()}
    open_names = [name for name in names if name not in into]
    open_given = [pointer for pointer in given if pointer.path not in bound]
    if whole and not open_names and all(pointer.written for pointer in open_given):
        return  # the kernel itself wrote what it reads there
    if not open_given or len(open_names) < len(open_given) or (whole and len(open_names) != len(open_given)):
        if open_given or (whole and open_names):
            raise FragmentError(f"it {verb} {len(open_given)} buffers, of which its fragment names {len(open_names)}")
        return
    fitting = list(_fitting(open_names, open_given, layouts, symbols))
    if len(fitting) != 1:
        raise FragmentError(f"{len(fitting)} orders fit the buffers that it {verb}")
    into.update(zip(fitting[0], open_given, strict=True))
    _unify(symbols, [(layouts[name], pointer.tensor) for name, pointer in into.items()])


def _fitting(
    names: list[str], given: list[Pointer], layouts: Mapping[str, Layout | None], symbols: dict[str, int]
) -> Iterator[tuple[str, ...]]:
    """The ways to choose of `names`, for each of `given` in their order, those whose layouts agree.

    Buffers that are read and written come first among a kernel's parameters, wherever they are read.
    """
    shared = [pointer for pointer in given if pointer.kind == "in_out"]
    for tried, chosen in enumerate(_choices(names, len(given), len(shared))):
        if tried > MOST_ORDERS:
            raise FragmentError("too many orders of its buffers")
        pairs = [(layouts[name], pointer.tensor) for name, pointer in zip(chosen, given, strict=True)]
        trial = dict(symbols)
        _unify(trial, pairs)
        if all(fits(layout, tensor, trial) for layout, tensor in pairs):
            yield chosen


def _choices(names: list[str], count: int, shared: int) -> Iterator[tuple[str, ...]]:
    for chosen in combinations(names, count):
        for first in combinations(chosen, shared):
            yield (*first, *(name for name in chosen if name not in first))


def fits(layout: Layout | None, tensor: TensorSpec, symbols: Mapping[str, int]) -> bool:
    """Whether `tensor` can be what `layout` says, as far as that is known."""
    if layout is None:
        return True
    if layout.dtype != tensor.dtype or len(layout.shape) != len(tensor.shape):
        return False
    told = [size_of(size, symbols) for size in layout.shape]
    return all(size is None or size == real for size, real in zip(told, tensor.shape, strict=True))


def _unify(symbols: dict[str, int], pairs: Iterable[tuple[Layout | None, TensorSpec]]) -> None:
    """Learn what the symbols are from sizes that are one symbol."""
    for layout, tensor in pairs:
        if layout is None or len(layout.shape) != len(tensor.shape):
            continue
        for size, real in zip(layout.shape, tensor.shape, strict=True):
            if isinstance(size, Size) and not size.operands:
                symbols.setdefault(size.operation, real)


def _agree(binding: Binding, layouts: Mapping[str, Layout | None]) -> None:
    for name, pointer in (*binding.reads.items(), *binding.writes.items()):
        if not fits(layouts[name], pointer.tensor, binding.symbols):
            raise FragmentError(f"its fragment's %{name} is not like argument {pointer.path}: it is of another use")
