"""Slots on a Ray cluster: the same Outcomes, whatever node they come from."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
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


def node(alive=True, **resources):
    """As ray.nodes() tells of it."""
    return {"Alive": alive, "Resources": resources}


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

        eight = [node(GPU=4, CPU=32), node(GPU=4, CPU=32)]
        assert slots_of(eight, SlotRequest("cuda", {"threads": None}, most=100)) == 8
        assert slots_of(eight, SlotRequest("cuda", {"threads": None}, most=3)) == 3
        assert slots_of(eight, SlotRequest("cpu", {"threads": 15}, most=100)) == 4
        assert slots_of([*eight, node(alive=False, GPU=4)], SlotRequest("cuda", {"threads": None}, most=100)) == 8

    def test_what_is_left_of_several_nodes_makes_no_slot(self):
        from kcap.bench.run.executors.ray import slots_of

        assert slots_of([node(CPU=3), node(CPU=3)], SlotRequest("cpu", {"threads": 1}, most=9)) == 2
        with pytest.raises(CallError, match=r"takes 2 CPU, and no node of the cluster has more than 1$"):
            slots_of([node(CPU=1), node(CPU=1)], SlotRequest("cpu", {"threads": 1}, most=9))
        with pytest.raises(CallError, match=r"takes 1 GPU, and no node of the cluster has more than 0$"):
            slots_of([node(CPU=64)], SlotRequest("cuda", {"threads": None}, most=1))

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
        slot = executor.RaySlot(SlotRequest("cpu", {"threads": 1}, 1), None, set())
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
        (scratch := judged_folder / "scratch").mkdir()
        env = {"PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(scratch)}
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
        assert not list(scratch.iterdir())


class TestTwoNodes:
    """Two nodes on one machine, each with one GPU by its own word, and a judge that uses none."""

    @pytest.fixture
    def cluster(self, faked, tmp_path, monkeypatch):
        pytest.importorskip("ray", reason="Ray is not installed: pip install kcap[ray]")
        from ray.cluster_utils import Cluster

        monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            nodes.add_node(num_cpus=1, num_gpus=1)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes
        nodes.shutdown()

    @pytest.fixture
    def asked(self, tmp_path):
        """The fake judges' processes and what they were asked, as far as the journal goes."""
        path = tmp_path / "journal"
        return lambda: [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    @pytest.fixture
    def long_folder(self, tmp_path):
        write_judged(tmp_path / "dataset")
        for number in range(4):
            write_solution(tmp_path / "solutions", f"s{number}", us=5, sleep=2)
        return tmp_path

    def judged_while(self, bench, asked, harm):
        """`kcap bench` on both nodes; `harm` gets a judge's process as soon as both are at work."""

        def wait_and_harm():
            until = time.monotonic() + 60
            while len({process for process, *_ in asked()}) < 2 and time.monotonic() < until:
                time.sleep(0.1)
            harm(int(asked()[-1][0]))

        thread = threading.Thread(target=wait_and_harm)
        thread.start()
        begun = time.monotonic()
        done = bench("--executor", "ray", "--device", "cuda")
        thread.join()
        assert time.monotonic() - begun < 90, "it waited for what does not come"
        return done

    def each_pair_once(self, folder):
        pairs = Counter((one.solution, one.workload, one.status) for one in outcomes_in(folder / "out"))
        return pairs == Counter((f"s{n}", uuid, "PASSED") for n in range(4) for uuid in ("s1", "s2"))

    @pytest.mark.slow
    def test_an_actor_that_is_killed_is_started_again(self, cluster, bench, long_folder, asked):
        def kill_actor(judge):
            os.kill(parent(judge), signal.SIGKILL)

        done = self.judged_while(bench, asked, kill_actor)
        assert (done.code, self.each_pair_once(long_folder)) == (0, True), done.err
        assert "is judged again: its actor was lost" in done.err
        assert "cannot be started" not in done.err
        assert len({process for process, *_ in asked()}) == 3

    @pytest.mark.slow
    def test_a_node_that_falls_out_leaves_its_work_to_the_other(self, cluster, bench, long_folder, asked):
        def stop_node(judge):
            raylet = parent(parent(judge))
            (lost,) = (node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid == raylet)
            cluster.remove_node(lost, allow_graceful=False)

        done = self.judged_while(bench, asked, stop_node)
        assert (done.code, self.each_pair_once(long_folder)) == (0, True), done.err
        assert "a judge cannot be started: --executor ray: " in done.err
        assert len({process for process, *_ in asked()}) == 2


def parent(process: int) -> int:
    """The parent of a process that may be gone."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
