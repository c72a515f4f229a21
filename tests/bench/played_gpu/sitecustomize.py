"""Python imports this at its start: in the fork server, candidates are given the GPU that is played."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

FORK_SERVER, CANDIDATE = "kcap.bench.judge.fork_server", "kcap.bench.judge.driver.candidate_process"


class Before(importlib.abc.MetaPathFinder):
    """Puts the played GPU in its place when the candidate's module is first asked for."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != CANDIDATE:
            return None
        sys.meta_path.remove(self)
        import played

        from kcap.bench.judge.driver import gpu

        gpu.gpu_handles = played.taken
        return importlib.util.find_spec(name)


if FORK_SERVER in sys.orig_argv:
    sys.meta_path.insert(0, Before())
