"""The scores by which a reference chooses: found while it runs, by watching what it calls.

An output of indices is a choice where it is what an argmax, a top-k or a sort of the reference returned, cast or cut to
the first few. Of equal scores any may be chosen, so `accuracy` needs the scores. Where integers are sorted stably there
is one right order, and no choice.

The reference runs in another process than the one that compares, and hands over outputs alone. So it is made to return
the scores as outputs: first `sizing_definition` says how many there are, then `scoring_definition` returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kcap.bench.accuracy import Choice, Truth
from kcap.schemas.files.python_source import function, parameters
from kcap.schemas.flashinfer.definition import AxisConst, Definition, DefinitionTensor

INDEX_DTYPES = ("int32", "int64", "int16")
LARGEST = ("argmax", "max", "topk")
SMALLEST = ("argmin", "min")
SORTS = ("sort", "argsort")
SIZES, SCORES = "kcap_sizes", "kcap_scores_of_{}"
FIELDS = 3  # of an output of indices: its rows, candidates, and whether the best comes first

# The parameters after the input, by position
PARAMETERS = {
    "argmax": ("dim", "keepdim"),
    "argmin": ("dim", "keepdim"),
    "max": ("dim", "keepdim"),
    "min": ("dim", "keepdim"),
    "topk": ("k", "dim", "largest", "sorted"),
    "sort": ("dim", "descending", "stable"),
    "argsort": ("dim", "descending", "stable"),
}


@dataclass(frozen=True)
class RecordedChoice:
    """`scores`: [rows, candidates], the larger the better; `indices`: [rows, chosen]."""

    scores: torch.Tensor
    indices: torch.Tensor
    ordered: bool

    def made(self, output: torch.Tensor) -> bool:
        """Whether `output` holds its indices, or the first of each row."""
        rows = len(self.scores)
        if not rows or output.is_floating_point() or output.numel() % rows or not output.numel():
            return False
        chosen = output.numel() // rows
        if chosen > self.indices.shape[1]:
            return False
        return bool(torch.equal(output.reshape(rows, chosen).long(), self.indices[:, :chosen]))


@dataclass
class ChoiceRecorder(TorchFunctionMode):
    """Records every choice that is made while it is entered."""

    choices: list[RecordedChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in PARAMETERS:
            recorded = _recorded(name, args, kwargs or {}, returned)
            self.choices += [recorded] if recorded else []
        return returned

    def choice_of(self, output: torch.Tensor) -> RecordedChoice | None:
        """The last choice that made `output`."""
        return next((choice for choice in reversed(self.choices) if choice.made(output)), None)


def _recorded(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], returned: Any) -> RecordedChoice | None:
    options = {**dict(zip(PARAMETERS[name], args[1:], strict=False)), **kwargs}
    scores = args[0] if args else kwargs.get("input")
    indices = returned if isinstance(returned, torch.Tensor) else returned[1]
    if not isinstance(scores, torch.Tensor) or isinstance(options.get("dim"), torch.Tensor) or not scores.numel():
        return None
    if name in ("max", "min") and isinstance(returned, torch.Tensor):
        return None  # the largest itself, or the larger of two
    if name in SORTS and options.get("stable") and not scores.is_floating_point():
        return None
    dim = options.get("dim", None if name in ("argmax", "argmin") else -1)
    with torch._C.DisableTorchFunction():
        if dim is None:
            scores, indices = scores.reshape(1, -1), indices.reshape(1, 1)
        elif name in LARGEST[:2] + SMALLEST and not options.get("keepdim"):
            indices = indices.unsqueeze(dim)
        if dim is not None and scores.dim():
            scores, indices = scores.movedim(dim, -1), indices.movedim(dim, -1)
        ascending = name in SMALLEST or (name in SORTS and not options.get("descending"))
        ascending = ascending or not options.get("largest", True)
        scores = scores.to(scores.dtype if scores.is_floating_point() else torch.float64).detach()
        scores = (-scores if ascending else scores.clone()).reshape(-1, scores.shape[-1])
        return RecordedChoice(scores, indices.reshape(len(scores), -1).clone(), bool(options.get("sorted", True)))


def has_choices(definition: Definition) -> bool:
    """Whether an output may be one."""
    return bool(_index_outputs(definition))


def _index_outputs(definition: Definition) -> list[int]:
    return [place for place, output in enumerate(definition.outputs.values()) if output.dtype in INDEX_DTYPES]


EXTENDED = """

