"""tritonbench's files: one operator each, and every input one that its loaders can make."""

from __future__ import annotations

import orjson
import pytest
import torch
from bench_calls import MM, TROUBLE, call, reasons, tensor
from evaluated import evaluate, tritonbench_tensor


def files(output):
    return {path.stem: orjson.loads(path.read_bytes()) for path in output.glob("*.json") if path.name != "loss.json"}


def test_each_operator_has_a_file_that_names_it_and_the_loader(everything, exported):
    output, _ = exported(everything, "tritonbench")
    for name, content in files(output).items():
        loader = "builtin" if name == "gemm" else "aten"
        assert list(content) == ["metadata", name]
        assert content["metadata"] == {"tritonbench_ops": [name], "tritonbench_loader": loader, "source": "kcap"}


def test_counts_are_those_exported(everything, exported):
    output, loss = exported(everything, "tritonbench")
    counted = sum(one["count"] for name, content in files(output).items() if name != "gemm" for one in content[name])
    assert counted == loss["exported"]


def test_its_code_can_make_and_call_every_input(everything, exported):
    output, _ = exported(everything, "tritonbench")
    for name, content in files(output).items():
        if name == "gemm":
            continue
        _, operator, overload = name.split(".")
        for one in content[name]:
            args, kwargs = evaluate(one["inputs"], tritonbench_tensor)
            assert torch.is_tensor(getattr(getattr(torch.ops.aten, operator), overload)(*args, **kwargs))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("library", "aten alone"),
        ("name", "-9 to 9"),
        ("substring", "embedding"),
        ("integers", "-9 to 9"),
        ("fp8", "float8_e4m3fn"),
        ("triton", "Triton"),
        ("stride 0", "stride of 0"),
        ("host", "one device"),
        ("random", "no probabilities"),
    ],
)
def test_what_it_cannot_run_is_lost_with_the_reason(kind, words, recorded, exported):
    output, loss = exported(recorded([TROUBLE[kind], MM]), "tritonbench")
    assert words in reasons(loss)[TROUBLE[kind].operator]
    assert set(files(output)) == {"aten.mm.default", "gemm"}


def test_a_matrix_product_is_a_builtin_gemm_of_strings(recorded, exported):
    output, _ = exported(recorded([MM]), "tritonbench")
    (one,) = files(output)["gemm"]["gemm"]
    keywords = eval(one["inputs"])[1]
    assert keywords == {"dtype": "bf16", "strides": "[[64, 1], [1, 64]]", "M": "8", "N": "32", "K": "64"}
    assert one["count"] == 100
    assert all(isinstance(value, str) for value in keywords.values())


def test_a_product_of_a_precision_that_gemm_lacks_is_in_the_aten_file_alone(recorded, exported):
    double = call("aten::mm", tensor(2, 2, dtype="float64"), tensor(2, 2, dtype="float64"))
    output, _ = exported(recorded([double]), "tritonbench")
    assert set(files(output)) == {"aten.mm.default"}


@pytest.mark.parametrize("args", ["", "T([4], f32),", "T([4], f32), T([4], f32),", "T([2, 3], f32), T([2, 3], f32),"])
def test_a_product_that_is_none_is_no_gemm(args, exported, tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text(f"Operator: aten.mm.default\ncnt: 3, (({args}), {{}})\n")
    output, _ = exported(path, "tritonbench")
    assert not (output / "gemm.json").exists()
