"""A fused kernel of inductor's as plain PyTorch, from the ATen operators that torch says it stands for.

The Recording keeps them beside the kernel (`Launch.fragment`). Nothing in them is run here: they are read by a grammar
(fragment_text), joined with the launch's arguments (fragment_bind) and written as a module (fragment_source).
"""

from __future__ import annotations

from dataclasses import dataclass

from kcap.errors import FormatError
from kcap.schemas.families.fragment_bind import Binding, Pointer, bind, fits
from kcap.schemas.families.fragment_nodes import Nodes
from kcap.schemas.families.fragment_source import write_run
from kcap.schemas.families.fragment_text import Operation, read_fragment
from kcap.schemas.families.fragment_values import FragmentError
from kcap.schemas.recording import Recording
from kcap.schemas.records import Call


@dataclass(frozen=True)
class Port:
    """An input or output of `run`: its name, the path of its tensor in the Call's arguments, and what that is like.

    Names are those of the kernel's parameters; what is read and written is `in_out_ptr0`, and `in_out_ptr0_out`.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FragmentReference:
    """`source` is a module whose `run` takes `inputs` and gives `outputs` (one: the tensor itself), in their order.

    `scratch`: paths of arguments that the kernel writes and no ATen operator gives (partial sums of a reduction).
    """

    source: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    scratch: tuple[str, ...] = ()


Outputs = list[tuple[str, Pointer]]


@dataclass(frozen=True)
class Unknown:
    """There is no reference, and why."""

    reason: str


def reference_of(call: Call, recording: Recording) -> FragmentReference | Unknown:
    """The reference of the fused kernel that `call` launches, for these arguments."""
    if call.launch is None:
        return Unknown("it is no launch of a kernel with a source of its own")
    try:
        text = recording.fragment(call.launch)
    except FormatError as error:
        return Unknown(error.reason)
    if text is None:
        return Unknown("torch's wrapper told no operators of it, or was not there")
    return reference_from(call, text)


def reference_from(call: Call, text: str) -> FragmentReference | Unknown:
    """The reference that the fragment `text` gives for `call`."""
    try:
        nodes = Nodes(read_fragment(text))
        binding = bind(call, nodes)
        outputs = _outputs(nodes, binding)
        if not outputs:
            raise FragmentError("none of what it writes is one of its fragment's operators")
        return _reference(nodes, binding, outputs)
    except FragmentError as error:
        return Unknown(str(error))


def _reference(nodes: Nodes, binding: Binding, outputs: Outputs) -> FragmentReference:
    results = [name for name, _ in outputs]
    used = _used(nodes, results)
    if unused := [name for name in binding.reads if name not in used]:
        raise FragmentError(f"it reads %{unused[0]}, which none of its fragment's operators takes")
    inputs = dict(sorted(binding.reads.items(), key=lambda item: int(item[1].path)))
    parameters = {name: (pointer.name, nodes.given[name]) for name, pointer in inputs.items()}
    known = {pointer.path for _, pointer in outputs}
    return FragmentReference(
        write_run(nodes, parameters, results),
        tuple(_port(pointer.name, pointer) for pointer in inputs.values()),
        tuple(_port(pointer.name + "_out" * pointer.read, pointer) for _, pointer in outputs),
        tuple(sorted({pointer.path for pointer in binding.writes.values()} - known, key=int)),
    )


def _port(name: str, pointer: Pointer) -> Port:
    return Port(name, pointer.path, pointer.tensor.shape, pointer.tensor.dtype)


def _used(nodes: Nodes, results: list[str]) -> set[str]:
    """The given buffers that `results` come from, by name."""
    taken = set(results).union(*(nodes.takes(operation) for operation in nodes.needed(results)))
    return {found for name in taken if isinstance(found := nodes.find(name), str)}


def _outputs(nodes: Nodes, binding: Binding) -> Outputs:
    """The nodes that the kernel writes, in the order of its arguments.

    A buffer that inductor made for no node holds the one end of the fragment that is like it, or is scratch.
    """
    found, loose, copied = [], {}, 0
    for name, pointer in binding.writes.items():
        node = nodes.stored(name)
        if node is None:
            loose[name] = pointer
        elif nodes.computed(node) and _like(nodes, node, pointer, binding.symbols):
            found.append((node, pointer))
            copied += node != name
        else:
            raise FragmentError(f"its fragment does not say all that %{name} comes from")
    if copied < len(nodes.copies):
        raise FragmentError("its fragment does not say which buffer it writes in place")
    found += _loose(nodes, binding, loose)
    return sorted(found, key=lambda output: int(output[1].path))


def _loose(nodes: Nodes, binding: Binding, loose: dict[str, Pointer]) -> Outputs:
    claims = {name: _claims(nodes, binding, pointer) for name, pointer in loose.items()}
    found = []
    for name, ends in claims.items():
        others = {end for other, known in claims.items() if other != name for end in known}
        if len(ends) > 1 or others & set(ends):
            raise FragmentError(f"its fragment does not say which operator gives %{name}")
        found += [(node, loose[name]) for node in ends.values()]
    return found


def _claims(nodes: Nodes, binding: Binding, pointer: Pointer) -> dict[str, str]:
    """The ends of the fragment that `pointer` may hold, and of each the node that is like it."""
    found = {}
    for end in nodes.ends:
        alike = [name for name in nodes.sources(end) if _like(nodes, name, pointer, binding.symbols)]
        if alike:
            found[end] = alike[0]
    return found


def _like(nodes: Nodes, name: str, pointer: Pointer, symbols: dict[str, int]) -> bool:
    node = nodes.find(name)
    return isinstance(node, Operation) and node.layout is not None and fits(node.layout, pointer.tensor, symbols)
