"""What adapters share: an engine's methods wrapped, failures contained, the process groups that it keeps."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import orjson

from kcap.capture.hooks.imports import Hook
from kcap.capture.recorder.recorder import c10d_group
from kcap.capture.session import Session
from kcap.capture.window.window import Window

Around = Callable[..., Any]  # called with the original, bound, then the object and the arguments


def contained(window: Window, hook_module: Hook) -> Hook:
    """An engine that kcap does not know is imported all the same; the Recording says what was missing."""

    def run(module: ModuleType) -> None:
        try:
            hook_module(module)
        except Exception as error:
            window.failed(error)

    return run


def wrap(owner: Any, name: str, around: Around) -> None:
    """Have `owner.name(self, …)` call `around(original, self, …)`. A method that `owner` inherits is left to the class
    that has it; AttributeError where there is none."""
    original = owner.__dict__.get(name)
    if original is None:
        getattr(owner, name)
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), self, *args, **kwargs)

    setattr(owner, name, wrapper)


def announce(session: Session, owner: Any, phases: Mapping[str, str]) -> None:
    """Have the session say what the engine does (`phases`: by method) while it is in a method of `owner`.

    A method that is not there is left out: it is for whoever waits, and for no count.
    """
    for name, phase in phases.items():
        if hasattr(owner, name):
            wrap(owner, name, functools.partial(_announced, session, phase))


def _announced(session: Session, phase: str, original: Around, owner: Any, *args: Any, **kwargs: Any) -> Any:
    before = session.doing
    _tell(session, phase)
    try:
        return original(*args, **kwargs)
    finally:
        _tell(session, before)


def _tell(session: Session, phase: str) -> None:
    with contextlib.suppress(OSError):
        session.doing_file.write_text(phase)


def run_after_pause(window: Window, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `original`, with which a step that was paused ends; where none is, it is called and no more."""
    if not window.resume():
        return original(*args, **kwargs)
    try:
        output = original(*args, **kwargs)
    except BaseException:
        window.discard()
        raise
    window.end()
    return output


WORLD = "world"


FIRST = ":0"  # how the name of the first group of a kind ends; "tp:1" is another that the engine made later


class Groups:
    """Tells the recorder the groups that an engine keeps: collectives are given one by name, handle or as c10d's own.

    `state`: the module that keeps them (vLLM's; SGLang's is made after it).
    """

    def __init__(self, window: Window, state: str = "vllm.distributed.parallel_state") -> None:
        self._window = window
        self._state = state
        self._told: set[str] = set()

    def tell(self) -> None:
        """Those that came since, once there is a recorder."""
        state = sys.modules.get(self._state)
        if state is None or self._window.recorder is None:
            return
        for name, reference in getattr(state, "_groups", {}).items():
            group = reference()
            if group is not None and name not in self._told:
                self._told.add(name)
                self._tell(name, group)

    def _tell(self, name: str, group: Any) -> None:
        recorder = self._window.recorder
        assert recorder is not None
        label, size, rank = name.removesuffix(FIRST), group.world_size, group.rank_in_group
        recorder.group(name, _handle(group), size, rank, label)
        for other_name in _other_names(group):
            recorder.group(other_name, 0, size, rank, label)
        ranks = list(getattr(group, "ranks", ()))
        if label != WORLD and size > 1 and len(ranks) == size:
            recorder.line(orjson.dumps({"t": "group", "name": label, "rank": rank, "ranks": ranks}))


def ranks_of_forward(state_module: str = "vllm.distributed.parallel_state") -> Any:
    """The group, on the CPU, of the ranks that run this one's forwards with it: those of its pipeline's stage.

    None for a rank alone.
    """
    group = sys.modules[state_module].get_tp_group()
    return group.cpu_group if group.world_size > 1 else None


def tensors_in(*values: Any) -> Iterator[Any]:
    """Those that a forward is given and may add to, which are no integers: by themselves, in lists, by name, or from an
    earlier stage of a pipeline."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield from [value] if value.is_floating_point() else []
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)
        elif isinstance(named := getattr(value, "tensors", value), Mapping):
            yield from tensors_in(*named.values())


def _handle(group: Any) -> int:
    """Of the group's custom all-reduce, which SGLang's groups hold themselves; 0 where there is none."""
    owner = getattr(group, "device_communicator", None) or group
    return int(getattr(getattr(owner, "ca_comm", None), "_ptr", 0) or 0)


def _other_names(group: Any) -> list[str]:
    """As operators of c10d have it, and those over shared memory, by which vLLM's ranks on a CPU talk."""
    held = [getattr(group, name, None) for name in ("device_group", "cpu_group")]
    number = getattr(getattr(getattr(group, "device_communicator", None), "dist_module", None), "handle", None)
    shared = [f"handle/{number}"] if isinstance(number, int) else []
    return shared + list(filter(None, map(c10d_group, held)))
