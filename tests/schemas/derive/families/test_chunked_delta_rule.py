"""gdn_chunk_*: the references against the kernels that vLLM runs, interpreted, each and in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import Launcher, kernels
from paging import starts
from torch.nn.functional import normalize

from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for, input_rules_for
from kcap.schemas.derive.invocation import Unrecognized
from kcap.schemas.derive.workload_draft import WorkloadDraft

FOLDER = "third_party/flash_linear_attention/ops/"
FILES = ("cumsum", "chunk_scaled_dot_kkt", "solve_tril", "wy_fast", "chunk_delta_h", "chunk_o")
CUMSUM, KKT, WY, STATE, OUTPUT = (
    f"triton::{name}.s01234567"
    for name in (
        "chunk_local_cumsum_scalar_kernel",
        "chunk_scaled_dot_kkt_fwd_kernel",
        "recompute_w_u_fwd_kernel",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "chunk_fwd_kernel_o",
    )
)
INVERSES = {16: "solve_tril_16x16", 32: "merge_16x16_to_32x32_inverse", 64: "merge_16x16_to_64x64_inverse"}
HK, HV, K, V, C = 2, 4, 16, 16, 16  # heads of keys and of values, their sizes, tokens of a chunk
LENGTHS = [19, 0, 5, 32]  # of sequences
TOKENS = sum(LENGTHS)
SIZES = {"H": HV, "Hg": HK, "K": K, "V": V, "BT": C}
Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> dict[str, Launcher]:
    return kernels("vllm", *(f"{FOLDER}{name}.py" for name in FILES))


def chunk_indices(size: int = C) -> torch.Tensor:
    """As `prepare_chunk_indices` of Flash Linear Attention makes them."""
    pairs = [(row, chunk) for row, length in enumerate(LENGTHS) for chunk in range(-(-length // size))]
    return torch.tensor(pairs, dtype=torch.int32)


CHUNKS = len(chunk_indices())


def sequences(size: int = C) -> Arguments:
    return {"cu_seqlens": starts(LENGTHS), "chunk_indices": chunk_indices(size)}


def tokens(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return randn(1, TOKENS, *shape, dtype=dtype, seed=seed)


def keys(dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return normalize(tokens(HK, K, dtype=torch.float32, seed=seed), dim=-1).to(dtype)


def gate() -> torch.Tensor:
    """Logarithms of decays, summed within each chunk."""
    logs = -tokens(HV, dtype=torch.float32, seed=2).exp() / 8
    parts = [part.cumsum(1) for sequence in logs.split(LENGTHS, 1) for part in sequence.split(C, 1)]
    return torch.cat(parts, dim=1)


def rates(dtype: torch.dtype) -> torch.Tensor:
    return tokens(HV, dtype=dtype, seed=3).sigmoid()


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1, TOKENS, *shape), 7.0, dtype=dtype)


def cumsum(**more: Any) -> Arguments:
    logs = -tokens(HV, dtype=torch.float32, seed=2).exp() / 8
    fixed = {"REVERSE": False, "HEAD_FIRST": False, "BT": C}
    return {"s": logs, "o": empty(HV, dtype=torch.float32), **sequences(), **fixed, **more}


def kkt(dtype: torch.dtype = torch.bfloat16, rate: torch.dtype = torch.float32, **more: Any) -> Arguments:
    call = {"k": keys(dtype), "g": gate(), "beta": rates(rate), "A": empty(HV, C, dtype=torch.float32)}
    return {**call, **sequences(), "BT": C, **more}


def below(size: int) -> torch.Tensor:
    """What `chunk_scaled_dot_kkt_fwd_kernel` leaves: zero on the diagonal and above it."""
    matrix, token = tokens(HV, size, dtype=torch.float32, seed=4) / 4, 0
    for length in LENGTHS:
        for place in range(length):
            matrix[0, token, :, place % size :] = 0.0
            token += 1
    return matrix


def inverse(size: int, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    call = {"A": below(size), "Ai": empty(HV, size, dtype=dtype), "USE_TMA": False, "DOT_PRECISION": "ieee"}
    return {**call, **sequences(size), "BT": size, **more}


def wy(dtype: torch.dtype = torch.bfloat16, rate: torch.dtype = torch.float32, **more: Any) -> Arguments:
    call = {"k": keys(dtype), "v": tokens(HV, V, dtype=dtype, seed=5), "beta": rates(rate), "g": gate()}
    call |= {"A": tokens(HV, C, dtype=dtype, seed=6), "w": empty(HV, K, dtype=dtype), "u": empty(HV, V, dtype=dtype)}
    return {**call, **sequences(), "BT": C, **more}


def state(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    offsets = starts([-(-length // C) for length in LENGTHS])
    call = {"k": keys(dtype), "v": tokens(HV, V, dtype=dtype, seed=7), "g": gate(), "gk": None}
    call |= {"w": normalize(tokens(HV, K, dtype=torch.float32, seed=8), dim=-1).to(dtype) / 4}
    call |= {"v_new": empty(HV, V, dtype=dtype), "h": torch.full((1, CHUNKS, HV, V, K), 7.0, dtype=dtype)}
    call |= {"h0": randn(len(LENGTHS), HV, V, K, dtype=torch.float32, seed=9)}
    call |= {"ht": torch.full((len(LENGTHS), HV, V, K), 7.0), "cu_seqlens": starts(LENGTHS), "chunk_offsets": offsets}
    return {**call, "BT": C, "USE_EXP2": False, **more}


def output(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    call = {"q": keys(dtype, 10), "k": keys(dtype), "v": tokens(HV, V, dtype=dtype, seed=11), "g": gate()}
    call |= {"h": randn(1, CHUNKS, HV, V, K, dtype=dtype, seed=12), "o": empty(HV, V, dtype=dtype), "scale": K**-0.5}
    return {**call, **sequences(), "BT": C, **more}


def runs(kernel: Launcher, grid: tuple[int, ...], **fixed: Any) -> Callable[..., None]:
    def run(**call: Any) -> None:
        """What heuristics tell of arguments that are there is in the kernels' own source."""
        there = {"USE_G": call.get("g") is not None, "USE_GK": False, "SAVE_NEW_VALUE": True}
        there |= {"USE_INITIAL_STATE": True, "STORE_FINAL_STATE": call.get("ht") is not None}
        known = {**there, **fixed, "IS_VARLEN": True, "T": TOKENS, "B": 1, "CAST_DOT_TO_K_DTYPE": False, **SIZES}
        names = parameters(kernel)
        kernel[grid](**call, **{name: known[name] for name in names if name in known and name not in call})

    return run


