"""A group as a Definition: its reference, its names, and its Calls' invocations under them.

Names are `{operator}_{overload}_{dtypes}_{constant sizes}`, `inplace` for an underscore at the end:
`mean_dim_f32_d4096`, `copy_inplace_bf16`. The op_type is the operator's name without overload and underscores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch

from kcap.schemas.derive.generic.group import Group, axis_constraints
from kcap.schemas.derive.generic.outputs import Output, Reference, Signature, flat_name
from kcap.schemas.derive.generic.pattern import TORCH_NAMESPACES, Member, Number, Path, Pattern, Tensor
from kcap.schemas.derive.generic.tracing import (
    Arguments,
    FakeRun,
    Name,
    ReferenceBody,
    Tracer,
    Untraceable,
    arguments_taken,
    make_arguments,
)
from kcap.schemas.derive.invocation import Invocation, Unrecognized, flatten
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, dtype_name
from kcap.schemas.recording.dtypes import word
from kcap.schemas.recording.values import TensorSpec

MOST_TRACED = 8  # Calls of a group whose decompositions are compared
WHOLE = {torch.Tag.core}  # what other operators decompose into

TEXT = """import torch


@torch.no_grad()
def run({inputs}):
    {body}
"""

ANYWHERE = 'torch.device("cuda" if torch.cuda.is_available() else "cpu")'


def reference_of_group(group: Group, inputs: list[str]) -> Reference:
    """`inputs`: tensors, then scalars, as `run` takes them."""
    if group.signature.reference is not None:
        return group.signature.reference
    lines = _decomposed(group)
    tag = "reference:operator" if lines is None else "reference:decomposition"
    body = "\n    ".join(lines or _operator(group))
    return Reference(TEXT.format(inputs=", ".join(inputs), body=body), (tag,))


def _device(signature: Signature) -> str:
    return next((f"{name}.device" for name in signature.tensors.values()), ANYWHERE)


def _decomposed(group: Group) -> list[str] | None:
    """The lines of a decomposition that is the same for all sizes; None if there is none."""
    signature = group.signature
    target = signature.target
    if target.namespace not in TORCH_NAMESPACES or target.tags & WHOLE or group.scalars or signature.copied:
        return None
    try:
        decompositions = {tuple(_trace(group, member)) for member in group.typical[:MOST_TRACED]}
    except (Untraceable, Unrecognized):
        return None
    lines = list(decompositions.pop())
    alone = any(f"torch.ops.{target.python}(" in line for line in lines)
    return None if decompositions or alone else lines


def _trace(group: Group, member: Member) -> list[str]:
    """The decomposition of one member's invocation, ended by what it returns."""
    signature = group.signature
    body_lines = ReferenceBody(_device(signature), {})

    def watch(arguments: Arguments) -> Tracer:
        names = {id(t): signature.tensors[path] for path, t in arguments.tensors.items() if path in signature.tensors}
        body_lines.names.update(names)
        body_lines.alive.append(arguments)
        return Tracer(body_lines)

    result = FakeRun(signature.pattern, member, signature.target).run(watch)
    results = flatten(result, signature.several)
    names = [body_lines.write(results[output.place]) for output, _ in group.outputs]
    lines = body_lines.needed_by(names)
    if lines and len(names) == 1 and lines[-1].startswith(f"{names[0]} = "):
        return [*lines[:-1], _returns(group, [lines[-1].removeprefix(f"{names[0]} = ")])]
    return [*lines, _returns(group, names)]


def _operator(group: Group) -> list[str]:
    """The operator itself, on copies of what it writes; its functional variant as it is."""
    signature = group.signature
    copies = {path: f"{flat_name(path)}_out" for path in signature.copied}
    body_lines = ReferenceBody(_device(signature), {})
    scalars = {number.path for number in group.scalars}
    arguments = make_arguments(
        signature.pattern,
        group.members[0],
        lambda n, value: Name(flat_name(n.path)) if n.path in scalars else value,
    )
    body_lines.names.update(
        {id(tensor): copies.get(path, flat_name(path)) for path, tensor in arguments.tensors.items()}
    )
    text = body_lines.call(
        signature.target.python,
        *arguments_taken(_without_defaults(signature.pattern), signature.target, arguments.values),
    )
    lines = [f"{copy} = {flat_name(path)}.clone()" for path, copy in copies.items()]
    places = [output.place for output, _ in group.outputs if output.place]
    if places == [(0,)] and not signature.several and not copies:
        return [_returns(group, [text])]
    result = "result" if "result" not in signature.tensors.values() else "results"
    texts = [result + "".join(f"[{i}]" for i in (index if signature.several else index[1:])) for index in places]
    return [*lines, f"{result} = {text}" if places else text, _returns(group, [*texts, *copies.values()])]


def _without_defaults(pattern: Pattern) -> Pattern:
    """Without arguments at their defaults, if all positional ones after them are at theirs."""
    stated = [p for p in pattern.parameters if not (p.keyword and p.default)]
    last = max((i for i, p in enumerate(stated) if not p.keyword and not p.default), default=-1)
    return pattern._replace(parameters=tuple(p for i, p in enumerate(stated) if p.keyword or i <= last))


def _returns(group: Group, texts: list[str]) -> str:
    """What is returned, in the dtype of the argument that the operator writes it to."""
    outputs = [output for output, _ in group.outputs]
    pairs = zip(texts, outputs, strict=True)
    return f"return {', '.join(t if o.returned_dtype == o.dtype else f'({t}).to(torch.{o.dtype})' for t, o in pairs)}"


MOST_CONSTANTS = 4  # sizes in a name
LONGEST_NAME = 100


