"""tritonbench's files: one operator each, and every input one that its loaders can make."""

from __future__ import annotations

import orjson
import pytest
import torch
from bench_calls import MM, TROUBLE, call, reasons, tensor
from evaluated import evaluate, tritonbench_tensor

from kcap.bench.exports.common.tritonbench_operators import LISTED
from kcap.schemas.backendbench import read
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import TorchConstant


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


def f32(*shape, **more):
    return tensor(*shape, dtype="float32", **more)


def out(*shape):
    return Argument(name="out", value=f32(*shape, storage=9), keyword=True)


COMPOSITE = [
    (call("aten::linear", f32(2, 3, 8), f32(4, 8)), "mm.default"),
    (call("aten::linear", f32(2, 3, 8), f32(4, 8), f32(4)), "addmm.default"),
    (call("aten::linear", f32(3, 8, strides=(16, 1)), f32(4, 8, strides=(1, 4)), None), "mm.default"),
    (call("aten::mm.out", f32(3, 8), f32(8, 4), out(3, 4)), "mm.default"),
    (call("aten::add.out", f32(3, 4), f32(3, 4), out(3, 4)), "add.Tensor"),
    (call("aten::matmul", f32(3, 8), f32(8, 4)), "mm.default"),
    (call("aten::matmul", f32(2, 3, 8), f32(2, 8, 4)), "bmm.default"),
    (call("aten::softmax.int", f32(3, 8), -1), "_softmax.default"),
    (call("aten::log_softmax.int", f32(3, 8), -1, TorchConstant("dtype", "float32")), "_log_softmax.default"),
    (call("aten::conv2d", f32(2, 4, 6, 6), f32(4, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], 2), "convolution.default"),
    (call("aten::conv1d", f32(2, 4, 6), f32(4, 4, 3), f32(4)), "convolution.default"),
    (call("aten::layer_norm", f32(3, 8), [8], f32(8), f32(8)), "native_layer_norm.default"),
    (call("aten::group_norm", f32(2, 8, 5), 4, f32(8), f32(8)), "native_group_norm.default"),
    (call("aten::max_pool2d", f32(1, 2, 6, 6), [2, 2]), "max_pool2d_with_indices.default"),
    (call("aten::adaptive_avg_pool2d", f32(1, 2, 6, 6), [2, 2]), "_adaptive_avg_pool2d.default"),
    (call("aten::to.dtype", f32(3, 8), TorchConstant("dtype", "bfloat16")), "_to_copy.default"),
]


def counting(size, dtype, stride=None, device=None):
    """A tensor whose memory counts up: the same through any view of it."""
    empty = torch.empty_strided(size, stride or torch.empty(size).stride(), dtype=dtype)
    memory = (torch.arange(empty.untyped_storage().nbytes() // dtype.itemsize) % 13).to(dtype)
    return memory.as_strided(empty.shape, empty.stride())


def run(name, text):
    _, operator, overload = name.split(".")
    args, kwargs = evaluate(text, counting)
    returned = getattr(getattr(torch.ops.aten, operator), overload)(*args, **kwargs)
    return returned[0] if isinstance(returned, tuple) else returned


@pytest.mark.parametrize(("one", "name"), COMPOSITE, ids=lambda value: getattr(value, "operator", value))
def test_a_composite_operator_is_run_as_the_listed_one_that_it_ends_in(one, name, recorded, exported):
    path = recorded([one])
    output, loss = exported(path, "tritonbench")
    (written,) = files(output)[f"aten.{name}"][f"aten.{name}"]
    (original,) = read(exported(path, "backendbench")[0] / "trace.txt")
    text = (output.parent / "tiny.backendbench" / "trace.txt").read_text().split(", ", 1)[1]
    expected, actual = run(original.operator, text), run(f"aten.{name}", written["inputs"])
    assert torch.equal(actual.flatten(), expected.flatten())
    assert any(f"aten.{name}" in lost["reason"] for lost in loss["reduced"])
    assert ("gemm" in files(output)) == (name == "mm.default")


@pytest.mark.parametrize(
    "one",
    [
        call("aten::acos", f32(3)),
        call("aten::linear", f32(8), f32(4, 8)),  # of a vector
        call("aten::linear", f32(2, 3, 8, strides=(48, 16, 2)), f32(4, 8), None),
        call("aten::linear", f32(2, 3, 8, strides=(8, 16, 1)), f32(4, 8), None),  # of no matrix
        call("aten::matmul", f32(2, 3, 8), f32(8, 4)),
        call("aten::softmax.int", f32(3, 8), -1, TorchConstant("dtype", "float64")),
        call("aten::conv2d", f32(2, 4, 6, 6), f32(4, 2, 3, 3), None, [2, 2], "same"),
    ],
    ids=lambda one: one.operator,
)
def test_an_operator_that_its_configuration_does_not_list_is_lost_and_never_the_next_command(
    one, recorded, kcap, exported, tmp_path
):
    output, loss = exported(recorded([one, call("aten::sub.Tensor", f32(3), f32(3))]), "tritonbench")
    written = set(files(output)) - {"gemm"}
    assert {name.removeprefix("aten.") for name in written} <= LISTED
    if one.operator in reasons(loss):
        assert "does not list it" in reasons(loss)[one.operator]
    else:
        assert written == {"aten.sub.Tensor", "aten.mm.default"}
    done = kcap("export", recorded([one], name="one.kcap"), "--to", "tritonbench", "-o", tmp_path / "next")
    command = done.err.splitlines()[-1].removeprefix("Next, in a clone of tritonbench: ").split()
    assert command[0] == "cat" or command[3] in {*(f"aten.{name}" for name in LISTED), "gemm"}