def parameters(launcher: Launcher) -> list[str]:
    kernel = launcher.kernel
    while not hasattr(kernel, "arg_names"):
        kernel = kernel.fn
    return list(kernel.arg_names)


def runs_of(found: dict[str, Launcher]) -> dict[str, Callable[..., None]]:
    blocks = {"BK": K, "BV": V}
    return {
        CUMSUM: runs(found["chunk_local_cumsum_scalar_kernel"], (CHUNKS, HV)),
        KKT: runs(replace(found["chunk_scaled_dot_kkt_fwd_kernel"], tf32=True), (CHUNKS, HV), BK=K),
        WY: runs(found["recompute_w_u_fwd_kernel"], (CHUNKS, HV), **blocks),
        STATE: runs(found["chunk_gated_delta_rule_fwd_kernel_h_blockdim64"], (1, len(LENGTHS) * HV), BV=V),
        OUTPUT: runs(found["chunk_fwd_kernel_o"], (1, CHUNKS, HV), **blocks),
    }


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def test_sums_of_decays_are_the_kernels(found: dict[str, Launcher]) -> None:
    instance = agrees(CUMSUM, runs_of(found)[CUMSUM], **cumsum())
    assert instance.name == "gdn_chunk_cumsum_v4_c16"
    torch.testing.assert_close(instance.outputs["gate"].get(), gate()[0])


@DTYPES
@pytest.mark.parametrize("rate", [torch.bfloat16, torch.float32])
def test_products_of_keys_are_the_kernels(found: dict[str, Launcher], dtype: torch.dtype, rate: torch.dtype) -> None:
    instance = agrees(KKT, runs_of(found)[KKT], **kkt(dtype, rate))
    words = ("_fp32" if dtype == torch.float32 else "") + ("_ratebf16" if rate == torch.bfloat16 else "")
    assert instance.name == f"gdn_chunk_kkt{words}_qk2_v4_k16_c16"


def test_products_without_decay(found: dict[str, Launcher]) -> None:
    assert "_nogate" in agrees(KKT, runs_of(found)[KKT], **kkt(g=None)).name


