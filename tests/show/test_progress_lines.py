"""How far a run is, where no terminal shows a bar."""

from __future__ import annotations

import pytest

from kcap.show import progress


def test_a_line_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 10.0, 31.0, 31.0, 40.0])
    monkeypatch.setattr(progress, "time", type("Time", (), {"monotonic": lambda: next(clock)}))
    with progress.progress() as bar:
        task = bar.add_task("bench", total=2_000)
        bar.update(task, advance=1, description="gemm_n4096 first")
        bar.update(task, advance=1, description="gemm_n4096 [second]")
        bar.update(task, advance=1)
    assert capfd.readouterr().err.strip() == "kcap: 2 of 2,000 done, gemm_n4096 [second]"
