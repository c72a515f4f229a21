"""The reference of a group: what its operator decomposes into, where that holds for all its Calls, or the operator."""

from __future__ import annotations

import torch

from kcap.schemas.families.generic_fake import Arguments, Fake, make, taken
from kcap.schemas.families.generic_group import Group
from kcap.schemas.families.generic_operator import TORCH
from kcap.schemas.families.generic_outputs import Reference, Signature, flatten, named
from kcap.schemas.families.generic_pattern import Member, Pattern
from kcap.schemas.families.generic_program import Name, Program, Recorder, Untraceable
from kcap.schemas.families.invocation import Unrecognized

MOST_TRACED = 8  # Calls of a group whose decompositions are compared
WHOLE = {torch.Tag.core}  # what other operators decompose into
TEXT = """import torch


@torch.no_grad()
def run({inputs}):
    {body}
"""
ANYWHERE = 'torch.device("cuda" if torch.cuda.is_available() else "cpu")'


def reference(group: Group, inputs: list[str]) -> Reference:
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
    if target.namespace not in TORCH or target.tags & WHOLE or group.scalars or signature.copied:
        return None
    try:
        found = {tuple(_trace(group, member)) for member in group.typical[:MOST_TRACED]}
    except (Untraceable, Unrecognized):
        return None
    lines = list(found.pop())
    alone = any(f"torch.ops.{target.python}(" in line for line in lines)
    return None if found or alone else lines


def _trace(group: Group, member: Member) -> list[str]:
    """The decomposition of one member's invocation, ended by what it returns."""
    signature = group.signature
    program = Program(_device(signature), {})

    def watch(arguments: Arguments) -> Recorder:
        names = {id(t): signature.tensors[path] for path, t in arguments.tensors.items() if path in signature.tensors}
        program.names.update(names)
        program.kept.append(arguments)
        return Recorder(program)

    result = Fake(signature.pattern, member, signature.target).run(watch)
    made = flatten(result, signature.several)
    names = [program.write(made[output.place]) for output, _ in group.outputs]
    lines = program.body(names)
    if lines and len(names) == 1 and lines[-1].startswith(f"{names[0]} = "):
        return [*lines[:-1], _returns(group, [lines[-1].removeprefix(f"{names[0]} = ")])]
    return [*lines, _returns(group, names)]


def _operator(group: Group) -> list[str]:
    """The operator itself, on copies of what it writes; its functional variant as it is."""
    signature = group.signature
    copies = {path: f"{named(path)}_out" for path in signature.copied}
    program = Program(_device(signature), {})
    scalars = {number.path for number in group.scalars}
    arguments = make(
        signature.pattern, group.members[0], lambda n, value: Name(named(n.path)) if n.path in scalars else value
    )
    program.names.update({id(tensor): copies.get(path, named(path)) for path, tensor in arguments.tensors.items()})
    text = program.call(signature.target.python, *taken(_said(signature.pattern), signature.target, arguments.values))
    lines = [f"{copy} = {named(path)}.clone()" for path, copy in copies.items()]
    places = [output.place for output, _ in group.outputs if output.place]
    if places == [(0,)] and not signature.several and not copies:
        return [_returns(group, [text])]
    result = "result" if "result" not in signature.tensors.values() else "results"
    texts = [result + "".join(f"[{i}]" for i in _within(signature, index)) for index in places]
    return [*lines, f"{result} = {text}" if places else text, _returns(group, [*texts, *copies.values()])]


def _within(signature: Signature, index: tuple[int, ...]) -> tuple[int, ...]:
    return index if signature.several else index[1:]


def _said(pattern: Pattern) -> Pattern:
    """Without arguments at their defaults, where those after them are, too, or named."""
    said = [p for p in pattern.parameters if not (p.keyword and p.default)]
    last = max((i for i, p in enumerate(said) if not p.keyword and not p.default), default=-1)
    return pattern._replace(parameters=tuple(p for i, p in enumerate(said) if p.keyword or i <= last))


def _returns(group: Group, texts: list[str]) -> str:
    """What is returned, in the dtype of the argument that the operator writes it to."""
    outputs = [output for output, _ in group.outputs]
    pairs = zip(texts, outputs, strict=True)
    return f"return {', '.join(t if o.made == o.dtype else f'({t}).to(torch.{o.dtype})' for t, o in pairs)}"
