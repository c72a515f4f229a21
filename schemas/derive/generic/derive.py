"""Definitions for Calls of no family: operators by their patterns, inductor's fused kernels by their fragments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from kcap.schemas.derive.fragment.reference import FragmentReference, Port, Unknown, reference_of
from kcap.schemas.derive.generic.definition import GenericKernel
from kcap.schemas.derive.generic.family import family_of_work
from kcap.schemas.derive.generic.group import Grouping
from kcap.schemas.derive.generic.outputs import Output, Reference, Signature, why_no_kernel
from kcap.schemas.derive.generic.pattern import Member, Operator, Parameter, Path, Pattern, Tensor, read_pattern
from kcap.schemas.derive.invocation import Unrecognized, argument_names
from kcap.schemas.derive.kernel import CallUse, DerivedDefinition
from kcap.schemas.flashinfer.definition import DTYPES
from kcap.schemas.recording.operators import SOURCES, base_of
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.values import TensorSpec

Refused = dict[int, str]


def derive_generic(calls: list[Call], recording: Recording | None) -> tuple[list[DerivedDefinition], Refused]:
    """Definitions for `calls`, and why the others have none, by Call id."""
    refused: Refused = {}
    launched = [call for call in calls if call.namespace in SOURCES]
    signatures = [*_operators(calls, refused), *fused_signatures(launched, recording, refused)]
    kernels = [kernel for signature, members in signatures for kernel in _kernels(signature, members, refused)]
    return [replace(kernel, family=family_of_work(kernel.uses[0].call, recording)) for kernel in kernels], refused


def _operators(calls: list[Call], refused: Refused) -> Iterator[tuple[Signature, list[Member]]]:
    """The patterns of the operators among `calls` with their Calls."""
    patterns: dict[Pattern, list[Member]] = defaultdict(list)
    for call in calls:
        if call.namespace not in SOURCES:
            try:
                pattern, member = read_pattern(call)
            except Unrecognized as error:
                refused[call.id] = str(error)
            else:
                patterns[pattern].append(member)
    for pattern, members in patterns.items():
        signature = Signature(pattern)
        reasons = {member.call.id: why_no_kernel(signature, member) for member in members}
        refused.update({call: reason for call, reason in reasons.items() if reason})
        if kept := [member for member in members if not reasons[member.call.id]]:
            yield signature, kept


def _kernels(signature: Signature, members: list[Member], refused: Refused) -> Iterator[DerivedDefinition]:
    """The Definitions of one pattern's Calls."""
    for group in Grouping(signature, refused).groups(members):
        generic = GenericKernel(group)
        try:
            definition = generic.instance.definition()
        except Unrecognized as error:
            refused.update({member.call.id: str(error) for member in group.members})
        else:
            yield DerivedDefinition(
                definition, "", tuple(CallUse(member.call, generic.bind) for member in group.members)
            )


LONGEST_TITLE = 48  # inductor names a kernel by all operators in it


@dataclass(frozen=True)
class Fused(Signature):
    """The Calls of one fragment: `first` is the reference of one Call, `references` has all by the Call's id.

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


def fused_signatures(
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
    reference = reference_of(call, recording)
    if isinstance(reference, Unknown):
        raise Unrecognized(reference.reason)
    for port in (*reference.inputs, *reference.outputs):
        if port.dtype not in DTYPES:
            raise Unrecognized(f"a Definition has no dtype {port.dtype}")
    return reference


def _pattern(call: Call) -> Pattern:
    """The tensors of a launch; they are its arguments, not lists of them."""
    names = argument_names(call)
    pairs = [(n, a) for n, a in zip(names, call.args, strict=True) if isinstance(a.value, TensorSpec)]
    return Pattern(base_of(call.operator), tuple(_parameter(n, a.value) for n, a in pairs))


def _parameter(name: str, spec: TensorSpec) -> Parameter:
    leaf = Tensor(spec.dtype, len(spec.shape), spec.device.split(":")[0], (name,))
    return Parameter(name, leaf, False, False, False)
