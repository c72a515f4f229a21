"""Which nodes of a fragment its kernel writes, and to which of its arguments."""

from __future__ import annotations

from collections import defaultdict

from kcap.schemas.derive.fragment.binding import Binding, Nodes, Pointer, is_shared, layout_fits
from kcap.schemas.derive.fragment.text import Operation
from kcap.schemas.derive.fragment.values import FragmentError, Ref

CAT = "aten.cat.default"
Outputs = list[tuple[str, Pointer]]


def written_nodes(nodes: Nodes, binding: Binding) -> Outputs:
    """The nodes that the kernel writes, in the order of its arguments.

    A buffer that is no node's holds the one end of the fragment whose layout matches, or is scratch; where the fragment
    is of other kernels, too, the end may be theirs.
    """
    outputs, unnamed, copied = [], {}, 0
    for name, pointer in binding.writes.items():
        node = nodes.stored_node(name)
        if node is None:
            unnamed[name] = pointer
        elif nodes.computed(node) and _layout_matches(nodes, node, pointer, binding.symbols):
            outputs.append((node, pointer))
            copied += node != name
        else:
            raise FragmentError(f"its fragment does not say all that %{name} comes from")
    if copied < len(nodes.copies):
        raise FragmentError("its fragment does not say which buffer it writes in place")
    if unnamed and is_shared(nodes, binding):
        first = next(iter(unnamed))
        raise FragmentError(f"several kernels share its fragment, and no operator in it is named %{first}")
    outputs += _joined_outputs(nodes, binding, unnamed)
    joined = {pointer.path for _, pointer in outputs}
    outputs += _unnamed_outputs(nodes, binding, {n: p for n, p in unnamed.items() if p.path not in joined})
    return sorted(outputs, key=lambda output: int(output[1].path))


def _joined_outputs(nodes: Nodes, binding: Binding, unnamed: dict[str, Pointer]) -> Outputs:
    """The parts of concatenations that are no node's buffers, in the order of their operators where some are alike."""
    written: dict[int, list[Pointer]] = defaultdict(list)
    for pointer in sorted(unnamed.values(), key=lambda one: one.tensor.offset or 0):
        written[pointer.tensor.storage].append(pointer)
    groups = [group for group in written.values() if len(group) > 1]
    joints = [parts for end in nodes.ends if (parts := _parts(nodes, end))]

    def fits(parts: list[str], group: list[Pointer]) -> bool:
        each = zip(parts, group, strict=False)
        return len(parts) == len(group) and all(_layout_matches(nodes, *one, binding.symbols) for one in each)

    outputs: Outputs = []
    for number, parts in enumerate(joints):
        fitting = [group for group in groups if fits(parts, group)]
        rivals = [n for n, other in enumerate(joints) if any(fits(other, group) for group in fitting)]
        if fitting and len(fitting) == len(rivals):
            outputs += zip(parts, fitting[rivals.index(number)], strict=True)
    return outputs


def _parts(nodes: Nodes, name: str) -> list[str]:
    """The nodes that a concatenation joins; none of another operator."""
    match nodes.find(name):
        case Operation(target=target, args=[[*parts], *_]) if target == CAT:
            return [part.name for part in parts if isinstance(part, Ref)]
    return []


def _unnamed_outputs(nodes: Nodes, binding: Binding, unnamed: dict[str, Pointer]) -> Outputs:
    """A node that is taken several times may be written once for each."""
    claims = {name: _matching_ends(nodes, binding, pointer) for name, pointer in unnamed.items()}
    outputs = []
    for name, ends in claims.items():
        alike = [claimed for claimed in claims.values() if claimed.keys() & ends.keys()]
        once_for_each = all(claimed == ends and len(alike) == _takers(nodes, claimed) for claimed in alike)
        if len(ends) > 1 or (len(alike) > 1 and not once_for_each):
            raise FragmentError(f"its fragment does not say which operator gives %{name}")
        outputs += [(node, unnamed[name]) for node in ends.values()]
    return outputs


def _takers(nodes: Nodes, ends: dict[str, str]) -> int:
    """How many operators take the one node of `ends`; 0, where there is none or are several. One that comes after the
    kernel and takes it twice, as experts may their tokens, is two."""
    operation = nodes.find(next(iter(ends.values()), "")) if len(ends) == 1 else None
    if not isinstance(operation, Operation):
        return 0
    after = (other for other in nodes.fragment.operations.values() if not nodes.computed(other.name))
    return operation.users + sum(max(0, other.takes(operation.name) - 1) for other in after)


def _matching_ends(nodes: Nodes, binding: Binding, pointer: Pointer) -> dict[str, str]:
    """The ends of the fragment that `pointer` may hold, and of each the node that is like it."""
    node_by_end = {}
    for end in nodes.ends:
        computed = [name for name in nodes.sources(end) if isinstance(nodes.find(name), Operation)]
        alike = [name for name in computed if _layout_matches(nodes, name, pointer, binding.symbols)]
        if alike:
            node_by_end[end] = alike[0]
    return node_by_end


def _layout_matches(nodes: Nodes, name: str, pointer: Pointer, symbols: dict[str, int]) -> bool:
    layout = nodes.layout(name)
    return layout is not None and layout_fits(layout, pointer.tensor, symbols)
