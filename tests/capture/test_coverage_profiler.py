"""kcap's rule as the analysis applies it to a profile, against what the recorder really recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kcap.capture.fold.coverage import STEP, Attributed, ProfiledStep, Ran, attribute, read_trace
from kcap.schemas.recording.recording import Recording

Record = Callable[..., Recording]


@torch.library.custom_op("kcapcoverage::kernel", mutates_args=())
def kernel(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).exp()


@torch.library.custom_op("kcapcoverage::region", mutates_args=())
def region(x: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.ops.kcapcoverage.kernel(x * 2) + torch.ops.kcapcoverage.kernel(x)


def body(width: int) -> None:
    x = torch.randn(4, width)
    for _ in range(3):
        y = torch.nn.functional.linear(x, torch.randn(width, width))
        y = torch.ops.kcapcoverage.region(y, "layers.0")
        y.view(-1)[1:].add_(1).contiguous()
        torch.add(y, y, out=y)
        torch.ops.kcapcoverage.kernel(y).softmax(-1).to(torch.bfloat16)
        with torch.enable_grad():
            weight = torch.ones(width, requires_grad=True)
            (weight * 2).sum().backward()


@pytest.fixture
def steps(record: Record, tmp_path: Path) -> tuple[Path, list[ProfiledStep]]:
    """Two steps recorded while the profiler runs: its trace, and their Calls."""
    path = tmp_path / "trace.json.gz"

    def run(session: Any) -> None:
        body(8)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for index, width in enumerate((8, 16)):
                with session.step("decode"), torch._C._profiler._RecordFunctionFast(f"{STEP}{index}"):
                    body(width)
                torch.relu(torch.ones(3))
        profiler.export_chrome_trace(str(path))

    recording = record(run)
    calls = recording.calls
    programs = [[calls[number] for number in program.calls] for program in recording.programs]
    return path, [
        ProfiledStep(index, [Ran(call.id, call.operator, region=call.kind == "region") for call in those])
        for index, those in enumerate(programs)
    ]


def attributed(steps: tuple[Path, list[ProfiledStep]]) -> list[Attributed]:
    return attribute(read_trace(steps[0]), steps[1])


def test_the_profiler_counts_what_the_recorder_counts(steps: tuple[Path, list[ProfiledStep]]) -> None:
    assert [found.disagreements for found in attributed(steps)] == [[], []]
    assert len(steps[1]) == 2
    operators = {ran.operator for step in steps[1] for ran in step.ran()}
    assert operators >= {"kcapcoverage::region", "kcapcoverage::kernel", "aten::linear", "aten::add.out"}


@pytest.mark.parametrize("operator", ["aten::linear", "kcapcoverage::kernel", "aten::mul.Tensor"])
def test_a_missed_and_an_invented_call_are_both_told(operator: str, steps: tuple[Path, list[ProfiledStep]]) -> None:
    first, second = steps[1]
    number = next(number for number, ran in enumerate(first.ran()) if ran.operator == operator)
    missed = ProfiledStep(0, first.items[:number] + first.items[number + 1 :])
    found = attribute(read_trace(steps[0]), [missed, ProfiledStep(1, [*second.items, first.items[number]])])
    differences = [[(each.operator, each.profiled - each.recorded) for each in one.disagreements] for one in found]
    assert differences == [[(operator.split(".")[0], 1)], [(operator.split(".")[0], -1)]]
