"""Attention of a decode, put back in the place of FlashAttention 3: the calls of the real vLLM on an H100, with their
tensors on a CPU, and an operator of the same schema that computes what it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from applied_plans import plan_of, python_solution
from torch._subclasses.fake_tensor import FakeTensorMode

import kcap
from kcap.bench.apply.process import place
from kcap.bench.apply.seams import Operators, Placed, Replacements, without_none
from kcap.bench.apply.trial import _try
from kcap.bench.apply.views import NoView, views_of
from kcap.replay.rebuild.operators import resolve_operator
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive import invocation
from kcap.schemas.derive.derive import derive
from kcap.schemas.derive.generic import pattern
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results.plan import Plan, plan_bytes, read_plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the real operator is there")
SCHEMA = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
    Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
    bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,
    Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
SCHEDULE = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,
    int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,
    Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new,
    bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa,
    int sm_margin) -> Tensor"""
NAME = "gqa_table_decode_h32_kv8_d128_ps16"
SEQUENCES, HEADS, KV_HEADS, DIM, PAGE, PAGES, COLUMNS = 16, 32, 8, 128, 16, 64, 128
SCALE = 0.08838834764831845
MARK = 7.0  # of what nobody may touch
SOLUTION = """
import torch


def run(q, k_cache, v_cache, block_table, seq_lens, sm_scale):
    page = k_cache.shape[1]
    columns = max(-(-int(seq_lens.max()) // page), 1)
    keys = torch.arange(columns * page, device=q.device)[None] < seq_lens[:, None]
    pages = torch.where(keys[:, ::page], block_table[:, :columns], 0).long()
    k, v = (cache[pages].flatten(1, 2).transpose(1, 2).float() for cache in (k_cache, v_cache))
    queries = q.float().unflatten(1, (k.shape[1], -1))
    logits = queries @ k.transpose(2, 3) * sm_scale
    logits = logits.masked_fill(~keys[:, None, None], float("-inf"))
    output = (logits.softmax(-1).nan_to_num() @ v).flatten(1, 2)
    return output.to(q.dtype), logits.logsumexp(-1).flatten(1, 2).T
"""
WRONG = SOLUTION.replace("output.to(q.dtype)", "output.to(q.dtype).roll(1, 1)")


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    """What it leaves of padding is what was there."""
    out, lengths, table, scale = rest[3], rest[8], rest[11], rest[20]
    lse = torch.full((q.shape[1], len(q)), MARK)
    for row, length in enumerate(lengths.tolist()):
        pages = table[row, : -(-length // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length].float().repeat_interleave(4, 1) for cache in (k, v))
        logits = torch.einsum("hd,khd->hk", q[row].float(), keys) * scale
        if length:
            out[row] = torch.einsum("hk,khd->hd", logits.softmax(-1), values).to(out.dtype)
            lse[:, row] = logits.logsumexp(-1)
    return [out, lse, torch.full((32, 2), MARK), torch.full((32, 2), MARK)]


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("fwd", flash, "CPU")
    library.define(SCHEDULE)
    library.impl("get_scheduler_metadata", lambda *given: torch.zeros(49, dtype=torch.int32), "CPU")
    forget_operators()
    yield
    library._destroy()
    forget_operators()


def forget_operators() -> None:
    """What is kept of torch's table, for the tests of other files."""
    for kept in (resolve_operator, pattern._registered, pattern.registered_operator, pattern.functional_variant):
        kept.cache_clear()
    invocation._schema.cache_clear()


@pytest.fixture(scope="module")
def recorded(llama_on_h100: Path) -> Recording:
    return kcap.load(llama_on_h100 / "model.kcap")


def plan_on_cpu(recorded: Recording, source: str, name: str = NAME) -> Plan:
    """Its calls' tensors are on a CPU."""
    plan = plan_of(recorded, python_solution(name, source))
    return plan.only([one.model_copy(update={"call": on_cpu(one.call)}) for one in plan.replacements])


def on_cpu(call: Call) -> Call:
    values = [replace(a.value, device="cpu") if isinstance(a.value, TensorSpec) else a.value for a in call.args]
    args = [arg.model_copy(update={"value": value}) for arg, value in zip(call.args, values, strict=True)]
    return call.model_copy(update={"args": args})


def placed_alone(recorded: Recording, source: str, folder: Path) -> Placed:
    (one,) = place(plan_on_cpu(recorded, source), folder)
    return one


@pytest.mark.parametrize(("source", "reason"), [(SOLUTION, None), (WRONG, "its output 0 is off by")])
def test_it_is_tried_alone_on_each_recorded_batch(
    recorded: Recording, tmp_path: Path, source: str, reason: str | None
) -> None:
    """The cache is cut to the pages in use; one of the batches is padded."""
    one = placed_alone(recorded, source, tmp_path)
    rebuilder = Rebuilder("cpu", "cpu", recorded.path)
    samples = [sample for sample in recorded.samples if sample.call == one.replacement.call.id]
    assert samples
    for sample in samples:
        found = _try(one, rebuilder, rebuilder.resolve(one.replacement.call, sample), slower=True)
        assert found == reason if reason is None else str(found).startswith(reason)


@pytest.fixture
def placed(recorded: Recording, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Placed]:
    """SOLUTION, or the test's parameter, in the operator's place; two invocations are checked."""
    plan = plan_on_cpu(recorded, getattr(request, "param", SOLUTION))
    (tmp_path / "plan.json").write_bytes(plan_bytes(plan))
    replacements = Replacements(place(read_plan(tmp_path / "plan.json"), tmp_path), checks=2)
    seam = Operators(replacements)
    seam.install()
    (one,) = replacements.placed
    yield one
    seam.uninstall()


def arguments(padded: int = 0, **more: Any) -> dict[str, Any]:
    """As vLLM passes them in a graph; the output is a part of a larger tensor. The last `padded` rows are padding."""
    generator = torch.Generator().manual_seed(padded)
    lengths = torch.randint(1, 3 * PAGE, (SEQUENCES,), generator=generator, dtype=torch.int32)
    lengths[SEQUENCES - padded :] = 0
    table = torch.randint(0, PAGES, (SEQUENCES, COLUMNS), generator=generator, dtype=torch.int32)
    table[SEQUENCES - padded :] = -1
    cache = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM, generator=generator).bfloat16()
    names = [word.split()[-1] for word in SCHEMA[4 : SCHEMA.index(")")].split(",")]
    given = {
        "q": torch.randn(SEQUENCES, HEADS, DIM, generator=generator).bfloat16(),
        "k": cache[0],
        "v": cache[1],
        "out": torch.full((SEQUENCES + 2, HEADS, DIM), MARK).bfloat16()[1:-1],
        "cu_seqlens_q": torch.arange(SEQUENCES + 1, dtype=torch.int32).clamp(max=SEQUENCES - padded),
        "seqused_k": lengths,
        "max_seqlen_q": 1,
        "max_seqlen_k": 2048,
        "page_table": table,
        **{f"{name}_descale": torch.ones(1).expand(SEQUENCES, KV_HEADS) for name in "qkv"},
        "softmax_scale": SCALE,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "scheduler_metadata": torch.zeros(49, dtype=torch.int32),
        "num_splits": 32,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    return {**dict.fromkeys(names), **given, **more}


def call(values: dict[str, Any]) -> list[torch.Tensor]:
    results: list[torch.Tensor] = torch.ops._vllm_fa3_C.fwd(*values.values())
    return results


def test_its_inputs_are_views_of_what_the_engine_passes(recorded: Recording) -> None:
    (kernel,) = derive(recorded).engine_forms
    assert kernel.definition.name == NAME
    views = views_of(kernel.definition, kernel.uses[0])
    paths = dict(zip(kernel.definition.inputs, (getattr(view, "argument", None) for view in views.inputs), strict=True))
    assert paths == {
        "q": "0", "k_cache": "1", "v_cache": "2", "block_table": "14", "seq_lens": "11", "sm_scale": None
    }  # fmt: skip
    assert [(view.argument, view.result) for view in views.outputs] == [("6", None), (None, 1)]
    assert views.padding is not None and views.padding.dims == [0, 1]
    paged = next(kernel for kernel in derive(recorded).kernels if kernel.definition.name.startswith("gqa_paged_decode"))
    with pytest.raises(NoView, match="kv_indptr is computed from values"):
        views_of(paged.definition, paged.uses[0])


def test_one_for_lists_of_pages_is_told_what_to_be_written_for(recorded: Recording) -> None:
    names = [kernel.definition.name for kernel in derive(recorded).kernels if "gqa_paged" in kernel.definition.name]
    left_out = {
        one.definition: one.reason for one in plan_of(recorded, *(python_solution(n, SOLUTION) for n in names)).left_out
    }
    assert left_out["gqa_paged_decode_h32_kv8_d128_ps16"].endswith(f"{NAME} takes what the engine passes")
    assert left_out["gqa_paged_prefill_causal_h32_kv8_d128_ps16"] == "prefill: hardly a batch has the sizes of another"


def test_it_writes_where_the_engine_looks_and_nowhere_else(placed: Placed) -> None:
    """The output is a part of a larger tensor; the log-sum-exp is natural and [heads, tokens]."""
    for _ in range(4):
        values = arguments()
        output, lse, *sums = call(values)
        assert output.data_ptr() == values["out"].data_ptr()
        assert [one.numel() for one in sums] == ([0, 0] if placed.eager else [64, 64])
        expected = values["out"].clone(), lse.clone()
        values["out"].fill_(MARK)
        flash(*values.values())
        torch.testing.assert_close(expected[0], values["out"], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(expected[1], flash(*values.values())[1])
        around = values["out"]._base
        assert (around[[0, -1]] == MARK).all()
    assert (placed.checked, placed.eager, placed.off, placed.misses) == (2, 2, "", {})


@pytest.mark.parametrize("padded", [1, 9, 16])
def test_rows_of_padding_are_nobodys(placed: Placed, padded: int) -> None:
    """The engine's own leaves them, the Solution writes zeros: that is no difference. Pages of -1 are not followed."""
    for _ in range(3):
        values = arguments(padded)
        output, lse = call(values)[:2]
    assert (placed.checked, placed.eager, placed.off) == (2, 1, "")
    assert not output[SEQUENCES - padded :].any() and (lse[:, SEQUENCES - padded :] == -math.inf).all()


@pytest.mark.parametrize("placed", [WRONG], indirect=True)
def test_one_that_is_wrong_in_real_rows_is_taken_out(placed: Placed) -> None:
    for _ in range(2):
        values = arguments(padded=9)
        kept = call(values)[0].clone()
        flash(*values.values())
        assert torch.equal(kept, values["out"])
    assert placed.off.startswith("its output 0 is off by")


def test_what_changes_how_it_is_computed_may_differ(placed: Placed) -> None:
    """Outside its graph a step has its own longest sequence, and a schedule or none."""
    hints = {"max_seqlen_k": 47, "num_splits": 0, "pack_gqa": True, "scheduler_metadata": None}
    call(arguments(**hints))
    assert placed.checked == 1 and not placed.misses


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"max_seqlen_q": 9}, "argument 12: value"),
        ({"window_size_left": 12}, "argument 25: value"),
        ({"softmax_scale": 0.1}, "argument 23: value"),
        ({"softcap": 30.0}, "argument 27: value"),
        ({"s_aux": torch.ones(HEADS)}, "argument 33: value"),
        ({"cu_seqlens_q": torch.zeros(9, dtype=torch.int32)}, "argument 7: shape"),
    ],
)
def test_any_other_attention_runs_the_engines_own(placed: Placed, changed: dict[str, Any], difference: str) -> None:
    values = arguments(**changed)
    assert (call(values)[2] == MARK).all()
    assert placed.misses == {difference: 1} and not placed.checked


