"""Recordings of small programs, for the tests of the recorder."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import graph_class

import kcap
from kcap.capture.session import Session
from kcap.capture.window.window import Window
from kcap.schemas.recording.recording import Recording

Body = Callable[[Any], object]


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    """`record(body, "native")` runs `body(recorder)` inside `kcap.record()`, without gradients."""
    numbers = itertools.count()

    def run(body: Body, recorder: str = "native", **options: Any) -> Recording:
        path = tmp_path / f"{next(numbers)}.kcap"
        with torch.no_grad(), kcap.record(path, recorder=recorder, **options) as session:
            body(session)
        return kcap.load(path)

    return run


@pytest.fixture
def counted() -> Callable[[Recording], dict[str, int]]:
    """Each operator's count, kernels that do work only."""

    def total(recording: Recording) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for call in recording.kernels():
            counts[call.operator] += call.total
        return dict(counts)

    return total


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python(text, *arguments)` runs a program in a process of its own."""
    numbers = itertools.count()

    def run(text: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        script = tmp_path / f"program{next(numbers)}.py"
        script.write_text(text)
        words = [sys.executable, str(script), *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, **options)

    return run


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A class of graphs that needs no GPU, in the place of torch's."""
    fake = graph_class()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake)
    return fake


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Window]:
    """Of a session in `tmp_path/shards`, closed in the end."""
    session = Session(str(tmp_path / "shards"))
    session.write()
    window = Window(session)
    yield window
    window.close()
