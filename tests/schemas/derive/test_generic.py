"""Definitions of operators that no family knows: their axes, what ties them, their outputs and references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generic_calls import call, check, derive, derived

from kcap.replay.datasets.reference import prepare_reference
from kcap.schemas.derive.invocation import Unrecognized, invocation_of
from kcap.schemas.flashinfer.definition import AxisConst, Definition, RandomInput, Workload
from kcap.schemas.recording.records import Argument, Call
from kcap.schemas.recording.values import Drift, TensorSpec, TorchConstant

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def randn(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def shapes(definition: Definition) -> dict[str, list[str] | None]:
    return {name: tensor.shape for name, tensor in (definition.inputs | definition.outputs).items()}


OPERATORS: dict[str, list[tuple[Any, ...]]] = {
    "aten::copy_": [(randn(n, 4), randn(n, 4, dtype=BF16), True) for n in (1, 3, 7)],
    "aten::fill_.Scalar": [(randn(n), 0.5) for n in (1, 2, 5)],
    "aten::fill_.Tensor": [(randn(n), torch.tensor(2.0)) for n in (1, 2, 5)],
    "aten::index.Tensor": [(randn(9, 4), [ints(9, n)]) for n in (1, 2, 5)],
    "aten::to.dtype": [(randn(n, 8), BF16) for n in (1, 2, 5)],
    "aten::lt.Tensor": [(randn(n), randn(n)) for n in (1, 2, 5)],
    "aten::sub.Tensor": [(randn(n), 1) for n in (1, 2, 5)],
    "aten::pow.Tensor_Scalar": [(randn(n, 6).abs(), 2) for n in (1, 2, 5)],
    "aten::mean.dim": [(randn(n, 6), [-1], True) for n in (1, 2, 5)],
    "aten::rsqrt": [(randn(n, 6).abs() + 1,) for n in (1, 2, 5)],
    "aten::mul.Tensor": [(randn(n, 6, dtype=BF16), randn(6, dtype=BF16)) for n in (1, 2, 5)],
    "aten::silu": [(randn(n, 6, dtype=BF16),) for n in (1, 2, 5)],
    "aten::scatter_.src": [(randn(n, 9), 1, ints(9, n, 1), randn(n, 1)) for n in (1, 2, 5)],
    "aten::argmax": [(randn(n, 9), -1) for n in (1, 2, 5)],
    "aten::softmax.int": [(randn(n, 9), -1) for n in (1, 2, 5)],
    "aten::layer_norm": [(randn(n, 8), [8], randn(8), randn(8), 1e-5) for n in (1, 2, 5)],
    "aten::native_layer_norm": [(randn(n, 8, dtype=BF16), [8], None, None, 1e-5) for n in (1, 2, 5)],
    "aten::bmm": [(randn(4, n, 8), randn(4, 8, n + 3)) for n in (1, 2, 5)],
    "aten::max.dim": [(randn(n, 8), -1) for n in (1, 2, 5)],
    "aten::gelu_backward": [(randn(n, 8), randn(n, 8)) for n in (1, 2, 5)],
    "aten::where.self": [(randn(n) > 0, randn(n), randn(n)) for n in (1, 2, 5)],
    "aten::index_put_": [(randn(9, 4), [ints(9, 1)], randn(1, 4), False)],
    "aten::_foreach_add_.Scalar": [([randn(2), randn(n)], 1) for n in (3, 5)],
    "aten::masked_fill_.Scalar": [(randn(n, 3), randn(n, 3) > 0, float("-inf")) for n in (1, 2)],
    "aten::zero_": [(randn(n, 3),) for n in (0, 2)],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_reference_is_the_operator(name: str):
    derived(name, *OPERATORS[name])


def test_dimensions_that_agree_share_an_axis_and_those_that_never_differ_are_constant():
    definition = derived("aten::mul.Tensor", *((randn(n, 64), randn(n, 1)) for n in (1, 3, 8)))
    assert shapes(definition) == {"self": ["n0", "d64"], "other": ["n0", "d1"], "output": ["n0", "d64"]}
    assert definition.var_axes == ["n0"] and definition.const_axes == {"d64": 64, "d1": 1}
    assert (definition.name, definition.op_type) == ("mul_tensor_f32_d64_d1", "mul")


def test_all_axes_of_a_single_call_are_constant():
    definition = derived("aten::rsqrt", (randn(4, 5).abs(),))
    assert all(isinstance(axis, AxisConst) for axis in definition.axes.values())
    assert shapes(definition) == {"self": ["d4", "d5"], "output": ["d4", "d5"]}


def test_an_out_is_no_input_and_keeps_its_name():
    definition = derived("aten::add.out", (randn(4), randn(4)), out=torch.empty(4))
    assert list(definition.inputs) == ["self", "other"] and list(definition.outputs) == ["out"]


def test_what_an_operator_writes_in_place_has_a_name_of_its_own():
    definition = derived("aten::copy_", *((randn(n), randn(n, dtype=BF16)) for n in (2, 5)))
    assert list(definition.inputs) == ["self", "src"] and list(definition.outputs) == ["self_out"]
    assert definition.name == "copy_inplace_f32_bf16"


def test_a_decomposition_is_written_out():
    definition = derived("aten::silu", *((randn(n, 8, dtype=BF16),) for n in (1, 2)))
    assert "reference:decomposition" in definition.tags
    assert "torch.ops.aten.silu" not in definition.reference and "sigmoid" in definition.reference


def test_a_number_that_differs_is_a_scalar_input():
    definition = derived("aten::fill_.Scalar", (randn(3), 0), (randn(5), 1))
    assert shapes(definition) == {"self": ["n0"], "value": None, "self_out": ["n0"]}
    assert definition.inputs["value"].dtype == "int64"


def test_an_integer_and_a_float_are_two_definitions():
    kernels, _ = derive(call("aten::mul.Tensor", ints(3, 4), 2), call("aten::mul.Tensor", ints(3, 4), 2.0))
    assert [kernel.definition.outputs["output"].dtype for kernel in kernels] == ["int64", "float32"]


def test_a_dimension_that_is_reduced_splits():
    kernels, _ = derive(*(call("aten::sum.dim_IntList", randn(3, n), [dim]) for dim in (0, 1) for n in (4, 5)))
    assert [len(kernel.uses) for kernel in kernels] == [2, 2]


def test_a_sum_of_axes_is_a_constraint():
    calls = [(randn(a + b, 4), [ints(a + b, a)], randn(b, 4)) for a, b in ((2, 3), (4, 7), (5, 1))]
    specs = [call("aten::index_put", *args) for args in calls]
    (kernel,) = derive(*specs)[0]
    assert kernel.definition.constraints == ["n2 == n0 - n1"]


@pytest.mark.parametrize(
    ("sizes", "constraint"), [([(2, 4), (3, 6)], "n1 == 2 * n0"), ([(4, 3), (7, 6)], "n1 == n0 - 1")]
)
def test_a_multiple_or_a_step_is_a_constraint(sizes: list[tuple[int, int]], constraint: str):
    definition = derived("aten::index_select", *((randn(a, 4), 0, ints(a, b)) for a, b in sizes))
    assert definition.constraints == [constraint]
    assert shapes(definition) == {"self": ["n0", "d4"], "index": ["n1"], "output": ["n1", "d4"]}


def test_concatenations_split_by_the_size_that_only_their_output_has():
    calls = [([randn(a, 4), randn(b, 4)], 0) for a, b in ((2, 3), (3, 2), (4, 7))]
    kernels, refused = derive(*(call("aten::cat", *args) for args in calls))
    assert not refused and sorted(len(kernel.uses) for kernel in kernels) == [1, 2]
    for kernel in kernels:
        check(kernel, "aten::cat", calls, {})
        assert list(kernel.definition.inputs) == ["tensors_0", "tensors_1"]


def test_broadcasting_either_way_is_two_definitions():
    calls = [(randn(a, 2), randn(b, 2)) for a, b in ((1, 5), (5, 1), (5, 5), (1, 7))]
    kernels, refused = derive(*(call("aten::add.Tensor", *args) for args in calls))
    assert not refused and len(kernels) == 3
    for kernel in kernels:
        check(kernel, "aten::add.Tensor", calls, {})


def test_what_broadcasts_in_the_middle_of_the_sizes_is_seen():
    sizes = [(1, 5, 5), (5, 1, 5), (5, 5, 1), (1, 1, 1)]
    calls = [(randn(a) > 0, randn(b), randn(c)) for a, b, c in sizes]
    kernels, refused = derive(*(call("aten::where.self", *args) for args in calls))
    assert not refused
    for kernel in kernels:
        check(kernel, "aten::where.self", calls, {})


def test_sizes_that_a_decomposition_would_bake_in_leave_the_operator():
    single = derived("aten::roll", (randn(4, 3), [1], [0]))
    several = derived("aten::roll", (randn(4, 3), [1], [0]), (randn(6, 3), [1], [0]))
    assert "reference:decomposition" in single.tags and "reference:operator" in several.tags


def test_an_out_of_another_dtype_gets_it():
    definition = derived("aten::add.out", (randn(4, dtype=BF16), randn(4, dtype=BF16)), out=torch.empty(4))
    assert definition.outputs["out"].dtype == "float32" and ".to(torch.float32)" in definition.reference


def test_no_definition_has_an_axis_that_no_input_has():
    calls = [
        (randn(1, 2, n, 8), randn(3, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1) for n in range(5, 11)
    ]
    kernels, refused = derive(*(call("aten::convolution", *args) for args in calls))
    assert not refused and sum(len(kernel.uses) for kernel in kernels) == len(calls)
    for kernel in kernels:
        check(kernel, "aten::convolution", calls, {})


def test_zero_sizes_and_0d_tensors_have_their_form():
    definition = derived("aten::fill_.Tensor", (torch.empty(0), torch.tensor(1.0)))
    assert shapes(definition) == {"self": ["d0"], "value": [], "self_out": ["d0"]}


def test_layout_is_stated_and_changes_nothing():
    definition = derived("aten::rsqrt", (randn(4, 6).abs().t(),), (randn(6, 6).abs(),))
    assert definition.inputs["self"].description == "Not contiguous in 1 of 2 Calls."
    expanded = derived("aten::rsqrt", (randn(1, 6).abs().expand(4, 6),))
    assert expanded.inputs["self"].description == "Broadcast (stride 0) in 1 of 1 Calls."


def test_a_copy_between_devices_is_a_copy_and_says_so():
    host, device = (TensorSpec((4,), "float32", device=name, storage=i) for i, name in enumerate(("cpu", "cuda:0")))
    args = [Argument(name="self", value=device, written=True), Argument(name="src", value=host)]
    (kernel,) = derive(Call(id=0, operator="aten::copy_", args=args))[0]
    assert "Between devices: self on cuda, src on cpu." in (kernel.definition.description or "")


def test_a_device_is_the_inputs():
    args = [
        Argument(name="self", value=TensorSpec((4,), "float32")),
        Argument(name="device", value=TorchConstant("device", "cuda:0")),
    ]
    args += [Argument(name="dtype", value=TorchConstant("dtype", "bfloat16"))]
    (kernel,) = derive(Call(id=0, operator="aten::to.device", args=args))[0]
    assert "self.device" in kernel.definition.reference and "cuda" not in kernel.definition.reference


def test_a_reference_pins_no_memory():
    """Pinned memory is the host's, and a reference may run on a GPU."""
    kwargs = {"dtype": torch.int32, "device": TorchConstant("device", "cpu"), "pin_memory": True}
    (kernel,), refused = derive(call("aten::zeros", [4], **kwargs))
    assert not refused and "pin_memory" not in kernel.definition.reference
    check(kernel, "aten::zeros", [([4],)], {"dtype": torch.int32})