def test_a_cache_in_another_order_or_with_other_pages_runs_the_engines_own(placed: Placed) -> None:
    caches = {
        "argument 1: strides": torch.randn(2, PAGES, KV_HEADS, PAGE, DIM).bfloat16().transpose(2, 3),  # heads first
        "argument 1: shape": torch.randn(2, PAGES // 2, 2 * PAGE, KV_HEADS, DIM).bfloat16(),  # pages of 32
        "which tensors share their memory": torch.randn(3, PAGES, PAGE, KV_HEADS, DIM).bfloat16()[::2],
    }
    for difference, (k, v) in caches.items():
        values = arguments()
        values["page_table"].clamp_(max=PAGES // 2 - 1)
        assert (call({**values, "k": k, "v": v})[2] == MARK).all()
        assert placed.misses.pop(difference) == 1 and not placed.misses
    more = torch.randn(2, 3 * PAGES, PAGE, KV_HEADS, DIM).bfloat16()
    call({**arguments(), "k": more[0], "v": more[1]})
    assert placed.checked == 1


def test_nothing_of_it_waits_for_values(recorded: Recording, tmp_path: Path) -> None:
    """As in a graph's capture, where nothing may be read on the host."""
    source = "def run(q, k_cache, v_cache, block_table, seq_lens, sm_scale, output, lse):\n    output.copy_(q)\n"
    solution = python_solution(NAME, source)
    spec = solution.spec.model_copy(update={"destination_passing_style": True})
    plan = plan_of(recorded, solution.model_copy(update={"spec": spec}))
    (one,) = place(plan, tmp_path)
    with FakeTensorMode() as mode:
        values = {str(index): mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                  for index, value in enumerate(arguments().values())}  # fmt: skip
        output, lse, *_ = one.run(values)
    assert (output.shape, lse.shape) == ((SEQUENCES, HEADS, DIM), (HEADS, SEQUENCES))


def test_undefined_tensors_of_a_list_reach_the_engine_as_empty_ones() -> None:
    """FlashAttention 3 returns such where it splits nothing, and no kernel in Python can."""
    results: list[list[Any]] = [[torch.ones(2), None], without_none([torch.ones(2), None])]
    library = torch.library.Library("kcap_test", "FRAGMENT")
    library.define("undefined(Tensor x) -> Tensor[]")
    library.impl("undefined", lambda x: results.pop(0), "CPU")
    with pytest.raises(RuntimeError, match="cast"):
        torch.ops.kcap_test.undefined(torch.ones(1))
    first, second = torch.ops.kcap_test.undefined(torch.ones(1))
    assert first.sum() == 2 and not second.numel()
    library._destroy()
