"""From a Recording's Calls to Definitions: by family where one knows the Call, generically where none does."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kcap.errors import FormatError
from kcap.schemas.derive.families import family_of, recognize
from kcap.schemas.derive.generic.derive import derive_generic
from kcap.schemas.derive.generic.family import family_of_work
from kcap.schemas.derive.invocation import Invocation, Unrecognized, invocation_of
from kcap.schemas.derive.kernel import BindInvocation, CallUse, DerivedDefinition, KernelInstance
from kcap.schemas.flashinfer.calling_record import CallingRecord, KernelCount, framework_of
from kcap.schemas.flashinfer.definition import DRAFT, Definition
from kcap.schemas.recording.operators import base_of
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call, Metadata, Sample, kernel_invocations


@dataclass
class Derived:
    """All Definitions of a Recording with their Calls, the most called first.

    `refused`: Calls (by id) that no Definition can hold, with the reason; `refused_families`: of these those whose
    family is known. `covered`: Calls inside a region that has a Definition, with its family; they have none of their
    own. `engine_forms`: of Calls in `kernels` whose inputs are computed from the engine's arguments, the Definitions
    that take these as they are; `why_no_form`: why a Call (by id) has none.
    """

    kernels: list[DerivedDefinition]
    refused: dict[int, str] = field(default_factory=dict)
    covered: dict[int, str] = field(default_factory=dict)
    refused_families: dict[int, str] = field(default_factory=dict)
    engine_forms: list[DerivedDefinition] = field(default_factory=list)
    why_no_form: dict[int, str] = field(default_factory=dict)

    @property
    def definitions(self) -> list[DerivedDefinition]:
        """All that a Solution may be written for: a Call may be in two of them."""
        return [*self.kernels, *self.engine_forms]

    def family_of(self) -> dict[int, str]:
        """The named family of each Call that has one, by the Call's id."""
        own = {use.call.id: kernel.family for kernel in self.kernels if kernel.family for use in kernel.uses}
        return {**self.covered, **self.refused_families, **own}

    def invocations_of(self, calls: Sequence[Call], definitions: Collection[str]) -> int:
        """How often the kernels in `calls` ran that the Definitions of these names stand for.

        The kernels inside a region count if all of the region's Definitions are among them.
        """
        uses = [(use.call, kernel.definition.name in definitions) for kernel in self.kernels for use in kernel.uses]
        inside = {call.id for call, chosen in uses if chosen}
        regions = {base_of(call.operator) for call, chosen in uses if call.kind == "region" and chosen}
        regions -= {base_of(call.operator) for call, chosen in uses if call.kind == "region" and not chosen}
        of_regions = [c for c in calls if c.id in self.covered and base_of(c.parent or "") in regions]
        return kernel_invocations([*(call for call in calls if call.id in inside), *of_regions])

    def invocations_in_families(self, calls: Sequence[Call]) -> int:
        """How often the kernels in `calls` ran that belong to a named family, or are inside a region that does."""
        defined = self.invocations_of(calls, {kernel.definition.name for kernel in self.kernels if kernel.family})
        return defined + kernel_invocations(call for call in calls if call.id in self.refused_families)


def derive(recording: Recording) -> Derived:
    """The Definitions of a Recording's kernels; views and allocations have none."""
    return derive_calls(recording.calls, recording.metadata, recording)


@dataclass(frozen=True)
class FamilyMatches:
    """`kernels`: Definitions of families. `covered`: kernels (by id) inside a region that has one, with its operator;
    `rest`: all other kernels that do work. `engine_forms`, `why_no_form`: as in Derived."""

    kernels: list[DerivedDefinition]
    covered: dict[int, str]
    rest: list[Call]
    engine_forms: list[DerivedDefinition]
    why_no_form: dict[int, str]


