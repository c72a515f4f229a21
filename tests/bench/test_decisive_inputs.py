"""On the inputs that the judge draws, references pass with room to spare, and who skips a part of the work does not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from bench_datasets import of
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.accuracy import Truth
from kcap.bench.accuracy.rounding import rounds_to
from kcap.bench.judge.reference import without_copies
from kcap.replay.datasets.invocations import InvocationDraws
from kcap.replay.datasets.reference import argument_order, compile_reference, named_outputs
from kcap.replay.datasets.spreads import spreads_for
from kcap.replay.datasets.workloads import default_workload
from kcap.schemas.derive.families import recognize
from kcap.schemas.derive.invocation import Invocation
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, RandomInput, ScalarInput, Workload, read

DATASET = Path(__file__).parents[1] / "data" / "flashinfer-trace" / "definitions"
PUBLISHED = [
    "rmsnorm/rmsnorm_h7168",
    "rmsnorm/rmsnorm_h128",
    "rmsnorm/fused_add_rmsnorm_h4096",
    "gemm/gemm_n128_k2048",
    "gemm/gemm_n2048_k4096",
    "gqa_paged/gqa_paged_decode_h32_kv8_d128_ps1",
    "gqa_paged/gqa_paged_prefill_causal_h20_kv4_d128_ps64",
    "gqa_ragged/gqa_ragged_prefill_causal_h32_kv4_d128",
    "mla_paged/mla_paged_decode_h16_ckv512_kpe64_ps64",
    "mla_ragged/mla_ragged_prefill_causal_h8_qk192_vo128",
    "gdn/gdn_decode_qk8_v16_d128_k_last",
    "mamba_ssu/mamba_ssu_decode_h64_d64_s128_ng4",
]


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int64)


CACHE_UPDATE = "_C_cache_ops::reshape_and_cache_flash"
SLOTS = {"query_start_loc": ints(3), "positions": ints(64), "block_table": ints(2, 8), "slot_mapping": ints(64)}
CALLS = {
    "aten::layer_norm": {"input": bf16(4, 512), "normalized_shape": [512], "weight": bf16(512), "bias": bf16(512)},
    "aten::softmax": {"self": bf16(4, 32000), "dim": -1},
    "aten::topk": {"self": torch.zeros(4, 512), "k": 8},
    "aten::argmax": {"self": torch.zeros(4, 32000), "dim": -1},
    "aten::mm": {"self": bf16(4, 512), "mat2": bf16(512, 64)},
    "aten::embedding": {"weight": bf16(100, 64), "indices": ints(7)},
    "_C::silu_and_mul": {"result": bf16(4, 512), "input": bf16(4, 1024)},
    "_C::rms_norm": {"result": bf16(4, 512), "input": bf16(4, 512), "weight": bf16(512), "epsilon": 1e-6},
    CACHE_UPDATE: {
        "key": bf16(5, 2, 64),
        "value": bf16(5, 2, 64),
        "key_cache": bf16(4, 16, 2, 64),
        "value_cache": bf16(4, 16, 2, 64),
        "slot_mapping": ints(5),
    },
    "_moe_C::topk_softmax": {
        "topk_weights": torch.zeros(16, 8),
        "topk_indices": torch.zeros(16, 8, dtype=torch.int32),
        "gating_output": bf16(16, 128),
        "renormalize": True,
    },
    "_C::static_scaled_fp8_quant": {
        "result": torch.zeros(4, 512, dtype=torch.float8_e4m3fn),
        "input": bf16(4, 512),
        "scale": torch.ones(1),
    },
    "_C::dynamic_scaled_int8_quant": {
        "result": torch.zeros(4, 512, dtype=torch.int8),
        "input": bf16(4, 512),
        "scale": torch.zeros(4, 1),
    },
}


def in_both_precisions(definition, workload, spread, draws=3):
    """The reference's outputs on each draw, in the dtype of its inputs and in float64."""
    drawn, run = InvocationDraws(definition, workload, None, 11, spread), compile_reference(definition.reference, "x")
    for number in range(draws):
        inputs = dict(zip(definition.inputs, drawn.draw(5, number), strict=True))
        outputs = []
        for upcast in (False, True):
            values = {name: copied(value, upcast) for name, value in inputs.items()}
            returned = named_outputs(definition, run(*(values[name] for name in argument_order(definition))))
            outputs.append([returned[name] for name in definition.outputs])
        yield outputs[0], [out.double() if out.dtype.is_floating_point else out for out in outputs[1]]