from kcap.bench.check import choices as _kcap_choices

_kcap_run = run


def run({names}):
    return _kcap_choices.{function}(_kcap_run, [{names}], {outputs!r}, {places!r})
"""


def sizing_definition(definition: Definition) -> Definition:
    """`definition`, with one more output: FIELDS numbers for each output of indices, 0 for one that is no choice."""
    places = _index_outputs(definition)
    axes = {"kcap_outputs": AxisConst(value=len(places)), "kcap_fields": AxisConst(value=FIELDS)}
    sizes = {SIZES: DefinitionTensor(shape=list(axes), dtype="int64")}
    return _extended(definition, "with_sizes", places, axes, sizes)


def scoring_definition(definition: Definition, sizes: torch.Tensor) -> Definition:
    """`definition` with the scores of each choice among its outputs; `sizes` as `sizing_definition` returns them.

    Scores are in the dtype in which a run has floating outputs: float64 where the inputs are.
    """
    choices = [(place, size) for place, size in zip(_index_outputs(definition), sizes.tolist(), strict=True) if size[0]]
    axes: dict[str, AxisConst] = {}
    scores = {}
    for place, (rows, candidates, _) in choices:
        names = [f"kcap_rows_{place}", f"kcap_candidates_{place}"]
        axes |= dict(zip(names, (AxisConst(value=rows), AxisConst(value=candidates)), strict=True))
        scores[SCORES.format(place)] = DefinitionTensor(shape=names, dtype="float32")
    return _extended(definition, "with_scores", [place for place, _ in choices], axes, scores)


def _extended(
    definition: Definition,
    name: str,
    places: list[int],
    axes: dict[str, AxisConst],
    outputs: dict[str, DefinitionTensor],
) -> Definition:
    names = ", ".join(parameters(function(definition.reference, "run")) or definition.inputs)
    added = EXTENDED.format(names=names, function=name, outputs=list(definition.outputs), places=places)
    fields = {name: getattr(definition, name) for name in type(definition).model_fields}
    return Definition.model_construct(
        **{
            **fields,
            "axes": {**definition.axes, **axes},
            "outputs": {**definition.outputs, **outputs},
            "reference": definition.reference + added,
        }
    )


def with_sizes(run: Callable[..., Any], inputs: list[Any], outputs: list[str], places: list[int]) -> list[Any]:
    """What the reference of `sizing_definition` does."""
    listed, recorder = _run(run, inputs, outputs)
    choices = [recorder.choice_of(listed[place]) for place in places]
    sizes = [[*choice.scores.shape, int(choice.ordered)] if choice else [0] * FIELDS for choice in choices]
    return [*listed, torch.tensor(sizes, dtype=torch.int64, device=listed[0].device).reshape(-1, FIELDS)]


def with_scores(run: Callable[..., Any], inputs: list[Any], outputs: list[str], places: list[int]) -> list[Any]:
    """What the reference of `scoring_definition` does."""
    listed, recorder = _run(run, inputs, outputs)
    for place in places:
        if (choice := recorder.choice_of(listed[place])) is None:
            raise RuntimeError(f"its output {outputs[place]} is no longer what it chose by scores")
        scores = choice.scores
        listed.append(scores if scores.dtype == torch.float64 else scores.to(torch.float32))
    return listed


def _run(run: Callable[..., Any], inputs: list[Any], outputs: list[str]) -> tuple[list[Any], ChoiceRecorder]:
    with ChoiceRecorder() as recorder:
        returned = run(*inputs)
    if isinstance(returned, dict):
        return [returned[name] for name in outputs], recorder
    return list(returned) if isinstance(returned, tuple | list) else [returned], recorder


def truth_of(
    definition: Definition,
    outputs: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    sizes: torch.Tensor | None = None,
) -> Truth:
    """The Truth of what `scoring_definition` returned in higher precision (`outputs`) and in its own (`own`).

    `sizes`: as for `scoring_definition`; None where `definition` itself ran.
    """
    count, choices = len(definition.outputs), {}
    if sizes is not None:
        chosen = [
            (place, size) for place, size in zip(_index_outputs(definition), sizes.tolist(), strict=True) if size[0]
        ]
        for (place, size), scores, its_own in zip(chosen, outputs[count:], own[count:], strict=True):
            choices[place] = Choice(scores.double(), its_own, bool(size[2]))
    return Truth(list(outputs[:count]), list(own[:count]), choices)
