from __future__ import annotations

from pathlib import Path

import pytest

from kcap.schemas.backendbench import (
    TraceLine,
    from_recording,
    parse_arguments,
    read,
    read_loss,
    serialize,
    trace_lines,
    write,
)
from kcap.schemas.backendbench.convert import DRIFT, FOLDED, HOST, INTEGERS, OFFSET, SHARED
from kcap.schemas.recording.recording import Argument, Call, Count, Launch, Metadata, Sample, load, write_recording
from kcap.schemas.recording.values import Drift, Folded, Opaque, TensorSpec, TorchConstant

TRACES = sorted((Path(__file__).parents[2] / "data" / "backendbench-traces").glob("*.txt"))


def gpu(*shape, dtype="bfloat16", **more):
    return TensorSpec(shape, dtype, device="cuda:0", **more)


def arg(value, name=None, **more):
    return Argument(name=name, value=value, **more)


def call(operator, *args, count=1, number=0, **more):
    args = [argument if isinstance(argument, Argument) else arg(argument) for argument in args]
    return Call(id=number, operator=operator, args=args, counts=[Count(phase="decode", count=count)], **more)


def texts(*calls, samples=()):
    lines, _ = trace_lines(calls, samples)
    return [f"{line.operator} {line.count} {serialize(line.args, line.kwargs)}" for line in lines]


def not_carried(*calls, samples=()):
    lines, loss = trace_lines(calls, samples)
    assert not lines
    return [(missing.operator, missing.reason, missing.count) for missing in loss.not_carried]


def losses(*calls, samples=()):
    return trace_lines(calls, samples)[1].totals.with_loss


def test_trailing_defaults_are_left_out_and_keywords_named():
    made = call(
        "aten::add.Tensor", gpu(8), gpu(8), arg(1, "alpha", keyword=True, default=True), arg(None, "out", keyword=True)
    )
    assert texts(made) == ["aten.add.Tensor 1 ((T([8], bf16), T([8], bf16)), {'out': None})"]


def test_a_default_before_another_argument_is_kept():
    made = call("aten::x", gpu(8), arg(None, default=True), arg(5), arg(False, default=True))
    assert texts(made) == ["aten.x.default 1 ((T([8], bf16), None, 5), {})"]


def test_one_argument_keeps_its_comma():
    assert texts(call("aten::relu", gpu(8))) == ["aten.relu.default 1 ((T([8], bf16),), {})"]


def test_counts_sum_over_phases_ranks_and_modes():
    counts = [
        Count(phase="prefill", count=2),
        Count(phase="decode", count=3, rank=1),
        Count(phase="decode", count=4, mode="graph"),
    ]
    (line,) = trace_lines([Call(id=0, operator="aten::relu", args=[arg(gpu(8))], counts=counts)])[0]
    assert line.count == 9


def test_views_are_written_and_regions_are_not():
    region = call("vllm::unified_attention", gpu(8), kind="region", count=100)
    view = call("aten::t", gpu(8, 8), work=False)
    lines, loss = trace_lines([region, view])
    assert [line.operator for line in lines] == ["aten.t.default"]
    assert loss.totals.not_carried == 0


def test_a_call_that_never_ran_is_no_synthetic_line():
    assert texts(call("aten::relu", gpu(8), count=0)) == []


def test_lines_go_by_operator_then_count_and_equal_ones_are_one():
    made = [
        call("aten::relu", gpu(8), count=1),
        call("aten::relu", gpu(9), count=5),
        call("aten::mm", gpu(2, 2), gpu(2, 2)),
        call("aten::relu", gpu(8), count=2, parent="vllm::moe"),
    ]
    expected = [
        "aten.mm.default 1 ((T([2, 2], bf16), T([2, 2], bf16)), {})",
        "aten.relu.default 5 ((T([9], bf16),), {})",
        "aten.relu.default 3 ((T([8], bf16),), {})",
    ]
    assert texts(*made) == expected == texts(*reversed(made))


def test_torch_objects_and_devices():
    made = call(
        "aten::_to_copy",
        gpu(8),
        arg(TorchConstant("dtype", "float16"), "dtype", keyword=True),
        arg(TorchConstant("layout", "strided"), "layout", keyword=True),
        arg(TorchConstant("device", "cuda:3"), "device", keyword=True),
        arg(TorchConstant("memory_format", "preserve_format"), "memory_format", keyword=True),
    )
    assert texts(made) == [
        "aten._to_copy.default 1 ((T([8], bf16),), {'dtype': f16, 'layout': torch.strided, "
        "'device': torch.device('cuda'), 'memory_format': torch.preserve_format})"
    ]


