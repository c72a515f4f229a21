"""The window of a process with a plan: the logits that are compared, and the graphs of each arm."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from applied_plans import plan_of, python_solution

from kcap.bench.apply import process
from kcap.bench.apply.graphs import ENGINE, GraphSets
from kcap.bench.apply.process import PlanWindow, read_engagements
from kcap.bench.apply.quality import MOST_ROWS, compare_logits, read_checks, rows_of
from kcap.capture.engines.vllm import adapter as vllm
from kcap.capture.window.step import Forward, StepShape
from kcap.schemas.derive.derive import derive
from kcap.schemas.recording.recording import Recording

X = torch.randn(4, 8)
DECODE = StepShape("decode", [1] * 4, [9] * 4)
Started = Callable[..., PlanWindow]


def step(window: PlanWindow, logits: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> torch.Tensor:
    """One forward, which adds to a state that it keeps."""
    state = torch.zeros(1)

    def run() -> torch.Tensor:
        state.add_(1)
        return torch.relu(X)

    window.begin(DECODE)
    with torch.no_grad():
        out: torch.Tensor = window.forward(Forward(run, logits, lambda: [state]))
    window.end()
    assert state.item() == 1
    return out


def test_one_that_is_right_stays_after_its_logits_were_compared(started: Started, tmp_path: Path) -> None:
    window = started("def run(x):\n    return x.clamp(min=0)\n")
    assert torch.equal(step(window), torch.relu(X))
    (check,) = read_checks(tmp_path)
    assert check.arms[0].tokens == 4 and check.arms[0].top1 == 1 and check.arms[0].kl == check.arms[0].rms == 0
    uses = window.replacements.placed[0].eager
    step(window)
    assert window.replacements.placed[0].eager == uses + 1  # nothing is compared any more
    assert len(list(read_checks(tmp_path))) == 1


@pytest.mark.parametrize("wrong", ["x.clamp(min=0) + 0.5", "x.clamp(min=0) * float('nan')"])
def test_one_that_changes_what_the_engine_says_is_taken_out(
    started: Started, capfd: pytest.CaptureFixture[str], wrong: str
) -> None:
    window = started(f"def run(x):\n    return {wrong}\n")
    for _ in range(2):
        assert torch.equal(step(window), torch.relu(X))
    assert "was taken out: with it the engine's logits" in capfd.readouterr().err
    assert "logits" in window.replacements.placed[0].off


def test_one_in_a_graph_is_compared_by_itself_without_it(started: Started, capfd: pytest.CaptureFixture[str]) -> None:
    """It is off by too little to be seen in the logits. What else the graph holds goes with it."""
    window = started("def run(x):\n    x = x.clamp(min=0)\n    x[0, 0] += 0.05\n    return x\n", checks=2)
    (placed,) = window.replacements.placed
    placed.captured = 1
    for _ in range(2):
        assert torch.equal(step(window), torch.relu(X))
    assert "was taken out: its output 0 is off by" in capfd.readouterr().err
    assert window.arm == ENGINE and placed.checked == 1 and not placed.eager


PEER = """
import os, sys
import torch.distributed as dist
import torch

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=1, world_size=2)
runs = []
# is it compared by none? is there no room for states? did it fail? do logits differ, is it out? is it in a graph?
taken_out = ([0], [0], [0], [0, 1], [0])
failed = ([0], [0], [1], [0, 1], [0])
for flags in (*taken_out, *failed, [0], [0], [1], [0], [0]):
    told = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    runs.append(told.tolist())
