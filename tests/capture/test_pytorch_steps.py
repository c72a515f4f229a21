"""Steps of plain PyTorch programs while the window opens: who waits for it, and who must not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import OptimizedModule

from kcap.capture.engines.pytorch import adapter
from kcap.capture.engines.pytorch.adapter import Opening, Steps


class Squares(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(adapter, "_capturing", lambda: True)
    return Steps(None)  # type: ignore[arg-type]


def test_what_is_compiled_of_a_module_is_pytorchs_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch saves it with what it compiled ahead of time, where nothing of kcap's may be."""
    monkeypatch.setattr(torch.nn.Module, "__call__", original := torch.nn.Module.__call__)
    monkeypatch.setattr(OptimizedModule, "_initialize", OptimizedModule._initialize)
    window: Any = SimpleNamespace(tap_failed=None)
    adapter._hook_dynamo(eval_frame, window, adapter._hook_modules(torch, Steps(window)))
    module = Squares()
    compiled = torch.compile(module, backend="eager")
    assert torch.nn.Module.__call__ is not original
    assert compiled.forward.__wrapped__.__func__ is original
    assert "__call__" not in vars(module)


def test_modules_in_the_first_steps_own_thread_never_wait(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a module may be in the capture of a CUDA graph, which opens no window."""
    monkeypatch.setattr(Opening, "POLL", 3600.0)  # who waits would not come back
    opening: Any = steps.opening
    with steps.lock:
        assert steps.begin(None, (), {}) is None
        opening.wait(steps.lock)


def test_other_threads_wait_until_it_is_open_or_nobody_opens_it(steps: Steps) -> None:
    opening: Any = steps.opening
    waiting = threading.Thread(target=opening.wait, args=(steps.lock,))
    with steps.lock, opening:
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()
    opening.wait(steps.lock)
