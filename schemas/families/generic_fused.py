"""Inductor's fused kernels as Signatures: their inputs, outputs and reference are those of their ATen fragment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kcap.schemas.definition import DTYPES
from kcap.schemas.families.fragment import FragmentReference, Port, Unknown, reference_of
from kcap.schemas.families.generic_operator import Operator
from kcap.schemas.families.generic_outputs import Output, Reference, Signature
from kcap.schemas.families.generic_pattern import Member, Parameter, Path, Pattern, Tensor
from kcap.schemas.families.invocation import Unrecognized, argument_names, base_of
from kcap.schemas.recording import Recording
from kcap.schemas.records import Call
from kcap.schemas.values import TensorSpec

LONGEST_TITLE = 48  # inductor names a kernel by all operators in it


@dataclass(frozen=True)
class Fused(Signature):
    """Calls of one fragment: `first` is the reference of one of them, `references` all by the Call's id.

    The `pattern` has the kernel's tensors alone: its numbers follow from their sizes.
    """

    names: tuple[str, ...]  # of all arguments
    first: FragmentReference
    references: dict[int, FragmentReference]

    @cached_property
    def own(self) -> Operator:
        return Operator(self.pattern.operator, "")

    @cached_property
    def inputs(self) -> list[Tensor]:
        leaves = {leaf.path: leaf for _, leaf in self.leaves}
        return [leaves[self._path(port)] for port in self.first.inputs]

    @property
    def title(self) -> str:
        words = self.own.base.removeprefix("fused")[:LONGEST_TITLE].strip("_")
        return f"fused_{words}".strip("_")

    @property
    def op_type(self) -> str:
        return "fused"

    @property
    def reference(self) -> Reference:
        return Reference(self.first.source, ("fused", "reference:inductor-fragment"))

    def outputs(self, member: Member, device: str = "") -> tuple[Output, ...]:
        ports = self.references[member.call.id].outputs
        return tuple(Output(p.name, p.dtype, p.shape, self._path(p), (), p.dtype) for p in ports)

    def _path(self, port: Port) -> Path:
        return (self.names[int(port.path)],)


def signatures(
    calls: list[Call], recording: Recording | None, refused: dict[int, str]
) -> Iterator[tuple[Signature, list[Member]]]:
    """The fused kernels among `calls`, those of one fragment together, with their Calls."""
    groups: dict[tuple[Pattern, str], list[Member]] = defaultdict(list)
    references: dict[int, FragmentReference] = {}
    for call in calls:
        try:
            references[call.id] = reference = _reference(call, recording)
        except Unrecognized as error:
            refused[call.id] = str(error)
        else:
            sizes = tuple(size for _, spec in call.tensors() for size in spec.shape)
            groups[_pattern(call), reference.source].append(Member(call, sizes, ()))
    for (pattern, _), members in groups.items():
        call = members[0].call
        yield Fused(pattern, tuple(argument_names(call)), references[call.id], references), members


def _reference(call: Call, recording: Recording | None) -> FragmentReference:
    if recording is None:
        raise Unrecognized("no Recording has the source that it was launched from")
    found = reference_of(call, recording)
    if isinstance(found, Unknown):
        raise Unrecognized(found.reason)
    for port in (*found.inputs, *found.outputs):
        if port.dtype not in DTYPES:
            raise Unrecognized(f"a Definition has no dtype {port.dtype}")
    return found


def _pattern(call: Call) -> Pattern:
    """The tensors of a launch; they are its arguments, not lists of them."""
    names = argument_names(call)
    pairs = [(n, a) for n, a in zip(names, call.args, strict=True) if isinstance(a.value, TensorSpec)]
    return Pattern(base_of(call.operator), tuple(_parameter(n, a.value) for n, a in pairs))


def _parameter(name: str, spec: TensorSpec) -> Parameter:
    leaf = Tensor(spec.dtype, len(spec.shape), spec.device.split(":")[0], (name,))
    return Parameter(name, leaf, False, False, False)
