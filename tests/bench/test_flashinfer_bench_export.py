"""FlashInfer-Bench's dataset of a Recording: what its own validator, evaluators and web page ask for."""

from __future__ import annotations

import orjson
import pytest
from derived_calls import METADATA, call, embedding, linear, ranged

from kcap.schemas.recording.recording import write_recording
from kcap.schemas.recording.values import TensorSpec

WHOLE = METADATA.model_copy(update={"layers_recorded": 32, "layers_model": 32})
GREEDY = call(2, "aten::argmax", self=TensorSpec((3, 2048), "float32"), dim=-1, keepdim=False)
SIN = call(3, "aten::sin", self=TensorSpec((3, 7), "float32"))


@pytest.fixture
def dataset(tmp_path, exported):
    path = tmp_path / "whole.kcap"
    write_recording(path, WHOLE, [linear(0, 4), embedding(1, 9), GREEDY, SIN], samples=[ranged(1, 0, 50)])
    return exported(path, "flashinfer-bench", "--no-check")[0]


def nulls(value, path=""):
    """Where `value` has null but as the shape of a scalar."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if item is None and key != "shape":
            yield f"{path}/{key}"
        yield from nulls(item, f"{path}/{key}")


def test_every_axis_and_tensor_is_described_and_nothing_is_null(dataset):
    documents = [orjson.loads(path.read_bytes()) for path in dataset.rglob("definitions/*/*.json")]
    assert len(documents) == 4
    for document in documents:
        assert list(nulls(document)) == []
        described = [document, *document["axes"].values(), *document["inputs"].values(), *document["outputs"].values()]
        assert all(one["description"] for one in described)
    (sine,) = [document for document in documents if document["name"].startswith("sin")]
    assert {axis["description"] for axis in sine["axes"].values()} == {
        "Dimension 0 of self, dimension 0 of output.",
        "Dimension 1 of self, dimension 1 of output.",
    }


def test_greedy_sampling_is_not_judged_as_a_draw_from_probabilities(dataset):
    data = pytest.importorskip("flashinfer_bench.data")
    evaluators = pytest.importorskip("flashinfer_bench.bench.evaluators")
    read = data.TraceSet.from_path(str(dataset))
    (name,) = [name for name in read.definitions if name.startswith("greedy")]
    assert evaluators.resolve_evaluator(read.definitions[name]) is evaluators.DefaultEvaluator