told_out, told_failed = runs[:5], runs[5:10]
assert told_out == [[0], [0], [0], [0, 1], [1]] and told_failed == [[0], [0], [1], [0, 1], [1]], runs
assert runs[10:] == [[0], [1], [1], [0], [0]], runs
sys.stdin.read()  # and comes to no more
os._exit(0)  # gloo may abort a process whose peer is still there as it ends
"""


@pytest.mark.timeout(120)
def test_ranks_take_out_the_same_and_run_as_many_forwards(
    started: Started, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forward they wait for each other."""
    peer = subprocess.Popen([sys.executable, "-c", PEER, str(tmp_path / "meeting")], stdin=subprocess.PIPE)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=2)
    try:
        window = started("def run(x):\n    return x.clamp(min=0)\n")
        window._to_compare = 3
        (placed,) = window.replacements.placed
        placed.captured = 1
        forwards = 0

        def run() -> torch.Tensor:
            nonlocal forwards
            forwards += 1
            return torch.relu(X)

        def forward(states: Callable[[], list[torch.Tensor]] = list) -> None:
            window.begin(DECODE)
            window.forward(Forward(run, torch.clone, states, ranks=lambda: torch.distributed.group.WORLD))
            window.end()

        with torch.no_grad():
            forward()
        assert (placed.off, window.arm, window._to_compare) == ("another rank took it out", ENGINE, 0)
        assert forwards == 4, "with it alone, the engine's, with it, and the engine's again"
        assert "was taken out: another rank took it out" in capfd.readouterr().err
        window._to_compare = 1
        with torch.no_grad():
            forward()
        assert forwards == 4 + 4, "the other could not compare, and runs it again"
        window._to_compare = 1
        with torch.no_grad():
            forward(lambda: [object()])  # as where its states have no room
        assert forwards == 9 and "could not be compared" in capfd.readouterr().err
        window._to_compare = 1
        with torch.no_grad():
            forward()
        assert forwards == 10 and window._to_compare == 1, "the other does not follow the engine's steps yet"
        monkeypatch.setattr(process, "OTHERS_WAIT", timedelta(seconds=1))
        monkeypatch.setattr(process, "compare_logits", None)
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            forward()
        assert peer.poll() is None and "could not be compared" in capfd.readouterr().err, "it waits in its own forward"
        peer.communicate()
        assert peer.returncode == 0
    finally:
        peer.kill()
        torch.distributed.destroy_process_group()


def test_nothing_is_compared_before_it_decodes(started: Started, tmp_path: Path) -> None:
    window = started("def run(x):\n    return x.clamp(min=0)\n")
    window.begin(StepShape("prefill", [4], [4]))
    window.forward(Forward(lambda: torch.relu(X), torch.clone))
    window.end()
    assert not list(read_checks(tmp_path))
    step(window)
    assert len(list(read_checks(tmp_path))) == 1


