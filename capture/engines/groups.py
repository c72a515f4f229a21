"""The process groups of an engine, whose collectives are given a group by name or handle."""

from __future__ import annotations

import sys
from typing import Any

from kcap.capture.window import Window


class Groups:
    """Tells the recorder the size and rank of an engine's groups, by their names and their all-reduces' handles.

    `state`: the module that keeps them (vLLM's; SGLang's is made after it).
    """

    def __init__(self, window: Window, state: str = "vllm.distributed.parallel_state") -> None:
        self._window = window
        self._state = state
        self._told: set[str] = set()

    def tell(self) -> None:
        """Those that came since, once there is a recorder."""
        state = sys.modules.get(self._state)
        recorder = self._window.recorder
        if state is None or recorder is None:
            return
        for name, reference in getattr(state, "_groups", {}).items():
            group = reference()
            if group is None or name in self._told:
                continue
            self._told.add(name)
            recorder.group(name, _handle(group), group.world_size, group.rank_in_group)


def _handle(group: Any) -> int:
    """Of the group's custom all-reduce, which SGLang's groups hold themselves; 0 where there is none."""
    owner = getattr(group, "device_communicator", None) or group
    return int(getattr(getattr(owner, "ca_comm", None), "_ptr", 0) or 0)
