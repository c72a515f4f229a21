"""Calls that families know, with their arguments named as an engine's recorder names them."""

from __future__ import annotations

from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, Sample, SampledTensor
from kcap.schemas.recording.values import TensorSpec, Value

METADATA = Metadata(model="meta-llama/Llama-3.1-8B", framework="vLLM", layers_recorded=2, layers_model=2)
VOCABULARY, HIDDEN = 100, 32


def call(number: int, operator: str, count: int = 6, phase: str = "decode", **arguments: Value) -> Call:
    args = [Argument(name=name, value=value) for name, value in arguments.items()]
    return Call(id=number, operator=operator, args=args, counts=[Count(phase=phase, count=count)])


def floats(*shape: int, storage: int = 0) -> TensorSpec:
    return TensorSpec(shape, "bfloat16", storage=storage)


def ints(*shape: int, storage: int = 0) -> TensorSpec:
    return TensorSpec(shape, "int64", storage=storage)


def linear(number: int, tokens: int, count: int = 6) -> Call:
    phase = "decode" if tokens == 1 else "prefill"
    weight = floats(16, HIDDEN, storage=1)
    return call(number, "aten::linear", count, phase, input=floats(tokens, HIDDEN), weight=weight, bias=None)


def embedding(number: int, tokens: int) -> Call:
    return call(number, "aten::embedding", weight=floats(VOCABULARY, HIDDEN), indices=ints(tokens, storage=1))


def ranged(number: int, low: int, high: int) -> Sample:
    """A Sample of an embedding whose ids were not kept, only their range."""
    return Sample(call=number, phase="decode", tensors={"1": SampledTensor(low=low, high=high)})