@dataclass(frozen=True)
class GenericKernel:
    """A group's Calls as one kernel; `bind` gives an invocation the Definition's names."""

    group: Group

    @cached_property
    def instance(self) -> KernelInstance:
        """Without values."""
        inputs = {
            name: TensorArg(shape, leaf.dtype, None, self._layout_note(leaf)) for name, shape, leaf in self._tensors()
        }
        inputs |= {flat_name(number.path): TensorArg(None, self._number(number), None) for number in self.group.scalars}
        text, tags = reference_of_group(self.group, list(inputs))
        return KernelInstance(
            name=self._name(),
            op_type=self.group.signature.op_type,
            axes=self._axes(inputs),
            inputs=inputs,
            outputs={output.name: TensorArg(shape, output.dtype, None) for output, shape in self.group.outputs},
            reference=text,
            description=self._description(),
            tags=tags,
            constraints=axis_constraints(self.group.axes),
        )

    def bind(self, call: Invocation) -> KernelInstance:
        """`call` in the Definition's names; Unrecognized if its tensors are others."""
        values = [_tensor(call, leaf) for _, _, leaf in self._tensors()]
        values += [_scalar(call, number) for number in self.group.scalars]
        pairs = zip(self.instance.inputs.items(), values, strict=True)
        outputs = {
            o.name: replace(self.instance.outputs[o.name], value=self._output(call, o)) for o, _ in self.group.outputs
        }
        kernel = replace(self.instance, inputs={n: replace(arg, value=v) for (n, arg), v in pairs}, outputs=outputs)
        kernel.sizes()
        return kernel

    def _output(self, call: Invocation, output: Output) -> Any:
        if output.path:
            return lambda: _argument_at(call, output.path)
        return lambda: flatten(call.result, self.group.signature.several)[output.place]

    def _tensors(self) -> Iterator[tuple[str, tuple[str, ...], Tensor]]:
        """Each input tensor's name and axes."""
        names = iter(self.group.axes.names)
        for leaf in self.group.signature.inputs:
            yield self.group.signature.tensors[leaf.path], tuple(islice(names, leaf.rank)), leaf

    def _axes(self, inputs: dict[str, TensorArg]) -> dict[str, int | None]:
        shapes = [arg.shape or () for arg in inputs.values()] + [shape for _, shape in self.group.outputs]
        names = dict.fromkeys(axis for shape in shapes for axis in shape)
        return {name: None if name in self.group.axes.variable else int(name.removeprefix("d")) for name in names}

    def _number(self, number: Number) -> str:
        """A number of a kind not known is an integer where all tensors are."""
        kind = number.type
        if kind == "number":
            floats = any(getattr(torch, leaf.dtype).is_floating_point for _, _, leaf in self._tensors())
            kind = "float" if floats else "int"
        return "int64" if kind == "int" else "float32"

    def _name(self) -> str:
        kinds = [leaf.dtype for leaf in self.group.signature.inputs] + [
            output.dtype for output, _ in self.group.outputs
        ]
        sizes = dict.fromkeys(name for name in self.group.axes.names if name not in self.group.axes.variable)
        parts = [self.group.signature.title, *dict.fromkeys(map(word, kinds)), *list(sizes)[:MOST_CONSTANTS]]
        return "_".join(parts)[:LONGEST_NAME]

    def _description(self) -> str:
        own, tensors = self.group.signature.own, self.group.signature.leaves
        lines = [f"{own.name}, as {len(self.group.members)} distinct Calls made it."]
        if len({leaf.device for _, leaf in tensors}) > 1:
            lines.append(
                f"Between devices: {', '.join(f'{flat_name(leaf.path)} on {leaf.device}' for _, leaf in tensors)}."
            )
        return " ".join(lines)

    @cached_property
    def _layouts(self) -> list[tuple[TensorSpec, ...]]:
        """Of each tensor of the pattern, its layout in each Call."""
        return list(zip(*([spec for _, spec in member.call.tensors()] for member in self.group.members), strict=True))

    def _layout_note(self, leaf: Tensor) -> str | None:
        """A note on a tensor's strides, which a Definition's axes do not hold."""
        index = [tensor for _, tensor in self.group.signature.leaves].index(leaf)
        strided = [spec for spec in self._layouts[index] if spec.strides is not None]
        if not strided:
            return None
        layout = "Broadcast (stride 0)" if any(0 in (spec.strides or ()) for spec in strided) else "Not contiguous"
        return f"{layout} in {len(strided)} of {len(self.group.members)} Calls."


def _argument_at(call: Invocation, path: Path) -> Any:
    """The argument at `path`; Unrecognized if there is none."""
    value = call[str(path[0])]
    for index in path[1:]:
        if not isinstance(value, list | tuple) or not isinstance(index, int) or index >= len(value):
            raise Unrecognized(f"{call.operator} has no argument {flat_name(path)}")
        value = value[index]
    return value


def _tensor(call: Invocation, leaf: Tensor) -> torch.Tensor:
    tensor = _argument_at(call, leaf.path)
    if not isinstance(tensor, torch.Tensor) or dtype_name(tensor.dtype) != leaf.dtype:
        raise Unrecognized(f"{call.operator}: {flat_name(leaf.path)} is no tensor of {leaf.dtype}")
    return tensor


def _scalar(call: Invocation, number: Number) -> Any:
    """The number, or a function that raises Unrecognized where no Sample has it."""
    value = _argument_at(call, number.path)
    return value if isinstance(value, int | float) else partial(_no_sample, call.operator, flat_name(number.path))


def _no_sample(operator: str, name: str) -> Any:
    raise Unrecognized(f"{operator}: {name} differs from call to call, and no Sample tells it")
