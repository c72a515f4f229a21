"""vLLM compiled by inductor, as it runs by default: its C++ kernels are recorded, counted, kept and replayed."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mixed_batches import LAYERS, LINEARS, OUTPUT, PROMPTS

import kcap
from kcap.schemas.recording import seal
from kcap.schemas.recording.recording import Call, Program, Recording
from kcap.schemas.recording.signature import signature
from kcap.schemas.results import measurement
from kcap.schemas.results.measurement import Measurement

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

ATTENTION, CACHE_UPDATE = "_C::cpu_attention_with_kv_cache", "_C::cpu_attn_reshape_and_cache"
PRODUCTS = {*LINEARS, "aten::mm.out"}  # inductor makes the second of a linear without bias that vLLM leaves to torch
# What vLLM compiles between its linears and attentions, by a word in the fused kernel's name, and how often a step
# runs it: two norms a layer and the last one, each with the residual before it; rotary embedding; SiLU and product.
FUSED = {"rsqrt": 2 * LAYERS + 1, "index_select": LAYERS, "silu": LAYERS}


@pytest.fixture(scope="module")
def recording(compiled: tuple[list[list[int]], Recording]) -> Recording:
    return compiled[1]


@pytest.fixture(scope="module")
def eager(batches: Any) -> Recording:
    """The same requests without compilation."""
    return kcap.load(batches(True, enforce_eager=True)[1])


def cpp(calls: Iterator[Call]) -> list[Call]:
    return [call for call in calls if call.operator.startswith("cpp::")]


def test_every_compiled_step_has_the_linears_and_attentions_of_its_layers(recording: Recording) -> None:
    assert recording.metadata.complete
    assert {"prefill", "mixed", "decode"} <= set(recording.metadata.steps)
    for program in recording.programs:
        ran = Counter(call.operator for call in recording.ran(program) if call.kind == "kernel")
        assert sum(ran[name] for name in PRODUCTS) == 4 * LAYERS + 1
        assert (ran[ATTENTION], ran[CACHE_UPDATE]) == (LAYERS, LAYERS)


def test_compiled_steps_account_for_every_token(recording: Recording) -> None:
    scheduled = sum(batch["tokens"] * batch["steps"] for batch in recording.metadata.batches)
    assert scheduled == sum(map(len, PROMPTS)) + len(PROMPTS) * (OUTPUT - 1)


Sizes = tuple[tuple[int, ...], ...]
Shapes = tuple[str, Sizes]
OWN = {*LINEARS, ATTENTION, CACHE_UPDATE} - {"aten::linear"}  # which is a product where a CPU has no linear of vLLM's


def decodes(recording: Recording) -> dict[int, set[tuple[Shapes, ...]]]:
    """The linears and attentions of decode steps with their shapes, in order, by the sequences of a step."""
    found: dict[int, set[tuple[Shapes, ...]]] = {}
    for step in recording.steps:
        if step.phase == "decode" and step.program is not None:
            found.setdefault(step.sequences, set()).add(heavy(recording, recording.programs[step.program]))
    return found


def heavy(recording: Recording, program: Program) -> tuple[Shapes, ...]:
    return tuple(
        (call.operator, tuple(spec.shape for _, spec in call.tensors())) if call.operator in OWN else product(call)
        for call in recording.ran(program)
        if call.operator in OWN | PRODUCTS
    )


def product(call: Call) -> tuple[str, Sizes]:
    """One of torch's: the input's shape, and the weight's elements, which inductor has transposed."""
    given, weight = (spec.shape for _, spec in list(call.tensors())[:2])
    return "product", (given, (math.prod(weight),))


def test_compiled_decodes_have_the_linears_and_attentions_of_eager_ones(recording: Recording, eager: Recording) -> None:
    compiled, plain = decodes(recording), decodes(eager)
    same = compiled.keys() & plain.keys()
    assert 4 in same, "full batches are in both"
    for sequences in same:
        assert compiled[sequences] == plain[sequences]