def derive_calls(calls: Iterable[Call], metadata: Metadata, recording: Recording | None = None) -> Derived:
    """The same for Calls alone; without a Recording there are no sources of fused kernels."""
    matches = match_families(calls, recording)
    generic, refused = derive_generic(matches.rest, recording)
    kernels = _with_names(_join_same([*matches.kernels, *generic]), metadata)
    families = {call: family_of(region)[0] for call, region in matches.covered.items()}
    undefined = (call for call in matches.rest if call.id in refused)
    refused_families = {call.id: family for call in undefined if (family := family_of_work(call, recording))}
    forms = _with_names(matches.engine_forms, metadata)
    return Derived(_by_total(kernels), refused, families, refused_families, _by_total(forms), matches.why_no_form)


def _by_total(kernels: list[DerivedDefinition]) -> list[DerivedDefinition]:
    return sorted(kernels, key=lambda kernel: (-kernel.total, kernel.definition.name))


def match_families(calls: Iterable[Call], recording: Recording | None = None) -> FamilyMatches:
    """The Definitions of families, under the names that they have there."""
    recognized, regions, unknown = _sort_calls(calls, recording)
    covered = _covered_by_regions(recognized, regions, unknown)
    rest = [call for call in unknown if call.kind == "kernel" and call.id not in covered]
    exported = recognized + [
        (call, kernel) for call, kernel in regions if base_of(call.operator) in set(covered.values())
    ]
    forms = [
        (call, replace(kernel.engine_form, family=kernel.family))
        for call, kernel in exported
        if isinstance(kernel.engine_form, KernelInstance)
    ]
    why_no_form = {call.id: kernel.engine_form for call, kernel in exported if isinstance(kernel.engine_form, str)}
    return FamilyMatches(
        _kernels_of_families(exported, bind_family),
        covered,
        rest,
        _kernels_of_families(forms, bind_engine_form),
        why_no_form,
    )


RecognizedCalls = list[tuple[Call, KernelInstance]]


def _sort_calls(
    calls: Iterable[Call], recording: Recording | None
) -> tuple[RecognizedCalls, RecognizedCalls, list[Call]]:
    """Kernels and regions that a family recognizes, and Calls of both kinds that none does."""
    recognized: RecognizedCalls = []
    regions: RecognizedCalls = []
    unknown: list[Call] = []
    samples = recording.sample_by_call if recording else {}
    for call in calls:
        if not call.total or (call.kind == "kernel" and not call.work):
            continue
        kernel = _recognize(call, recording, samples.get(call.id))
        if kernel is not None:
            (recognized if call.kind == "kernel" else regions).append((call, kernel))
        else:
            unknown.append(call)
    return recognized, regions, unknown


def _contents(recording: Recording, sample: Sample) -> dict[str, torch.Tensor]:
    """The integer tensors of a Sample, by path, as far as their files can be read."""
    try:
        values = {path: recording.value(tensor) for path, tensor in sample.tensors.items()}
    except FormatError:
        return {}
    return {path: value for path, value in values.items() if value is not None}


def _recognize(call: Call, recording: Recording | None, sample: Sample | None) -> KernelInstance | None:
    """The integer tensors of `sample` are read where the Call alone does not say what it computes."""
    if family_of(call.operator)[1] is None:
        return None
    try:
        kernel = recognize(invocation_of(call))
        if kernel is None and recording is not None and sample is not None:
            kernel = recognize(invocation_of(call, _contents(recording, sample)))
        return kernel
    except Unrecognized:  # a dtype that this torch lacks
        return None


def _covered_by_regions(recognized: RecognizedCalls, regions: RecognizedCalls, unknown: list[Call]) -> dict[int, str]:
    """The region around each kernel in `unknown`, if a family recognizes it and nothing inside it.

    A kernel names its parent's operator, not the parent's Call, so the family has to recognize all Calls of that
    operator. One recorder names a parent without its overload, the other with it.
    """
    opened = {base_of(call.parent) for call, _ in (*recognized, *regions) if call.parent}
    opened |= {base_of(call.operator) for call in unknown if call.kind == "region"}
    closed = {base_of(call.operator) for call, _ in regions} - opened
    kernels = [call for call in unknown if call.kind == "kernel" and call.parent]
    return {call.id: parent for call in kernels if (parent := base_of(call.parent or "")) in closed}


