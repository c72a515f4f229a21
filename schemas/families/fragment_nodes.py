"""What the nodes of a graph fragment are to the kernel: given to it, computed by it, or neither."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from kcap.schemas.families.fragment_text import Fragment, Layout, Operation
from kcap.schemas.families.fragment_values import FragmentValue, Ref, Size
from kcap.schemas.values import TorchConstant

VIEWS = frozenset(
    f"aten.{name}"
    for name in "view.default reshape.default unsqueeze.default squeeze.dim squeeze.dims permute.default "
    "expand.default t.default transpose.int slice.Tensor select.int alias.default clone.default".split()
)


COPY = "aten.copy_.default"
CONVERT = "prims.convert_element_type.default"
FLOAT32 = TorchConstant("dtype", "float32")
HALVES = (TorchConstant("dtype", "bfloat16"), TorchConstant("dtype", "float16"))


class Nodes:
    """The nodes of `fragment`, by what defines them."""

    def __init__(self, fragment: Fragment) -> None:
        self.fragment = fragment

    @cached_property
    def given(self) -> dict[str, Layout | None]:
        """The buffers that the kernel reads and does not itself write before, in torch's order."""
        return {name: layout for name, layout in self.fragment.reads.items() if name not in self.fragment.writes}

    @cached_property
    def _held(self) -> dict[str, str]:
        """Nodes that are the content of a given buffer under another name."""
        buffers = {self.fragment.buffer(name): name for name in self.given}
        held = {name: buffers[known] for name, known in self.fragment.buffers.items() if known in buffers}
        held = {name: known for name, known in held.items() if name not in (*self.given, *self.fragment.writes)}
        return {**self._deduced(held), **held}

    def _deduced(self, held: dict[str, str]) -> dict[str, str]:
        """The one node that nothing defines is the one given buffer that no operator takes."""
        known = {*held, *self.given, *self.fragment.operations, *self.fragment.sizes}
        taken = set[str]().union(*(operation.refs() for operation in self._wanted()))
        loose, unused = taken - known, set(self.given) - taken - set(held.values())
        return {loose.pop(): unused.pop()} if len(loose) == len(unused) == 1 else {}

    def _wanted(self) -> list[Operation]:
        """Operations but those whose result nobody reads: they only follow on the kernel."""
        return [operation for operation in self.fragment.operations.values() if operation.layout or operation.users]

    def find(self, name: str) -> str | Size | int | Operation | None:
        """What `name` is: the name of a given buffer, a size, or an Operation; None where nothing defines it."""
        if name in self.given or name in self._held:
            return self._held.get(name, name)
        return self.fragment.sizes.get(name, self.fragment.operations.get(name))

    def computed(self, name: str) -> bool:
        """Whether the kernel can have this node from what it is given."""
        found = self.find(name)
        return name in self._computable if isinstance(found, Operation) else found is not None

    @cached_property
    def _computable(self) -> set[str]:
        """Operations all of whose arguments are given or computable (Kahn's order: a fragment may be long)."""
        lacking = {name: self._operands(node) for name, node in self.fragment.operations.items()}
        takers: dict[str, list[str]] = defaultdict(list)
        for name, operands in lacking.items():
            for operand in operands:
                takers[operand].append(name)
        ready = [name for name, operands in lacking.items() if not operands]
        found = set[str]()
        while ready:
            found.add(name := ready.pop())
            for taker in takers[name]:
                lacking[taker].discard(name)
                if not lacking[taker]:
                    ready.append(taker)
        return found

    def _operands(self, operation: Operation) -> set[str]:
        """Of what it takes, what is neither given nor a size."""
        return {name for name in operation.refs() if not isinstance(self.find(name), str | Size | int)}

    @cached_property
    def ends(self) -> list[str]:
        """Operations that the kernel computes, and neither names as written nor takes for another."""
        mine = [operation for operation in self.fragment.operations.values() if self.computed(operation.name)]
        taken = set[str]().union(*(operation.refs() for operation in mine))
        known = taken | set(self.fragment.writes) | set(self.copies)
        return [operation.name for operation in mine if operation.name not in known]

    def stored(self, name: str) -> str | None:
        """The node whose value the written buffer `name` holds: itself, or what is copied there; None: none is told."""
        own = self.fragment.operations.get(name)
        if own is not None and own.target != COPY:
            return name
        buffer = self.fragment.buffer(name)
        copied = [source for copy, source in self.copies.items() if self.fragment.buffer(copy) == buffer]
        return copied[0] if len(copied) == 1 else None

    @cached_property
    def copies(self) -> dict[str, str]:
        """Nodes that write to what they are given, and the node whose value they write."""
        mine = [operation for operation in self.fragment.operations.values() if operation.target == COPY]
        return {copy.name: value.name for copy in mine if isinstance(value := copy.args[-1], Ref)}

    def sources(self, name: str) -> list[str]:
        """`name`, and what it is a view of."""
        found = [name]
        while isinstance(node := self.find(found[-1]), Operation) and node.target in VIEWS and len(node.refs()) == 1:
            found += node.refs()
        return found

    def unrounded(self, operation: Operation) -> FragmentValue:
        """What a conversion converts: inductor keeps in float32 what a graph rounds to 16 bits and takes up again."""
        value = operation.args[0]
        inner = self.find(value.name) if isinstance(value, Ref) else None
        if isinstance(inner, Operation) and inner.target == CONVERT and self._type(inner.args[0]) == operation.args[1]:
            return inner.args[0] if operation.args[1:] == [FLOAT32] and inner.args[1] in HALVES else value
        return value

    def _type(self, value: FragmentValue) -> TorchConstant | None:
        found = self.find(value.name) if isinstance(value, Ref) else None
        layout = (
            found.layout if isinstance(found, Operation) else self.given.get(found) if isinstance(found, str) else None
        )
        return TorchConstant("dtype", layout.dtype) if layout else None

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
            found = self.find(name)
            if not isinstance(found, Operation) or name in ordered:
                continue
            if complete:
                ordered[name] = found
            else:
                stack += [(name, True), *((other, False) for other in reversed(self.takes(found)))]
        return list(ordered.values())