def copied(value, upcast):
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return value.double() if upcast and plain else value.clone()


@pytest.mark.parametrize("name", PUBLISHED)
def test_references_that_were_published_pass_with_room_to_spare(name):
    definition = read(DATASET / f"{name}.json")
    for own, higher in in_both_precisions(definition, default_workload(definition), spreads_for(definition)[0]):
        assert max(off.error for off in Truth(higher).differences(own)) < 0.6, name


@pytest.mark.parametrize("operator", CALLS)
def test_references_of_families_pass_with_room_to_spare(operator):
    kernel = recognize(Invocation(operator, CALLS[operator]))
    assert kernel is not None
    definition = kernel.definition()
    axes = {name: size for name, size in kernel.sizes().items() if name in definition.var_axes}
    workload = Workload(uuid="one", axes=axes, inputs=dict.fromkeys(definition.inputs, RandomInput()))
    for own, higher in in_both_precisions(definition, workload, spreads_for(definition)[0]):
        assert rounds_to(definition, own, higher, {})
        assert max(off.error for off in Truth(higher).differences(own)) < 0.6


def test_a_scale_is_positive():
    """Else a quantized output is zero, whatever its input is."""
    kernel = recognize(Invocation("_C::static_scaled_fp8_quant", CALLS["_C::static_scaled_fp8_quant"]))
    assert kernel is not None
    drawn = InvocationDraws(kernel.definition(), default_workload(kernel.definition()), None, 3)
    assert all(drawn.draw(seed, 0)[1] > 0 for seed in range(9))


def test_a_familys_cache_is_written_in_place_where_the_reference_is_timed():
    kernel = recognize(Invocation(CACHE_UPDATE, CALLS[CACHE_UPDATE]))
    assert kernel is not None
    definition = kernel.definition()
    assert definition.written_inputs == {"k_cache": "k_cache_out", "v_cache": "v_cache_out"}
    drawn = InvocationDraws(definition, default_workload(definition), None, 1).draw(1, 1)
    pure, in_place = (compile_reference(of_.reference, "x") for of_ in (definition, without_copies(definition)))
    expected = pure(*drawn)
    written = in_place(*drawn)
    assert all(torch.equal(out, right) for out, right in zip(written, expected, strict=True))
    assert [out.data_ptr() for out in written] == [cache.data_ptr() for cache in drawn[2:4]]


ROWS = {"x": of("M D", "bfloat16"), "w": of("D", "bfloat16")}
NORM = "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()"
LAYER = "F.layer_norm(x, (x.shape[-1],), w.float())"
SHORTCUTS = {
    "a norm of nothing": (16384, NORM, lambda x, w: x * w),
    "a norm with a usual scale": (16384, NORM, lambda x, w: x * w / x.pow(2).mean().sqrt()),
    "a norm by half of the row": (16384, NORM, lambda x, w: x * x[:, ::2].pow(2).mean(-1, True).rsqrt() * w),
    "a norm that leaves out what stands out": (
        4096,
        NORM,
        lambda x, w: x * x.clamp(-8, 8).pow(2).mean(-1, True).rsqrt() * w,
    ),
    "no mean": (16384, LAYER, lambda x, w: x / x.var(-1, correction=0, keepdim=True).sqrt() * w),
    "no variance": (16384, LAYER, lambda x, w: (x - x.mean(-1, True)) * w),
    "a constant log-sum-exp": (128256, "x.logsumexp(-1)", lambda x, w: torch.full((4,), math.log(128256) + 0.5)),
    "a maximum for a log-sum-exp": (128256, "x.logsumexp(-1)", lambda x, w: x.amax(-1)),
    "a softmax of a usual sum": (128256, "x.softmax(-1)", lambda x, w: x.exp() / 128256 / math.exp(0.5)),
    "a maximum of a part": (4096, "x.abs().amax(-1)", lambda x, w: x[:, :2048].abs().amax(-1)),
    "a mean of a part": (4096, "x.mean(-1)", lambda x, w: x[:, :1024].mean(-1)),
    "no sum": (16384, "x.sum(-1)", lambda x, w: torch.zeros(4)),
}