@pytest.mark.parametrize("size", INVERSES)
def test_inverse_is_the_kernels(found: dict[str, Launcher], size: int) -> None:
    name = f"{INVERSES[size]}_kernel"
    for dtype in (torch.bfloat16, torch.float32):
        call = inverse(size, dtype)
        run = runs(found[name], (len(call["chunk_indices"]), HV))
        instance = agrees(f"triton::{name}.s01234567", run, **call)
    assert instance.name == f"gdn_chunk_inverse_outfp32_v4_c{size}"
    assert instance.outputs["inverse"].get()[0, 0].tolist() == [1.0] + [0.0] * (size - 1)


@DTYPES
@pytest.mark.parametrize("rate", [torch.bfloat16, torch.float32])
def test_keys_and_values_are_the_kernels(found: dict[str, Launcher], dtype: torch.dtype, rate: torch.dtype) -> None:
    agrees(WY, runs_of(found)[WY], **wy(dtype, rate))


@DTYPES
@pytest.mark.parametrize("decays", [True, False])
def test_states_are_the_kernels(found: dict[str, Launcher], dtype: torch.dtype, decays: bool) -> None:
    """The second sequence has no tokens: its state stays."""
    call = state(dtype, **({} if decays else {"g": None}))
    instance = agrees(STATE, runs_of(found)[STATE], **call)
    assert torch.equal(instance.outputs["final_state"].get()[1], call["h0"][1])
    assert instance.inputs["chunk_indices"].get().tolist() == chunk_indices().tolist()


def test_states_in_bfloat16_and_no_final_one(found: dict[str, Launcher]) -> None:
    initial = randn(len(LENGTHS), HV, V, K, seed=9)
    instance = agrees(STATE, runs_of(found)[STATE], **state(h0=initial, ht=None))
    assert instance.name == "gdn_chunk_state_nofinal_statebf16_qk2_v4_k16_d16_c16"


@DTYPES
@pytest.mark.parametrize("decays", [True, False])
def test_output_is_the_kernels(found: dict[str, Launcher], dtype: torch.dtype, decays: bool) -> None:
    agrees(OUTPUT, runs_of(found)[OUTPUT], **output(dtype, **({} if decays else {"g": None})))


def test_tokens_after_the_last_sequence_are_zero(found: dict[str, Launcher]) -> None:
    shorter = {"cu_seqlens": starts([*LENGTHS[:-1], LENGTHS[-1] - 3])}
    for operator, call in ((KKT, kkt()), (WY, wy()), (OUTPUT, output()), (STATE, state())):
        instance = agrees(operator, runs_of(found)[operator], **{**call, **shorter})
        last = list(instance.outputs.values())[1 if operator == STATE else 0].get()[-3:]
        assert last.abs().max() == 0


TF32 = {"rtol": 1e-3, "atol": 5e-4}


