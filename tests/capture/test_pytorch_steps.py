"""Steps of plain PyTorch programs while the window opens: who waits for it, and who must not."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kcap.capture.engines.pytorch import adapter
from kcap.capture.engines.pytorch.adapter import Opening, Steps


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(adapter, "_capturing", lambda: True)
    return Steps(None)  # type: ignore[arg-type]


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