def test_a_tensor_on_the_cpu_beside_the_gpu_says_so():
    made = call("aten::add.Tensor", gpu(8), TensorSpec((), "float64", storage=1))
    assert texts(made) == ["aten.add.Tensor 1 ((T([8], bf16), T([], f64, device='cpu')), {})"]
    assert losses(made) == {}


def test_a_recording_of_the_cpu_is_written_without_devices_and_says_so():
    made = call("aten::relu", TensorSpec((8,), "float32"), count=3)
    assert texts(made) == ["aten.relu.default 3 ((T([8], f32),), {})"]
    assert losses(made) == {HOST: 3}


def test_what_a_line_cannot_carry_is_counted():
    made = [
        call("aten::mm", gpu(2, 2, dtype="float8_e4m3fn"), gpu(2, 2), count=7),
        call("aten::normal_", gpu(2), arg(Opaque("Generator"), "generator", keyword=True), count=2),
        call("_fused_kernel", gpu(2), count=3),
        call("aten::from_file", "x", count=1),
        call("aten::slice.Tensor", gpu(2), Drift("int"), count=4),
        call("aten::relu", gpu(2, dtype="uint16"), count=5),
        call("a::b", Opaque("ST([2], f32, 3), __import__('os')"), count=6),
        call("aten::relu", gpu(2**60), count=8),
        call("aten::relu", arg(1, keyword=True), count=9),
        call("aten::to", "torch.device('cpu')", count=10),
    ]
    found = {operator + str(count): reason for operator, reason, count in not_carried(*made)}
    assert found == {
        "aten::mm7": "a tensor of float8_e4m3fn",
        "aten::normal_2": "an opaque value (Generator)",
        "_fused_kernel3": "not a torch operator (namespace::operator)",
        "aten::from_file1": "from_file reaches files or libraries: not called from files",
        "aten::slice.Tensor4": "a drifting scalar without a Sample",
        "aten::relu5": "a tensor of uint16",
        "a::b6": "an opaque value (ST([2], f32, 3), __import__('os'))",
        "aten::relu8": "a tensor of more than 16 TiB",
        "aten::relu9": "a keyword without a name",
        "aten::to10": "a string that reads back as a device",
    }
    assert trace_lines(made)[1].totals.not_carried == 55


def test_an_opaque_default_costs_nothing():
    made = call("aten::normal_", gpu(2), arg(Opaque("Generator"), "generator", keyword=True, default=True))
    assert texts(made) == ["aten.normal_.default 1 ((T([2], bf16),), {})"]


def test_drifting_values_come_from_the_first_sample():
    made = call("aten::x", gpu(2), [1, Drift("int")], Drift("float"), count=5)
    samples = [
        Sample(call=0, phase="decode", rank=0, step=9, scalars={"1.1": 9, "2": 9.5}),
        Sample(call=0, phase="decode", rank=0, step=2, scalars={"1.1": 2, "2": 2.5}),
        Sample(call=0, phase="decode", rank=1, step=1, scalars={"1.1": 1, "2": 1.5}),
        Sample(call=1, phase="decode", rank=0, step=0, scalars={"1.1": 0, "2": 0.5}),
    ]
    assert texts(made, samples=samples) == ["aten.x.default 5 ((T([2], bf16), [1, 2], 2.5), {})"]
    assert losses(made, samples=samples) == {DRIFT: 5}


def test_what_a_line_leaves_out_is_counted():
    made = [
        call("aten::a", gpu(2, offset=64), count=1),
        call("aten::a", gpu(2, offset=None), count=2),
        call("aten::b", gpu(2, storage=0), gpu(2, storage=0), count=4),
        call("aten::c", gpu(9, storage=0), gpu(2, dtype="int64", storage=1), count=8),
        call("vllm::d", gpu(2), Folded("model.layers.*.attn"), count=16),
    ]
    lines, loss = trace_lines(made)
    assert loss.totals.with_loss == {OFFSET: 3, SHARED: 4, INTEGERS: 8, FOLDED: 16}
    assert [(lost.operator, lost.signatures, lost.count) for lost in loss.with_loss] == [
        ("aten::a", 2, 3),
        ("aten::b", 1, 4),
        ("aten::c", 1, 8),
        ("vllm::d", 1, 16),
    ]
    assert lines[-1].args[1] == "model.layers.*.attn"


