"""From a Call and one Sample to the operator that ran and the arguments that it had: decided first, then built."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kcap.replay import classes, indices, memory, rules
from kcap.replay.bind import Bound, bind
from kcap.replay.inputs import NONE, Inputs, build, clone, view
from kcap.replay.launches import Launches, is_launch
from kcap.replay.layout import Target
from kcap.replay.operators import Operator, resolve
from kcap.schemas.recording import Call, Sample, SampledTensor, load
from kcap.schemas.values import TensorSpec


@dataclass(frozen=True)
class Decided:
    """An invocation whose every value is decided and of which nothing is allocated.

    `remade`: arguments that the Rule makes from the others. `total`: bytes of one set of inputs.
    """

    operator: Operator
    rule: rules.Rule
    bound: Bound
    remade: list[str]
    total: int

    @property
    def touched(self) -> int:
        """Of `total`, the bytes that one invocation can reach."""
        return self.rule.touched(self.bound, self.total)


class Rebuilder:
    """Rebuilds Calls on one device. `home` is the device type that they were recorded on.

    `trust`: kernel sources of the Recording in `root` run, whoever made it.
    """

    def __init__(self, device: str, home: str, root: Path | None, trust: bool = False) -> None:
        self.target = Target(device, home)
        self.recording = load(root) if root else None
        self.launches = Launches(self.recording, trust)

    def decide(self, call: Call, sample: Sample | None, cut: bool = False) -> Decided:
        """Skip says why `call` cannot be rebuilt here. `cut`: of tables only the rows that it reads."""
        operator, rule = self._resolve(call)
        bound = bind(call, sample, operator.schema, self._load)
        remade = prepare(bound, rule)
        if cut:
            rule.cut(bound)
        indices.fill(bound)
        sizes = memory.plan(bound, self.target.device, self.target.home)
        total = memory.check(sizes, rule.extra_bytes(bound), self.target.device)
        return Decided(operator, rule, bound, remade, total)

    def build(self, decided: Decided, given: Mapping[memory.Key, torch.Tensor] = NONE) -> Inputs:
        """One set of arguments, some in the buffers `given`; torch's default generators draw the numbers."""
        return finish(decided, build(decided.bound, self.target, given))

    def clone(self, decided: Decided, inputs: Inputs, moved: Collection[memory.Key] | None = None) -> Inputs:
        """The same arguments with the same content at other addresses: all, or the storages `moved`."""
        return finish(decided, clone(decided.bound, self.target, inputs, moved))

    def _resolve(self, call: Call) -> tuple[Operator, rules.Rule]:
        if is_launch(call):
            return self.launches.resolve(call, self.target.device)
        if classes.is_class(call):
            return classes.resolve(call), rules.find(call.operator)
        return resolve(call.operator), rules.find(call.operator)

    def _load(self, tensor: SampledTensor) -> torch.Tensor | None:
        return self.recording.value(tensor) if self.recording else None


def prepare(bound: Bound, rule: rules.Rule) -> list[str]:
    """Let `rule` decide what it knows of `bound`; the names of the arguments that it will make."""
    remade = [name for name in rule.remade if isinstance(bound[name], TensorSpec)]
    for name in remade:
        bound.set_value(name, None)
    rule.prepare(bound)
    return remade


def finish(decided: Decided, inputs: Inputs) -> Inputs:
    """`inputs` with the arguments that the rule makes in their places."""
    if not decided.remade:
        return inputs
    for name, value in decided.rule.remake(decided.bound, inputs).items():
        place(decided.bound, inputs, name, value)
    return inputs


def over(decided: Decided, target: Target, inputs: Inputs, buffers: Mapping[memory.Key, torch.Tensor]) -> Inputs:
    """The arguments of `inputs`, with `buffers` in place of some of their own; nothing is filled."""
    new = view(decided.bound, target, {**inputs.buffers, **buffers})
    for name in decided.remade:
        place(decided.bound, new, name, rules.argument(decided.bound, inputs, name))
    return new


def place(bound: Bound, inputs: Inputs, name: str, value: Any) -> None:
    index = bound.index(name)
    if index is None:
        return
    if bound.args[index].keyword:
        inputs.kwargs[name] = value
    else:
        inputs.args[index] = value
