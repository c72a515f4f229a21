"""The cost of Calls as replay rebuilds them, and of Definitions on Workloads: by family, by op_type, or in part."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import Values, call, tensor

from kcap.replay.datasets.inputs import make_inputs
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.replay.roofline.cost import cost_of_call, cost_of_workload
from kcap.replay.roofline.sweeps import sweeps_all
from kcap.schemas.derive.cost import Cost, cost_of_instance, distinct_bytes
from kcap.schemas.derive.families import recognize
from kcap.schemas.derive.invocation import Invocation
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, DefinitionTensor
from kcap.schemas.recording.recording import Call, Sample
from kcap.schemas.recording.values import TensorSpec

DATASET = Path(__file__).parents[2] / "data" / "flashinfer-trace"
Write = Callable[..., Path]


def cost(one: Call, sample: Sample | None = None, root: Path | None = None, cut: bool = True) -> Cost | None:
    rebuilder = Rebuilder("cpu", "cpu", root)
    resolved = rebuilder.resolve(one, sample, timed=cut)
    return cost_of_call(one, resolved, rebuilder.build(resolved))


def of(operator: str, *values: Any, **more: Any) -> Cost | None:
    return cost(call(operator, *values, **more))


def test_a_call_that_a_family_knows():
    read = 4 * (8 * 64 + 64 * 32)
    assert of("aten::mm", tensor(8, 64), tensor(64, 32, storage=1)) == Cost(
        read + 4 * 8 * 32, read, 2 * 8 * 64 * 32, "float32"
    )


def test_one_tensor_given_twice_is_read_once():
    found = of("aten::mm", tensor(64, 64), tensor(64, 64))
    assert found is not None and found.read == 4 * 64 * 64 and found.bytes == 2 * 4 * 64 * 64
    assert of("aten::mul.Tensor", tensor(64, 64), tensor(64, 64)) == Cost(2 * 4 * 64 * 64, 4 * 64 * 64, 0, "float32")


@pytest.mark.parametrize(("operator", "written"), [("aten::neg", 4 * 64), ("aten::sum", 4)])
def test_a_result_of_one_dimension_or_none_is_one_tensor(operator: str, written: int):
    assert of(operator, tensor(64)) == Cost(4 * 64 + written, 4 * 64, 0, "float32")


def test_a_lookup_reads_the_rows_of_its_sample(recorded: Write, values: Values):
    table, ids = tensor(1000, 16), tensor(6, dtype="int64", storage=1)
    one = call("aten::embedding", table, ids)
    kept = values([5, 5, 9, 5, 9, 5], torch.int64)
    sample = Sample(call=0, step=0, phase="decode", tensors={"1": kept})
    found = cost(one, sample, recorded([one], [sample]))
    assert found == Cost(4 * 16 * (6 + 2) + 6 * 8, 4 * 16 * 2 + 6 * 8, 0, "float32")


ELEMENTS = 4 * 1000 * 16
X, Y, OUT = tensor(1000, 16), tensor(1000, 16, storage=1), tensor(1000, 16, storage=2)
ROW, IDS = tensor(16, storage=1), tensor(5, dtype="int64", storage=1)


@pytest.mark.parametrize(
    ("operator", "arguments", "read", "written"),
    [
        ("aten::add.Tensor", [X, Y], 2 * ELEMENTS, ELEMENTS),
        ("aten::add.Tensor", [X, ROW], ELEMENTS + 64, ELEMENTS),
        ("aten::add_.Tensor", [X, Y], 2 * ELEMENTS, ELEMENTS),
        ("aten::add.out", [X, Y, 1, OUT], 2 * ELEMENTS, ELEMENTS),
        ("aten::copy_", [X, Y], ELEMENTS, ELEMENTS),
        ("aten::fill_.Scalar", [X, 1.0], 0, ELEMENTS),
        ("aten::cat", [[X, Y]], 2 * ELEMENTS, 2 * ELEMENTS),
        ("aten::_softmax", [X, -1, False], ELEMENTS, ELEMENTS),
        ("aten::sum.dim_IntList", [X, [1]], ELEMENTS, 4000),
        ("aten::argmax", [X, 1], ELEMENTS, 8000),
        ("aten::sort", [X], ELEMENTS, 3 * ELEMENTS),
        ("aten::_to_copy", [TensorSpec((1000, 16), "float32")], ELEMENTS, ELEMENTS),
        ("aten::add.Tensor", [TensorSpec((1000, 16), "float32", strides=(0, 1)), Y], ELEMENTS + 64, ELEMENTS),
    ],
)
def test_operators_that_read_and_write_all(operator: str, arguments: list[Any], read: int, written: int):
    found = of(operator, *arguments)
    assert found is not None and (found.read, found.bytes) == (read, read + written)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("aten::index_select", [X, 0, IDS]),
        ("aten::gather", [X, 0, tensor(5, 16, dtype="int64", storage=1)]),
        ("aten::index.Tensor", [X, [IDS]]),
        ("aten::where.self", [tensor(1000, 16, dtype="bool", storage=2), X, Y]),
        ("aten::tril", [X]),
        ("aten::any", [X]),
        ("aten::slice_scatter", [X, ROW]),
        ("aten::nonzero", [X]),
    ],
)
def test_of_operators_that_pick_nothing_is_claimed(operator: str, arguments: list[Any]):
    assert of(operator, *arguments) is None


def test_no_work_costs_nothing():
    assert of("aten::view", X, [16000], work=False) is None
    assert of("aten::contiguous", X) is None
    assert of("aten::add.Tensor", tensor(0, 16), tensor(0, 16, storage=1)) is None
    assert of("aten::to.dtype", X, 6) is None, "it may return its input"
    assert of("aten::copy_", X, X) is None


def test_pointwise_is_what_torch_tags_so_and_more_by_name():
    assert sweeps_all("aten::silu") and sweeps_all("aten::cat") and sweeps_all("aten::mul.Tensor")
    assert not any(
        map(sweeps_all, ("aten::where.self", "aten::embedding", "aten::no_such", "aten::masked_fill.Scalar"))
    )


def definition(name: str, op_type: str, inputs: dict[str, Any], outputs: dict[str, Any], **axes: int) -> Definition:
    """Axes with a size are constant; a tensor is its dtype and the names of its axes."""

    def tensors(given: dict[str, Any]) -> dict[str, DefinitionTensor]:
        return {
            n: DefinitionTensor(shape=shape.split() if shape is not None else None, dtype=d)
            for n, (d, shape) in given.items()
        }

    named = {axis for _, shape in (*inputs.values(), *outputs.values()) for axis in (shape or "").split()}
    return Definition(
        name=name,
        op_type=op_type,
        axes={axis: AxisConst(value=axes[axis]) if axis in axes else AxisVar() for axis in sorted(named)},
        inputs=tensors(inputs),
        outputs=tensors(outputs),
        reference=f"def run({', '.join(inputs)}):\n    pass\n",
    )


BF16, F32, I32 = "bfloat16", "float32", "int32"
GEMM = definition("g", "gemm", {"A": (BF16, "M K"), "B": (BF16, "N K")}, {"C": (BF16, "M N")}, N=32, K=64)
UNKNOWN = definition("u", "gdn", {"x": (BF16, "M K"), "state": (BF16, "M N")}, {"y": (F32, "M K")}, N=32, K=64)
LOGITS = definition("l", "sampling", {"logits": (F32, "B V")}, {"samples": ("int64", "B")}, V=100)
PROBS = definition("p", "sampling", {"probs": (F32, "B V")}, {"samples": ("int64", "B")}, V=100)


def zeros(of: Definition, **sizes: int) -> dict[str, torch.Tensor]:
    return {n: torch.zeros(of.sizes(t.shape or (), sizes), dtype=getattr(torch, t.dtype)) for n, t in of.inputs.items()}


def test_a_gemm_of_any_dataset_is_counted_by_the_axis_that_is_summed():
    found = cost_of_workload(GEMM, zeros(GEMM, M=8))
    assert found == Cost(2 * (8 * 64 + 32 * 64 + 8 * 32), 2 * (8 * 64 + 32 * 64), 2 * 8 * 32 * 64, BF16)


def test_what_has_no_output_need_read_nothing():
    assert cost_of_workload(GEMM, zeros(GEMM, M=0)) is None


def test_of_an_op_type_that_nobody_knows_the_outputs_are_written():
    assert cost_of_workload(UNKNOWN, zeros(UNKNOWN, M=8)) == Cost(4 * 8 * 64, 0, 0, BF16)


def test_inputs_that_are_not_those_of_the_op_type_count_for_their_outputs_alone():
    odd = GEMM.model_copy(update={"op_type": "gqa_paged"})
    assert cost_of_workload(odd, zeros(odd, M=8)) == Cost(2 * 8 * 32, 0, 0, BF16)


def test_a_copy_has_no_floor_for_its_input_may_be_the_answer():
    for op_type in ("copy", "clone", "to"):
        same = definition("c", op_type, {"x": (F32, "N")}, {"y": (F32, "N")})
        assert cost_of_workload(same, {"x": torch.ones(9)}) is None


def test_pointwise_op_types_read_all():
    silu = definition("s", "silu", {"x": (F32, "N")}, {"y": (F32, "N")})
    assert cost_of_workload(silu, {"x": torch.ones(9)}) == Cost(72, 36, 0, F32)


def test_sampling_reads_all_logits_and_half_of_the_probabilities():
    logits, probs = (cost_of_workload(one, zeros(one, B=3)) for one in (LOGITS, PROBS))
    assert logits == Cost(1200 + 24, 1200, 0, F32) and probs == Cost(600 + 24, 600, 0, F32)


PAGED = definition(
    "gqa_paged_decode_h8_kv2_d64_ps16",
    "gqa_paged",
    {
        "q": (BF16, "batch_size h d"),
        "k_cache": (BF16, "num_pages ps kv d"),
        "v_cache": (BF16, "num_pages ps kv d"),
        "kv_indptr": (I32, "len_indptr"),
        "kv_indices": (I32, "num_kv_indices"),
        "kv_last_page_len": (I32, "batch_size"),
        "sm_scale": (F32, None),
    },
    {"output": (BF16, "batch_size h d"), "lse": (F32, "batch_size h")},
    h=8,
    d=64,
    kv=2,
    ps=16,
)


def paged(indices: list[int]) -> dict[str, Any]:
    """Three sequences: two pages of which the last has 5 rows, none, one of 9 rows."""
    cache = torch.zeros(100, 16, 2, 64, dtype=torch.bfloat16)
    made = {"q": torch.zeros(3, 8, 64, dtype=torch.bfloat16), "k_cache": cache, "v_cache": cache, "sm_scale": 0.1}
    numbers = {"kv_indptr": [0, 2, 2, 3], "kv_indices": indices, "kv_last_page_len": [5, 3, 9]}
    return {**made, **{name: torch.tensor(given, dtype=torch.int32) for name, given in numbers.items()}}


def test_attention_of_a_dataset_reads_the_rows_in_use():
    found = cost_of_workload(PAGED, paged([7, 8, 9]))
    assert found is not None and found.flops == 4 * 8 * 64 * (21 + 9)
    assert found.read == 2 * 2 * 64 * 2 * (21 + 9) + 2 * 2 * 8 * 64
    assert found.bytes == found.read + 3 * 8 * (2 * 64 + 4)
    shared = cost_of_workload(PAGED, paged([7, 8, 7]))
    assert shared is not None and shared.flops == found.flops and found.read - shared.read == 2 * 2 * 64 * 2 * 9


def test_a_window_counts_if_the_name_tells_it_and_nothing_is_known_if_only_the_reference_does():
    window = PAGED.model_copy(update={"name": "gqa_paged_decode_window3_h8"})
    found = cost_of_workload(window, paged([7, 8, 9]))
    assert found is not None and found.flops == 4 * 8 * 64 * 8
    hidden = PAGED.model_copy(update={"reference": PAGED.reference + "    # sliding window\n"})
    assert cost_of_workload(hidden, paged([7, 8, 9])) == Cost(3 * 8 * (2 * 64 + 4), 0, 0, BF16)


def test_every_definition_of_flashinfers_dataset_costs_no_more_than_all_of_its_tensors():
    """And those with FLOPs have the ones that their op_type's arithmetic has."""
    dataset, counted = Dataset.load(DATASET), set()
    for one in dataset.definitions.values():
        for workload in dataset.workloads.get(one.name, [])[:1]:
            made = make_inputs(one, workload, dataset, limit=1 << 29) if small(one, workload.axes) else None
            if made is None:
                continue
            given = dict(zip(one.inputs, made.inputs, strict=True))
            found = cost_of_workload(one, given)
            every = sum(distinct_bytes(value) for value in given.values() if isinstance(value, torch.Tensor))
            assert found is not None and 0 <= found.read <= every and found.read < found.bytes, one.name
            counted.add((one.op_type, found.flops > 0))
    assert {("gemm", True), ("gqa_paged", True), ("rmsnorm", False)} <= counted


