"""What `scripts/gpu/apply.py` says of each plan, and the Solutions that it makes."""

from __future__ import annotations

import ast
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from applied_plans import passed, python_solution

import kcap
from kcap.bench.apply.choice import read_judged

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"
KIND = {"phase": "decode", "steps": 90, "engine_us": 200.0, "predicted_us": -4.0, "held": 1.0}
FOUND = {"us": -3.0, "half_interval_us": 1.0, "pairs": 12}
PUT_IN = SimpleNamespace(replacements=[SimpleNamespace(seam="launch")])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "apply", raising=False)
    return importlib.import_module("apply")


def test_a_row_has_what_was_predicted_beside_what_was_measured(script: Any) -> None:
    other = {**KIND, "steps": 2, "solutions": None}
    found = {"compared": [other, {**KIND, "solutions": FOUND}], "quality": {"rms": 3.1e-05}}
    row = script.row_of("norm", PUT_IN, found)
    assert (row.predicted, row.measured, row.half, row.held) == (-0.02, -0.015, 0.005, 1.0)
    assert row.text().split() == ["launch", "-2.00%", "-1.50%", "±", "0.50%", "100%", "3.1e-05", "norm"]


def test_what_was_not_put_in_has_its_reason_and_no_figure(script: Any) -> None:
    left = SimpleNamespace(solution="local/norm", reason="tried alone: crashed")
    nothing = SimpleNamespace(replacements=[], left_out=[left])
    row = script.row_of("norm", nothing, None)
    assert (row.predicted, row.measured, row.failure) == (None, None, "tried alone: crashed")
    assert (
        script.row_of("chosen", SimpleNamespace(replacements=[], left_out=[left]), None).failure == "nothing is faster"
    )
    assert script.row_of("norm", PUT_IN, None).failure == "not measured"
    unpaired = {"compared": [{**KIND, "solutions": None}], "quality": {}}
    assert script.row_of("norm", PUT_IN, unpaired).measured is None


def test_both_solutions_of_a_definition_compute_its_reference(script: Any) -> None:
    reference = "import torch\n\n\n@torch.no_grad()\ndef run(x, w):\n    return x * w\n"
    definition = SimpleNamespace(name="scale_h8", reference=reference, inputs={"x": None, "w": None})
    made = script.references_of(SimpleNamespace(definition=definition))
    assert made.keys() == {"scale_h8_plain", "scale_h8_compiled"}
    x, w = torch.randn(4, 8), torch.randn(8)
    for text in made.values():
        assert text.startswith("# definition: scale_h8\n")
        names: dict[str, Any] = {}
        exec(compile(ast.parse(text), "solution", "exec"), names)
        torch.testing.assert_close(names["run"](x, w), x * w)


def test_each_example_is_made_for_the_definitions_it_is_for(script: Any, llama_on_h100: Path) -> None:
    made = dict(script.examples_of(kcap.load(llama_on_h100 / "model.kcap")))
    products = {f"gemm_bf16_{size}" for size in ("n28672_k4096", "n4096_k14336", "n4096_k4096", "n6144_k4096")}
    assert products <= {name.removesuffix("_example") for name in made}
    assert [name for name in made if name.endswith("_twice")] == ["gemm_bf16_n28672_k4096_twice"]
    for name, text in made.items():
        assert text.startswith(f"# definition: {name.rpartition('_')[0]}\n")
        ast.parse(text)


def test_plans_that_are_to_be_found_out_differ_in_that_alone(script: Any, llama_on_h100: Path) -> None:
    recording, judged = kcap.load(llama_on_h100 / "model.kcap"), read_judged(llama_on_h100 / "judged")
    plans = dict(script.make_plans(recording, judged, llama_on_h100))
    assert {one.definition for one in plans["chosen"].replacements} == {
        "cache_update_kv8_d128_ps16", "gemm_bf16_n128256_k4096", "gemm_bf16_n4096_k4096", "gemm_bf16_n6144_k4096",
        "greedy_sampling_v128256",
    }  # fmt: skip
    right = plans["gemm_bf16_n28672_k4096_example"].replacements
    assert script.TOGETHER not in plans  # nobody judged attention then
    odd = script.odd_ones(plans)
    wrong, useless = odd["gemm_bf16_n28672_k4096_wrong"], odd["useless"]
    assert [one.call for one in wrong.replacements] == [one.call for one in right]
    assert {one.solution for one in wrong.replacements} == wrong.solutions.keys() != {one.solution for one in right}
    assert [one.call.args[0].value.shape for one in useless.replacements] == [(17, 4096)]
    assert [one.solution for one in useless.replacements] == [one.solution for one in right]


def test_one_plan_has_an_operator_a_fused_kernel_and_attention(script: Any, llama_on_h100: Path) -> None:
    """Of what was judged on the H100, and of attention as if it had been."""
    recording, judged = kcap.load(llama_on_h100 / "model.kcap"), read_judged(llama_on_h100 / "judged")
    name, text = next(made for made in script.examples_of(recording) if made[0].startswith("gqa_table_decode_"))
    solution = python_solution(name.removesuffix("_example"), text, name)
    spec = solution.spec.model_copy(update={"destination_passing_style": True})
    attention = passed(recording, solution.model_copy(update={"spec": spec}))
    both = replace(
        judged,
        solutions={**judged.solutions, **attention.solutions},
        outcomes={**judged.outcomes, **attention.outcomes},
    )
    plans = dict(script.make_plans(recording, both, llama_on_h100))
    together = plans[script.TOGETHER]
    assert {(one.seam, one.call.operator.partition("::")[0]) for one in together.replacements} == {
        ("operator", "aten"), ("operator", "_vllm_fa3_C"), ("launch", "triton"),
    }  # fmt: skip
    odd = script.odd_ones(plans)
    assert odd.keys() == {"gemm_bf16_n28672_k4096_wrong", script.USELESS, f"{solution.definition}_wrong"}
    (wrong,) = odd[f"{solution.definition}_wrong"].solutions.values()
    assert wrong.sources[0].content.rstrip().endswith("output.view(-1)[::1000].neg_()")
