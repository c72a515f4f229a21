"""How sampling is shared out."""

from __future__ import annotations

from handmade import call, tensor

from kcap.replay.budget import SHARE, seconds_of
from kcap.replay.call_job import CallJob, Group
from kcap.replay.job import Job


def job(count: int, *shape: int) -> Job:
    return CallJob({"decode": count}, call("aten::relu", tensor(*shape)), [Group(None, None)])


def test_what_will_hardly_count_is_sampled_for_a_fifth() -> None:
    assert seconds_of([job(9999, 8), job(100, 8), job(1, 8)], 0.1) == [0.1, 0.1, SHARE * 0.1]


def test_large_tensors_count_though_they_are_rare() -> None:
    assert seconds_of([job(9999, 8), job(1, 1 << 28)], 0.1) == [0.1, 0.1]


def test_a_single_job_has_it_all() -> None:
    assert seconds_of([job(1, 8)], 0.5) == [0.5]
    assert seconds_of([], 0.5) == []
