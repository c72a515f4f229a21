"""What `scripts/gpu/apply.py` says of each plan, and the Solutions that it makes."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
    row = script.row_of("norm", PUT_IN, "", {"compared": [other, {**KIND, "solutions": FOUND}]})
    assert (row.predicted, row.measured, row.half, row.held) == (-0.02, -0.015, 0.005, 1.0)
    assert row.text().split() == ["launch", "-2.00%", "-1.50%", "±", "0.50%", "100%", "norm"]


def test_what_was_not_put_in_has_its_reason_and_no_figure(script: Any) -> None:
    row = script.row_of("norm", SimpleNamespace(replacements=[]), "tried alone: crashed", None)
    assert (row.predicted, row.measured, row.failure) == (None, None, "tried alone: crashed")
    assert script.row_of("norm", PUT_IN, "", None).failure == "not measured"
    assert script.row_of("norm", PUT_IN, "", {"compared": [{**KIND, "solutions": None}]}).measured is None


def test_both_solutions_of_a_definition_compute_its_reference(script: Any) -> None:
    reference = "import torch\n\n\n@torch.no_grad()\ndef run(x, w):\n    return x * w\n"
    definition = SimpleNamespace(name="scale_h8", reference=reference, inputs={"x": None, "w": None})
    made = script.solutions_of(SimpleNamespace(definition=definition))
    assert made.keys() == {"scale_h8_plain", "scale_h8_compiled"}
    x, w = torch.randn(4, 8), torch.randn(8)
    for text in made.values():
        assert text.startswith("# definition: scale_h8\n")
        names: dict[str, Any] = {}
        exec(compile(ast.parse(text), "solution", "exec"), names)
        torch.testing.assert_close(names["run"](x, w), x * w)