def test_arguments_without_names_take_the_schemas():
    layer_norm = call("aten::native_layer_norm", *OPERATORS["aten::native_layer_norm"][0])
    bare = layer_norm.model_copy(update={"args": [a.model_copy(update={"name": None}) for a in layer_norm.args]})
    (named,), (unnamed,) = derive(layer_norm)[0], derive(bare)[0]
    assert named.definition == unnamed.definition


DRIFTING = Call(
    id=0,
    operator="aten::fill_.Scalar",
    args=[
        Argument(name="self", value=TensorSpec((4,), "int32"), written=True),
        Argument(name="value", value=Drift("number")),
    ],
)


def test_a_drifting_number_is_a_scalar_input_that_a_sample_tells():
    (kernel,) = derive(DRIFTING)[0]
    assert kernel.definition.inputs["value"].dtype == "int64"
    untold = kernel.uses[0].bind(invocation_of(DRIFTING)).inputs["value"]
    with pytest.raises(Unrecognized):
        untold.get()
    invocation = invocation_of(DRIFTING)
    invocation.arguments["value"] = 7
    assert kernel.uses[0].bind(invocation).inputs["value"].get() == 7


def test_an_invocation_of_other_sizes_or_dtypes_is_declined():
    (kernel,) = derive(call("aten::rsqrt", randn(4)))[0]
    for other in (randn(5), randn(4, dtype=BF16), randn(4, 1), 3):
        with pytest.raises(Unrecognized):
            kernel.uses[0].bind(invocation_of(call("aten::rsqrt", other)))