def test_kernels_one_after_another_are_the_recurrence(found: dict[str, Launcher]) -> None:
    """Each token decays the state, and takes its value on at its rate, less what the state gave for its key."""
    run, f32 = runs_of(found), torch.float32
    key, query, value, rate, initial = keys(f32), keys(f32, 10), wy(f32)["v"], rates(f32), state(f32)["h0"]
    (sums,) = values(CUMSUM, run[CUMSUM], **cumsum())
    (matrix,) = values(KKT, run[KKT], **kkt(f32, g=sums[None]))
    solve = runs(found["solve_tril_16x16_kernel"], (CHUNKS, HV))
    (inverted,) = values("triton::solve_tril_16x16_kernel", solve, **inverse(C, f32, A=matrix[None]))
    w, u = values(WY, run[WY], **wy(f32, A=inverted[None], g=sums[None]))
    h, new, final = values(STATE, run[STATE], **state(f32, w=w[None], v=u[None], g=sums[None]))
    (result,) = values(OUTPUT, run[OUTPUT], **output(f32, h=h[None], v=new[None], g=sums[None]))

    token, logs = 0, cumsum()["s"]
    for sequence, length in enumerate(LENGTHS):
        current = initial[sequence]
        for _ in range(length):
            one, other = (m[0, token].repeat_interleave(HV // HK, dim=0) for m in (key, query))
            current = current * logs[0, token].exp()[:, None, None]
            change = (value[0, token] - (current * one[:, None]).sum(-1)) * rate[0, token, :, None]
            current = current + change[..., None] * one[:, None]
            torch.testing.assert_close(result[token], (current * other[:, None]).sum(-1) * K**-0.5, **TF32)
            token += 1
        torch.testing.assert_close(final[sequence], current, **TF32)


def values(operator: str, run: Callable[..., None], **call: Any) -> list[torch.Tensor]:
    return [output_.get() for output_ in agrees(operator, run, **call).outputs.values()]


def test_what_is_declined() -> None:
    assert declined(CUMSUM, **cumsum(REVERSE=True)) and declined(CUMSUM, **cumsum(cu_seqlens=None))
    assert declined(KKT, **kkt(CAST_DOT_TO_K_DTYPE=True)) and declined(WY, **wy(g=None))
    assert declined(STATE, **state(USE_EXP2=True)) and declined(STATE, **state(gk=gate()))
    assert declined(STATE, **state(h0=None)) and declined(STATE, **state(v_new=None))
    assert declined(OUTPUT, **output(q=keys(torch.bfloat16).expand(2, -1, -1, -1)))
    unknown = kernel_of(OUTPUT, **output(chunk_indices=chunk_indices().to("meta")))
    with pytest.raises(Unrecognized, match="not sampled"):
        unknown.outputs["output"].get()
    unknown = kernel_of(STATE, **state(chunk_offsets=starts([2, 0, 1, 2]).to("meta")))
    assert unknown.inputs["chunk_indices"].get().is_meta and cost_of_instance(unknown).bytes == 0


def test_costs_count_tokens_and_pairs_of_a_chunk() -> None:
    lengths = [16, 3, 5, 16, 16]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    table = 4 * (len(LENGTHS) + 1 + 2 * CHUNKS)
    instance = kernel_of(OUTPUT, **output())
    cost = cost_of_instance(instance)
    assert cost.flops == 2 * (TOKENS * HV * V * K + pairs * (HK * K + HV * V))
    read = 2 * (TOKENS * (2 * HK * K + HV * V) + CHUNKS * HV * V * K) + 4 * TOKENS * HV + table
    assert (cost.read, cost.bytes) == (read, read + 2 * TOKENS * HV * V)
    given = {name: arg.value for name, arg in instance.inputs.items()}
    function = cost_function_for("gdn_chunk_output")
    assert function is not None and function(CostInputs(checked(instance), given)) == cost
    assert cost_of_instance(kernel_of(KKT, **kkt())).flops == 2 * (pairs - TOKENS) * HK * K
    assert cost_of_instance(kernel_of(WY, **wy())).flops == 2 * pairs * HV * (K + V)
    assert cost_of_instance(kernel_of(STATE, **state())).flops == 4 * TOKENS * HV * K * V
    solved = cost_of_instance(kernel_of("triton::solve_tril_16x16_kernel", **inverse(C)))
    assert solved.flops == sum(n**3 for n in lengths) * HV // 3
    assert solved.read == 4 * (pairs - TOKENS) * HV + table


def test_sequences_of_which_some_are_empty_have_no_more_tokens_than_there_are() -> None:
    definition = checked(kernel_of(KKT, **kkt()))
    axes = {"num_chunks": 3, "total_tokens": 30, "len_indptr": 6}
    draft = WorkloadDraft(definition, axes, {}, torch.Generator(), made_by_rule)
    lengths = draft["cu_seqlens"].diff().tolist()
    assert sum(lengths) == 30 and sorted(lengths)[:2] == [0, 0] and sorted(lengths)[2] > 0
    assert len(draft["chunk_indices"]) == 3


def test_inputs_made_by_rule_are_chunks() -> None:
    """Three sequences of 60 tokens in five chunks."""
    definition = checked(kernel_of(KKT, **kkt()))
    draft = WorkloadDraft(
        definition, {"num_chunks": 5, "total_tokens": 60, "len_indptr": 4}, {}, torch.Generator(), made_by_rule
    )
    lengths = draft["cu_seqlens"].diff()
    chunks = ((lengths + C - 1) // C).tolist()
    assert lengths.sum() == 60 and sum(chunks) == 5 and min(chunks) >= 1
    assert draft["chunk_indices"].tolist() == [[row, chunk] for row in range(3) for chunk in range(chunks[row])]
    assert draft["gate"].max() < 0 and draft["beta"].min() >= 0
    assert draft["k"].norm(dim=-1).sub(1).abs().max() < 1e-5
    definition = checked(kernel_of("triton::solve_tril_16x16_kernel", **inverse(C)))
    draft = WorkloadDraft(definition, draft.axes, {}, torch.Generator(), made_by_rule)
    places = torch.cat([torch.arange(length) % C for length in draft["cu_seqlens"].diff().tolist()])
    assert torch.equal(draft["A"] != 0, (torch.arange(C) < places[:, None])[:, None].expand(draft["A"].shape))


def made_by_rule(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    made = (rule(draft, name) for rule in input_rules_for(draft.definition.op_type, name))
    return next((value for value in made if value is not None), None)
