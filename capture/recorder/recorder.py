"""The recorder of a process: what a tap feeds and an engine adapter steers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

FIRST_COMPARED = 16  # slots of Samples from here on are of steps that are like profiled ones
Ranges = Sequence[tuple[int, int]]  # of addresses: from, to


class Recorder(Protocol):
    """Interns calls into the process's shard and counts them; `kind` names it in the Recording.

    Opened with `loose`, every thread's calls count at once. Otherwise a step's calls count together when it ends, so
    that a process killed in a step leaves the steps before it, whole.
    """

    kind: str
    sees_graphs: bool  # whether it records what is called while a CUDA graph is captured
    library: str  # the file that a tap in C++ finds it in; empty where it is in Python

    @property
    def error(self) -> str: ...
    def start(self, loose: bool) -> None: ...
    def stop(self) -> None: ...
    def step_begin(self, phase: int, sampled: bool = True, slot: int = -1) -> None:
        """`sampled`: whether Samples may be taken in the step. `slot`: where the first invocation of each call in this
        step is sampled, besides those drawn; -1: nowhere."""

    def step_pause(self) -> None: ...
    def step_resume(self) -> None: ...
    def step_end(self, tokens: int, sequences: int, details: bytes) -> None: ...
    def step_program(self) -> int:
        """End the step without counting it; its Program's number in the shard, -1 where there is none."""

    def line(self, text: bytes) -> None: ...
    def close(self) -> None: ...
    def forget(self) -> None:
        """In a forked child: the shard is the parent's, and nothing is recorded."""

    # Calls that do not come through the dispatcher.
    def operator(self, name: str, arguments: Sequence[str], work: bool, region: bool = False) -> int:
        """A number for the operator `name`, whose parameters are called `arguments`.

        `region`: no kernel, but the engine's own name for what runs in it. All of that counts as it would outside;
        a call of it in which nothing was recorded is not kept.
        """

    def launch(self, body: bytes) -> int:
        """A number for what a kernel is launched with: the JSON of kcap.schemas.recording.recording.Launch."""

    def may_record(self, detail: bool) -> bool:
        """Whether `call` may record what is called on this thread now, before anything is said of it.

        A call that it refuses outside a step counts as one there, as if `call` had been asked.
        """

    def call(self, operator: int, launch: int, values: Sequence[Any], enter: bool, detail: bool) -> bool:
        """One invocation on this thread; whether it is recorded. `launch` -1: none.

        `enter`: what runs until `leave` runs in it. `detail`: not recorded inside another call that was entered.
        """

    def leave(self) -> None: ...
    def ignore_begin(self) -> None:
        """What this thread calls until `ignore_end` is not recorded: a compiler's own work, say. May be nested."""

    def ignore_end(self) -> None: ...
    def replace_begin(self) -> None:
        """What this thread calls until `replace_end` runs in the place of the operator that it is in: recorded, too,
        so that the operator is a region."""

    def replace_end(self) -> None: ...

    # CUDA graphs. What is called on a thread from `graph_begin` on is the graph's, until it ends or is abandoned.
    def graph_begin(self, nodes: bool, stream: int = 0) -> None:
        """`nodes`: note what each call adds to the graph, which `stream` captures; 0: torch's current one."""

    def graph_nodes(self) -> int: ...
    def graph_end(self, info: bytes, nodes: int) -> int:
        """The graph's number, -1 where it cannot be kept. `info`: more members of its line, each after a comma."""

    def graph_abandon(self) -> None: ...
    def graph_launching(self, graph: int) -> bool:
        """The graph is about to be launched on this thread. Whether `graph_launched` is to be called after, for Samples
        of what the graph computes itself."""

    def graph_launched(self) -> None: ...
    def graph_memory(self, ranges: Ranges | None) -> None:
        """Where graphs keep what they compute themselves, sampled after a launch, all else before. None: not known, and
        nothing is sampled."""

    def group(self, name: str, handle: int, size: int, rank: int, label: str = "") -> None:
        """A process group, by the name or the handle that operators are given it by; c10d's own as `c10d/NAME`.

        `label`: what the engine calls it, such as `tp`.
        """


def c10d_group(group: Any) -> str | None:
    """The name by which `Recorder.group` is told of torch's process group; None where it has no name, or no backend."""
    try:
        return f"c10d/{group.group_name}"
    except (AttributeError, RuntimeError):
        return None