def test_logits_that_cannot_be_compared_end_no_engine(started: Started, capfd: pytest.CaptureFixture[str]) -> None:
    def full(hidden: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("it is full")

    window = started("def run(x):\n    return x.clamp(min=0)\n")
    assert torch.equal(step(window, full), torch.relu(X))
    assert "could not be compared: OutOfMemoryError: it is full" in capfd.readouterr().err
    assert window.arm == 0, "the plan's, as before"


def test_a_forked_child_tells_nothing_of_the_plan(started: Started, tmp_path: Path) -> None:
    """It ends by what its parent registered, as one that a compiler forks does."""
    window = started("def run(x):\n    return x.clamp(min=0)\n")
    step(window)
    child = os.fork()
    if not child:
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    window.ends()
    assert [one.pid for one in read_engagements(tmp_path)] == [os.getpid()]


def test_what_became_of_the_plan_is_told_before_the_shard_is_closed(started: Started, tmp_path: Path) -> None:
    """Who waits for the shard may kill the process as soon as it is closed."""
    window = started("def run(x):\n    return x.clamp(min=0)\n")
    window.start()
    step(window)
    recorder, told = window.recorder, []

    def close() -> None:
        told.extend(read_engagements(tmp_path))
        type(recorder).close(recorder)  # type: ignore[arg-type]

    recorder.close = close  # type: ignore[union-attr, method-assign]
    window.close()
    assert [one.steps for one in told] == [{"decode": 1}]


def test_rows_of_padding_are_not_compared() -> None:
    hidden = torch.arange(2000.0)[:, None]
    assert rows_of(hidden, 3).flatten().tolist() == [0, 1, 2]
    rows = rows_of(hidden, 1500).flatten()
    assert len(rows) == MOST_ROWS and rows[0] == 0 and rows[-1] == 1499


def test_what_logits_differ_by() -> None:
    own = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    other = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    compared = compare_logits(other, own)
    assert compared.tokens == 2 and compared.top1 == 0.5
    expected = torch.nn.functional.kl_div(other.log_softmax(-1), own.softmax(-1), reduction="batchmean")
    assert compared.kl == pytest.approx(expected.item(), rel=1e-5)
    assert compared.rms == pytest.approx(2**0.5)  # 2 of one number in four, of a root mean square of 2**-0.5
    assert compare_logits(other * float("inf"), own).kl is None


def test_what_an_engine_gives_its_forward_is_as_it_was_in_each(started: Started, tmp_path: Path) -> None:
    """Layers of an early stage's output, or of embeddings, add to it."""
    window = started("def run(x):\n    return x.clamp(min=0)\n")
    stage, runs = torch.zeros(4, 8), []

    class Runner:
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        model = SimpleNamespace(compute_logits=torch.clone)
        kv_caches: list[torch.Tensor] = []

        def _model_forward(self, input_ids: torch.Tensor, intermediate_tensors: object) -> torch.Tensor:
            runs.append(float(stage.sum()))
            stage.add_(X)
            return torch.relu(stage)

    groups = SimpleNamespace(get_tp_group=lambda: SimpleNamespace(world_size=1))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(sys.modules, "vllm.distributed.parallel_state", groups)
        patch.setattr(vllm, "_without_graphs", contextlib.nullcontext)
        window.begin(DECODE)
        run = functools.partial(Runner()._model_forward, torch.ones(4, dtype=torch.int32))
        out = vllm._model_forward(window, run, Runner(), SimpleNamespace(tensors={"residual": stage}))
        window.end()
    assert runs == [0] * 3 and torch.equal(stage, X) and torch.equal(out, torch.relu(X))
    assert next(read_checks(tmp_path)).arms[0].rms == 0


def test_graphs_of_drafts_of_halves_and_of_encoders_are_exchanged_too() -> None:
    managers = [SimpleNamespace(graphs={1: "graph"}) for _ in range(2)]
    halves = SimpleNamespace(cudagraphs={2: "graph"})
    encoders = SimpleNamespace(budget_graphs={3: "graph"})
    drafts = SimpleNamespace(prefills=managers[1])
    runner = SimpleNamespace(manager=managers[0], model=halves, encoders=encoders, speculator=drafts)
    assert vllm._graph_tables(runner) == [{1: "graph"}, {2: "graph"}, {3: "graph"}, {1: "graph"}]


def test_the_engines_own_graphs_are_captured_only_where_forwards_are_compared(started: Started) -> None:
    window = started("def run(x):\n    return x.clamp(min=0)\n")
    shown: list[int] = []
    window.capture(list, lambda: shown.append(window.arm), compares=True)
    window.capture(list, lambda: shown.append(window.arm), compares=False)
    assert shown == [0, ENGINE, 0] and window.arms == (0,)


def test_ranks_build_a_solution_one_after_another(recording: Recording, tmp_path: Path) -> None:
    """A compiler of one would find its folder removed by another."""
    plan = plan_of(recording, python_solution(derive(recording).kernels[0].definition.name, "def run(x):\n    pass\n"))
    inside: list[int] = []

    def build(*_: object) -> Callable[..., None]:
        inside.append(1)
        time.sleep(0.1)
        assert len(inside) == 1
        inside.pop()
        return lambda x: None

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as ranks:
        patch.setattr(process, "build", build)
        assert len(list(ranks.map(lambda _: process.place(plan, tmp_path / "built"), range(4)))) == 4


def test_the_engine_finds_the_graphs_of_one_arm() -> None:
    table: dict[int, str] = {7: "of a trial run"}
    using: list[int] = []

    def capture() -> int:
        assert not table
        table.update({1: f"graph of {using[-1]}", 2: f"graph of {using[-1]}"})
        return using[-1]

    sets = GraphSets()
    assert sets.capture((0, ENGINE), lambda: [table], capture, using.append) == 0
    sets.show(0)
    assert table == {1: "graph of 0", 2: "graph of 0"}
    sets.show(ENGINE)
    assert table == {1: f"graph of {ENGINE}", 2: f"graph of {ENGINE}"}
    sets.drop(0)
    sets.show(0)
    assert table[1] == f"graph of {ENGINE}"
