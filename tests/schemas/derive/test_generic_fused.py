"""Definitions of inductor's fused kernels, by the ATen operators that a Recording keeps beside them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import kcap
from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.derive import derive as derive_recording
from kcap.schemas.derive.generic import derive
from kcap.schemas.derive.generic.family import aten_family, family_of_operators
from kcap.schemas.derive.invocation import invocation_of
from kcap.schemas.derive.kernel import DerivedDefinition
from kcap.schemas.flashinfer.definition import check_definition
from kcap.schemas.recording.recording import Recording, write_recording
from kcap.schemas.recording.records import Argument, Call, Count, Launch, Metadata
from kcap.schemas.recording.values import TensorSpec

FRAGMENT = b"""%arg0_1 : Tensor "f32[s0, 8][8, 1]cpu" = PlaceHolder[target=arg0_1]
%mul : Tensor "f32[s0, 8][8, 1]cpu"[num_users=1] = \
call_function[target=torch.ops.aten.mul.Tensor](args = (%arg0_1, %arg0_1), kwargs = {})
return %mul
call(arg0_1, mul, s0)
"""
NAME = f"{hashlib.sha256(FRAGMENT).hexdigest()}.txt"


def launch(number: int, rows: int, fragment: str | None = NAME) -> Call:
    tensors = {n: TensorSpec((rows, 8), "float32", storage=i) for i, n in enumerate(("in_ptr0", "out_ptr0"))}
    return Call(
        id=number,
        operator="triton::fused_mul.s0123abcd",
        args=[Argument(name=n, value=v) for n, v in {**tensors, "xnumel": rows * 8}.items()],
        launch=Launch(function="fused_mul", fragment=fragment),
        counts=[Count(phase="decode", count=1)],
    )


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    calls = [launch(0, 3), launch(1, 5), launch(2, 7, fragment=None)]
    write_recording(tmp_path / "r.kcap", Metadata(), calls, kernels={NAME: FRAGMENT})
    return kcap.load(tmp_path / "r.kcap")


def kernel_of(recording: Recording) -> DerivedDefinition:
    (found,), _ = derive.derive_generic(recording.calls, recording)
    return found


def test_launches_of_one_fragment_are_one_definition_over_their_sizes(recording: Recording):
    definition = kernel_of(recording).definition
    assert definition.name == "fused_mul_f32_d8" and definition.op_type == "fused"
    assert definition.tags == ["fused", "reference:inductor-fragment"]
    assert definition.inputs["in_ptr0"].shape == definition.outputs["out_ptr0"].shape == ["n0", "d8"]
    assert check_definition(definition) == []


def test_an_invocation_is_bound_by_the_kernels_own_arguments(recording: Recording):
    kernel = kernel_of(recording)
    invocation = invocation_of(kernel.uses[1].call)
    x, out = torch.randn(5, 8), torch.empty(5, 8)
    invocation.arguments |= {"in_ptr0": x, "out_ptr0": out}
    form = kernel.uses[1].bind(invocation)
    assert form.inputs["in_ptr0"].get() is x and form.outputs["out_ptr0"].get() is out
    assert form.sizes()["n0"] == 5
    reference = compile_reference(kernel.definition.reference, "fused")
    torch.testing.assert_close(reference(x), x * x)


def test_a_launch_without_a_fragment_is_refused_with_the_reason(recording: Recording):
    kernels, refused = derive.derive_generic(recording.calls, recording)
    assert len(kernels[0].uses) == 2 and list(refused) == [2]
    assert "told no operators" in refused[2]


def test_a_launch_without_its_recording_is_refused(recording: Recording):
    kernels, refused = derive.derive_generic(recording.calls, None)
    assert not kernels and set(refused) == {0, 1, 2}


@pytest.mark.parametrize(
    ("operators", "family"),
    [
        ("mul convert_element_type add", "pointwise"),
        ("pow mean rsqrt mul add", "rmsnorm"),
        ("var_mean sub rsqrt mul add", "layernorm"),
        ("slice tanh mul add", "activation"),
        ("amax sub exp sum div", "softmax"),
        ("embedding mul", "embedding"),
        ("index slice mul sub cat", "rope"),
        ("full", "fill"),
        ("", ""),
    ],
)
def test_a_fused_kernel_is_of_the_family_whose_work_it_does(operators: str, family: str):
    assert family_of_operators(set(operators.split()), quantizes=False) == family


@pytest.mark.parametrize(("operators", "family"), [("abs amax div", "quantize"), ("mean rsqrt mul", "rmsnorm_quant")])
def test_one_that_quantizes_is_of_that_family(operators: str, family: str):
    assert family_of_operators(set(operators.split()), quantizes=True) == family


def test_its_family_is_known_where_it_gets_no_definition(tmp_path: Path):
    """It reads `buf9`, of which the fragment does not say which of its nodes it is."""
    text = FRAGMENT.replace(b"call(arg0_1, mul, s0)", b"call(buf9, arg0_1, mul, s0)")
    text = b'%buf9 : Tensor "f32[s0, 1][1, s0]cpu" = PlaceHolder[target=buf9]\n' + text
    name = f"{hashlib.sha256(text).hexdigest()}.txt"
    call = launch(0, 3, fragment=name)
    sums = Argument(name="in_ptr9", value=TensorSpec((3, 1), "float32", storage=7))
    call = call.model_copy(update={"args": [sums, *call.args]})
    write_recording(tmp_path / "r.kcap", Metadata(), [call], kernels={name: text})
    recording = kcap.load(tmp_path / "r.kcap")
    derived = derive_recording(recording)
    assert not derived.kernels and "which none of its fragment's operators takes" in derived.refused[0]
    assert derived.family_of() == {0: "pointwise"}
    assert derived.invocations_in_families(recording.calls) == 1


@pytest.mark.parametrize(
    ("operator", "family"),
    [
        ("aten::copy_", "copy"),
        ("aten::to.dtype", "copy"),
        ("aten::reshape", "copy"),
        ("aten::type_as", "copy"),
        ("aten::zero_", "fill"),
        ("aten::zeros_like", "fill"),
        ("aten::new_zeros", "fill"),
        ("aten::index.Tensor", "indexing"),
        ("aten::add.Tensor", "pointwise"),
        ("aten::sub_.Tensor", "pointwise"),
        ("aten::cumsum", ""),
        ("aten::no_such_operator", ""),
        ("vllm::copy_", ""),
    ],
)
def test_an_operator_of_aten_is_of_the_family_that_torch_tags_it_as(operator: str, family: str):
    assert aten_family(operator) == family
