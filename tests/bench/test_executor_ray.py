"""Slots on a Ray cluster: the same Outcomes, whatever node they come from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from judged import outcomes_in, statuses, write_judged, write_solution

from kcap.bench.run.executors import SlotRequest, find_executor
from kcap.errors import CallError, KcapError


class Actor:
    """Takes any call."""

    def __getattr__(self, name):
        return self

    def remote(self, *args):
        return args


def raised_or_given(answer):
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def judged_folder(tmp_path):
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "fast", us=5)
    write_solution(tmp_path / "solutions", "fatal", "masked", die=9)
    return tmp_path


def test_without_ray_the_error_names_what_to_install(bench, judged_folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "kcap.bench.run.executors.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = bench("--executor", "ray", "--threads", 1)
    assert (done.code, "pip install kcap[ray]" in done.err) == (2, True), done.err
    monkeypatch.delitem(sys.modules, "kcap.bench.run.executors.ray", raising=False)


class TestWithRay:
    """What needs Ray itself."""

    @pytest.fixture(autouse=True)
    def _ray(self):
        pytest.importorskip("ray", reason="Ray is not installed: pip install kcap[ray]")

    def test_which_gpu_is_rays_to_choose(self):
        with pytest.raises(CallError, match=r"--device cuda$"):
            find_executor("ray").check("cuda:1", None)

    def test_cpus_of_a_slot_are_to_be_said(self):
        with pytest.raises(CallError, match="--threads"):
            find_executor("ray").check("cpu", None)

    def test_a_slot_for_each_gpu_and_no_more_than_have_work(self):
        from kcap.bench.run.executors.ray import slots_of

        assert slots_of({"GPU": 8, "CPU": 64}, SlotRequest("cuda", {"threads": None}, most=100)) == 8
        assert slots_of({"GPU": 8, "CPU": 64}, SlotRequest("cuda", {"threads": None}, most=3)) == 3
        assert slots_of({"CPU": 64}, SlotRequest("cpu", {"threads": 15}, most=100)) == 4
        with pytest.raises(CallError, match="0 together"):
            slots_of({"CPU": 64}, SlotRequest("cuda", {"threads": None}, most=1))

    def test_a_dataset_that_is_sent_arrives_whole(self, judged_folder):
        from kcap.bench.run.executors.common.actor import dataset_bytes as size
        from kcap.bench.run.executors.common.actor import dataset_files as content
        from kcap.bench.run.executors.common.actor import write_files as write

        files = content(judged_folder / "dataset")
        write(judged_folder / "there", files)
        assert content(judged_folder / "there") == files
        assert size(judged_folder / "there") == sum(map(len, files.values())) > 0

    def test_a_large_dataset_that_a_node_lacks_is_an_error_that_says_so(self, tmp_path):
        from kcap.bench.run.executors.common.actor import JudgeActor as Judge

        judge = Judge(
            {"root": str(tmp_path / "nowhere"), "device": "cpu", "threads": 1, "hidden": []}, "fake_judge", None
        )
        assert "share the folder" in judge.start()["error"]

    def test_an_actor_that_is_lost_costs_one_attempt_and_is_replaced(self, monkeypatch):
        from kcap.bench.run.executors import ray as executor

        class Lost(executor.ray.exceptions.RayError):
            pass

        started = []
        slot = executor.RaySlot(SlotRequest("cpu", {"threads": 1}, 1), None)
        monkeypatch.setattr(executor.RaySlot, "start", lambda self: started.append(setattr(self, "_actor", Actor())))
        monkeypatch.setattr(executor.ray, "kill", lambda actor: None)
        answers = [Lost("lines\nthe node died"), {"status": "PASSED"}]
        monkeypatch.setattr(executor.ray, "get", lambda *_, **__: raised_or_given(answers.pop(0)))
        assert slot.run({}, 1) == {"status": "failed", "reason": "its actor was lost: the node died"}
        assert slot.run({}, 1) == {"status": "PASSED"}
        assert len(started) == 2
        slot.stop()
        with pytest.raises(KcapError):
            slot.run({}, 1)

    @pytest.mark.slow
    def test_a_cluster_judges_as_one_machine_does(self, bench, judged_folder, monkeypatch):
        ray = pytest.importorskip("ray")
        monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        env = {"PYTHONPATH": str(Path(__file__).parent)}
        ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": env})
        try:
            done = bench("--executor", "ray", "--threads", 1)
        finally:
            ray.shutdown()
        assert done.code == 3, done.err
        assert statuses(judged_folder / "out") == {
            ("fast", "s1"): "PASSED",
            ("fast", "s2"): "PASSED",
            ("fatal", "k1"): "NOT_JUDGED",
        }
        assert {one.reason for one in outcomes_in(judged_folder / "out") if one.reason} == {
            "the judge failed 2 times: crashed: SIGABRT"
        }
        assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("kcap-dataset-*"))
