"""`kcap diff` of two engines: what each runs for a kernel in the mean step of a phase, and what only one runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from two_engines import LAYERS, LINEARS, call, sglang, tensor, vllm, write

from kcap.schemas.recording.recording import Call, load
from kcap.schemas.recording.signature import call_key
from kcap.schemas.results.measurement import Measurement, write_measurements

ROPE = "rope_with_cos_sin_cache_neox_style_bf16cache_d128_rd128"
Compare = Callable[..., dict[str, Any]]


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """Ten steps of vLLM, seven of SGLang."""
    a = write(tmp_path / "a", list(vllm(10)), "vLLM", 10)
    return a, write(tmp_path / "b", list(sglang(7)), "SGLang", 7)


@pytest.fixture
def compare(kcap: Callable[..., Any]) -> Compare:
    def run(a: Path, b: Path, *more: object) -> dict[str, Any]:
        done = kcap("diff", a, b, "--json", *more)
        document: dict[str, Any] = orjson.loads(done.out)
        assert done.code == (0 if document["equal"] else 1)
        return document

    return run


def lines(document: dict[str, Any], phase: str = "decode") -> dict[str, dict[str, Any]]:
    (chosen,) = [phase_diff for phase_diff in document["phases"] if phase_diff["phase"] == phase]
    return {line["name"]: line for line in chosen["lines"]}


def test_a_definition_has_the_operators_of_both_and_their_counts_in_a_step(both: tuple[Path, Path], compare: Compare):
    document = compare(*both)
    (decode,) = document["phases"]
    assert (document["by"], decode["phase"], decode["same_batches"]) == ("family", "decode", True)
    by_name = lines(document)
    for n, k in LINEARS:
        line = by_name[f"gemm_bf16_n{n}_k{k}"]
        assert line["purpose"] == "gemm"
        assert (line["a"]["operators"], line["b"]["operators"]) == ({"aten::mm.out": LAYERS}, {"aten::linear": LAYERS})
    for name, per_step in {"rmsnorm_h4096": 1, "fused_add_rmsnorm_h4096": 2 * LAYERS, ROPE: LAYERS}.items():
        assert by_name[name]["a"]["per_step"] == pytest.approx(per_step)
        assert by_name[name]["b"]["per_step"] == pytest.approx(per_step)
    for side, per_step in (("a", 322), ("b", 354)):
        assert (decode[side]["per_step"], decode[side]["us_per_step"]) == (per_step, None)
        assert decode[side]["untimed_per_step"] is None, "nothing was measured"


def test_launches_that_are_a_part_of_attention_stand_beside_it(both: tuple[Path, Path], compare: Compare):
    attention = {name: line for name, line in lines(compare(*both)).items() if line["purpose"] == "attention"}
    assert {name for name, line in attention.items() if line["b"]} == {
        "triton::_fwd_grouped_kernel_stage1",
        "triton::_fwd_kernel_stage2",
    }
    assert [name for name, line in attention.items() if line["a"]] == ["gqa_paged_decode_h32_kv8_d128_ps16"]


def test_the_table_tells_the_same(both: tuple[Path, Path], kcap: Callable[..., Any]):
    out = kcap("diff", *both).out
    for words in ("decode: A 10 steps of 16 tokens (16 sequences); B 7 steps", "A: vLLM", "B: SGLang"):
        assert words in out
    (row,) = [line.split() for line in out.splitlines() if "silu_and_mul_h14336" in line]
    assert row == ["silu_and_mul_h14336", "_C::silu_and_mul", "32", "sglang::_run_activation_inplace", "32"]
    assert "batches differ" not in out and "only in" not in out


def test_other_batches_are_said_and_the_counts_still_compare(tmp_path: Path, compare: Compare, kcap: Any):
    a = write(tmp_path / "a", list(vllm(3)), "vLLM", 3)
    b = write(tmp_path / "b", list(sglang(3, 4)), "SGLang", 3, batch=4)
    document = compare(a, b)
    assert document["phases"][0]["same_batches"] is False
    assert lines(document)["silu_and_mul_h14336"]["b"]["per_step"] == LAYERS
    assert "batches differ" in kcap("diff", a, b).out


@pytest.mark.parametrize(("times", "same"), [((2, 4), True), ((3, 3), False)])
def test_batches_are_the_same_where_each_has_the_same_share_of_the_steps(
    tmp_path: Path, compare: Compare, times: tuple[int, int], same: bool
):
    def batches(*steps: int) -> list[dict[str, Any]]:
        return [
            {"phase": "decode", "sequences": n, "tokens": n, "steps": m} for n, m in zip((4, 8), steps, strict=True)
        ]

    a = write(tmp_path / "a", list(vllm(3)), "vLLM", 3, batches=batches(1, 2))
    b = write(tmp_path / "b", list(sglang(6)), "SGLang", 6, batches=batches(*times))
    assert compare(a, b)["phases"][0]["same_batches"] is same


def test_what_one_engine_runs_alone_comes_last_with_its_arguments(tmp_path: Path, compare: Compare, kcap: Any):
    glue = [call("mine::gather", n, 2, self=tensor(size)) for n, size in ((5, 8), (1, 9))]
    shared = [call("mine::neg", 3, 2, self=tensor(4))]
    a = write(tmp_path / "a", [*vllm(2), *shared], "vLLM", 2)
    embedding = call("aten::embedding", 1, 2, weight=tensor(50, 64), indices=tensor(4, dtype="int64"))
    b = write(tmp_path / "b", [*vllm(2), *shared, embedding, *glue], "SGLang", 2)
    line = lines(compare(a, b))["mine::gather"]
    assert (line["purpose"], line["a"], line["b"]["per_step"]) == (None, None, 6)
    assert line["b"]["arguments"] == {"bf16[8]": 5, "bf16[9]": 1}
    out = kcap("diff", a, b).out
    assert out.index("of no family, in both") < out.index("mine::neg") < out.index("only in B")
    alone = out[out.index("only in B") :]
    assert "bf16[8] and 1 more" in alone
    assert alone.index("embedding_v50_h64") < alone.index("mine::gather"), "a family's before more calls of none"


def test_a_region_is_one_kernel_and_what_it_holds_none(tmp_path: Path, compare: Compare):
    """SGLang's class and vLLM's operator of one norm, each as PyTorch runs it."""

    def norm(operator: str, inner: int, **arguments: Any) -> list[Call]:
        region = call(operator, 5, 4, x=tensor(4, 64), weight=tensor(64), **arguments)
        parts = [call("aten::pow.Tensor_Scalar", 5, 4, self=tensor(4, 64 + n)) for n in range(inner)]
        return [
            region.model_copy(update={"kind": "region"}),
            *(part.model_copy(update={"parent": operator}) for part in parts),
        ]

    a = write(tmp_path / "a", norm("vllm_ir::rms_norm", 2, epsilon=1e-5, variance_size=None), "vLLM", 4)
    b = write(tmp_path / "b", norm("sglang_op::RMSNorm", 3, residual=None, variance_epsilon=1e-5), "SGLang", 4)
    document = compare(a, b)
    assert document["equal"]
    assert {name: line["b"]["operators"] for name, line in lines(document).items()} == {
        "rmsnorm_h64": {"sglang_op::RMSNorm": 5}
    }


def test_a_phase_that_one_never_ran_is_not_compared(tmp_path: Path, compare: Compare, kcap: Any):
    a = write(tmp_path / "a", list(vllm(2)), "vLLM", 2, steps={"decode": 2, "prefill": 1})
    b = write(tmp_path / "b", list(sglang(2)), "SGLang", 2)
    assert compare(a, b)["phases_of_one"] == {"prefill": {"a": 1, "b": 0}}
    same = write(tmp_path / "same", list(vllm(2)), "SGLang", 2)
    assert not compare(a, same)["equal"], "all that can be compared is equal"
    assert "prefill: 1 step in A, 0 in B: not compared" in kcap("diff", a, b).out


def test_what_ran_in_no_step_is_not_compared_and_said(tmp_path: Path, compare: Compare, kcap: Any):
    loose = [call("aten::relu", 5, 1, phase="other", self=tensor(4))]
    a = write(tmp_path / "a", [*vllm(2), *loose], "vLLM", 2)
    b = write(tmp_path / "b", list(vllm(2)), "SGLang", 2)
    document = compare(a, b)
    assert document["equal"]
    assert document["warnings"] == ["other: in no step, and not compared: 5 invocations in A, 0 in B"]
    a, b = (write(tmp_path / name, loose, "vLLM", 0, steps={}, batches=[]) for name in ("c", "d"))
    refused = kcap("diff", a, b, "--by", "family")
    assert refused.code == 2 and "compare them --by call" in refused.err


def test_other_layers_models_and_ranks_are_said(tmp_path: Path, compare: Compare):
    a = write(tmp_path / "a", list(vllm(2)), "vLLM", 2, world_size=2)
    b = write(tmp_path / "b", list(sglang(2)), "SGLang", 2, layers_recorded=2, model="x")
    document = compare(a, b)
    said = ("two models", "32 layers in A, 2 in B", "2 ranks in A, 1 in B")
    assert all(words in warning for words, warning in zip(said, document["warnings"], strict=True))
    assert lines(document)["silu_and_mul_h14336"]["a"]["per_step"] == LAYERS / 2, "of a step and rank"


def test_an_engine_that_does_not_name_its_model_is_said_to(tmp_path: Path, compare: Compare):
    a = write(tmp_path / "a", list(vllm(2)), "vLLM", 2)
    b = write(tmp_path / "b", list(sglang(2)), "TVM", 2, layers_recorded=None, model=None)
    unnamed, layers = compare(a, b)["warnings"]
    assert unnamed == "B does not name its model"
    assert layers == "layers: 32 in A, not known in B: counts per step may not compare"


def measured(path: Path, us: float, but: str = "") -> Path:
    file = path.with_suffix(".jsonl")
    """What replay gives of the Recording in `path`: regions have no times."""
    timed = [kernel for kernel in load(path).kernels() if kernel.operator != but]
    write_measurements(
        file,
        [
            Measurement(
                call=kernel.id, key=call_key(kernel), operator=kernel.operator, count=kernel.total, median_us=us
            )
            for kernel in timed
        ],
    )
    return file


def test_measured_times_stand_beside_the_counts(both: tuple[Path, Path], compare: Compare, kcap: Any):
    first, second = measured(both[0], 2.0), measured(both[1], 3.0, but="sglang::store_cache")
    times = ("--measurements", first, "--measurements", second)
    document = compare(*both, *times)
    line = lines(document)["silu_and_mul_h14336"]
    assert (line["a"]["us_per_step"], line["b"]["us_per_step"]) == pytest.approx((64, 96))
    decode = document["phases"][0]
    assert decode["a"]["us_per_step"] == pytest.approx(2 * 322)
    assert decode["b"]["us_per_step"] == pytest.approx(3 * (354 - LAYERS))
    assert decode["b"]["untimed_per_step"] == pytest.approx(LAYERS)
    out = kcap("diff", *both, *times).out
    assert "B: 32 invocations of a step have no time" in out and "A: 32" not in out
    assert out.splitlines()[-1].split() == ["all", "322", "644.0", "354", "966.0"]


def test_times_within_regions_are_of_their_line_or_of_their_purpose(tmp_path: Path, compare: Compare):
    """RMSNorm is two kernels by whether it adds: what runs within does not say of which."""
    norm = {"x": tensor(4, 64), "weight": tensor(64), "variance_epsilon": 1e-5}
    regions = [
        call("sglang_op::SiluAndMul", 1, 2, x=tensor(4, 64)),
        call("sglang_op::RMSNorm", 1, 2, residual=None, **norm),
        call("sglang_op::RMSNorm", 1, 2, residual=tensor(4, 64), **norm),
    ]
    inner = [
        call("aten::silu", 1, 2, self=tensor(4, 32)).model_copy(update={"parent": "sglang_op::SiluAndMul"}),
        call("aten::rsqrt", 2, 2, self=tensor(4, 1)).model_copy(update={"parent": "sglang_op::RMSNorm"}),
    ]
    calls = [*(region.model_copy(update={"kind": "region"}) for region in regions), *inner]
    a, b = (write(tmp_path / name, calls, name, 2) for name in ("one", "two"))
    document = compare(a, b, "--measurements", measured(a, 5.0), "--measurements", measured(b, 5.0))
    assert lines(document)["silu_and_mul_h32"]["a"]["us_per_step"] == pytest.approx(5)
    assert lines(document)["rmsnorm_h64"]["a"]["us_per_step"] is None
    side = document["phases"][0]["a"]
    assert (side["us_within"], side["us_per_step"]) == ({"rmsnorm": pytest.approx(10)}, pytest.approx(15))
    assert side["untimed_per_step"] == 0


def test_recordings_of_one_engine_are_compared_by_call_unless_asked(tmp_path: Path, compare: Compare):
    a = write(tmp_path / "a", list(vllm(2)), "vLLM", 2)
    b = write(tmp_path / "b", list(vllm(4)), "vLLM", 4)
    assert compare(a, b)["by"] == "call"
    document = compare(a, b, "--by", "family")
    assert (document["by"], document["equal"]) == ("family", True)


def test_what_cannot_be_compared_is_refused_by_name(both: tuple[Path, Path], tmp_path: Path, kcap: Any):
    a, b = both
    times = measured(a, 1.0)
    once = kcap("diff", a, b, "--measurements", times)
    assert once.code == 2 and "twice" in once.err
    by_call = kcap("diff", a, b, "--by", "call", "--measurements", times, "--measurements", times)
    assert by_call.code == 2 and "--by family" in by_call.err
    swapped = kcap("diff", b, a, "--measurements", times, "--measurements", times)
    assert swapped.code == 2 and "of no call of" in swapped.err
    (tmp_path / "t.txt").write_text("Operator: aten.relu.default\ncnt: 3, ((T([4], f32),), {})\n")
    trace = kcap("diff", a, tmp_path / "t.txt", "--by", "family")
    assert trace.code == 2 and "--by call" in trace.err


def test_two_engines_on_a_gpu_run_as_much_for_each_family(compare: Compare, llama_in_two_engines: Path) -> None:
    """Llama-3.1-8B, whose norms, ropes and activations vLLM's compiler fused; SGLang's split attention has two
    launches."""
    layers = 32
    found = compare(llama_in_two_engines / "vllm.kcap", llama_in_two_engines / "sglang.kcap")
    decode = next(phase for phase in found["phases"] if phase["phase"] == "decode")
    ran = {side: dict[str, float]() for side in "ab"}
    for line in decode["lines"]:
        for side in "ab":
            purpose, share = line["purpose"], line[side]
            ran[side][purpose] = ran[side].get(purpose, 0.0) + (share["per_step"] if share else 0.0)
    once = {"gemm": 4 * layers + 1, "rmsnorm": 2 * layers + 1, "activation": layers, "cache_update": layers}
    for side, attention in (("a", layers), ("b", 2 * layers)):
        assert {purpose: ran[side][purpose] for purpose in once} == once
        assert ran[side]["attention"] == attention
