"""The real vLLM, recorded: the counts that its model's shape demands, and outputs that recording does not change."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mixed_batches import LINEAR, plain
from safetensors.numpy import load

import kcap
from kcap.schemas.recording.recording import Program, Recording
from kcap.schemas.results import coverage as coverage_format

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

LAYERS, MODEL_LAYERS = 2, 3
ATTENTION = "_C::cpu_attention_with_kv_cache"
CACHE_UPDATE = "_C::cpu_attn_reshape_and_cache"
OPAQUE = {"vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"}
NORM, ADDED_NORM = "vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm"
SILU, ROTARY = "vllm_custom_op::silu_and_mul", "_C::rotary_embedding"
REGIONS = {NORM: 1, ADDED_NORM: 2 * LAYERS} | dict.fromkeys((SILU, *OPAQUE), LAYERS)  # in a step
BLOCK = 128  # tokens of a cache page, which a prefix hit covers whole
OUTPUT = 4
Kcap = Callable[..., "subprocess.CompletedProcess[str]"]


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that are no size, count or address of anything else."""
    draw = random.Random(seed)
    return [draw.randrange(50_000, 60_000) for _ in range(length)]


HUB_TOKEN = "a-secret-of-the-test"
CHUNKED, LONG = prompt(129, 1), prompt(200, 2)
PROMPTS = [CHUNKED, LONG, LONG, CHUNKED]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, offline: Kcap) -> Recording:
    """One request at a time, in chunks of 64 tokens: every step is known beforehand."""
    output = tmp_path_factory.mktemp("alone") / "out"
    ran = offline(output, PROMPTS, *one_at_a_time(), VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert ran.returncode == 0, ran.stderr
    return kcap.load(output)


def one_at_a_time() -> list[object]:
    one = ("max_num_seqs=1", "max_num_batched_tokens=64", "enable_prefix_caching=true", "enable_chunked_prefill=true")
    arguments = (*one, f"hf_token={HUB_TOKEN}")
    return ["--output-len", OUTPUT, *(word for argument in arguments for word in ("--engine-arg", argument))]


def operators(recording: Recording, program: Program, kind: str = "kernel") -> Counter[str]:
    calls = {call.id: call for call in recording.calls}
    return Counter(plain(calls[number].operator) for number in program.calls if calls[number].kind == kind)


def assert_counts_of_a_llama(recording: Recording, linears: int = 4 * LAYERS + 1) -> None:
    """What every step must hold, whatever its phase; `linears` a step."""
    assert recording.programs
    for program in recording.programs:
        found = operators(recording, program)
        assert found[LINEAR] == linears
        assert found[ATTENTION] == LAYERS
        assert found[CACHE_UPDATE] == LAYERS
        assert operators(recording, program, "region") == REGIONS
    steps = sum(recording.metadata.steps.values())
    assert sum(count.count for program in recording.programs for count in program.counts) == steps
    totals = Counter[str]()
    for call in recording.calls:
        totals[plain(call.operator)] += call.total
    assert totals[LINEAR] == linears * steps
    assert totals[ATTENTION] == totals[CACHE_UPDATE] == LAYERS * steps


def scheduled(recording: Recording) -> int:
    return sum(batch["tokens"] * batch["steps"] for batch in recording.metadata.batches)


def test_every_step_has_the_linears_and_attention_of_its_layers(alone: Recording) -> None:
    assert_counts_of_a_llama(alone)
    assert alone.metadata.complete
    assert all(tap.status in ("ok", "absent") for tap in alone.metadata.taps)
    assert "RecordFunction" in {tap.name for tap in alone.metadata.taps if tap.status == "ok"}


def test_chunks_and_prefix_hits_are_prefill_however_short(alone: Recording) -> None:
    """129 tokens are chunks of 64, 64 and 1; the same prompt again finds its first page and computes one token."""
    prefills = [(64, 2), (1, 1), (64, 3), (8, 1), (64, 1), (8, 1), (1, 1)]
    expected = Counter[tuple[str, int]]()
    for tokens, times in prefills:
        expected["prefill", tokens] += times
    expected["decode", 1] = len(PROMPTS) * (OUTPUT - 1)
    assert {(b["phase"], b["tokens"]): b["steps"] for b in alone.metadata.batches} == expected
    assert alone.metadata.steps == {"decode": 12, "prefill": 10}


def test_nothing_from_start_up_is_counted(alone: Recording) -> None:
    hits = 2 * BLOCK
    assert scheduled(alone) == sum(map(len, PROMPTS)) - hits + len(PROMPTS) * (OUTPUT - 1)
    assert [step.lengths for step in alone.steps][:4] == [[64], [128], [129], [130]]
    assert [step.index for step in alone.steps] == list(range(22))


def test_each_request_has_its_hits_and_the_sum_of_all_is_the_total(alone: Recording) -> None:
    tokens = [(r.prompt, r.cached, r.computed, r.decoded, r.generated, r.again) for r in alone.requests]
    decoded = OUTPUT - 1
    assert tokens == [
        (129, 0, 129, decoded, OUTPUT, 0),
        (200, 0, 200, decoded, OUTPUT, 0),
        (200, BLOCK, 72, decoded, OUTPUT, 0),
        (129, BLOCK, 1, decoded, OUTPUT, 0),
    ]
    assert sum(request.tokens for request in alone.requests) == scheduled(alone)
    assert sum(r.prefills + r.decodes for r in alone.requests) == sum(alone.metadata.steps.values())
    assert {number for step in alone.steps for number in step.requests} == {0, 1, 2, 3}


def test_regions_are_never_among_the_kernels(alone: Recording) -> None:
    assert {call.operator for call in alone.calls if call.kind == "region"} == set(REGIONS)
    assert not REGIONS.keys() & {call.operator for call in alone.kernels(hidden=True)}
    parents = {call.operator: call.parent for call in alone.kernels() if call.operator in (ATTENTION, CACHE_UPDATE)}
    assert set(parents.values()) == OPAQUE


def test_what_vllm_fuses_by_name_alone_is_the_parent_of_its_kernels(alone: Recording) -> None:
    """In every step: nothing of a norm or an activation is outside its region; a rotary embedding is one kernel."""
    calls = {call.id: call for call in alone.calls}
    norm = Counter({"aten::pow.Tensor_Scalar": 1, "aten::mean.dim": 1, "aten::rsqrt": 1, "aten::mul.Tensor": 2})
    for program in alone.programs:
        ran = [calls[number] for number in program.calls]
        inside = {name: Counter(call.operator for call in ran if call.parent == name and call.work) for name in REGIONS}
        for name, times in ((NORM, 1), (ADDED_NORM, 2 * LAYERS)):
            assert {operator: inside[name][operator] for operator in norm} == {o: n * times for o, n in norm.items()}
        assert inside[SILU] == {"aten::silu": LAYERS, "aten::mul.Tensor": LAYERS}
        assert [call.parent for call in ran if call.operator == ROTARY] == [None] * LAYERS
        assert not [call for call in ran if call.parent is None and call.operator in ("aten::rsqrt", "aten::silu")]


def test_a_fused_operators_arguments_say_all_that_it_computes_with(alone: Recording) -> None:
    def names(operator: str) -> list[str]:
        (found,) = {tuple(a.name or "" for a in call.args) for call in alone.calls if call.operator == operator}
        return list(found)

    assert names(NORM) == ["x", "weight", "epsilon", "variance_size"]
    assert names(ADDED_NORM) == ["x", "x_residual", "weight", "epsilon", "variance_size"]
    assert names(SILU) == ["x"]


def test_sampling_is_in_every_step(alone: Recording) -> None:
    for program in alone.programs:
        found = operators(alone, program)
        assert found["_C::greedy_argmax"] + found["aten::argmax"] >= 1


def test_the_layers_of_the_recording_and_of_the_model_are_said(alone: Recording) -> None:
    assert (alone.metadata.layers_recorded, alone.metadata.layers_model) == (LAYERS, MODEL_LAYERS)
    assert (alone.metadata.framework, alone.metadata.world_size) == ("vLLM", 1)
    assert alone.metadata.framework_version
    assert (alone.path / "calling_record.json").is_file()
    assert (alone.path / "trace.txt").is_file()


def test_attention_is_sampled_with_its_tables_taken_together(alone: Recording) -> None:
    calls = {call.id: call for call in alone.calls if call.operator == ATTENTION}
    names = {number: [argument.name for argument in call.args] for number, call in calls.items()}
    samples = [sample for sample in alone.samples if sample.call in calls]
    assert samples
    for sample in samples:
        held = {names[sample.call][int(path)]: alone.value(tensor) for path, tensor in sample.tensors.items()}
        assert {"query_start_loc", "seq_lens", "block_table"} <= set(held)
        assert held["query_start_loc"].tolist()[0] == 0
        assert held["seq_lens"].min() >= held["query_start_loc"].tolist()[-1] > 0
        assert sample.step is not None
        assert alone.steps[sample.step].lengths == held["seq_lens"].tolist()


def numbers(path: Path) -> Iterator[int]:
    """Every number in a Recording's files."""
    for file in path.rglob("*"):
        if file.parent.name == "values":
            held = load(gzip.decompress(file.read_bytes()))
            yield from (int(value) for array in held.values() for value in array.flatten())
        elif file.suffix in (".json", ".jsonl"):
            for line in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
                yield from leaves(json.loads(line))
        elif file.is_file():
            yield from (int(word) for word in "".join(c if c.isdigit() else " " for c in file.read_text()).split())


def leaves(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (int(key),) if key.isdigit() else ()
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, int | float):
        yield int(value)


def test_token_ids_are_nowhere_in_the_recording(alone: Recording) -> None:
    found = set(numbers(alone.path))
    assert found
    assert not found & {token for tokens in PROMPTS for token in tokens}


def test_secrets_are_nowhere_in_the_recording(alone: Recording) -> None:
    assert alone.metadata.engine_arguments["hf_token"] == "REDACTED"
    assert not [file for file in alone.path.rglob("*") if file.is_file() and HUB_TOKEN.encode() in file.read_bytes()]


def test_the_recording_holds_its_own_files_only(alone: Recording) -> None:
    tables = {f"{name}.jsonl" for name in ("calls", "programs", "steps", "requests", "samples")}
    derived = {"calling_record.json", "trace.txt", "trace.loss.json"}
    assert {path.name for path in alone.path.iterdir()} == {"recording.json", "values", "kernels", *tables, *derived}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, offline: Kcap) -> tuple[Recording, str]:
    """The same requests, after steps under the profiler; the Recording, and what was said."""
    output = tmp_path_factory.mktemp("checked") / "out"
    ran = offline(output, PROMPTS, "--check-coverage", *one_at_a_time())
    assert ran.returncode == 0, ran.stderr
    return kcap.load(output), ran.stderr


