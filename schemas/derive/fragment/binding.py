"""Which launch argument is which buffer of a graph fragment, and what each node is: an input, computed, or neither.

The wrapper's call names its buffers, and the fragment says which node each is of. Where it does not (a wrapper that
was compiled without kcap), inductor's order decides: it numbers `in_ptr`s as their buffers are first read and
`out_ptr`s as they are first written (`torch._inductor.codegen.common.KernelArgs`), and so go the fragment's lines;
shapes and dtypes have to agree, and what more than one order fits is left open.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from kcap.schemas.derive.fragment.text import Fragment, Layout, Operation
from kcap.schemas.derive.fragment.values import FragmentError, FragmentValue, Ref, Size, size_of
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.values import TensorSpec, TorchConstant

VIEWS = frozenset(
    f"aten.{name}"
    for name in "view.default reshape.default unsqueeze.default squeeze.dim squeeze.dims permute.default "
    "expand.default t.default transpose.int slice.Tensor select.int alias.default clone.default".split()
)

FUSED = ("aten.", "prims.", "inductor_prims.", "quantized_decomposed.", "getitem")  # what inductor has lowerings of
COPY = "aten.copy_.default"
CONVERT = "prims.convert_element_type.default"
FLOAT32 = TorchConstant("dtype", "float32")
HALVES = (TorchConstant("dtype", "bfloat16"), TorchConstant("dtype", "float16"))


class Nodes:
    """The nodes of `fragment`, by what defines them."""

    def __init__(self, fragment: Fragment) -> None:
        self.fragment = fragment

    @cached_property
    def input_buffers(self) -> dict[str, Layout | None]:
        """The buffers that the kernel reads and does not itself write before, in torch's order."""
        own = {*self.fragment.writes, *self._overwritten()}
        return {name: layout for name, layout in self.fragment.reads.items() if name not in own}

    def _overwritten(self) -> list[str]:
        """Nodes that write to their argument, which no other operator takes."""
        taken = Counter(name for operation in self.fragment.operations.values() for name in operation.refs())
        copies = (self.fragment.operations[name] for name in self.copies)
        return [copy.name for copy in copies if isinstance(to := copy.args[0], Ref) and taken[to.name] == 1]

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Nodes that are the content of an input buffer under another name."""
        buffers = {self.fragment.buffer(name): name for name in self.input_buffers}
        aliases = {name: buffers[buffer] for name, buffer in self.fragment.buffers.items() if buffer in buffers}
        aliases = {
            name: buffer for name, buffer in aliases.items() if name not in (*self.input_buffers, *self.fragment.writes)
        }
        return {**self._deduced(aliases), **aliases}

    def _deduced(self, aliases: dict[str, str]) -> dict[str, str]:
        """The one node that nothing defines is the one input buffer that no operator takes."""
        defined = {*aliases, *self.input_buffers, *self.fragment.operations, *self.fragment.sizes}
        taken = set[str]().union(*(operation.refs() for operation in self._used_operations()))
        undefined, unused = taken - defined, set(self.input_buffers) - taken - set(aliases.values())
        return {undefined.pop(): unused.pop()} if len(undefined) == len(unused) == 1 else {}

    def _used_operations(self) -> list[Operation]:
        """Operations without those whose result is not read: they come after the kernel."""
        return [operation for operation in self.fragment.operations.values() if operation.layout or operation.users]

    def find(self, name: str) -> str | Size | int | Operation | None:
        """What `name` is: the name of an input buffer, a size, or an Operation; None where nothing defines it."""
        if name in self.input_buffers or name in self._aliases:
            return self._aliases.get(name, name)
        return self.fragment.sizes.get(name, self.fragment.operations.get(name))

    def computed(self, name: str) -> bool:
        """Whether the kernel can compute this node from its inputs."""
        definition = self.find(name)
        return name in self._computable if isinstance(definition, Operation) else definition is not None

    @cached_property
    def _computable(self) -> set[str]:
        """Operations all of whose arguments are inputs or computable (Kahn's order: a fragment may be long), but for
        those that inductor fuses into no kernel: they come after."""
        fused = {name: node for name, node in self.fragment.operations.items() if node.target.startswith(FUSED)}
        lacking = {name: self._operands(node) for name, node in fused.items()}
        takers: dict[str, list[str]] = defaultdict(list)
        for name, operands in lacking.items():
            for operand in operands:
                takers[operand].append(name)
        ready = [name for name, operands in lacking.items() if not operands]
        computable = set[str]()
        while ready:
            computable.add(name := ready.pop())
            for taker in takers[name]:
                lacking[taker].discard(name)
                if not lacking[taker]:
                    ready.append(taker)
        return computable

    def _operands(self, operation: Operation) -> set[str]:
        """Its operands that are neither inputs nor sizes."""
        return {name for name in operation.refs() if not isinstance(self.find(name), str | Size | int)}

    @cached_property
    def ends(self) -> list[str]:
        """Operations that the kernel computes, and neither writes by name nor uses for another."""
        computed = [operation for operation in self.fragment.operations.values() if self.computed(operation.name)]
        taken = set[str]().union(*(operation.refs() for operation in computed))
        excluded = taken | set(self.fragment.writes) | set(self.copies)
        return [operation.name for operation in computed if operation.name not in excluded]

    def stored_node(self, name: str) -> str | None:
        """The node whose value the written buffer `name` holds: itself, or what is copied there; None if not known."""
        own = self.fragment.operations.get(name)
        if own is not None and own.target != COPY:
            return name
        buffer = self.fragment.buffer(name)
        copied = [source for copy, source in self.copies.items() if self.fragment.buffer(copy) == buffer]
        return copied[0] if len(copied) == 1 else None

    @cached_property
    def copies(self) -> dict[str, str]:
        """Nodes that write to their argument, and the node whose value they write."""
        copies = [operation for operation in self.fragment.operations.values() if operation.target == COPY]
        return {copy.name: value.name for copy in copies if isinstance(value := copy.args[-1], Ref)}

    def sources(self, name: str) -> list[str]:
        """`name`, and what it is a view of."""
        chain = [name]
        while isinstance(node := self.find(chain[-1]), Operation) and node.target in VIEWS and len(node.refs()) == 1:
            chain += node.refs()
        return chain

    def unrounded(self, operation: Operation) -> FragmentValue:
        """What a conversion converts: inductor keeps in float32 what a graph rounds to 16 bits and takes up again."""
        value = operation.args[0]
        inner = self.find(value.name) if isinstance(value, Ref) else None
        if isinstance(inner, Operation) and inner.target == CONVERT and self._type(inner.args[0]) == operation.args[1]:
            return inner.args[0] if operation.args[1:] == [FLOAT32] and inner.args[1] in HALVES else value
        return value

    def keeps_type(self, operation: Operation) -> bool:
        """Whether it converts to the dtype that it is given."""
        return operation.target == CONVERT and self._type(operation.args[0]) == operation.args[1]

    def _type(self, value: FragmentValue) -> TorchConstant | None:
        layout = self.layout(value.name) if isinstance(value, Ref) else None
        return TorchConstant("dtype", layout.dtype) if layout else None

    def layout(self, name: str) -> Layout | None:
        """What the node `name` is like, where that is known."""
        definition = self.find(name)
        if isinstance(definition, Operation):
            return definition.layout
        return self.input_buffers.get(definition) if isinstance(definition, str) else None

    def takes(self, operation: Operation) -> list[str]:
        """The nodes that `run` takes for `operation`."""
        if operation.target == CONVERT and len(operation.args) == 2:
            value = self.unrounded(operation)
            return [value.name] if isinstance(value, Ref) else []
        return operation.refs()

    def needed(self, names: list[str]) -> list[Operation]:
        """The Operations that `names`, which are computed, come from, each after those that it takes."""
        ordered: dict[str, Operation] = {}
        stack = [(name, False) for name in reversed(names)]
        while stack:
            name, complete = stack.pop()
            definition = self.find(name)
            if not isinstance(definition, Operation) or name in ordered:
                continue
            if complete:
                ordered[name] = definition
            else:
                stack += [(name, True), *((other, False) for other in reversed(self.takes(definition)))]
        return list(ordered.values())


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


def is_shared(nodes: Nodes, binding: Binding) -> bool:
    """Whether the fragment is of other kernels, too: those that inductor makes of one group of nodes, because they can
    run side by side, have one fragment, which names buffers that this one does not read."""
    return binding.reads.keys() != nodes.input_buffers.keys()


def launch_pointers(call: Call, fragment: Fragment) -> list[Pointer]:
    """The tensor arguments of `call`; FragmentError if one is not named as inductor names its kernels' arguments."""
    pointers = []
    names = fragment.call if len(fragment.call) >= len(call.args) else []
    for index, argument in enumerate(call.args):
        if isinstance(argument.value, TensorSpec):
            name = argument.name or ""
            match = _POINTER.fullmatch(name)
            if match is None:
                raise FragmentError(f"its argument '{argument.name}' is no buffer of the fragment's")
            buffer = names[index] if index < len(names) else None
            pointers.append(Pointer(name, str(index), argument.value, match[1], buffer))
    return pointers


def bind_buffers(call: Call, nodes: Nodes) -> Binding:
    """Which of `call`'s arguments is which buffer; FragmentError where that is not certain."""
    binding, fragment = Binding(), nodes.fragment
    pointers = launch_pointers(call, fragment)
    reading = [pointer for pointer in pointers if pointer.read]
    writing = [pointer for pointer in pointers if pointer.written]
    before = {
        pointer.path: pointer.buffer and (fragment.reused.get(pointer.buffer, pointer.buffer)) for pointer in writing
    }
    for pointer in reading:
        _match_by_name(binding.reads, nodes.input_buffers, fragment, pointer, before.get(pointer.path, pointer.buffer))
    for pointer in writing:
        _match_by_name(binding.writes, fragment.writes, fragment, pointer, pointer.buffer)
    named = len(binding.writes)
    layouts = {name: _layout(nodes, name) for name in (*nodes.input_buffers, *fragment.writes)}
    _unify(binding.symbols, [(layouts[n], p.tensor) for n, p in (*binding.reads.items(), *binding.writes.items())])
    _match_by_order(binding.reads, nodes.input_buffers, reading, layouts, binding.symbols, "reads", whole=True)
    _match_by_order(binding.writes, fragment.writes, writing, layouts, binding.symbols, "writes", whole=False)
    _check_layouts(binding, layouts)
    _check_names(fragment, {name: pointer for name, pointer in binding.reads.items() if not pointer.written})
    _check_names(fragment, binding.writes)
    if is_shared(nodes, binding) and len(binding.writes) > named:
        raise FragmentError("several kernels share its fragment, which does not name all that this one writes")
    return binding


def _match_by_name(
    into: dict[str, Pointer], names: Iterable[str], fragment: Fragment, pointer: Pointer, buffer: str | None
) -> None:
    same = [name for name in names if fragment.buffer(name) == buffer]
    if len(same) == 1 and same[0] not in into:
        into[same[0]] = pointer


def _check_names(fragment: Fragment, matched: Mapping[str, Pointer]) -> None:
    """FragmentError if the wrapper's call has another node's buffer where a node was matched."""
    for name, pointer in matched.items():
        buffer = pointer.buffer
        if buffer in fragment.buffers.values() and fragment.buffers.get(name, buffer) != buffer:
            raise FragmentError(f"its fragment's %{name} is {fragment.buffers[name]}, and it is called with {buffer}")


def _layout(nodes: Nodes, name: str) -> Layout | None:
    operation = nodes.fragment.operations.get(name)
    return nodes.fragment.reads.get(name) or (operation.layout if operation else None)


def _match_by_order(
    into: dict[str, Pointer],
    names: Iterable[str],
    pointers: list[Pointer],
    layouts: Mapping[str, Layout | None],
    symbols: dict[str, int],
    verb: str,
    whole: bool,
) -> None:
    """Match the pointers that no name matched with the buffers that are left, in order; `whole`: with all of them.

    Where the names match all pointers, the buffers that are left are of other kernels (`is_shared`).
    """
    bound = {pointer.path for pointer in into.values()}
    open_names = [name for name in names if name not in into]
    open_pointers = [pointer for pointer in pointers if pointer.path not in bound]
    if whole and not open_names and all(pointer.written for pointer in open_pointers):
        return  # the kernel itself wrote what it reads there
    if not open_pointers:
        return
    if len(open_names) < len(open_pointers) or (whole and len(open_names) > len(open_pointers)):
        count, named = len(open_pointers), len(open_names)
        raise FragmentError(f"it {verb} {count} buffers that its wrapper does not name, and its fragment has {named}")
    fitting = list(_fitting(open_names, open_pointers, layouts, symbols))
    if len(fitting) != 1:
        raise FragmentError(f"{len(fitting)} orders fit the buffers that it {verb}")
    into.update(zip(fitting[0], open_pointers, strict=True))
    _unify(symbols, [(layouts[name], pointer.tensor) for name, pointer in into.items()])


def _fitting(
    names: list[str], pointers: list[Pointer], layouts: Mapping[str, Layout | None], symbols: dict[str, int]
) -> Iterator[tuple[str, ...]]:
    """The ways to choose of `names`, for each of `pointers` in their order, those whose layouts agree.

    Buffers that are read and written come first among a kernel's parameters, wherever they are read.
    """
    shared = [pointer for pointer in pointers if pointer.kind == "in_out"]
    for tried, chosen in enumerate(_choices(names, len(pointers), len(shared))):
        if tried > MOST_ORDERS:
            raise FragmentError("too many orders of its buffers")
        pairs = [(layouts[name], pointer.tensor) for name, pointer in zip(chosen, pointers, strict=True)]
        trial = dict(symbols)
        _unify(trial, pairs)
        if all(layout_fits(layout, tensor, trial) for layout, tensor in pairs):
            yield chosen


def _choices(names: list[str], count: int, shared: int) -> Iterator[tuple[str, ...]]:
    for chosen in combinations(names, count):
        for first in combinations(chosen, shared):
            yield (*first, *(name for name in chosen if name not in first))


def layout_fits(layout: Layout | None, tensor: TensorSpec, symbols: Mapping[str, int]) -> bool:
    """Whether `tensor` can be what `layout` says, as far as that is known."""
    if layout is None:
        return True
    if layout.dtype != tensor.dtype or len(layout.shape) != len(tensor.shape):
        return False
    sizes = [size_of(size, symbols) for size in layout.shape]
    return all(size is None or size == real for size, real in zip(sizes, tensor.shape, strict=True))


def _unify(symbols: dict[str, int], pairs: Iterable[tuple[Layout | None, TensorSpec]]) -> None:
    """Learn what the symbols are from sizes that are one symbol."""
    for layout, tensor in pairs:
        if layout is None or len(layout.shape) != len(tensor.shape):
            continue
        for size, real in zip(layout.shape, tensor.shape, strict=True):
            if isinstance(size, Size) and not size.operands:
                symbols.setdefault(size.operation, real)


def _check_layouts(binding: Binding, layouts: Mapping[str, Layout | None]) -> None:
    for name, pointer in (*binding.reads.items(), *binding.writes.items()):
        if not layout_fits(layouts[name], pointer.tensor, binding.symbols):
            raise FragmentError(f"its fragment's %{name} is not like argument {pointer.path}: it is of another use")
