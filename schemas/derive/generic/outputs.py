"""The outputs of a pattern's operator, returned or written, and their names; and which operators get no Definition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from kcap.schemas.derive.generic.pattern import (
    TORCH_NAMESPACES,
    Member,
    Operator,
    Parameter,
    Path,
    Pattern,
    Tensor,
    functional_variant,
    registered_operator,
)
from kcap.schemas.derive.generic.tracing import FakeRun
from kcap.schemas.derive.invocation import Unrecognized, argument_names, flatten
from kcap.schemas.derive.kernel import dtype_name
from kcap.schemas.flashinfer.definition import DTYPES
from kcap.schemas.recording.operators import MAY_COPY, does_work
from kcap.schemas.recording.records import Call


class Output(NamedTuple):
    """One output. `path`: the argument that holds it once the operator ran; () where it returns it.

    `place`: its position in what the reference's operator returns, `returned_dtype`: its dtype there; () and its own
    dtype where that operator writes it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    place: tuple[int, ...]
    returned_dtype: str


class Reference(NamedTuple):
    """The text of a reference, and tags that say where it is from."""

    text: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Signature:
    """A pattern's operator with the names of its inputs, and what of it a reference calls.

    `target` is the operator itself, on copies of what it writes, or its functional variant.
    """

    pattern: Pattern

    @cached_property
    def own(self) -> Operator:
        return registered_operator(self.pattern.operator)

    @property
    def title(self) -> str:
        """The operator in a Definition's name: `add_tensor`, `copy_inplace`."""
        base = self.own.base.strip("_") + ("_inplace" if self.own.base.endswith("_") else "")
        return f"{base}_{self.own.overload.lower()}" if self.own.overload else base

    @property
    def op_type(self) -> str:
        return self.own.base.strip("_")

    @property
    def reference(self) -> Reference | None:
        """The reference, where it is known already."""
        return None

    @cached_property
    def leaves(self) -> list[tuple[Parameter, Tensor]]:
        return [(parameter, leaf) for parameter, leaf in self.pattern.leaves() if isinstance(leaf, Tensor)]

    @cached_property
    def written(self) -> list[tuple[Parameter, Tensor]]:
        return [(p, leaf) for p, leaf in self.leaves if p.written]

    @cached_property
    def target(self) -> Operator:
        if not self.written:
            return self.own
        variant = functional_variant(self.own.name)
        return variant or self.own

    @property
    def pure(self) -> bool:
        """Whether `target` returns what the operator writes."""
        return self.target is not self.own

    @property
    def several(self) -> bool:
        """Whether the reference's operator returns a tuple of returns, not one."""
        return self.target.schema is not None and len(self.target.schema.returns) > 1

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The tensors that are inputs; an `out` of a functional variant is none."""
        return [leaf for parameter, leaf in self.leaves if not self.dropped(parameter)]

    @cached_property
    def tensors(self) -> dict[Path, str]:
        """The name of each input."""
        return {leaf.path: flat_name(leaf.path) for leaf in self.inputs}

    def row(self, member: Member) -> tuple[int, ...]:
        """The sizes of the inputs' dimensions, one after another."""
        if len(self.inputs) == len(self.leaves):
            return member.sizes
        shapes = self.shapes(member)
        return tuple(size for leaf in self.inputs for size in shapes[leaf.path])

    def shapes(self, member: Member) -> dict[Path, tuple[int, ...]]:
        """The shape of each tensor of `member`, by its path."""
        shapes, at = {}, 0
        for _, leaf in self.leaves:
            shapes[leaf.path] = member.sizes[at : at + leaf.rank]
            at += leaf.rank
        return shapes

    @property
    def copied(self) -> list[Path]:
        """What the reference's operator writes itself."""
        return [] if self.pure else [leaf.path for _, leaf in self.written]

    def dropped(self, parameter: Parameter) -> bool:
        return self.pure and parameter.written and parameter.keyword

    def outputs(self, member: Member, device: str = "") -> tuple[Output, ...]:
        """The outputs of `member`, by a fake run on `device`; Unrecognized if no Definition can have them."""
        drifts = any(not isinstance(number, int | float) for number in member.numbers)
        outputs = self._outputs(member, device, 1)
        if drifts and outputs != self._outputs(member, device, 2):
            raise Unrecognized("its outputs' sizes depend on a number that differs from call to call")
        return outputs

    def _outputs(self, member: Member, device: str, drift: float) -> tuple[Output, ...]:
        if self.pure:
            returned = flatten(FakeRun(self.pattern, member, self.target, device).run(drift=drift), self.several)
            if len(returned) != len(self.written):
                raise Unrecognized(
                    f"it writes {len(self.written)} tensors, and {self.target.name} returns {len(returned)}"
                )
            pairs = zip(self.written, returned.items(), strict=True)
            return tuple(
                self._written(p, leaf, tuple(t.shape))._replace(place=place, returned_dtype=dtype_name(t.dtype))
                for (p, leaf), (place, t) in pairs
            )
        shapes = self.shapes(member)
        writes = [self._written(parameter, leaf, shapes[leaf.path]) for parameter, leaf in self.written]
        return (*self._returned(member, device, drift), *writes)

    def _returned(self, member: Member, device: str, drift: float) -> list[Output]:
        if self.own.schema is None or not (fresh := self.own.fresh()):
            return []
        if self.own.namespace not in TORCH_NAMESPACES and not _has_meta(self.own.name):
            raise Unrecognized("its library does not tell its outputs' sizes (it has no meta kernel)")
        result = flatten(FakeRun(self.pattern, member, self.own, device).run(drift=drift), self.several)
        new_tensors = {index: tensor for index, tensor in result.items() if index[0] in fresh}
        return [self._returned_output(index, tensor, len(new_tensors)) for index, tensor in new_tensors.items()]

    def _returned_output(self, index: tuple[int, ...], tensor: torch.Tensor, count: int) -> Output:
        returns = self.own.schema.returns
        declared = returns[index[0]].name if len(index) == 1 else ""
        place = index if len(returns) > 1 else index[1:]
        name = declared or ("output" if count == 1 else f"output_{'_'.join(map(str, place))}")
        dtype = dtype_name(tensor.dtype)
        if dtype not in DTYPES:
            raise Unrecognized(f"it returns {dtype}, and a Definition has no such dtype")
        return Output(self._unused_name(name), dtype, tuple(tensor.shape), (), index, dtype)

    def _written(self, parameter: Parameter, leaf: Tensor, shape: tuple[int, ...]) -> Output:
        name = flat_name(leaf.path) if self.dropped(parameter) else self._unused_name(f"{flat_name(leaf.path)}_out")
        return Output(name, leaf.dtype, shape, leaf.path, (), leaf.dtype)

    def _unused_name(self, name: str) -> str:
        return f"{name}_out" if name in self.tensors.values() else name


