"""mamba2_*: the references against vLLM's Triton kernels, interpreted, each and in their order; what is declined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import Launcher, kernels
from paging import starts

from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for, input_rules_for
from kcap.schemas.derive.invocation import Unrecognized
from kcap.schemas.derive.workload_draft import WorkloadDraft

FOLDER = "model_executor/layers/mamba/ops/"
FILES = ("triton_helpers", "mamba_ssm", "ssd_chunk_state", "ssd_state_passing", "ssd_bmm", "ssd_chunk_scan")
KERNELS = ("_chunk_cumsum_fwd", "_chunk_state_fwd", "_state_passing_fwd", "_bmm_chunk_fwd", "_chunk_scan_fwd")
CUMSUM, STATE, PASSING, BMM, SCAN = (f"triton::{name}_kernel.s01234567" for name in KERNELS)
H, D, S, G, C = 4, 16, 16, 2, 16  # heads, channels, numbers of a state, groups, tokens of a chunk
LENGTHS = [16, 3, 16, 7, 1]  # of chunks, of which sequence 0 has two, 1 one and 2 two
SEQUENCES, LASTS = [0, 0, 1, 2, 2], [1, 2, 4]
TOKENS, CHUNKS = sum(LENGTHS), len(LENGTHS)
BLOCKS = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16}
Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> dict[str, Launcher]:
    return kernels("vllm", *(f"{FOLDER}{name}.py" for name in FILES))


def bounds() -> Arguments:
    return {"cu_chunk_seqlens_ptr": starts(LENGTHS)}


def cumsum(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    return {
        "dt_ptr": randn(TOKENS, H, dtype=dtype, seed=1),
        "A_ptr": -randn(H, dtype=torch.float32, seed=2).exp(),
        "dt_bias_ptr": randn(H, dtype=torch.float32, seed=3),
        "dt_out_ptr": torch.full((H, CHUNKS, C), 7.0),
        "dA_cumsum_ptr": torch.full((H, CHUNKS, C), 7.0),
        **bounds(),
        "dt_min": 0.0,
        "dt_max": float("inf"),
        "DT_SOFTPLUS": True,
        **more,
    }


def places() -> Arguments:
    """Time steps and decays as `_chunk_cumsum_fwd_kernel` leaves them."""
    steps = torch.zeros(H, CHUNKS, C)
    for chunk, length in enumerate(LENGTHS):
        steps[:, chunk, :length] = randn(H, length, dtype=torch.float32, seed=chunk).exp() / 8
    return {"dt_ptr": steps, "dA_cumsum_ptr": (-steps * torch.arange(1, H + 1)[:, None, None]).cumsum(-1)}


def state(dtype: torch.dtype = torch.bfloat16) -> Arguments:
    """`x` and `B` are parts of one tensor, as vLLM splits its convolution's output."""
    wide = randn(TOKENS, H * D + G * S, dtype=dtype, seed=4)
    return {
        "x_ptr": wide[:, : H * D].unflatten(1, (H, D)),
        "b_ptr": wide[:, H * D :].unflatten(1, (G, S)),
        "states_ptr": torch.full((CHUNKS, H, D, S), 7.0),
        **places(),
        **bounds(),
    }


def passing(initial: bool, dtype: torch.dtype = torch.float32, final: bool = False) -> Arguments:
    """`final`: the last states are put into a cache, as since vLLM 0.33."""
    cache = {
        "final_states_ptr": torch.full((6, H, D * S), 7.0, dtype=dtype),
        "final_state_indices_ptr": torch.tensor([4, 0, 5], dtype=torch.int32),
    }
    return {
        "states_ptr": randn(CHUNKS, H, D * S, dtype=torch.float32, seed=5),
        "out_ptr": torch.full((CHUNKS, H, D * S), 7.0, dtype=dtype),
        "dA_cs_ptr": places()["dA_cumsum_ptr"],
        "initstates_ptr": randn(3, H, D * S, dtype=dtype, seed=6) if initial else None,
        "last_chunk_indices_ptr": torch.tensor(LASTS, dtype=torch.int32),
        **(cache if final else {}),
    }