def test_profiled_steps_change_nothing_that_is_counted(checked: tuple[Recording, str], alone: Recording) -> None:
    """They leave no prefix in the cache, no request behind, and no count."""
    recording = checked[0]
    assert recording.metadata.complete
    assert recording.metadata.steps == alone.metadata.steps
    assert recording.metadata.batches == alone.metadata.batches
    assert recording.metadata.totals == alone.metadata.totals
    assert [(step.phase, step.lengths) for step in recording.steps] == [(s.phase, s.lengths) for s in alone.steps]
    assert ran_in_steps(recording) == ran_in_steps(alone)


def ran_in_steps(recording: Recording) -> list[list[str]]:
    """What each counted step ran, in order."""
    return [[call.operator for call in recording.ran(recording.programs[step.program])] for step in recording.steps]


def test_profiled_steps_without_a_gpu_are_said_to_have_no_gpu_time(checked: tuple[Recording, str]) -> None:
    recording, said = checked
    coverage = recording.metadata.coverage
    assert coverage is not None
    steps = len(recording.steps)  # the requests are so short that the profiler sees them whole
    assert (coverage["steps"], coverage.get("gpu_us", 0)) == (steps, 0)
    assert f"coverage: the profiler saw no GPU time in {steps} steps" in said
    profiled = coverage_format.read(recording.path / coverage_format.FILE)
    assert [step.index for step in profiled] == list(range(steps))


