"""What `scripts/gpu/repeatability.py` makes of several runs' measurements."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kcap.schemas.results.measurement import Measurement

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("repeatability", "spread"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("repeatability")


def one(call: int, us: float, method: str = "graph", sample: int | None = None) -> Measurement:
    return Measurement.model_validate(
        {"call": call, "operator": "aten::mm", "median_us": us, "method": method, "cache": "serving", "sample": sample}
    )


def runs(*medians: float, **more: Any) -> list[list[Measurement]]:
    return [[one(0, us, **more)] for us in medians]


@pytest.mark.parametrize(
    ("medians", "name", "holds"),
    [
        ((10.0, 10.0, 10.09), "over 5 µs", True),
        ((10.0, 10.0, 10.11), "over 5 µs", False),
        ((3.0, 3.0, 3.08), "2 to 5 µs", True),
        ((3.0, 3.0, 3.1), "2 to 5 µs", False),
        ((1.0, 1.0, 1.9), "under 2 µs", True),
    ],
)
def test_each_class_has_its_bound(script: Any, medians: tuple[float, ...], name: str, holds: bool) -> None:
    (found,), _ = script.kernels(runs(*medians))
    assert (found.of.name, found.holds) == (name, holds)
    lines = script.table([found], [])
    assert lines[0].startswith("ok " if holds else "BAD")


def on(device: str) -> dict[str, Any]:
    return {"tensor": {"shape": [16], "dtype": "int64", "device": device}}


@pytest.mark.parametrize(
    ("operator", "values", "judged"),
    [
        ("aten::copy_", [on("cuda"), on("cpu")], False),
        ("aten::copy_", [on("cuda"), on("cuda")], True),
        ("aten::_to_copy", [on("cpu"), {"device": "cuda:0"}], False),
        ("aten::to.dtype_layout", [on("cuda"), {"device": "cpu"}], False),
        ("aten::to.dtype_layout", [on("cuda"), {"device": "cuda:0"}], True),
        ("aten::mul.Tensor", [on("cuda"), on("cpu")], True),
    ],
)
def test_a_copy_over_the_hosts_bus_is_no_kernel(
    script: Any, operator: str, values: list[dict[str, Any]], judged: bool
) -> None:
    more = {"operator": operator, "args": [{"name": "one", "value": value} for value in values]}
    copies = [Measurement.model_validate({**one(0, us).model_dump(), **more}) for us in (3.0, 4.0)]
    (found,), lacking = script.kernels([[copy] for copy in copies])
    assert (found.judged, found.holds) == (judged, not judged)
    line = script.table([found], lacking)[0]
    assert line.startswith("BAD 2 to 5" if judged else "ok  copies between host and GPU: 1, worst 28.57%")


def test_samples_are_kernels_of_their_own_and_what_a_run_lacks_is_apart(script: Any) -> None:
    first = [one(0, 9.0, sample=1), one(0, 90.0, sample=2), one(7, 5.0)]
    found, lacking = script.kernels([first, [*first[:2], one(8, 1.0)]])
    assert [(kernel.us, kernel.spread) for kernel in found] == [(9.0, 0.0), (90.0, 0.0)]
    assert [kernel.us for kernel in lacking] == [5.0, 1.0]


@pytest.mark.parametrize(("us", "mark"), [(1.9, "ok "), (2.0, "BAD")])
def test_a_kernel_that_some_run_lacks_is_told_and_fails_where_it_is_judged(script: Any, us: float, mark: str) -> None:
    whole = [one(0, 9.0), one(1, us)]
    line = script.table(*script.kernels([whole, whole[:1], whole]))[-1]
    assert line.startswith(f"{mark} kernels that some run lacks: 1, ")
    assert ("(call 1, sample None)" in line) is (mark == "BAD")


@pytest.mark.parametrize("found", [[], [[one(0, 1.0)]] * 2])
def test_where_no_kernel_is_judged_nothing_has_been_compared(script: Any, found: list[list[Measurement]]) -> None:
    lines = script.table(*script.kernels(found))
    assert any(line.startswith("BAD") and "was compared" in line for line in lines)


def test_the_hosts_times_are_none_of_the_gpus(script: Any) -> None:
    assert script.kernels(runs(9.0, 9.0, method="host")) == ([], [])


def test_a_run_of_more_than_a_minute_is_told(script: Any) -> None:
    assert script.times([59.0, 60.0], 2, "")[-1].startswith("ok ")
    assert script.times([59.0, 61.0], 2, "")[-1].startswith("BAD")


def test_what_is_out_of_its_bound_comes_first(script: Any) -> None:
    (small, large), _ = script.kernels([[one(0, 1.0), one(1, 9.0)], [one(0, 1.5), one(1, 9.2)]])
    assert sys.modules["spread"].worst([small, large])[0].endswith("(call 1, sample None)")


class Replays:
    """Stands in for `kcap replay`: its runs end with `statuses`, and the script with `code`."""

    def __init__(self, script: Any, monkeypatch: pytest.MonkeyPatch, *statuses: int) -> None:
        self.script, self.monkeypatch, self.statuses = script, monkeypatch, list(statuses)
        self.commands: list[list[str]] = []
        monkeypatch.setattr(script.subprocess, "run", self.run)

    def run(self, command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        status = self.statuses[len(self.commands) - 1]
        if status != 2:
            Path(command[command.index("-o") + 1]).write_bytes(one(0, 9.0).line())
        return subprocess.CompletedProcess(command, status, "", "a warning\nthe GPU is gone\n" if status else "")

    def code(self, *words: str) -> int:
        self.monkeypatch.setattr(sys, "argv", ["repeatability.py", *words])
        with pytest.raises(SystemExit) as ended:
            self.script.main()
        return int(ended.value.code or 0)


def test_all_the_runs_are_compared_also_where_calls_were_skipped(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = Replays(script, monkeypatch, 0, 3, 0)
    assert replays.code("x.kcap", "--runs", "3") == 0
    assert len(replays.commands) == 3


@pytest.mark.parametrize("words", [("x.kcap",), ("x.kcap", "--runs", "2"), ("--runs", "2", "x.kcap")])
def test_what_comes_after_the_dashes_goes_to_kcap_replay(
    words: tuple[str, ...], script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = Replays(script, monkeypatch, *5 * [0])
    assert replays.code(*words, "--", "--phase", "decode", "--runs", "--") == 0
    assert replays.commands[0][-5:] == ["--force", "--phase", "decode", "--runs", "--"]


@pytest.mark.parametrize("status", [1, 2, 124, -9])
def test_a_run_that_failed_is_told_and_not_compared(
    status: int, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replays = Replays(script, monkeypatch, 0, 0, status, 0, 0)
    assert replays.code("x.kcap") == 1
    assert f"BAD runs: 2 of 5: run 3 failed, status {status}: the GPU is gone\n" in capsys.readouterr().out
    assert len(replays.commands) == 3


def test_what_an_earlier_call_left_is_no_run(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"run{number}.jsonl").write_bytes(one(0, 9.0).line())
    monkeypatch.setattr(script.subprocess, "run", lambda *words, **more: subprocess.CompletedProcess([], 0, "", ""))
    ended, why = script.runs(tmp_path, tmp_path, 2, 60.0, [])
    assert (ended, why) == ([], "run 1 failed, status 0: no message")


@pytest.mark.parametrize(("limit", "count"), [("0", 0), ("0.05", 1)])
def test_fewer_runs_than_asked_for_do_not_pass(
    limit: str, count: int, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replays = Replays(script, monkeypatch, *5 * [0])
    fast = script.replay
    monkeypatch.setattr(script, "replay", lambda *words: script.Run(fast(*words).output, 1.0))
    assert replays.code("x.kcap", "--limit", limit) == 1
    said = capsys.readouterr().out
    assert f"BAD runs: {count} of 5: the limit was over\n" in said and "µs: within" not in said


@pytest.mark.parametrize("asked", ["1", "0", "-1"])
def test_fewer_than_two_runs_cannot_be_asked_for(asked: str, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Replays(script, monkeypatch).code("x.kcap", "--runs", asked) == 2
