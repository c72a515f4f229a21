"""What `scripts/gpu/trtllm_check.py` makes of a Recording."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kcap.schemas.recording.recording import load, write_recording
from kcap.schemas.recording.records import Call, Count, Metadata, Tap

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"
LAYERS, DECODES = 4, 15
RIGHT = {
    "trtllm::cublas_mm": 4 * LAYERS * DECODES,
    "aten::mm.out": DECODES,
    "trtllm::attention_inplace": LAYERS * DECODES,
}
WHOLE = Metadata(
    framework="TRT-LLM",
    framework_version="1.2.1",
    complete=True,
    steps={"decode": DECODES, "prefill": 4},
    coverage={"share": 0.99},
)


def failed(path: Path, monkeypatch: pytest.MonkeyPatch, counts: dict[str, int], **metadata: object) -> list[str]:
    """The checks that fail of a Recording with these operators."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("counts", "marks", "trtllm_check"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    calls = [
        Call(id=number, operator=operator, counts=[Count(phase="decode", count=count)])
        for number, (operator, count) in enumerate(counts.items())
    ]
    write_recording(path, WHOLE.model_copy(update=metadata), calls)
    rows = importlib.import_module("trtllm_check").of_recording(load(path), LAYERS)
    return [row.what for row in rows if not row.passed]


def test_a_step_of_the_architecture_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(tmp_path / "r.kcap", monkeypatch, RIGHT) == []


@pytest.mark.parametrize(
    ("counts", "metadata", "check"),
    [
        ({"aten::mm.out": DECODES - 1}, {}, "products of decode steps"),
        ({"trtllm::attention_inplace": LAYERS}, {}, "attentions of decode steps"),
        ({}, {"coverage": {"share": 0.9}}, "coverage"),
        ({}, {"framework": "PyTorch"}, "framework"),
        ({}, {"complete": False}, "the Recording is complete"),
        ({}, {"taps": [Tap(name="a hook", status="failed")]}, "the Recording is complete"),
    ],
)
def test_what_is_wrong_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: dict[str, int], metadata: dict[str, object], check: str
) -> None:
    assert failed(tmp_path / "r.kcap", monkeypatch, RIGHT | counts, **metadata) == [check]
