"""Calls of a GPU program: one of each kind that some target has trouble with."""

from __future__ import annotations

from kcap.schemas.recording.recording import Argument, Call, Count, Launch, Metadata
from kcap.schemas.recording.values import Drift, Opaque, TensorSpec

METADATA = Metadata(
    model="kcap/tiny",
    framework="vLLM",
    framework_version="0.32.0",
    device="NVIDIA H200",
    layers_recorded=2,
    layers_model=2,
)


def tensor(*shape, dtype="bfloat16", **more):
    return TensorSpec(shape, dtype, **{"device": "cuda:0", **more})


def call(operator, *args, count=10, **more):
    made = [arg if isinstance(arg, Argument) else Argument(value=arg) for arg in args]
    counts = more.pop("counts", [Count(phase="decode", count=count)])
    return Call(id=more.pop("id", 0), operator=operator, args=made, counts=counts, **more)


WEIGHT = tensor(64, 32, strides=(1, 64))
MM = call(
    "aten::mm",
    tensor(8, 64),
    WEIGHT,
    counts=[Count(phase="prefill", count=30), Count(phase="decode", rank=1, mode="graph", count=70)],
)
ADD = call("aten::add.Tensor", tensor(8), tensor(8), Argument(name="alpha", value=1, keyword=True, default=True))
SCALED = call("aten::mul.Scalar", tensor(8), Argument(name="other", value=Drift("number")))
TROUBLE = {
    "view": call("aten::view", tensor(8, 64), [512], work=False, count=100),
    "region": call("vllm::attention", tensor(8), kind="region", count=5),
    "library": call("_C::rms_norm", tensor(8), tensor(8), 1e-6),
    "name": call("aten::index_select", tensor(8, 8), 0, tensor(4, dtype="int64")),
    "substring": call("aten::embedding_renorm_", tensor(8, 8), tensor(4, dtype="int64"), 1.0, 2.0),
    "integers": call("aten::take", tensor(8), tensor(4, dtype="int64")),
    "fp8": call("aten::_scaled_mm", tensor(8, 64, dtype="float8_e4m3fn"), tensor(64, 32, dtype="float8_e4m3fn")),
    "triton": call("triton::fused.s12345678", tensor(8), launch=Launch(function="fused")),
    "opaque": call("aten::relu_", Opaque("Generator")),
    "empty": call("aten::sub.Tensor", tensor(0, 8, strides=(1, 4)), tensor(8)),
    "stride 0": call("aten::mul.Tensor", tensor(8, 4, strides=(0, 1)), tensor(8, 4)),
    "random": call("aten::bernoulli", tensor(8)),
    "creation": call("aten::clone", tensor(8)),
    "host": call("aten::div.Tensor", tensor(8), tensor(dtype="float32", device="cpu")),
}


def numbered(calls):
    return [one.model_copy(update={"id": number}) for number, one in enumerate(calls)]


def reasons(loss):
    return {lost["operator"]: lost["reason"] for lost in loss["lost"]}