def test_a_recording_becomes_a_file_and_a_report_of_its_loss(tmp_path):
    calls = [
        call("aten::mm", gpu(2, 2, storage=0), gpu(2, 2, strides=(1, 2), storage=1), count=7),
        call("aten::mm", gpu(2, 2, dtype="float8_e4m3fn"), gpu(2, 2), count=2),
    ]
    write_recording(tmp_path / "r.kcap", Metadata(), calls)
    lines, loss = from_recording(load(tmp_path / "r.kcap"))
    written = write(tmp_path / "trace.txt", lines, loss)
    assert (tmp_path / "trace.txt").read_text() == (
        "Operator: aten.mm.default\ncnt: 7, ((T([2, 2], bf16), T([2, 2], bf16, stride=(1, 2))), {})\n"
    )
    assert list(read(tmp_path / "trace.txt")) == lines
    assert read_loss(tmp_path / "trace.loss.json") == written
    totals = written.totals
    assert (totals.lines, totals.written, totals.not_carried) == (1, 7, 2)
    assert written.not_carried[0].arguments == "float8_e4m3fn[2, 2] x bf16[2, 2]"


def test_a_line_that_cannot_be_written_goes_to_the_report(tmp_path):
    lines = [
        TraceLine("aten.mm.default", 3, [Opaque("Generator")], {}),
        TraceLine("aten.mm.load_library", 4, [], {}),
        TraceLine("aten.mm.default", -1, [], {}),
        TraceLine("aten.relu.default", 5, [], {}),
    ]
    loss = write(tmp_path / "trace.txt", lines)
    assert (tmp_path / "trace.txt").read_text() == "Operator: aten.relu.default\ncnt: 5, ((), {})\n"
    assert [missing.operator for missing in loss.not_carried] == [
        "aten.mm.default",
        "aten.mm.default",
        "aten.mm.load_library",
    ]


def constant(kind, name):
    return TorchConstant(kind, name)


REAL_CALLS = [
    call("aten::add.Tensor", gpu(8, 4), gpu(8, 4), arg(1, "alpha", keyword=True, default=True)),
    call("aten::add.Tensor", gpu(8, 4), 2.5, arg(2, "alpha", keyword=True)),
    call("aten::mul.Tensor", gpu(8, 4), TensorSpec((), "float64", device="cpu")),
    call(
        "aten::_to_copy",
        gpu(8, 4),
        arg(constant("dtype", "float32"), "dtype", keyword=True),
        arg(None, "layout", keyword=True, default=True),
        arg(constant("device", "cuda:0"), "device", keyword=True),
        arg(None, "pin_memory", keyword=True, default=True),
        arg(False, "non_blocking", keyword=True, default=True),
        arg(constant("memory_format", "contiguous_format"), "memory_format", keyword=True),
    ),
    call("aten::mean.dim", gpu(8, 4), [-1], True, arg(constant("dtype", "float32"), "dtype", keyword=True)),
    call(
        "aten::arange",
        5,
        arg(constant("dtype", "int64"), "dtype", keyword=True),
        arg(constant("layout", "strided"), "layout", keyword=True),
        arg(constant("device", "cuda"), "device", keyword=True),
        arg(False, "pin_memory", keyword=True),
    ),
    call("aten::_softmax", gpu(8, 4), -1, False),
    call("aten::softmax.int", gpu(8, 4), -1, arg(None, "dtype", default=True)),
    call("aten::cat", [gpu(8, 4), gpu(2, 4)], arg(0, "dim", default=True)),
    call("aten::cat", [gpu(8, 4), gpu(8, 2)], -1),
    call("aten::index.Tensor", gpu(8, 4), [None, gpu(3, dtype="int64")]),
    call("aten::index_put_", gpu(8, 4), [gpu(3, dtype="int64")], gpu(3, 4), arg(False, default=True)),
    call("aten::sum.dim_IntList", gpu(8, 4), [0], True, arg(None, "dtype", keyword=True, default=True)),
    call("aten::sum.dim_IntList", gpu(8, 4), None),
    call("aten::slice.Tensor", gpu(8, 4), arg(0, default=True), arg(None, default=True), 4, arg(1, default=True)),
    call("aten::scaled_dot_product_attention", gpu(1, 2, 8, 4), gpu(1, 2, 8, 4), gpu(1, 2, 8, 4), None, 0.0, True,
         arg(0.5, "scale", keyword=True)),
    call("aten::addmm", gpu(4), gpu(8, 2), gpu(2, 4, strides=(1, 2))),
    call("aten::masked_fill_.Scalar", gpu(8, 4), gpu(8, 4, dtype="bool"), float("-inf")),
    call("aten::full", [8, 4], float("nan"), arg(constant("dtype", "float32"), "dtype", keyword=True),
         arg(constant("device", "cuda"), "device", keyword=True)),
    call("aten::copy_", gpu(8, 4), gpu(8, 4), arg(False, default=True)),
    call("aten::split_with_sizes", gpu(8, 6), [4, 2], -1),
    call("aten::view", gpu(8, 4), [-1, 2]),
    call("aten::gelu", gpu(8, 4), arg("tanh", "approximate", keyword=True)),
    call("aten::to.device", gpu(8), constant("device", "cuda:0"), constant("dtype", "float32"), False),
    call("aten::div.Tensor_mode", gpu(8), gpu(8), arg("floor", "rounding_mode", keyword=True)),
    call("aten::mm.out", gpu(8, 4), gpu(4, 8), arg(gpu(8, 8), "out", keyword=True, written=True)),
]  # fmt: skip