@pytest.mark.parametrize("name", SHORTCUTS)
def test_who_skips_work_is_wrong(name):
    columns, body, shortcut = SHORTCUTS[name]
    shape = "M D" if "keepdim" in body or "layer_norm" in body or "softmax" in body else "M"
    definition = Definition(
        name="rows",
        op_type="test",
        axes={"M": AxisVar(), "D": AxisConst(value=columns)},
        inputs=ROWS,
        outputs={"y": of(shape, "bfloat16")},
        reference=f"import torch\nimport torch.nn.functional as F\n\n\ndef run(x, w):\n    x = x.float()\n"
        f"    return ({body}).to(torch.bfloat16)\n",
    )
    workload = Workload(uuid="one", axes={"M": 4}, inputs=dict.fromkeys(ROWS, RandomInput()))
    drawn, run = InvocationDraws(definition, workload, None, 3), compile_reference(definition.reference, "rows")
    wrong = 0
    for seed in range(9):  # as many as the judge compares at most
        x, w = drawn.draw(seed, 0)
        truth = Truth([run(x.double(), w.double()).double()], [run(x, w)])
        assert truth.differences([run(x, w)])[0].error < 0.6
        wrong += truth.differences([shortcut(x.float(), w.float()).bfloat16()])[0].error > 1
    assert wrong >= 3, wrong


PASSED = """    state = torch.zeros_like(states[0])
    for chunk, decay in zip(states, dA_cumsum[:, :, -1].exp().T):
        state = state * decay[:, None] + chunk
    return state.bfloat16()
"""
SCANNED = """    state = torch.zeros_like(x[0])
    for token, value in enumerate(x):
        state = state * {decay} + value
    return state.bfloat16()
"""
HISTORIES = {  # op_type: inputs, the last state, and as much of the past as would do if states decayed quickly
    "mamba2_state_passing": ({"states": of("M H S"), "dA_cumsum": of("H M L")}, PASSED, 1),
    "selective_scan": ({"x": of("M H"), "A": of("H")}, SCANNED.format(decay="A.exp()"), 16),
    "gdn": ({"x": of("M H"), "A_log": of("H")}, SCANNED.format(decay="torch.exp(-A_log.exp())"), 200),
    "gdn_chunk_cumsum": ({"x": of("M H"), "g": of("M H")}, SCANNED.format(decay="g[token].exp()"), 200),
}


@pytest.mark.parametrize("op_type", HISTORIES)
def test_who_leaves_out_what_is_long_ago_is_wrong(op_type):
    inputs, body, history = HISTORIES[op_type]
    sizes = {"H": 32, "L": 256, "S": 16}
    definition = Definition(
        name="recurrence",
        op_type=op_type,
        axes={"M": AxisVar()} | {name: AxisConst(value=size) for name, size in sizes.items()},
        inputs=inputs,
        outputs={"state": of("H S" if "dA_cumsum" in inputs else "H", "bfloat16")},
        reference=f"import torch\n\n\ndef run({', '.join(inputs)}):\n{body}",
    )
    workload = Workload(uuid="one", axes={"M": 400}, inputs=dict.fromkeys(inputs, RandomInput()))
    drawn, run = InvocationDraws(definition, workload, None, 3), compile_reference(definition.reference, "recurrence")
    for seed in range(3):
        values = drawn.draw(seed, 0)
        recent = [
            value.narrow(shape.index("M"), 400 - history, history) if "M" in shape else value
            for value, shape in zip(values, (tensor.shape for tensor in inputs.values()), strict=True)
        ]
        assert Truth([run(*values)]).differences([run(*recent)])[0].error > 1


