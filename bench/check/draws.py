"""Whether a reference can be compared on the random inputs that another benchmark draws, and on which it can.

The square root of standard normal numbers is nan half of the time, and other benchmarks call nan wrong even where both
sides have it: no Solution could pass. Such a reference is tried again with inputs of the *bounded draw*: numbers from
0.05 to 0.95, and integers as small as replay draws those of which nothing is known. First one input is bounded, then
all. Runs in the process that checks references (kcap.bench.check.worker).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Required, TypedDict

import torch

from kcap.bench.problems import RecordedWorkload, make_workload
from kcap.replay.calls.runner import POISONING_PHRASES
from kcap.replay.datasets.inputs import definition_dtype, draw_tensor
from kcap.replay.datasets.reference import argument_order, named_outputs
from kcap.replay.rebuild.rebuild import SMALL_INTEGERS
from kcap.schemas.derive.bound_call import RANDOM_BLOCK, fill_repeating
from kcap.schemas.derive.kernel import CallUse
from kcap.schemas.flashinfer.definition import Definition, DefinitionTensor, RandomInput, ScalarInput
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Sample

BOUNDS = (0.05, 0.95)  # where logarithms, roots and inverse functions are finite, in float16 and bfloat16, too
ENOUGH = 1 << 14  # random elements that show whether any is out of a reference's domain
MOST_TRIES = 16
INTEGERS = ("int16", "int32", "int64")


@dataclass(frozen=True)
class TargetDraw:
    """How `target` compares outputs of random inputs: `integers`, the lowest and the highest that it draws, and which
    of nan, inf and -inf it takes for equal to themselves."""

    target: str
    integers: tuple[int, int] = (-1024, 1023)
    tolerated: tuple[str, ...] = ()


class DrawRequest(TypedDict):
    """What the worker is asked: the fields of a CheckRequest, and those of a TargetDraw."""

    definition: str
    call: int
    sample: dict[str, Any] | None
    seed: int
    target: str
    integers: tuple[int, int]
    tolerated: tuple[str, ...]


class DrawAnswer(TypedDict, total=False):
    """`bounded`: the inputs that need the bounded draw. `reason`, with `refused`: why no draw will do.

    Without `workload` the answer holds for all Workloads of the Definition: there is no reference to try.
    """

    status: Required[Literal["comparable", "refused", "skipped", "failed"]]
    workload: str
    bounded: list[str]
    reason: str
    poisoned: bool


def try_draws(
    definition: Definition,
    run: Any,
    use: CallUse,
    sample: Sample | None,
    recording: Recording | None,
    request: DrawRequest,
    device: str,
) -> DrawAnswer:
    """Run the reference `run` on the target's draw of the Workload of `use` and `sample`; Skip where there is none."""
    recorded = make_workload(definition, use, sample, recording)
    uuid, generator = recorded.workload.uuid, torch.Generator(device).manual_seed(request["seed"])
    faults = []
    for bounded in _candidates(definition, recorded):
        draws = _Draws(definition, recorded, request["integers"], frozenset(bounded), generator)
        if (fault := draws.fault(run, request["tolerated"])) is None:
            return {"status": "comparable", "workload": uuid, "bounded": bounded}
        faults.append(fault)
        if fault.poisons:
            break
    reason = f"{request['target']} compares outputs of random inputs, and {faults[0].reason}"
    return {"status": "refused", "workload": uuid, "reason": reason, "poisoned": faults[-1].poisons}


def _candidates(definition: Definition, recorded: RecordedWorkload) -> Iterator[list[str]]:
    """Which inputs to bound: none, each alone, all."""
    drawn = [
        name
        for name, workload_input in recorded.workload.inputs.items()
        if isinstance(workload_input, RandomInput) and _can_bound(definition.inputs[name])
    ]
    yield []
    yield from ([name] for name in drawn)
    if len(drawn) > 1:
        yield drawn


def _can_bound(tensor: DefinitionTensor) -> bool:
    return tensor.dtype in INTEGERS or tensor.dtype in ("float32", "float16", "bfloat16")


class _Fault(NamedTuple):
    """`poisons`: this process can do no more on its device."""

    reason: str
    poisons: bool = False


@dataclass(frozen=True)
class _Draws:
    definition: Definition
    recorded: RecordedWorkload
    integers: tuple[int, int]
    bounded: Collection[str]
    generator: torch.Generator

    def fault(self, run: Any, tolerated: Collection[str]) -> _Fault | None:
        """Why what the reference makes of these draws cannot be compared."""
        elements = 0
        for _ in range(MOST_TRIES):
            inputs = {name: self._input(name) for name in self.definition.inputs}
            elements += sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
            try:
                returned = run(*(inputs[name] for name in argument_order(self.definition)))
                outputs = named_outputs(self.definition, returned)
                found = {name: _not_finite(output) - set(tolerated) for name, output in outputs.items()}
            except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError) as error:
                if isinstance(error, torch.OutOfMemoryError | NotImplementedError):
                    raise
                words = str(error).strip().splitlines()
                text = f"its reference fails on them ({type(error).__name__}{f': {words[0][:120]}' if words else ''})"
                return _Fault(text, any(phrase in str(error) for phrase in POISONING_PHRASES))
            for name, values in found.items():
                if values:
                    return _Fault(f"its reference returns {min(values)} in {name}")
            if elements >= ENOUGH:
                break
        return None

    def _input(self, name: str) -> Any:
        workload_input, tensor = self.recorded.workload.inputs.get(name), self.definition.inputs[name]
        if isinstance(workload_input, ScalarInput):
            return workload_input.value
        if workload_input is None:
            return None
        if name in self.recorded.blob:
            return self.recorded.blob[name].clone().to(self.generator.device)
        sizes = self.definition.sizes(tensor.shape or (), self.recorded.workload.axes)
        elements = math.prod(sizes)
        block = self._drawn((min(max(elements, 1), RANDOM_BLOCK),), name, tensor.dtype)
        cells = torch.empty(elements * block.dtype.itemsize, dtype=torch.uint8, device=block.device)
        fill_repeating(cells, block.view(torch.uint8))
        return cells.view(block.dtype).view(sizes)

    def _drawn(self, sizes: tuple[int, ...], name: str, dtype: str) -> torch.Tensor:
        if name in self.bounded:
            return draw_bounded(sizes, dtype, self.generator)
        if dtype in INTEGERS:
            return _draw_integers(sizes, dtype, self.integers, self.generator)
        return draw_tensor(sizes, dtype, self.generator)


def draw_bounded(sizes: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor of the bounded draw on the generator's device."""
    if dtype in INTEGERS:
        return _draw_integers(sizes, dtype, SMALL_INTEGERS, generator)
    low, high = BOUNDS
    drawn = torch.rand(sizes, device=generator.device, generator=generator) * (high - low) + low
    return drawn.to(definition_dtype(dtype))


def _draw_integers(
    sizes: tuple[int, ...], dtype: str, bounds: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    low, high = bounds
    device = generator.device
    return torch.randint(low, high + 1, sizes, dtype=definition_dtype(dtype), device=device, generator=generator)


def _not_finite(output: torch.Tensor) -> set[str]:
    if not output.is_floating_point():
        return set()
    values = output.float() if output.dtype.itemsize == 1 else output
    inf = float("inf")
    tests = {"nan": values.isnan(), "inf": values == inf, "-inf": values == -inf}
    return {name for name, found in tests.items() if bool(found.any())}
