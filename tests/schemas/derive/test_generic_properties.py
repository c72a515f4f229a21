"""Whatever Calls there are: each gets a Definition whose reference is the operator, or a reason why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from generic_calls import call, check, derive
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kcap.replay.source import calls_of_trace as trace_calls
from kcap.schemas.backendbench import Problems
from kcap.schemas.derive.derive import derive_calls
from kcap.schemas.flashinfer.definition import check_definition
from kcap.schemas.recording.records import Argument, Call, Metadata
from kcap.schemas.recording.values import Drift, Folded, Opaque, TensorSpec, TorchConstant

TRACES = sorted((Path(__file__).parents[2] / "data/backendbench-traces").glob("*.txt"))
UNARY = ["aten::silu", "aten::neg", "aten::exp", "aten::relu_", "aten::sigmoid", "aten::hardswish", "aten::clone"]
BINARY = ["aten::add.Tensor", "aten::mul.Tensor", "aten::maximum", "aten::lt.Tensor", "aten::copy_", "aten::atan2"]
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
size = st.sampled_from([0, 1, 2, 3, 5])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
generator = torch.Generator().manual_seed(0)


def randn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def holds(name: str, invocations: list[tuple[Any, ...]]) -> None:
    kernels, refused = derive(*(call(name, *args) for args in invocations))
    assert not refused
    assert sum(len(kernel.uses) for kernel in kernels) == len(invocations)
    for kernel in kernels:
        check(kernel, name, invocations, {})


@quick
@given(st.sampled_from(UNARY), st.lists(st.lists(size, max_size=3).map(tuple), min_size=1, max_size=5), dtypes)
def test_elementwise_of_any_shapes(name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype):
    holds(name, [(randn(shape, dtype),) for shape in shapes])


@st.composite
def broadcast(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes, the second of which broadcasts to the first."""
    full = draw(st.lists(size, max_size=3))
    part = [draw(st.sampled_from([n, 1])) for n in full[draw(st.integers(0, len(full))) :]]
    return tuple(full), tuple(part)


@quick
@given(st.sampled_from(BINARY), st.lists(broadcast(), min_size=1, max_size=5), dtypes, st.booleans())
def test_broadcasts_of_any_shapes(name: str, shapes: list[Any], dtype: torch.dtype, swap: bool):
    swap = swap and name != "aten::copy_"  # it writes the first, which has to be the larger one
    pairs = [(randn(a, dtype), randn(b, dtype)) for a, b in shapes]
    holds(name, [(b, a) if swap else (a, b) for a, b in pairs])


@quick
@example([[2, 4], [4, 2], [2, 3]])  # the extremes of either size have the same sum
@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=5))
def test_concatenations_of_any_sizes(sizes: list[list[int]]):
    holds("aten::cat", [([randn((n, 3), torch.float32) for n in rows], 0) for rows in sizes])


DTYPES = st.sampled_from(["float32", "bfloat16", "int64", "bool", "uint8", "float8_e4m3fn", "complex64"])
specs = st.builds(
    TensorSpec, st.lists(size, max_size=4).map(tuple), DTYPES, device=st.sampled_from(["cpu", "cuda:0", "xpu"])
)
constants = st.sampled_from(["dtype", "layout", "memory_format", "device", "triton"]).flatmap(
    lambda kind: st.builds(TorchConstant, st.just(kind), st.sampled_from(["float16", "strided", "cuda", "nn", "x"]))
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.complex_numbers(),
    specs,
    constants,
    st.builds(Drift, st.just("number")),
    st.builds(Folded, st.text(max_size=3)),
    st.builds(Opaque, st.text(max_size=3)),
)
arguments = st.builds(
    Argument,
    name=st.one_of(st.none(), st.sampled_from(["self", "out", "dim", "from", "a b", "x"])),
    value=specs | st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6),
    keyword=st.booleans(),
    default=st.booleans(),
    written=st.booleans(),
)
names = st.sampled_from(
    [*UNARY, *BINARY, "aten::cat", "aten::to.dtype", "aten::convolution", "aten::topk", "x::y", "?"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(names, st.lists(arguments, max_size=4)), max_size=6))
def test_any_call_has_a_definition_or_a_reason(made: list[tuple[str, list[Argument]]]):
    calls = [Call(id=i, operator=name, args=args) for i, (name, args) in enumerate(made)]
    kernels, refused = derive(*calls)
    held = [use.call.id for kernel in kernels for use in kernel.uses]
    assert sorted([*held, *refused]) == list(range(len(calls)))
    assert all(refused.values())
    for kernel in kernels:
        assert check_definition(kernel.definition) == []


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_every_call_of_a_trace_file_has_a_definition_or_a_reason(path: Path):
    calls = [c for c in trace_calls(path, Problems()) if c.work]
    derived = derive_calls(calls, Metadata())
    held = [use.call.id for kernel in derived.kernels for use in kernel.uses]
    assert sorted([*held, *derived.refused]) == [c.id for c in calls]
    assert len(held) > 0.8 * len(calls)
    for kernel in derived.kernels:
        assert check_definition(kernel.definition) == []