def _kernels_of_families(calls: RecognizedCalls, bind: BindInvocation) -> list[DerivedDefinition]:
    groups: dict[Hashable, list[CallUse]] = defaultdict(list)
    instances: dict[Hashable, KernelInstance] = {}
    for call, instance in calls:
        instances.setdefault(instance.key, instance)
        groups[instance.key].append(CallUse(call, bind))
    return [
        DerivedDefinition(instances[key].definition(), instances[key].family, tuple(uses))
        for key, uses in groups.items()
    ]


def bind_family(invocation: Invocation) -> KernelInstance:
    kernel = recognize(invocation)
    if kernel is None:
        raise Unrecognized(f"{invocation.operator} with these values is not its family's")
    return kernel


def bind_engine_form(invocation: Invocation) -> KernelInstance:
    form = bind_family(invocation).engine_form
    if not isinstance(form, KernelInstance):
        raise Unrecognized(form or f"{invocation.operator} has no other form")
    return form


def content_hash(definition: Definition) -> bytes:
    """A SHA-256 of a Definition without its tags and description."""
    fields = definition.model_dump_json(exclude={"tags", "description"})
    return hashlib.sha256(fields.encode()).digest()


def _join_same(kernels: list[DerivedDefinition]) -> list[DerivedDefinition]:
    """Equal Definitions joined: a copy to the GPU and a copy on it have the same one."""
    groups: dict[bytes, list[DerivedDefinition]] = defaultdict(list)
    for kernel in kernels:
        groups[content_hash(kernel.definition)].append(kernel)
    return [replace(same[0], uses=tuple(use for kernel in same for use in kernel.uses)) for same in groups.values()]


def _with_names(kernels: list[DerivedDefinition], metadata: Metadata) -> list[DerivedDefinition]:
    """The Definitions with tags, under names of their own.

    A name that was not given by a family, or that two Definitions share, ends with six digits of the content hash, so
    that it means the same in every Recording.
    """
    names: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        names[kernel.definition.name] += 1
    generic = [kernel.uses[0].bind not in (bind_family, bind_engine_form) for kernel in kernels]
    return [
        _with_name_and_tags(kernel, numbered or names[kernel.definition.name] > 1, metadata)
        for kernel, numbered in zip(kernels, generic, strict=True)
    ]


def _with_name_and_tags(kernel: DerivedDefinition, numbered: bool, metadata: Metadata) -> DerivedDefinition:
    own = kernel.definition
    name = f"{own.name}_{content_hash(own).hex()[:6]}" if numbered else own.name
    phases = {count.phase for use in kernel.uses for count in use.call.counts if count.count}
    tags = {*own.tags, DRAFT, *(f"stage:{phase}" for phase in phases if phase in ("prefill", "decode"))}
    if metadata.model:  # `meta-llama/Llama-3.1-8B` -> `model:llama-3.1-8b`, as FlashInfer-Bench's dataset writes it
        tags.add(f"model:{metadata.model.rstrip('/').split('/')[-1].lower()}")
    return DerivedDefinition(own.model_copy(update={"name": name, "tags": sorted(tags)}), kernel.family, kernel.uses)


def calling_record_of(recording: Recording) -> CallingRecord | None:
    """The record of a Recording, or None for one that names no model or none of the four frameworks.

    Ids are the names of the Definitions that kcap derives, or the operator's where it derives none. Only kernels that
    do work are in it (no views or allocations; a region with a Definition counts in place of its operators);
    counts are sums over phases, ranks, eager and graph.
    """
    framework = framework_of(recording.metadata)
    if framework is None or not recording.metadata.model:
        return None
    counts = kernel_counts(recording)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kernels = [KernelCount(id=name, count=count) for name, count in ordered if count]
    return CallingRecord(model=recording.metadata.model, framework=framework, kernels=kernels)


def kernel_counts(recording: Recording) -> Counter[str]:
    """Invocations by Definition; by operator for Calls that have none."""
    derived = derive(recording)
    counts = Counter({kernel.definition.name: kernel.total for kernel in derived.kernels})
    for number in derived.refused:
        counts[recording.calls[number].operator] += recording.calls[number].total
    return counts
