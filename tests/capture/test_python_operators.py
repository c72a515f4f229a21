"""Operators that torch 2.14 and newer call past their dispatcher, here with a stand-in of its switch in older ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import Engine, counts, health

X = torch.ones(2, 2)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is switched on runs as its function; it is on from the start, as in torch."""
    kind: Any = torch._ops.OpOverload
    if hasattr(kind, "_enable_pyobj_dispatch"):
        return
    dispatched, functions = kind.__call__, {"kcap_python::before": before, "kcap_python::after": after}
    on: set[str] = {"kcap_python::before"}

    def call(overload: Any, *args: Any, **kwargs: Any) -> Any:
        past = overload._schema.name in on
        return functions[overload._schema.name](*args) if past else dispatched(overload, *args, **kwargs)

    def enable(overload: Any, enabled: bool = True) -> None:
        (on.add if enabled else on.discard)(overload._schema.name)

    monkeypatch.setattr(kind, "__call__", call)
    monkeypatch.setattr(kind, "_enable_pyobj_dispatch", enable, raising=False)
    monkeypatch.setattr(kind, "_is_pyobj_dispatcher_enabled", lambda it: it._schema.name in on, raising=False)


def before(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def after(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_operators_in_python_are_recorded_and_called_past_the_dispatcher_afterwards(
    switch: None, tmp_path: Path
) -> None:
    first = torch.library.custom_op("kcap_python::before", before, mutates_args=())
    engine = Engine(tmp_path)
    engine.open()
    second = torch.library.custom_op("kcap_python::after", after, mutates_args=())
    overloads: list[Any] = [first._opoverload, second._opoverload]
    overloads[1]._enable_pyobj_dispatch(True)  # as torch's own does once it is defined
    for overload in overloads:
        engine.step("decode", lambda overload=overload: overload(X))
    recording = engine.close()
    assert counts(recording) == {(f"kcap_python::{n}", "decode", "eager"): 1 for n in ("before", "after")}
    assert health(recording, "python_operators").status == "ok"
    assert all(overload._is_pyobj_dispatcher_enabled() for overload in overloads)