def test_the_profiler_of_a_real_engine_counts_what_the_recorder_counts(checked: tuple[Recording, str]) -> None:
    coverage = checked[0].metadata.coverage
    assert coverage is not None
    assert not coverage.get("disagreements"), checked[1]


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory, offline: Kcap) -> Recording:
    """The fallback recorder, three steps of two requests, token ids kept."""
    output = tmp_path_factory.mktemp("fallback") / "out"
    options = ("--recorder", "python", "--steps", 3, "--keep-tokens", "--output-len", 30)
    ran = offline(output, [prompt(16, 3), prompt(16, 4)], *options)
    assert ran.returncode == 0, ran.stderr
    return kcap.load(output)


def test_the_fallback_counts_the_same_attention_and_cache_updates(fallback: Recording) -> None:
    assert_counts_of_a_llama(fallback)
    assert fallback.metadata.recorder == ["TorchDispatchMode"]
    assert "asked for" in fallback.metadata.notes[0]


def test_a_limit_of_steps_ends_the_recording(fallback: Recording) -> None:
    assert sum(fallback.metadata.steps.values()) == 3
    assert fallback.metadata.complete


def test_token_ids_are_kept_if_asked_for(fallback: Recording) -> None:
    assert set(numbers(fallback.path)) & set(prompt(16, 3))


def test_an_engine_that_does_not_start_ends_with_its_last_lines(tmp_path: Path, offline: Kcap) -> None:
    ran = offline(tmp_path / "out", [[1, 2]], "--engine-arg", "no_such_argument=1")
    assert ran.returncode == 1
    assert "kcap: the engine did not start (status 1):" in ran.stderr
    assert "no_such_argument" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
