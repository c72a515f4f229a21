"""Whatever arguments an operator that a family knows is called with: a Definition, or a reason why there is none."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcap.schemas.derive.derive import derive_calls
from kcap.schemas.derive.families import FAMILIES, REFUSALS, family_of
from kcap.schemas.derive.invocation import Invocation, without_data
from kcap.schemas.flashinfer.definition import check_definition
from kcap.schemas.recording.records import Argument, Call, Count, Metadata
from kcap.schemas.recording.values import Drift, Folded, Group, Opaque, TensorSpec, TorchConstant, Value

assert family_of("aten::mm")[1] is not None  # all families are registered from here on
COUNTS = [Count(phase="decode", count=1)]
OPERATORS = sorted(FAMILIES)
RANKS = st.lists(st.sampled_from([0, 1, 2, 16, 128]), max_size=5).map(tuple)
FLOATS = st.sampled_from(["bfloat16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
INTEGERS = st.sampled_from(["int32", "int64", "bool", "uint8", "complex64"])
tensors = st.builds(TensorSpec, RANKS, FLOATS | INTEGERS)
SHAPES = st.sampled_from([(16, 128), (16, 128), (128, 128), (128,), (16,), (1,), (16, 2, 128), (16, 16, 2, 128)])
numbers = st.sampled_from([0, 1, 2, 16, 128, -1, 10**30, 0.0, 1.0, 1e-6, float("nan"), float("inf"), 1j])
words = st.sampled_from(["silu", "vec", "amx", "sum", "none", "a b", ""])
others = st.sampled_from(
    [
        Drift("number"),
        Folded("a*"),
        Opaque("P"),
        Group(2, 0),
        TorchConstant("dtype", "float16"),
        TorchConstant("dtype", "x"),
    ]
)
leaves = st.none() | st.booleans() | numbers | words | others | tensors
values = leaves | st.lists(leaves, max_size=3)


class Asked(dict[str, Any]):
    """Arguments that are drawn when a family first asks for them; `drawn` has them as a Recording would."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__()
        self.data = data
        usual = st.builds(TensorSpec, SHAPES, st.just(data.draw(FLOATS)))
        indices = st.builds(TensorSpec, SHAPES, st.just("int32"))
        likely = [usual, usual, usual, indices, st.none(), st.sampled_from([False, True, 1, 16, 1e-6, "silu"]), values]
        self.kinds = st.sampled_from(likely)
        self.drawn: dict[str, Value] = {}

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self.drawn:
            self.drawn[name] = self.data.draw(self.data.draw(self.kinds), name)
            self[name] = without_data(self.drawn[name], name, {})
        return self[name]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.sampled_from(OPERATORS), st.data())
def test_any_arguments_of_a_known_operator(operator: str, data: st.DataObject):
    asked = Asked(data)
    recognize = family_of(operator)[1]
    assert recognize is not None
    with suppress(*REFUSALS):
        recognize(Invocation(operator, asked))
    args = [Argument(name=name, value=value) for name, value in asked.drawn.items()]
    derived = derive_calls(
        [Call(id=0, operator=operator, args=args, counts=[Count(phase="decode", count=1)])], Metadata()
    )
    assert len(derived.kernels) + len(derived.refused) == 1
    assert all(derived.refused.values())
    for kernel in derived.kernels:
        assert check_definition(kernel.definition) == []


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 0)])
def test_rows_of_no_columns(shape: tuple[int, ...]):
    x, q, scale = (TensorSpec(s, d) for s, d in ((shape, "bfloat16"), (shape, "float8_e4m3fn"), ((1,), "float32")))
    args = [Argument(name=n, value=v) for n, v in (("result", q), ("input", x), ("scale", scale))]
    call = Call(id=0, operator="_C::dynamic_scaled_fp8_quant", args=args, counts=COUNTS)
    assert derive_calls([call], Metadata()).refused[0]


TOPK: dict[str, Value] = {"self": TensorSpec((4, 64), "bfloat16"), "k": 1e300, "dim": -1, "sorted": False}
TABLES = {name: TensorSpec(shape, "int32") for name, shape in (("SliceSizes", (4,)), ("BlockOffs", (3, 5)))}
SCHEDULES: dict[str, Value] = {**TABLES, "BlockSchedule": TensorSpec((2, 9), "int32"), "n_slices": 4, "SIZES": 2}


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("aten::topk", TOPK),  # a name of 300 digits
        ("triton::_ragged_tensor_metadata_memset", {**SCHEDULES, "first_block_size_log2": 1 << 62}),
    ],
)
def test_a_number_that_no_definition_holds(operator: str, arguments: dict[str, Value]):
    args = [Argument(name=name, value=value) for name, value in arguments.items()]
    derived = derive_calls([Call(id=0, operator=operator, args=args, counts=COUNTS)], Metadata())
    assert len(derived.kernels) + len(derived.refused) == 1


def test_torch_logs_no_traceback_of_shapes_that_it_refuses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [caplog.handler])
    a, b = (TensorSpec((2, size), "float32", device="cuda", storage=size) for size in (3, 5))
    args = [Argument(name="self", value=a), Argument(name="other", value=b)]
    derived = derive_calls([Call(id=0, operator="aten::add.Tensor", args=args, counts=COUNTS)], Metadata())
    assert "torch cannot tell its outputs' sizes" in derived.refused[0]
    assert not caplog.records
