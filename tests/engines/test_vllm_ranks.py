"""The real vLLM in two ranks of tensor parallelism on a CPU: each records its own steps, and both the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from applied_plans import plan_of, python_solution
from mixed_batches import ARGUMENTS, AVX512, BLOCKS, LAYERS, LINEAR, OUTPUT, PROMPTS, plain

import kcap
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.shards.reader import read_shard, stems
from kcap.schemas.derive.derive import derive
from kcap.schemas.merge.recordings import merge_recordings
from kcap.schemas.recording.recording import Call, Program, Recording
from kcap.schemas.recording.signature import signature
from kcap.schemas.recording.values import Group
from kcap.schemas.results.plan import plan_bytes, read_plan
from kcap.show.recording import header

pytest.importorskip("vllm", reason="vLLM is not installed")
CORES = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(len(CORES) < 2 or Path("/dev/nvidiactl").exists(), reason="two ranks on two cores of a CPU"),
]

IN_A_STEP = {
    LINEAR: 4 * LAYERS + 1,
    "_C::cpu_attention_with_kv_cache": LAYERS,
    "_C::cpu_attn_reshape_and_cache": LAYERS,
    "_C::rotary_embedding": LAYERS,
    "_C::shm_allreduce" if AVX512 else "c10d::allreduce_": 2 * LAYERS + 1,  # each layer's two, and the embedding's
    "_C::shm_all_gather" if AVX512 else "c10d::_allgather_base_": 1,  # the logits'
}
Tokens = list[list[int]]
Generated = Callable[[bool], tuple[Tokens, Path]]


@pytest.fixture(scope="module")
def generated(
    generate: Callable[..., Tokens], one_process: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Generated]:
    """`generated(recorded)`: the tokens of two ranks, and where their Recording is."""

    def run(recorded: bool) -> tuple[Tokens, Path]:
        directory = tmp_path_factory.mktemp("ranks")
        arguments: dict[str, Any] = {**ARGUMENTS, "enforce_eager": True, "tensor_parallel_size": 2}
        return generate(directory, PROMPTS, OUTPUT, recorded, **arguments), directory / "out"

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(one_process, "VLLM_CPU_OMP_THREADS_BIND", f"{CORES[0]}|{CORES[1]}")
        yield run


@pytest.fixture(scope="module")
def recorded(generated: Generated) -> tuple[Tokens, Path]:
    return generated(True)


@pytest.fixture(scope="module")
def recording(recorded: tuple[Tokens, Path]) -> Recording:
    return kcap.load(recorded[1])


def on_rank(program: Program, rank: int) -> int:
    return sum(count.count for count in program.counts if count.rank == rank)


def test_every_step_of_each_rank_has_the_kernels_of_its_layers(recording: Recording) -> None:
    assert recording.metadata.complete
    steps = sum(recording.metadata.steps.values())
    for rank in (0, 1):
        assert sum(on_rank(program, rank) for program in recording.programs) == steps
        for program in recording.programs:
            ran = Counter(plain(call.operator) for call in recording.ran(program))
            assert {name: ran[name] for name in IN_A_STEP} == IN_A_STEP
        totals = Counter[str]()
        for call in recording.calls:
            totals[plain(call.operator)] += sum(count.count for count in call.counts if count.rank == rank)
        assert {name: totals[name] for name in IN_A_STEP} == {name: n * steps for name, n in IN_A_STEP.items()}


def test_both_ranks_run_the_same_in_each_step(recording: Recording) -> None:
    counts = Counter[tuple[int, str, str, str]]()
    for call in recording.calls:
        for count in call.counts:
            counts[count.rank, call.operator, call.kind, count.phase] += count.count
    ranks: list[Counter[tuple[str, str, str]]] = [
        Counter({key[1:]: n for key, n in counts.items() if key[0] == rank}) for rank in (0, 1)
    ]
    alone = {operator for operator, _, _ in (ranks[0] - ranks[1]) + (ranks[1] - ranks[0])}
    assert ranks[0] == ranks[1], [call for call in recording.calls if call.operator in alone]
    listed = [[(s.index, s.phase, s.queries, s.lengths) for s in recording.steps if s.rank == rank] for rank in (0, 1)]
    assert listed[0] == listed[1]
    assert recording.metadata.disagreements == []


def test_prefill_decode_and_mixed_steps_are_told_apart_on_both_ranks(recording: Recording) -> None:
    assert recording.metadata.steps.keys() == {"prefill", "decode", "mixed"}
    for step in recording.steps:
        # a request is in prefill until its prompt is computed
        prefills = [length <= len(PROMPTS[0]) for length in step.lengths]
        assert step.phase == ("prefill" if all(prefills) else "mixed" if any(prefills) else "decode")
    scheduled = sum(batch["tokens"] * batch["steps"] for batch in recording.metadata.batches)
    assert scheduled == sum(map(len, PROMPTS)) + len(PROMPTS) * (OUTPUT - 1)


def test_each_rank_says_where_it_stands_and_each_collective_its_group(recording: Recording) -> None:
    assert recording.metadata.world_size == 2
    ranks = recording.metadata.ranks
    assert [(rank.rank, rank.places, rank.groups, rank.ended) for rank in ranks] == [
        (0, {"tp": 0}, {"tp": [0, 1]}, True),
        (1, {"tp": 1}, {"tp": [0, 1]}, True),
    ]
    assert ranks[0].steps == ranks[1].steps == recording.metadata.steps
    for call in recording.calls:
        if call.operator.startswith("_C::shm_all"):
            (group,) = (argument.value for argument in call.args if isinstance(argument.value, Group))
            assert group in [Group(2, count.rank, "tp") for count in call.counts]


def test_the_tokens_are_the_same_with_and_without(recorded: tuple[Tokens, Path], generated: Generated) -> None:
    tokens = recorded[0]
    assert tokens == generated(False)[0]
    assert len({tuple(each) for each in tokens}) > 1
    assert {len(each) for each in tokens} == {OUTPUT}


def counted(calls: list[Call]) -> Counter[tuple[str, str, str, int]]:
    """How often each rank ran each operator, on which arguments, in which phase."""
    total = Counter[tuple[str, str, str, int]]()
    for call in calls:
        for count in call.counts:
            total[call.operator, signature(call.args), count.phase, count.rank] += count.count
    return total


def test_what_two_hosts_recorded_of_one_run_joins_to_what_one_would_have(
    recorded: tuple[Tokens, Path], recording: Recording, tmp_path: Path
) -> None:
    """Each host has the shards of its own ranks."""
    halves = []
    for rank in (0, 1):
        session = Session(str(tmp_path / f"host{rank}"), framework="vLLM", model="tiny")
        session.write()
        for stem in stems(recorded[1].with_name("shards")):
            if read_shard(stem).rank == rank:
                for file in stem.parent.glob(f"{stem.name}.*"):
                    shutil.copy(file, session.directory)
        halves.append(fold_session(session, tmp_path / f"half{rank}"))
    assert [[rank.rank for rank in half.metadata.ranks] for half in halves] == [[0], [1]]
    whole = merge_recordings(halves, hosts=True)
    assert whole.metadata.ranks == recording.metadata.ranks
    assert (whole.metadata.world_size, whole.metadata.disagreements) == (2, [])
    assert whole.metadata.steps == recording.metadata.steps
    assert counted(whole.calls) == counted(recording.calls)
    listed = {(step.rank, step.index, step.phase, tuple(step.lengths)) for step in whole.steps}
    assert listed == {(step.rank, step.index, step.phase, tuple(step.lengths)) for step in recording.steps}


ROPE = """
import torch