def test_every_step_runs_each_fused_kernel_as_often_as_the_layers_say(recording: Recording) -> None:
    assert recording.programs
    for program in recording.programs:
        ran = cpp(recording.ran(program))
        found = {word: sum(word in call.operator for call in ran) for word in FUSED}
        assert found == FUSED
        assert len(ran) == sum(FUSED.values()), [call.operator for call in ran]


Ran = dict[tuple[Any, ...], Counter[tuple[str, str, str]]]


def ran(recording: Recording) -> Ran:
    """What each step ran, with arguments and sources, by its phase and sequences: batches go by when requests come."""
    return {
        (step.phase, tuple(step.queries), tuple(step.lengths)): Counter(
            (call.operator, signature(call.args), str(call.launch))
            for call in recording.ran(recording.programs[step.program])
        )
        for step in recording.steps
        if step.program is not None
    }


def test_a_second_start_records_what_the_first_did(recording: Recording, unrecorded: Any, batches: Any) -> None:
    """The first found nothing compiled. Since then, the engine compiled without kcap, too."""
    again = kcap.load(batches(True)[1])
    first, second = ran(recording), ran(again)
    same = first.keys() & second.keys()
    assert {phase for phase, _, _ in same} >= {"decode", "mixed"}
    assert {key: second[key] for key in same} == {key: first[key] for key in same}
    assert [tap for tap in again.metadata.taps if tap.status == "failed"] == []
    kept = [{file.name for file in (each.path / "kernels").iterdir()} for each in (again, recording)]
    assert kept[0] == kept[1]


def test_an_eager_engine_runs_no_fused_kernel(eager: Recording) -> None:
    assert not cpp(iter(eager.calls))


def test_every_fused_kernel_has_the_operators_that_it_stands_for(recording: Recording) -> None:
    launches = [call.launch for call in cpp(iter(recording.calls)) if call.launch]
    assert launches and all(launch.fragment for launch in launches)


def test_every_fused_kernel_has_its_source_and_none_is_left_over(recording: Recording) -> None:
    launches = [call.launch for call in cpp(iter(recording.calls))]
    assert launches
    for launch in launches:
        assert launch is not None
        assert (launch.language, launch.function) == ("cpp", "kernel")
        assert launch.kernel == hashlib.sha256(recording.source(launch).encode()).hexdigest() + ".cpp"
    kept = {path.name for path in (recording.path / "kernels").iterdir()}
    assert kept == {name for launch in launches if launch for name in (launch.kernel, launch.fragment) if name}
    assert seal.holds(recording.metadata.seal, kept)


@pytest.fixture(scope="module")
def replayed(
    recording: Recording, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[Measurement]]:
    """The exit code of `kcap replay`, and its measurements."""
    output: Path = tmp_path_factory.mktemp("replay") / "out.jsonl"
    words = [sys.executable, "-m", "kcap", "replay", str(recording.path), "--seconds", "0.01", "-o", str(output)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment)
    assert output.is_file(), ran.stderr
    return ran.returncode, list(measurement.read_measurements(output))


def test_fused_kernels_and_linears_are_replayed(replayed: tuple[int, list[Measurement]], recording: Recording) -> None:
    """By the one who recorded them: their sources are sealed, so nobody is asked to trust them."""
    ok = {each.call for each in replayed[1] if each.status == "ok" and each.median_us}
    wanted = {call.id for call in recording.kernels() if call.operator.startswith(("cpp::", *LINEARS, ATTENTION))}
    assert wanted
    assert wanted <= ok


def test_no_replay_fails_and_what_is_skipped_says_why(replayed: tuple[int, list[Measurement]]) -> None:
    code, measurements = replayed
    assert not [(each.operator, each.reason) for each in measurements if each.status == "failed"]
    assert all(each.reason for each in measurements if each.status == "skipped")
    assert code == (3 if any(each.status == "skipped" for each in measurements) else 0)