def bmm(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    a, b = (randn(TOKENS, G, S, dtype=dtype, seed=seed) for seed in (7, 8))
    return {
        "a_ptr": a,
        "b_ptr": b,
        "out_ptr": torch.full((CHUNKS, G, C, C), 7.0),
        **bounds(),
        "IS_CAUSAL": False,
        **more,
    }


def scan(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    return {
        "cb_ptr": randn(CHUNKS, G, C, C, dtype=torch.float32, seed=9),
        "x_ptr": randn(TOKENS, H, D, dtype=dtype, seed=4),
        "z_ptr": None,
        "out_ptr": torch.full((TOKENS, H, D), 7.0, dtype=dtype),
        **places(),
        "seq_idx_ptr": torch.tensor(SEQUENCES, dtype=torch.int32),
        "C_ptr": randn(TOKENS, G, S, dtype=dtype, seed=7),
        "states_ptr": randn(CHUNKS, H, D, S, dtype=torch.float32, seed=10),
        "D_ptr": randn(H, dtype=dtype, seed=11),
        "initstates_ptr": None,
        **bounds(),
        "IS_CAUSAL": True,
        **more,
    }


def strides(call: Arguments, **names: tuple[str, ...]) -> dict[str, int]:
    """The strides of each argument by the parameters' suffixes; 0 where there is none."""
    return {
        f"stride_{suffix}": call[f"{name}_ptr"].stride(dim) if call[f"{name}_ptr"] is not None else 0
        for name, suffixes in names.items()
        for dim, suffix in enumerate(suffixes)
    }


def of(name: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"{name}_{part}" for part in parts)


def runs(kernel: Launcher, grid: tuple[int, ...], fixed: Arguments, **names: tuple[str, ...]) -> Callable[..., None]:
    def run(**call: Any) -> None:
        kernel[grid](**call, **strides(call, **names), **fixed)

    return run


PLACE_STRIDES = {"dt": of("dt", "head", "chunk", "csize"), "dA_cumsum": of("dA_cs", "head", "chunk", "csize")}


def runs_cumsum(found: dict[str, Launcher], bias: bool = True) -> Callable[..., None]:
    fixed = {"nheads": H, "chunk_size": C, "HAS_DT_BIAS": bias, "BLOCK_SIZE_H": 2, "BLOCK_SIZE_CHUNK": C}
    names = {"dt": of("dt", "seqlen", "head"), "A": ("A_head",), "dt_bias": ("dt_bias_head",)}
    names |= {"dt_out": of("dt_out", "head", "chunk", "csize"), "dA_cumsum": PLACE_STRIDES["dA_cumsum"]}
    return runs(found["_chunk_cumsum_fwd_kernel"], (CHUNKS, H // 2), fixed, **names)


def runs_state(found: dict[str, Launcher]) -> Callable[..., None]:
    fixed = {"hdim": D, "dstate": S, "chunk_size": C, "nheads_ngroups_ratio": H // G, **BLOCKS}
    names = {"x": of("x", "seqlen", "head", "hdim"), "b": of("b", "seqlen", "head", "dstate"), **PLACE_STRIDES}
    names["states"] = of("states", "chunk", "head", "hdim", "dstate")
    return runs(found["_chunk_state_fwd_kernel"], (1, CHUNKS, H), fixed, **names)


def keeps_final(found: dict[str, Launcher]) -> bool:
    return "final_states_ptr" in found["_state_passing_fwd_kernel"].kernel.arg_names


def runs_passing(found: dict[str, Launcher], initial: bool, final: bool = False) -> Callable[..., None]:
    fixed = {"dim": D * S, "chunk_size": C, "HAS_INITSTATES": initial, "BLOCK_SIZE": 256}
    names = {"states": of("states", "chunk", "head", "dim"), "out": of("out", "chunk", "head", "dim")}
    names |= {"dA_cs": PLACE_STRIDES["dA_cumsum"], "initstates": of("initstates", "batch", "head", "dim")}
    absent = {}
    if keeps_final(found):
        fixed["HAS_FINAL_STATES"] = final
        names |= {"final_states": of("final_states", "slot", "head", "dim")}
        names["final_state_indices"] = ("final_state_indices",)
        absent = {"final_states_ptr": None, "final_state_indices_ptr": None}
    run = runs(found["_state_passing_fwd_kernel"], (1, len(LASTS), H), fixed, **names)
    return lambda **call: run(**absent | call)


def runs_bmm(found: dict[str, Launcher], dtype: torch.dtype) -> Callable[..., None]:
    import triton.language as tl

    dot = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
    fixed = {"chunk_size": C, "K": S, "ngroups": G, "dot_dtype": dot, **BLOCKS}
    names = {"a": ("a_seqlen", "a_head", "ak"), "b": ("b_seqlen", "b_head", "bk")}
    out = ("out_chunk", "out_head", "outm", "outn")
    return runs(found["_bmm_chunk_fwd_kernel"], (1, CHUNKS * G), fixed, **names, out=out)


def runs_scan(found: dict[str, Launcher]) -> Callable[..., None]:
    def run(**call: Any) -> None:
        skip, gate, initial = (call[f"{name}_ptr"] for name in ("D", "z", "initstates"))
        fixed = {"chunk_size": C, "hdim": D, "dstate": S, "nheads_ngroups_ratio": H // G, "IS_TRITON_22": True}
        fixed |= {"HAS_D": skip is not None, "D_HAS_HDIM": skip is not None and skip.dim() == 2}
        fixed |= {"HAS_Z": gate is not None, "HAS_INITSTATES": initial is not None, "BLOCK_SIZE_DSTATE": S, **BLOCKS}
        names = {name: of(name, "seqlen", "head", "hdim") for name in ("x", "z", "out")} | PLACE_STRIDES
        names |= {"cb": of("cb", "chunk", "head", "csize_m", "csize_k"), "seq_idx": ("seq_idx_chunk",)}
        names |= {"C": of("C", "seqlen", "head", "dstate"), "D": ("D_head",)}
        names |= {"states": of("states", "chunk", "head", "hdim", "dstate")}
        names |= {"initstates": of("init_states", "batch", "head", "hdim", "dstate")}
        runs(found["_chunk_scan_fwd_kernel"], (1, CHUNKS, H), fixed, **names)(**call)

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_time_steps_and_decays_are_vllms(found: dict[str, Launcher], dtype: torch.dtype) -> None:
    instance = agrees(CUMSUM, runs_cumsum(found), **cumsum(dtype))
    assert instance.name == f"mamba2_chunk_cumsum{'' if dtype == torch.bfloat16 else '_fp32'}_h4_c16"
    steps = instance.outputs["dt_out"].get()
    assert steps[:, 1, 3:].abs().max() == 0 and steps[:, 1, :3].min() > 0


def test_time_steps_without_bias_and_within_bounds(found: dict[str, Launcher]) -> None:
    arguments = cumsum(dt_bias_ptr=None, DT_SOFTPLUS=False, dt_min=0.25, dt_max=1.5)
    instance = agrees(CUMSUM, runs_cumsum(found, bias=False), **arguments)
    assert instance.name == "mamba2_chunk_cumsum_nobias_nosoftplus_min0.25_max1.5_h4_c16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_of_each_chunk_is_vllms(found: dict[str, Launcher], dtype: torch.dtype) -> None:
    instance = agrees(STATE, runs_state(found), **state(dtype))
    assert instance.name.endswith("_h4_d16_s16_ng2_c16") and "_state" not in instance.name.removeprefix(
        "mamba2_chunk_state"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("initial", [False, True])
def test_states_are_passed_on_as_vllm_does(found: dict[str, Launcher], dtype: torch.dtype, initial: bool) -> None:
    instance = agrees(PASSING, runs_passing(found, initial), **passing(initial, dtype))
    assert ("_noinitial" in instance.name) != initial and ("_outbf16" in instance.name) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_last_states_are_kept_as_vllm_does(found: dict[str, Launcher], dtype: torch.dtype) -> None:
    if not keeps_final(found):
        pytest.skip("this vLLM's kernel keeps no last states: 0.33 is the first whose does")
    instance = agrees(PASSING, runs_passing(found, True, final=True), **passing(True, dtype, final=True))
    assert "_final" in instance.name


def test_the_last_states_are_the_last_that_were_passed_on() -> None:
    kernel = kernel_of(PASSING, **passing(True, final=True))
    given = [slot.get() for slot in kernel.inputs.values()]
    passed, final = compile_reference(checked(kernel).reference, kernel.name)(*given)
    assert torch.equal(final, passed[LASTS])
    cache = torch.arange(6.0)[:, None, None].expand(6, H, D * S)
    kernel = kernel_of(PASSING, **{**passing(True, final=True), "final_states_ptr": cache})
    assert kernel.outputs["final_states"].get()[:, 0, 0].tolist() == [4, 0, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_within_chunks_are_vllms(found: dict[str, Launcher], dtype: torch.dtype) -> None:
    agrees(BMM, runs_bmm(found, dtype), **bmm(dtype))


SCANS = {
    "": {"initstates_ptr": randn(3, H, D, S, dtype=torch.float32, seed=12)},
    "_noinitial": {},
    "_z_noD_noinitial": {"D_ptr": None, "z_ptr": randn(TOKENS, H, D, seed=13)},
    "_Dhdim_noinitial": {"D_ptr": randn(H, D, seed=14)},
}


@pytest.mark.parametrize("words", SCANS)
def test_output_is_vllms(found: dict[str, Launcher], words: str) -> None:
    instance = agrees(SCAN, runs_scan(found), **scan(**SCANS[words]))
    assert instance.name == f"mamba2_chunk_scan{words}_statefp32_h4_d16_s16_ng2_c16"


def test_output_in_float32_and_padding(found: dict[str, Launcher]) -> None:
    """The last chunk is no one's: its token is padding."""
    bounds_ = starts([*LENGTHS[:-1], 0])
    instance = agrees(SCAN, runs_scan(found), **scan(torch.float32, cu_chunk_seqlens_ptr=bounds_))
    assert instance.outputs["output"].get()[-1].abs().max() == 0


def test_kernels_one_after_another_are_the_recurrence(found: dict[str, Launcher]) -> None:
    """Each token decays the state by exp(A dt) and adds dt x B; C reads it."""
    x, b, c = (randn(TOKENS, n, m, dtype=torch.float32, seed=k) for k, n, m in ((1, H, D), (2, G, S), (3, G, S)))
    first = cumsum(torch.float32)
    outputs = list(values(CUMSUM, runs_cumsum(found), **first))
    placed = dict(zip(("dt_ptr", "dA_cumsum_ptr"), outputs, strict=True))
    (added,) = values(STATE, runs_state(found), **{**state(torch.float32), "x_ptr": x, "b_ptr": b, **placed})
    initial = randn(3, H, D, S, dtype=torch.float32, seed=4)
    flat = {"states_ptr": added.flatten(2), "initstates_ptr": initial.flatten(2), "dA_cs_ptr": placed["dA_cumsum_ptr"]}
    (passed,) = values(PASSING, runs_passing(found, True), **{**passing(True), **flat})
    (products,) = values(BMM, runs_bmm(found, torch.float32), **{**bmm(torch.float32), "a_ptr": c, "b_ptr": b})
    last = {"cb_ptr": products, "x_ptr": x, "C_ptr": c, "states_ptr": passed.unflatten(2, (D, S)), **placed}
    last |= {"initstates_ptr": initial, "D_ptr": None}
    (output,) = values(SCAN, runs_scan(found), **{**scan(torch.float32), **last})

    step = torch.nn.functional.softplus(first["dt_ptr"] + first["dt_bias_ptr"])
    token = 0
    for sequence in range(3):
        current = initial[sequence]
        for _ in range(sum(n for n, owner in zip(LENGTHS, SEQUENCES, strict=True) if owner == sequence)):
            key, query = (m[token].repeat_interleave(H // G, dim=0) for m in (b, c))
            grown = (step[token, :, None] * x[token])[..., None] * key[:, None]
            current = current * torch.exp(first["A_ptr"] * step[token])[:, None, None] + grown
            torch.testing.assert_close(output[token], (current * query[:, None]).sum(-1), rtol=1e-3, atol=1e-3)
            token += 1
        torch.testing.assert_close(passed[LASTS[sequence]], current.flatten(1), rtol=1e-3, atol=1e-3)


def values(operator: str, run: Callable[..., None], **call: Any) -> list[torch.Tensor]:
    return [output.get() for output in agrees(operator, run, **call).outputs.values()]


def test_what_is_declined() -> None:
    assert declined(CUMSUM, **cumsum(DT_SOFTPLUS=None)) and declined(CUMSUM, **cumsum(dt_max=None))
    assert declined(BMM, **bmm(IS_CAUSAL=True)) and declined(BMM, **bmm(b_ptr=bmm(torch.float32)["b_ptr"]))
    assert declined(SCAN, **scan(IS_CAUSAL=False)) and declined(SCAN, **scan(seq_idx_ptr=None))
    unknown = kernel_of(SCAN, **scan(cu_chunk_seqlens_ptr=starts(LENGTHS).to("meta")))
    with pytest.raises(Unrecognized, match="not sampled"):
        unknown.outputs["output"].get()


def test_costs_count_tokens_and_pairs_of_a_chunk() -> None:
    """Without initial states, tokens of a sequence's first chunk have no state to read: 3 + 1 tokens have one."""
    pairs = sum(n * (n + 1) // 2 for n in LENGTHS)
    instance = kernel_of(SCAN, **scan())
    cost = cost_of_instance(instance)
    assert cost.flops == 2 * H * D * ((3 + 1) * S + pairs)
    read = 2 * TOKENS * (H * D + G * S) + 2 * H + 4 * (3 * CHUNKS + 2 * H * TOKENS + 2 * H * D * S + G * pairs)
    assert (cost.read, cost.bytes) == (read, read + 2 * TOKENS * H * D)
    assert cost_of_instance(kernel_of(STATE, **state())).flops == 2 * TOKENS * H * D * S
    assert cost_of_instance(kernel_of(BMM, **bmm())).flops == 2 * sum(n * n for n in LENGTHS) * G * S
    passed = cost_of_instance(kernel_of(PASSING, **passing(False)))
    assert passed.bytes == 4 * (2 * CHUNKS * H * D * S + H * CHUNKS + 3)
    given = {name: arg.value for name, arg in instance.inputs.items()}
    function = cost_function_for("mamba2_chunk_scan")
    assert function is not None and function(CostInputs(checked(instance), given)) == cost


@pytest.mark.parametrize("arguments", [(SCAN, scan(**SCANS[""])), (PASSING, passing(True)), (CUMSUM, cumsum())])
def test_inputs_made_by_rule_are_chunks(arguments: tuple[str, Arguments]) -> None:
    operator, call = arguments
    definition = checked(kernel_of(operator, **call))
    axes = {"num_chunks": 5, "total_tokens": 70, "num_seqs": 2}
    draft = WorkloadDraft(definition, axes, {}, torch.Generator().manual_seed(0), made_by_rule)
    if operator == PASSING:
        first, last = draft["last_chunk_indices"].tolist()
        assert 0 <= first < last == 4
    else:
        starts, ends = draft["chunk_starts"], draft["chunk_ends"]
        assert starts[0] == 0 and ends[-1] == 70 and torch.equal(starts[1:], ends[:-1])
        assert (ends - starts).min() >= 1 and (ends - starts).max() <= definition.const_axes.get("chunk_size", 70)
    if operator == SCAN:
        sequences = draft["seq_idx"]
        assert sequences.diff().min() >= 0 and sequences.unique().tolist() == [0, 1]
        assert draft["dA_cumsum"].diff(dim=-1).max() <= 0


def made_by_rule(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    made = (rule(draft, name) for rule in input_rules_for(draft.definition.op_type, name))
    return next((value for value in made if value is not None), None)