def run(q, k, cos_sin_cache, positions, is_neox):
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)

    def rotate(x):
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    return rotate(q), rotate(k)
"""
ROTARY = "_C::rotary_embedding"


@pytest.fixture(scope="module")
def plan(recording: Recording, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rotary embedding of every step's shape replaced, on both ranks."""
    (name,) = {kernel.definition.name for kernel in derive(recording).kernels if kernel.family == "rope"}
    made = plan_of(recording, python_solution(name, ROPE), us=20.0)  # which is slower, as this one is
    assert len(made.replacements) == len([call for call in recording.kernels() if call.operator == ROTARY])
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_bytes(plan_bytes(made.model_copy(update={"model": str(model)})))  # the Recording names it otherwise
    return file


@pytest.fixture(scope="module")
def two_ranks(model: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`two_ranks(command…)`: kcap with the engine of `recording`; what it prints."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    sizes = {"max_model_len": 512, "num_gpu_blocks_override": BLOCKS}
    given = {**ARGUMENTS, **sizes, "tensor_parallel_size": 2, "dtype": "bfloat16"}
    arguments = [word for name, value in given.items() for word in ("--engine-arg", f"{name}={value}")]
    start = ["--model", str(model), "--load-format", "dummy", "--num-layers", str(LAYERS), "--eager"]
    load = ["--prompts", str(prompts), "--output-len", str(OUTPUT)]

    def run(*command: object) -> str:
        words = [sys.executable, "-m", "kcap", *map(str, command), *start, *load, *arguments]
        env = {**environment, "VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}"}
        ran = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


def test_a_plan_reaches_every_rank_and_the_recording_says_so(
    plan: Path, two_ranks: Callable[..., str], tmp_path: Path
) -> None:
    told = two_ranks("record", "-o", tmp_path / "out", "--plan", plan)
    assert "taken out" not in told
    applied, made = kcap.load(tmp_path / "out"), read_plan(plan)
    solution, steps = made.replacements[0].recorded_as, sum(applied.metadata.steps.values())
    replaced = {signature(one.call.args) for one in made.replacements}
    for rank in (0, 1):
        assert ran_on(applied, rank, solution) + ran_on(applied, rank, ROTARY) == LAYERS * steps
        assert ran_on(applied, rank, solution) >= LAYERS * applied.metadata.steps["decode"] / 2
    for call in applied.calls:
        if call.operator == ROTARY and call.kind == "region":  # a Solution ran in it
            assert signature(call.args) in replaced
    assert any("with Solutions in the place of kernels: test/mine" in line.plain for line in header(applied.metadata))
    assert applied.metadata.plan is not None
    assert applied.metadata.plan.solutions == {"test/mine": made.replacements[0].solution}


def ran_on(recording: Recording, rank: int, operator: str) -> int:
    kernels = [call for call in recording.kernels() if call.operator == operator]
    return sum(count.count for call in kernels for count in call.counts if count.rank == rank)


def test_each_arm_runs_what_it_is_to_run_in_every_rank(plan: Path, two_ranks: Callable[..., str]) -> None:
    found = json.loads(two_ranks("ab", "--plan", plan, "--block", "2", "--json"))
    decode = next(one for one in found["plans"][0]["compared"] if one["phase"] == "decode")
    assert decode["steps"] and decode["solutions"]["pairs"] and decode["control"]["pairs"]
    assert found["quality"].keys() == {"control", str(plan)}
    assert found["quality"]["control"]["kl"] == 0.0
    assert decode["held"] > 0.5
    assert decode["predicted_us"] == pytest.approx(10.0 * LAYERS * decode["held"])
    assert [one["rank"] for one in found["engagement"]] == [0, 1]
    for one in found["engagement"]:
        steps = sum(one["steps"].values())
        held = sum(each["steps"] for each in one["replacements"])
        assert 0 < held <= steps / 2  # about a third of the steps
        assert held * LAYERS == sum(each["eager"] for each in one["replacements"])
    assert not [problem for problem in found["problems"] if "taken out" in problem]
