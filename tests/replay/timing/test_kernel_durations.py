"""Kernel durations from a profiler's events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcap.replay.timing import graphs
from kcap.replay.timing.graphs import KernelRun, graph_replays, kernel_durations, kernels_us


def ran(*pairs: tuple[str, float]) -> list[KernelRun]:
    return [KernelRun(name, start, us, 1) for start, (name, us) in enumerate(pairs)]


def said(found) -> list[tuple[str, float, float]]:
    return [(one.name, one.us, one.count) for one in found]


def test_each_place_of_an_invocation_has_its_own_median() -> None:
    events = ran(("split", 10), ("reduce", 2), ("split", 12), ("reduce", 3), ("split", 11), ("reduce", 40))
    assert said(kernel_durations(events, 3)) == [("split", 11, 1), ("reduce", 3, 1)]


def test_one_kernel_twice_in_an_invocation_is_one_entry_that_adds_up() -> None:
    found = kernel_durations(ran(("copy", 1), ("mm", 9), ("copy", 5), ("copy", 1), ("mm", 9), ("copy", 5)), 2)
    assert said(found) == [("copy", 3, 2), ("mm", 9, 1)]
    assert kernels_us(found) == 15


def test_invocations_that_differ_are_counted_by_name() -> None:
    assert said(kernel_durations(ran(("a", 4), ("b", 1), ("a", 6)), 2)) == [("a", 5, 1), ("b", 1, 0.5)]


def test_nothing_ran() -> None:
    assert kernel_durations([], 3) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 1e4)), min_size=1, max_size=6), st.integers(1, 5))
def test_equal_invocations_add_up_to_one_of_them(pattern: list[tuple[str, float]], times: int) -> None:
    found = kernel_durations(ran(*pattern * times), times)
    assert kernels_us(found) == pytest.approx(sum(us for _, us in pattern))
    assert sum(one.count for one in found) == len(pattern)


def event(name: str, launch: int, start: int, us: float = 1.0, gpu: bool = True, kind: str = "kernel"):
    types = torch._C._autograd.DeviceType
    return SimpleNamespace(
        name=lambda: name,
        correlation_id=lambda: launch,
        start_ns=lambda: start,
        duration_ns=lambda: int(us * 1000),
        device_type=lambda: types.CUDA if gpu else types.CPU,
        activity_type=lambda: kind,
        is_user_annotation=lambda: kind == "gpu_user_annotation",
    )


def test_only_what_the_graphs_ran_is_theirs_in_the_order_of_launch_and_start(monkeypatch) -> None:
    found = [
        event("cudaGraphLaunch", 8, 50, gpu=False, kind="cuda_runtime"),
        event("cudaLaunchKernel", 3, 5, gpu=False, kind="cuda_runtime"),
        event("cudaGraphLaunch_v10000", 7, 10, gpu=False, kind="cuda_runtime"),
        event("second", 7, 30),
        event("first", 7, 20),
        event("sweep", 3, 8),
        event("step", 7, 20, kind="gpu_user_annotation"),
        event("third", 8, 60, us=2.5),
    ]
    monkeypatch.setattr(graphs, "profiler_events", lambda work: found)
    assert [[one.name for one in replay] for replay in graph_replays(lambda: None)] == [["first", "second"], ["third"]]
    assert [one.name for one in graphs.kernel_runs(lambda: None)] == ["sweep", "first", "second", "third"]
    assert graphs.kernel_runs(lambda: None)[-1].us == 2.5


def test_without_graph_launches_what_comes_before_a_replay_is_left_out(monkeypatch) -> None:
    lead, replay = ran(("copy", 1), ("sweep", 1)), ran(("mm", 5), ("mm", 6))
    seen = {"before": lead, "all": [*lead, *replay] * 3, "odd": [*lead, *replay, *lead], "none": lead * 3}
    monkeypatch.setattr(graphs, "kernel_runs", lambda work: seen[work])  # type: ignore[index]
    found = graphs.replays_after("before", "all", 3)  # type: ignore[arg-type]
    assert [[one.us for one in each] for each in found] == [[5, 6]] * 3
    assert graphs.replays_after("before", "odd", 4) == []  # type: ignore[arg-type]
    assert graphs.replays_after("before", "none", 3) == []  # type: ignore[arg-type]


def test_this_torchs_profiler_has_what_is_read_of_its_events() -> None:
    with torch.autograd.profiler.profile(use_kineto=True) as profiler:
        torch.ones(2).add(1)
    found = profiler.kineto_results.events()
    assert found
    assert graphs.runs_on_gpu(found) == []
    assert all(isinstance(one.start_ns(), int) and one.duration_ns() >= 0 for one in found)
    assert all(isinstance(one.correlation_id(), int) and one.name() for one in found)
