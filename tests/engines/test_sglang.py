"""The real SGLang: the counts that its model's shape demands, and outputs that recording leaves alone."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from applied_plans import plan_of, python_solution
from sglang_runs import PYTHON, TINY, TWO_RANKS, environment, marks, recorded, write_prompts

import kcap
from kcap.bench.apply.process import read_engagements, session_options
from kcap.bench.apply.quality import quality_of, read_checks
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import SESSION_VARIABLE, Session
from kcap.schemas.derive.derive import derive
from kcap.schemas.recording.recording import Program, Recording
from kcap.schemas.recording.values import Group

pytestmark = marks

LAYERS, OUTPUT, CHUNK = 2, 4, 16
SHARED = [50_000 + 7 * i for i in range(18)]
PROMPTS = [[*SHARED, 1, 2], [51_000 + 7 * i for i in range(20)], [*SHARED, 3, 4], [*SHARED, 5, 6]]
HITS = [len(SHARED)] * 2
# Two requests at a time, in chunks; one that prefills may join one that decodes.
BATCHING = {"max_running_requests": 2, "chunked_prefill_size": CHUNK, "enable_mixed_chunk": True}
REGIONS = {"RMSNorm": 2 * LAYERS + 1, "RotaryEmbedding": LAYERS, "SiluAndMul": LAYERS}  # in a step
STEPS = 5  # of an offline recording that ends there
API_KEY = "a-secret-of-the-test"


def generated(model: Path, directory: Path, is_recorded: bool) -> tuple[list[list[int]], Recording | None]:
    """The tokens of PROMPTS, and the Recording where there is one."""
    session = Session(str(directory / "shards"), framework="SGLang")
    tokens = run_engine(model, directory, session, is_recorded)
    return tokens, fold_session(session, directory / "out") if is_recorded else None


def run_engine(model: Path, directory: Path, session: Session, is_hooked: bool) -> list[list[int]]:
    """The tokens of PROMPTS."""
    session.write()
    override = json.dumps({"num_hidden_layers": LAYERS})
    always = {"model_path": str(model), "load_format": "dummy", "json_model_override_args": override}
    job = {
        "session": str(session.file),
        "workload": {"prompts": PROMPTS, "output_len": OUTPUT},
        "engine_arguments": always | BATCHING | {"skip_tokenizer_init": True, "context_length": 256},
        "outputs": str(directory / "outputs.json"),
    }
    (directory / "job.json").write_text(json.dumps(job))
    named = {SESSION_VARIABLE: str(session.file)} if is_hooked else {}
    words = [str(PYTHON), "-m", "kcap.capture.engines.sglang.offline", str(directory / "job.json")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment(**named))
    assert (directory / "outputs.json").exists(), ran.stderr
    tokens: list[list[int]] = json.loads((directory / "outputs.json").read_text())
    return tokens


def two_ranks(directory: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """By the command line, with kcap's own configuration of the model; it would go on for long after STEPS."""
    prompts = write_prompts(directory / "prompts.jsonl", [[7 * i % 1000 for i in range(16)], [1, 2, 3]])
    words = (*TINY, "--prompts", prompts, "--keep-tokens", "--steps", STEPS, "--output-len", 1500)
    more = ("--engine-arg", "tp_size=2", "--engine-arg", f"api_key={API_KEY}", "-o", directory / "out")
    return recorded(*words, *more, **TWO_RANKS), directory / "out"