def small(one: Definition, axes: dict[str, int]) -> bool:
    sizes = [one.sizes(t.shape, axes) for t in one.inputs.values() if t.shape]
    return sum(int(torch.Size(size).numel()) for size in sizes) < 1 << 25


@pytest.mark.parametrize("seed", range(4))
def test_a_family_and_its_definition_agree(seed: int):
    """What a Call costs, and what its Definition costs on the same tensors."""
    drawn = random.Random(seed)
    m, n, k = (drawn.choice([1, 8, 40]) for _ in range(3))
    a, b, ids = torch.randn(m, k), torch.randn(n, k), torch.randint(0, n, (m, 2))
    moe = {"hidden_states": a, "w1": torch.randn(n, 16, k), "w2": torch.randn(n, k, 8)}
    calls = [
        ("aten::linear", {"input": a, "weight": b, "bias": None}),
        ("aten::bmm", {"self": a[None], "mat2": b.T[None]}),
        ("aten::embedding", {"weight": b, "indices": ids}),
        ("aten::rms_norm", {"input": a, "normalized_shape": [k], "weight": b[0], "eps": 1e-5}),
        ("_C::fused_experts_cpu", {**moe, "topk_weights": torch.rand(m, 2), "topk_ids": ids}),
        ("aten::_grouped_mm", {"self": a, "mat2": torch.randn(1, k, n), "offs": torch.tensor([m], dtype=torch.int32)}),
        ("aten::argmax", {"self": torch.randn(m, 2000), "dim": -1}),
        ("aten::scaled_dot_product_attention", {name: torch.randn(2, 4, m, 16) for name in ("query", "key", "value")}),
    ]
    rows, cache = {"values": torch.randn(m, 2, 8), "accumulate": False}, torch.randn(100, 16)
    calls.append(("aten::index_put_", {"self": cache.view(100, 2, 8), "indices": [torch.arange(m)], **rows}))
    heads = {name: torch.randn(m, 2, 8) for name in "qkv"} | {"cos_sin_cache": torch.randn(9, 8), "is_neox": True}
    places = {"positions": torch.arange(m) % 9, "out_loc": torch.arange(m), "k_cache": cache, "v_cache": cache}
    calls.append(("sglang::apply_rope_inplace_with_kvcache", {**heads, **places}))
    for operator, arguments in calls:
        form = recognize(Invocation(operator, arguments))
        assert form is not None, operator
        by_family = cost_of_instance(form)
        by_type = cost_of_workload(form.definition(), {name: slot.get() for name, slot in form.inputs.items()})
        assert by_type is not None
        small_inputs = 8 * (m + 3)  # offsets, which one of them counts
        assert abs(by_type.bytes - by_family.bytes) <= small_inputs, operator
        if by_type.flops and "attention" not in operator:
            assert by_type.flops == by_family.flops, operator
        assert by_type.flops <= by_family.flops, operator