def test_an_unknown_operator_that_writes_is_its_own_reference():
    args = [Argument(name="out", value=TensorSpec((4,), "float32"), written=True)]
    args += [Argument(name="x", value=TensorSpec((8,), "float32")), Argument(name="mode", value="fast")]
    (kernel,), refused = derive(Call(id=0, operator="absent::op", args=args))
    assert not refused and list(kernel.definition.outputs) == ["out_out"]
    assert "torch.ops.absent.op.default(out_out, x, 'fast')" in kernel.definition.reference
    assert "reference:operator" in kernel.definition.tags


def spec(dtype: str = "float32") -> TensorSpec:
    return TensorSpec((4,), dtype)


REFUSED = {
    "dtype uint8": ("aten::neg", [Argument(name="self", value=spec("uint8"))]),
    "dtype float64": ("aten::neg", [Argument(name="self", value=spec("float64"))]),
    "returns uint8": ("aten::to.dtype", [Argument(value=spec()), Argument(value=TorchConstant("dtype", "uint8"))]),
    "depend on its inputs' values": ("aten::nonzero", [Argument(value=spec())]),
    "sizes depend": ("aten::masked_select", [Argument(value=spec()), Argument(value=spec("bool"))]),
    "random": ("aten::bernoulli", [Argument(value=spec())]),
    "view": ("aten::t", [Argument(value=spec())]),
    "allocates": ("aten::empty_like", [Argument(value=spec())]),
    "does not know": ("absent::op", [Argument(name="x", value=spec())]),
    "returns number": ("aten::item", [Argument(value=spec())]),
    "collective": ("c10d::allreduce_", [Argument(value=spec())]),
    "cannot tell": ("aten::mm", [Argument(value=spec()), Argument(value=spec())]),
    "cannot be a name": ("absent::op", [Argument(name="x): pass #", value=spec(), written=True)]),
    "'from' cannot be": ("absent::op", [Argument(name="from", value=spec(), written=True)]),
    "have one name": (
        "absent::op",
        [Argument(name="x", value=spec(), written=True), Argument(name="x_out", value=spec())],
    ),
    "a number that differs": (
        "aten::topk",
        [Argument(value=spec()), Argument(value=Drift("number")), Argument(value=-1)],
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_definition_holds_is_refused_with_the_reason(reason: str):
    name, args = REFUSED[reason]
    kernels, refused = derive(Call(id=0, operator=name, args=args))
    assert not kernels and reason in refused[0]


def test_a_dropout_of_nothing_draws_no_numbers():
    q, mask = torch.randn(1, 4, 5, 8), torch.rand(5, 5) > 0.3
    attention = "aten::scaled_dot_product_attention"
    assert list(derived(attention, (q, q, q, mask, 0.0)).inputs) == ["query", "key", "value", "attn_mask"]
    _, refused = derive(call(attention, q, q, q, mask, 0.1))
    assert "random" in refused[0]
    (kernel,), refused = derive(*(call(attention, q, q, q, mask, share) for share in (0.0, 0.1)))
    assert [use.call.id for use in kernel.uses] == [0] and list(refused) == [1]


def test_one_bad_call_costs_itself_alone():
    calls = [call("aten::mm", randn(2, 3), randn(3, n)) for n in (2, 4)]
    bad = calls[0].model_copy(update={"args": calls[0].args[:1] * 2})
    kernels, refused = derive(*calls, bad)
    assert list(refused) == [2] and sum(len(kernel.uses) for kernel in kernels) == 2


SEVEN = torch.tensor([0, 3, 1, 0, 2, 5, 1])


@pytest.mark.parametrize(
    ("given", "size"),
    [
        *(((randn(*shape), SEVEN, dim), 12) for shape, dim in [((7,), None), ((3, 7), 1), ((7, 2), 0), ((12, 7), 1)]),
        ((randn(7), torch.ones(7, dtype=I64), None), 7),
        *(((randn(3, 7), torch.tensor(two), 1), 14) for two in (2, [2])),
        ((randn(3, 7), torch.tensor([2]), None), 42),
    ],
)
def test_repeats_that_are_made_up_add_up_to_the_outputs_size(given: tuple[Any, ...], size: int) -> None:
    run_on_made_up_inputs(derived("aten::repeat_interleave.self_Tensor", given, output_size=size), size)


def test_repeats_alone_that_are_made_up_add_up_to_the_outputs_size() -> None:
    run_on_made_up_inputs(derived("aten::repeat_interleave.Tensor", (SEVEN,), output_size=12), 12)


def run_on_made_up_inputs(definition: Definition, size: int) -> None:
    inputs = {name: RandomInput(type="random") for name in definition.inputs}
    prepared = prepare_reference(definition, Workload(uuid="0", axes={}, inputs=inputs), None)
    assert size in prepared.reference(*prepared.arguments).shape