def on_meta(torch, value):
    if isinstance(value, list):
        return [on_meta(torch, item) for item in value]
    if isinstance(value, TensorSpec):
        made = torch.empty_strided(
            value.shape, value.effective_strides, dtype=getattr(torch, value.dtype), device="meta"
        )
        return made if value.shape else torch.zeros((), dtype=getattr(torch, value.dtype))
    if isinstance(value, TorchConstant):
        return torch.device("meta") if value.kind == "device" else getattr(torch, value.name)
    return "meta" if value == "cuda" else value


def bind(torch, line):
    """Let torch itself match the arguments with the operator's schema, on tensors without data."""
    name, _, overload = line.name.partition(".")
    function, *_ = torch._C._get_operation_overload(name, overload)
    args, kwargs = on_meta(torch, line.args), {name: on_meta(torch, value) for name, value in line.kwargs.items()}
    return function(*args, **kwargs)


@pytest.mark.parametrize("made", REAL_CALLS, ids=lambda made: made.operator)
def test_every_written_line_binds_to_its_schema(made):
    torch = pytest.importorskip("torch")
    (line,), loss = trace_lines([made])
    assert loss.totals.not_carried == 0
    args, kwargs = parse_arguments(serialize(line.args, line.kwargs))
    bind(torch, TraceLine(line.operator, 1, args, kwargs))


def test_a_line_that_does_not_bind_is_noticed():
    torch = pytest.importorskip("torch")
    for args in ([gpu(8)], [gpu(8, 8), "x"], [gpu(8, 8), gpu(8, 8), 1]):
        with pytest.raises(RuntimeError, match="Declaration:"):
            bind(torch, TraceLine("aten.mm.default", 1, args, {}))


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_real_lines_bind_to_their_schemas(trace):
    torch = pytest.importorskip("torch")
    gone = {"aten::im2col_backward", "aten::col2im_backward"}  # torch has these no more
    for line in read(trace):
        try:
            bind(torch, line) if line.name not in gone else None
        except (RuntimeError, NotImplementedError) as error:
            assert "Declaration:" not in str(error)  # it bound, and torch has no kernel for tensors without data


@pytest.mark.parametrize(
    ("language", "operator", "reason"),
    [
        ("triton", "triton::mul_silu.s0a1b2c3d", "a Triton kernel has no operator name that BackendBench knows"),
        ("cpp", "cpp::kernel.s0a1b2c3d", "a C++ kernel of inductor has no operator name that BackendBench knows"),
        ("tvm", "tvm::rmsnorm", "a function of a compiled library has no operator name that BackendBench knows"),
        ("triton", "aten::mm", "a Triton kernel has no operator name that BackendBench knows"),
    ],
)
def test_a_launch_is_counted_as_lost_and_never_becomes_a_line(language, operator, reason):
    """Its name looks like an operator's, so that a line of it would look right and mean nothing."""
    launch = Launch(language=language, function="kernel", grid=[4, 1, 1], constexprs={"BLOCK": 64})
    assert not_carried(call(operator, gpu(8), count=161, launch=launch)) == [(operator, reason, 161)]


def test_the_lines_around_a_launch_are_written():
    made = call("triton::f.s00000000", gpu(8), launch=Launch(function="f"), count=2)
    lines, loss = trace_lines([made, call("aten::relu", gpu(8), number=1)])
    assert [line.operator for line in lines] == ["aten.relu.default"]
    assert loss.totals.not_carried == 2