def embedded(directory: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """By the command line: two loads of a model that embeds, one request and three."""
    words = ("--model", "BAAI/bge-large-en-v1.5", "--framework", "SGLang", "--load-format", "dummy")
    sizes = ("--num-layers", LAYERS, "--num-prompts", "1,3", "--input-len", "24,16")
    return recorded(*words, *sizes, "-o", directory / "out"), directory / "out"


@pytest.fixture(scope="module")
def runs(model: Path, own_key: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """Two engines at a time: a start takes one core."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            "recorded": pool.submit(generated, model, tmp_path_factory.mktemp("recorded"), True),
            "plain": pool.submit(generated, model, tmp_path_factory.mktemp("plain"), False),
            "two ranks": pool.submit(two_ranks, tmp_path_factory.mktemp("ranks")),
            "embedded": pool.submit(embedded, tmp_path_factory.mktemp("embedded")),
        }


@pytest.fixture(scope="module")
def recording(runs: dict[str, Future[Any]]) -> Recording:
    return runs["recorded"].result()[1]


def operators(recording: Recording, program: Program, kind: str = "kernel") -> Counter[str]:
    return Counter(call.operator for call in recording.ran(program) if call.kind == kind)


def assert_counts_of_a_llama(recording: Recording) -> None:
    """What every step must hold, whatever its phase. PyTorch's attention runs once for each sequence."""
    sequences = {step.program: step.sequences for step in recording.steps}
    for number, program in enumerate(recording.programs):
        found = operators(recording, program)
        assert found["aten::linear"] + found["aten::matmul"] == 4 * LAYERS + 1
        assert found["aten::scaled_dot_product_attention"] == LAYERS * sequences[number]
        assert found["aten::index_put_"] == 2 * LAYERS, "keys and values into the cache"
        assert found["aten::argmax"] == 1
        regions = operators(recording, program, "region")
        assert {name: regions[f"sglang_op::{name}"] for name in REGIONS} == REGIONS
    totals = Counter[str]()
    for call in recording.calls:
        totals[call.operator] += call.total
    ranks = recording.metadata.world_size
    assert totals["aten::linear"] + totals["aten::matmul"] == ranks * (4 * LAYERS + 1) * sum(
        recording.metadata.steps.values()
    )


def test_every_step_has_the_linears_and_attention_of_its_layers(recording: Recording) -> None:
    assert_counts_of_a_llama(recording)
    assert recording.metadata.complete
    assert (recording.metadata.framework, recording.metadata.layers_recorded) == ("SGLang", LAYERS)
    assert recording.metadata.framework_version


def test_prefill_decode_and_mixed_are_told_apart(recording: Recording) -> None:
    """The first prompt's chunk fills a step; its rest and the second's first chunk the next; and so on."""
    assert [(step.phase, step.queries) for step in recording.steps] == [
        ("prefill", [16]),
        ("prefill", [4, 12]),
        ("mixed", [8, 1]),
        ("decode", [1, 1]),
        ("decode", [1, 1]),
        ("decode", [1]),
        ("prefill", [2]),
        ("mixed", [2, 1]),
        ("decode", [1, 1]),
        ("decode", [1, 1]),
        ("decode", [1]),
    ]
    assert [step.lengths for step in recording.steps][:4] == [[16], [20, 12], [20, 21], [21, 22]]


def test_hits_in_the_radix_cache_are_in_their_steps(recording: Recording) -> None:
    hits = [step.cached for step in recording.steps if step.cached]
    assert hits == [[len(SHARED)], [len(SHARED), 0]]


def test_nothing_from_start_up_is_counted(recording: Recording) -> None:
    scheduled = sum(batch["tokens"] * batch["steps"] for batch in recording.metadata.batches)
    assert scheduled == sum(map(len, PROMPTS)) - sum(HITS) + len(PROMPTS) * (OUTPUT - 1)


def test_the_tokens_are_the_same_with_and_without(runs: dict[str, Future[Any]]) -> None:
    tokens, _ = runs["recorded"].result()
    assert tokens == runs["plain"].result()[0]
    assert len({tuple(one) for one in tokens}) > 1
    assert {len(one) for one in tokens} == {OUTPUT}


def test_two_ranks_count_the_same_and_end_at_the_last_step(runs: dict[str, Future[Any]]) -> None:
    ran, path = runs["two ranks"].result()
    assert ran.returncode == 0, ran.stderr
    recording = kcap.load(path)
    assert (recording.metadata.world_size, recording.metadata.complete) == (2, True)
    by_rank = Counter[tuple[str, int]]()
    for call in recording.kernels(hidden=True):
        for count in call.counts:
            by_rank[call.operator, count.rank] += count.count
    names = {name for name, _ in by_rank}
    assert {name: by_rank[name, 0] for name in names} == {name: by_rank[name, 1] for name in names}
    assert sum(recording.metadata.steps.values()) == STEPS
    assert by_rank["c10d::allreduce_", 0] == (2 * LAYERS + 1) * STEPS
    assert by_rank["aten::linear", 0] + by_rank["aten::matmul", 0] == (4 * LAYERS + 1) * STEPS
    groups = [call.args[1].value for call in recording.calls if call.operator == "c10d::allreduce_"]
    assert all(isinstance(group, Group) and group.size == 2 for group in groups)
    assert {group.rank for group in groups} == {0, 1}


def test_prompts_are_those_of_the_file_and_their_tokens_are_kept_when_asked_for(runs: dict[str, Future[Any]]) -> None:
    _, path = runs["two ranks"].result()
    recording = kcap.load(path)
    assert sum(step.tokens for step in recording.steps if step.phase == "prefill" and step.rank == 0) == 16 + 3
    embeddings = [call.id for call in recording.calls if call.operator == "aten::embedding"]
    kept = [recording.value(tensor).tolist() for sample in recording.samples if sample.call in embeddings
            for tensor in sample.tensors.values()]  # fmt: skip
    assert any(one[-3:] == [1, 2, 3] or one[:3] == [1, 2, 3] for one in kept), kept


def test_a_model_that_embeds_is_one_forward_a_load(runs: dict[str, Future[Any]]) -> None:
    """Three embeddings and their norm; four products, two norms and a gelu a layer; no logits, and no token ids."""
    ran, path = runs["embedded"].result()
    assert ran.returncode == 0, ran.stderr
    recording = kcap.load(path)
    assert [(step.phase, step.queries, step.lengths) for step in recording.steps] == [
        ("prefill", [24], [24]),
        ("prefill", [16] * 3, [16] * 3),
    ]
    assert [(request.computed, request.generated) for request in recording.requests] == [(24, 0), *[(16, 0)] * 3]
    per_layer = {"linear": 4, "layer_norm": 2, "gelu": 1, "index_put_": 2}
    for step, program in zip(recording.steps, recording.programs, strict=True):
        counts = operators(recording, program)
        in_layers = {name: counts[f"aten::{name}"] for name in per_layer}
        assert in_layers == {name: number * LAYERS + (name == "layer_norm") for name, number in per_layer.items()}
        assert counts["aten::scaled_dot_product_attention"] == LAYERS * step.sequences
        assert counts["aten::embedding"] == 3 and not counts["aten::argmax"]
    families = {kernel.family for kernel in derive(recording).kernels}
    assert {"gemm", "layernorm", "gqa_ragged", "cache_update", "embedding"} <= families


def test_an_api_key_is_in_no_recording(runs: dict[str, Future[Any]]) -> None:
    _, path = runs["two ranks"].result()
    files = [file for file in path.rglob("*") if file.is_file()]
    assert files and not any(API_KEY.encode() in file.read_bytes() for file in files)


def test_a_plan_is_held_and_its_logits_are_the_engines_own(
    recording: Recording, runs: dict[str, Future[Any]], model: Path, tmp_path: Path
) -> None:
    (name,) = {kernel.definition.name for kernel in derive(recording).kernels if kernel.family == "embedding"}
    plan = plan_of(recording, python_solution(name, "def run(input_ids, weight):\n    return weight[input_ids]\n"))
    options = session_options([plan], tmp_path, compared=2)
    session = Session(str(tmp_path / "shards"), framework="SGLang", window="manual", **options)
    assert run_engine(model, tmp_path, session, True) == runs["plain"].result()[0]
    (told,) = read_engagements(tmp_path)
    assert sum(told.steps.values()) == sum(recording.metadata.steps.values())
    assert not any(one.off for one in told.replacements)
    assert all(one.checked + one.eager > 0 for one in told.replacements)
    compared = quality_of(list(read_checks(tmp_path)))[0]
    assert compared.tokens > 0 and compared.rms == 0.0
