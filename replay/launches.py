"""Kernels launched from a source of their own (Triton, inductor): the callable, and valid arguments for it.

A source runs only where the Recording's seal holds or its user trusts it, and never if its content is not what its name
says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from kcap.errors import FormatError
from kcap.replay import cpp_source, triton_source
from kcap.replay.bind import Bound
from kcap.replay.launch_values import Parameters, Runnable, inductor_made, least_bound
from kcap.replay.layout import compact
from kcap.replay.operators import Operator
from kcap.replay.rules import Rule
from kcap.replay.skip import Skip
from kcap.schemas.operators import SOURCES
from kcap.schemas.recording import Call, Launch, Recording
from kcap.schemas.seal import holds
from kcap.schemas.values import TensorSpec

UNTRUSTED = "its kernel sources come from elsewhere: look at them in kernels/, then pass --trust"
NO_SOURCE = "its source is not there (a trace file holds none): replay the Recording that it comes from"
ZEROED = ("ws_ptr", "sem_ptr")  # inductor's workspaces and semaphores: zero when a kernel starts
WRITTEN = ("in_out_ptr", "out_ptr", *ZEROED)


def is_launch(call: Call) -> bool:
    """Whether `call` is a kernel with a source of its own, by what it holds or by its name."""
    return call.launch is not None or call.namespace in SOURCES


class Launches:
    """The kernels of one Recording; each source is compiled once. `trusted`: its user looked at the sources."""

    def __init__(self, recording: Recording | None, trusted: bool) -> None:
        self.recording = recording
        self.trusted = trusted
        self.loaded: dict[tuple[str | None, str], Any] = {}

    @cached_property
    def allowed(self) -> bool:
        if self.trusted or self.recording is None:
            return self.trusted
        folder = self.recording.path / "kernels"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return holds(self.recording.metadata.seal, names)

    def resolve(self, call: Call, device: str) -> tuple[Operator, Rule]:
        """What runs `call` on `device`, and its Rule; Skip says why nothing does."""
        launch = call.launch
        if launch is None or self.recording is None:
            raise Skip(NO_SOURCE)
        if launch.language != call.namespace:
            raise Skip(f"its name is not that of a kernel in {launch.language}")
        text = self.source(self.recording, launch)
        made = self.cpp(call, launch, text) if launch.language == "cpp" else self.triton(call, launch, text, device)
        inductor = launch.language == "cpp" or inductor_made(text, made.parameters)
        schema = Parameters.of(made.parameters, WRITTEN if inductor else ())
        return Operator(call.operator, made.run, schema, made.notes), LaunchRule(text, inductor)

    def source(self, recording: Recording, launch: Launch) -> str:
        if launch.kernel is None:
            raise Skip(launch.unread or "its source was not read when it was recorded")
        if not self.allowed:
            raise Skip(UNTRUSTED)
        try:
            return recording.source(launch)
        except FormatError as error:
            raise Skip(error.reason) from None

    def triton(self, call: Call, launch: Launch, text: str, device: str) -> Runnable:
        kernel = self.load(launch, lambda: triton_source.load(text, launch.function))
        triton_source.check_device(kernel, device)
        parameters = [name for name in kernel.arg_names if name not in launch.constexprs]
        notes = [triton_source.INTERPRETED] if triton_source.interpreted(kernel) else []
        run = triton_source.launcher(kernel, launch, names_of(call, parameters))
        return Runnable(run, parameters, notes)

    def cpp(self, call: Call, launch: Launch, text: str) -> Runnable:
        types, parameters = cpp_source.signature(text)
        if len(names_of(call, parameters)) < len(parameters):
            raise Skip(f"its source takes {len(parameters)} arguments, {len(call.args)} were recorded")
        return Runnable(self.load(launch, lambda: cpp_source.load(text, types)), parameters)

    def load(self, launch: Launch, make: Callable[[], Any]) -> Any:
        """What `make` makes of a source, made once."""
        key = launch.kernel, launch.function
        if key not in self.loaded:
            self.loaded[key] = make()
        return self.loaded[key]


def names_of(call: Call, parameters: list[str]) -> list[str]:
    """The parameter that each argument is for: the recorded name, else the one at its place."""
    if len(call.args) > len(parameters):
        raise Skip(f"its source takes {len(parameters)} arguments, {len(call.args)} were recorded")
    return [given.name or name for given, name in zip(call.args, parameters, strict=False)]


class LaunchRule(Rule):
    """Integer tensors that were not recorded: inductor's kernels say how far they index, or take zeros."""

    def __init__(self, text: str, inductor: bool) -> None:
        self.text = text
        self.inductor = inductor

    def prepare(self, bound: Bound) -> None:
        if not self.inductor:
            return  # what an index may be is not known: kcap.replay.indices skips the Call
        limit = least_bound(self.text, bound)
        for path, spec in bound.integers():
            name = bound.holder(path).name or ""
            if name.startswith(ZEROED):
                bound.contents[path] = torch.zeros(compact(spec), dtype=torch.int64)
            elif path not in bound.contents and spec.numel:
                bound.contents[path] = drawn(spec, limit, bound.ranges.get(path))


def launch_rule(call: Call, recording: Recording | None) -> Rule:
    """The Rule of a kernel with a source of its own, which is read and not run; Skip if it is not there."""
    if call.launch is None or recording is None:
        raise Skip(NO_SOURCE)
    text = recording.source(call.launch) if call.launch.kernel else ""
    inductor = call.launch.language == "cpp" or inductor_made(text, [a.name or "" for a in call.args])
    return LaunchRule(text, inductor)


def drawn(spec: TensorSpec, limit: int, seen: tuple[int, int] | None) -> torch.Tensor:
    """Numbers from 0 to below `limit`, and within the range `seen` where one was recorded."""
    most = min(limit, 1 << (spec.bits - 1)) - 1
    low, high = seen or (0, most)
    low, high = min(max(low, 0), most), min(max(high, 0), most)
    return torch.randint(low, max(low, high) + 1, compact(spec))