def flat_name(path: Path) -> str:
    """`("tensors", 0)` -> `tensors_0`."""
    return "_".join(map(str, path))


def _has_meta(name: str) -> bool:
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("Meta", "CompositeImplicitAutograd")
    )


VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "detach", "lift"})
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def why_no_kernel(signature: Signature, member: Member) -> str | None:
    """Why a Call of the pattern gets no Definition: it computes nothing, or nothing that a reference can repeat; else
    None.
    """
    own = signature.own
    names = [flat_name(leaf.path) for _, leaf in signature.pattern.leaves()]
    names += [f"{flat_name(leaf.path)}_out" for _, leaf in signature.written]
    if len(set(names)) < len(names):
        return "two of its arguments would have one name in a reference"
    if own.schema is None:
        return None if signature.written else "torch does not know this operator here: nothing tells what it returns"
    if own.namespace in TORCH_NAMESPACES and own.base in ALLOCATIONS:
        return "it allocates memory and computes nothing"
    if own.namespace in TORCH_NAMESPACES and _is_view(own, member):
        return "it is a view and computes nothing"
    if torch.Tag.nondeterministic_seeded in own.tags and not _drops_nothing(member.call):
        return "it draws random numbers: no reference gives the same"
    if unsupported_return := own.unsupported_return():
        return f"it returns {unsupported_return}, not a tensor"
    if not signature.written and not own.fresh():
        return "it neither returns nor writes a tensor"
    return None


def _drops_nothing(call: Call) -> bool:
    """Whether it draws numbers for a dropout alone, and that is of nothing."""
    named = zip(argument_names(call), call.args, strict=True)
    return any(name in ("dropout_p", "dropout") and argument.value == 0.0 for name, argument in named)


def _is_view(own: Operator, member: Member) -> bool:
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in own.schema.returns)
    return own.base in VIEWS or (aliases and f"aten::{own.base}" not in MAY_COPY) or not does_work(member.call)