def test_what_rules_make_leaves_nothing_to_guess():
    """A single expert has a weight, too, positions lie on all pages of a table, and some sequences are padding."""
    kernel = recognize(Invocation("_C::compute_slot_mapping_kernel_impl", {**SLOTS, "block_size": 16}))
    assert kernel is not None
    positions = InvocationDraws(kernel.definition(), default_workload(kernel.definition(), 8), None, 3).draw(1, 1)[1]
    assert len((positions // 16).unique()) > 4
    lengths = of("M", "int32", description="Tokens of each sequence; 0: a row of padding.")
    padded = Definition(
        name="padded",
        op_type="gqa_paged",
        axes={"M": AxisVar(), "K": AxisConst(value=4)},
        inputs={"block_table": of("M K", "int32"), "seq_lens": lengths},
        outputs={"y": lengths},
        reference="def run(block_table, seq_lens):\n    return seq_lens\n",
    )
    workload = Workload(uuid="one", axes={"M": 64}, inputs=dict.fromkeys(padded.inputs, RandomInput()))
    drawn = InvocationDraws(padded, workload, None, 3).draw(1, 1)[1]
    assert 0 < (drawn == 0).sum() < 32 and drawn[0] > 0
    shape = of("M K", "float32")
    routed = Definition(
        name="routed",
        op_type="moe",
        axes={"M": AxisVar(), "K": AxisConst(value=1)},
        inputs={"topk_weights": shape},
        outputs={"y": shape},
        reference="def run(topk_weights):\n    return topk_weights\n",
    )
    workload = Workload(uuid="one", axes={"M": 64}, inputs={"topk_weights": RandomInput()})
    (weights,) = InvocationDraws(routed, workload, None, 3).draw(1, 1)
    assert 0 < weights.min() < 0.5 < weights.max() < 1


STARTS = {
    "mamba2_chunk_scan": ("chunk_starts:M", "chunk_ends:M", "seq_idx:M"),
    "mamba2_state_passing": ("last_chunk_indices:num_seqs", "states:num_chunks"),
    "gdn_chunk_state": ("cu_seqlens:len_indptr", "chunk_indices:num_chunks pair"),
    "cache_gather": (
        "block_table:num_seqs M",
        "workspace:total_tokens",
        "cu_seq_lens:len_indptr",
        "seq_starts:num_seqs",
    ),
    "lora_shrink": (
        "lora_ids:num_seqs",
        "num_tokens_per_lora:num_seqs",
        "lora_token_start_loc:len_indptr",
        "token_indices_sorted_by_lora_ids:total_tokens",
        "lora_a:num_seqs M M",
    ),
}


@pytest.mark.parametrize("op_type", STARTS)
def test_where_sequences_and_chunks_begin_differs_from_draw_to_draw(op_type):
    shapes = dict(text.split(":") for text in STARTS[op_type])
    floats = ("states", "workspace", "lora_a")
    sizes = {"M": 40, "num_chunks": 40, "num_seqs": 4, "len_indptr": 5, "total_tokens": 600}
    const = {"pair": 2, "chunk_size": 16, "page_size": 16}
    definition = Definition(
        name="starts",
        op_type=op_type,
        axes={name: AxisVar() for name in sizes} | {name: AxisConst(value=size) for name, size in const.items()},
        inputs={name: of(shape, "float32" if name in floats else "int32") for name, shape in shapes.items()},
        outputs={"y": of("M")},
        reference=f"def run({', '.join(shapes)}):\n    return None\n",
    )
    workload = Workload(uuid="one", axes=sizes, inputs=dict.fromkeys(shapes, RandomInput()))
    drawn = InvocationDraws(definition, workload, None, 3)
    first, second = (dict(zip(shapes, drawn.draw(seed, 0), strict=True)) for seed in (1, 2))
    assert all(not torch.equal(first[name], second[name]) for name in shapes if name != "lora_ids")
    if op_type == "mamba2_chunk_scan":
        lengths = first["chunk_ends"] - first["chunk_starts"]
        assert lengths.sum() == 600 and lengths.min() >= 1 and lengths.max() <= 16
        assert torch.equal(first["chunk_ends"][:-1], first["chunk_starts"][1:])
        assert first["seq_idx"].unique().tolist() == [0, 1, 2, 3]
    if op_type == "cache_gather":
        ends = first["seq_starts"] + first["cu_seq_lens"].diff()
        assert ends.max() <= 40 * 16 and first["cu_seq_lens"][-1] == 600


@given(total=st.integers(0, 12), count=st.integers(1, 6), least=st.integers(0, 1))
def test_few_are_divided_otherwise_in_each_draw(total, count, least):
    generator = torch.Generator().manual_seed(total)
    draft = WorkloadDraft(definition=None, axes={}, given={}, generator=generator, make=None)
    low, high = torch.full((count,), least), torch.full((count,), max(least, 3))
    drawn = [draft.parts(total, low, high) for _ in range(40)]
    for parts in drawn:
        assert (parts >= low).all() and (parts <= high).all()
        assert parts.sum() == min(max(total, low.sum()), high.sum())
    if count > 1 and low.sum() < total < high.sum():
        assert len({tuple(parts.tolist()) for parts in drawn}) > 1


def test_scalars_of_a_workload_are_given_as_they_are():
    definition = read(DATASET / "gqa_ragged" / "gqa_ragged_prefill_causal_h32_kv4_d128.json")
    workload = default_workload(definition)
    drawn = InvocationDraws(definition, workload, None, 3).draw(1, 1)
    scalars = {name: value.value for name, value in workload.inputs.items() if isinstance(value, ScalarInput)}
    assert scalars.items() <= dict(zip(definition.inputs, drawn, strict=True)).items()
