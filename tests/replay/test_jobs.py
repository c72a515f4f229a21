"""How sampling is shared out."""

from __future__ import annotations

from handmade import call, tensor

from kcap.replay.jobs import RARE_SECONDS, CallJob, Job, SampleGroup, sampling_seconds


def job(count: int, *shape: int) -> Job:
    return CallJob({"decode": count}, call("aten::relu", tensor(*shape)), [SampleGroup(None, None)])


def test_what_will_hardly_count_is_sampled_for_a_fifth() -> None:
    assert sampling_seconds([job(9999, 8), job(100, 8), job(1, 8)], 0.1) == [0.1, 0.1, RARE_SECONDS * 0.1]


def test_large_tensors_count_though_they_are_rare() -> None:
    assert sampling_seconds([job(9999, 8), job(1, 1 << 28)], 0.1) == [0.1, 0.1]


def test_a_single_job_has_it_all() -> None:
    assert sampling_seconds([job(1, 8)], 0.5) == [0.5]
    assert sampling_seconds([], 0.5) == []
