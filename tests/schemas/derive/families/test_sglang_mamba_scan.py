"""mamba2_joined_*: the references against SGLang's Triton kernels, interpreted; Workloads, replay, the recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import Launcher, kernels
from paging import starts
from test_chunked_delta_rule import made_by_rule
from test_sglang_mamba import SOFTPLUS

from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.families import cost_function_for
from kcap.schemas.derive.workload_draft import WorkloadDraft

FILES = ("ssd_chunk_state", "ssd_state_passing", "ssd_bmm", "ssd_chunk_scan")
NAMES = ("chunk_cumsum_fwd", "chunk_state_fwd", "state_passing_fwd", "bmm_chunk_fwd", "chunk_scan_fwd")
CUMSUM, STATE, PASSING, BMM, SCAN, LAST = (
    f"triton::_{name}_kernel.s01234567" for name in (*NAMES, "chunk_state_varlen")
)
Arguments = dict[str, Any]
H, D, G, S, C = 4, 16, 2, 16, 16
LENGTHS = [21, 11, 3, 15, 1]  # the second begins within a chunk, the third with one, the last two within it
TOKENS, CHUNKS = sum(LENGTHS), 4
BLOCKS = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16}


@pytest.fixture(scope="module")
def found() -> dict[str, Launcher]:
    return kernels("sglang", *(f"kernels/ops/mamba/triton_ops/{name}.py" for name in FILES), head=SOFTPLUS)


def sequences() -> torch.Tensor:
    return torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).int()[None]


def pieces() -> Arguments:
    """As `Mamba2Metadata` prepares them."""
    begins = sorted({*range(0, TOKENS, C), *starts(LENGTHS)[:-1].tolist()})
    tables = {"chunk_indices_ptr": [at // C for at in begins], "chunk_offsets_ptr": [at % C for at in begins]}
    return {**{name: torch.tensor(table).int() for name, table in tables.items()}, "chunk_meta_num": len(begins)}


def places() -> Arguments:
    """Time steps and decays, 0 and level after the last token."""
    steps = torch.nn.functional.pad(randn(1, H, TOKENS, dtype=torch.float32, seed=1).abs(), (0, CHUNKS * C - TOKENS))
    decays = -steps * randn(H, 1, dtype=torch.float32, seed=2).abs()
    return {
        "dt_ptr": steps.reshape(1, H, CHUNKS, C),
        "dA_cumsum_ptr": decays.reshape(1, H, CHUNKS, C).cumsum(-1),
    }


def cumsum(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    call = {
        "dt_ptr": randn(1, TOKENS, H, dtype=dtype),
        "A_ptr": -randn(H, dtype=torch.float32, seed=1).abs(),
        "dt_bias_ptr": randn(H, dtype=torch.float32, seed=2),
        "dt_out_ptr": torch.full((1, H, CHUNKS, C), 7.0),
        "dA_cumsum_ptr": torch.full((1, H, CHUNKS, C), 7.0),
        "dt_min": 0.0,
        "dt_max": float("inf"),
        "DT_SOFTPLUS": True,
    }
    return {**call, **more}


def state(dtype: torch.dtype = torch.bfloat16) -> Arguments:
    return {
        "x_ptr": randn(1, TOKENS, H, D, dtype=dtype, seed=3),
        "b_ptr": randn(1, TOKENS, G, S, dtype=dtype, seed=4),
        "states_ptr": torch.full((1, CHUNKS, H, D, S), 7.0),
        **places(),
        "seq_idx_ptr": sequences(),
    }


def passing(initial: bool, dtype: torch.dtype = torch.float32) -> Arguments:
    return {
        "states_ptr": randn(1, CHUNKS, H, D * S, dtype=torch.float32, seed=5),
        "out_ptr": torch.full((1, CHUNKS, H, D * S), 7.0, dtype=dtype),
        "final_states_ptr": torch.full((1, H, D * S), 7.0),
        "dA_cs_ptr": places()["dA_cumsum_ptr"],
        "initstates_ptr": randn(len(LENGTHS), H, D * S, dtype=dtype, seed=6) if initial else None,
        "seq_idx_ptr": sequences(),
        **{name: pieces()[name] if initial else None for name in ("chunk_offsets_ptr", "chunk_meta_num")},
        "IS_CONT_BATCHED": True,
    }


def bmm(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    a, b = (randn(1, TOKENS, G, S, dtype=dtype, seed=seed) for seed in (7, 8))
    out = torch.full((1, CHUNKS, G, C, C), 7.0)
    return {"a_ptr": a, "b_ptr": b, "out_ptr": out, "seq_idx_ptr": sequences(), "IS_CAUSAL": False, **more}


def scan(initial: bool, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    """Products of two sequences are zero, as `bmm` leaves them."""
    seq = torch.nn.functional.pad(sequences()[0], (0, CHUNKS * C - TOKENS), value=-1).reshape(CHUNKS, C)
    same = (seq[:, :, None] == seq[:, None])[None, :, None]
    call = {
        "cb_ptr": randn(1, CHUNKS, G, C, C, dtype=torch.float32, seed=9) * same,
        "x_ptr": randn(1, TOKENS, H, D, dtype=dtype, seed=3),
        "z_ptr": None,
        "out_ptr": torch.full((1, TOKENS, H, D), 7.0, dtype=dtype),
        "out_x_ptr": None,
        **places(),
        "seq_idx_ptr": sequences(),
        "C_ptr": randn(1, TOKENS, G, S, dtype=dtype, seed=7),
        "states_ptr": randn(1, CHUNKS, H, D, S, dtype=torch.float32, seed=10),
        "D_ptr": randn(H, dtype=dtype, seed=11),
        "initstates_ptr": randn(len(LENGTHS), H, D, S, dtype=torch.float32, seed=12) if initial else None,
        **{name: value if initial else None for name, value in pieces().items()},
        "IS_CAUSAL": True,
    }
    return {**call, **more}


def last(initial: bool, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    batch = {**state(dtype), **places()}
    return {
        **{name: batch[name][0] for name in ("x_ptr", "b_ptr", "dt_ptr", "dA_cumsum_ptr")},
        "chunk_states_ptr": randn(CHUNKS, H, D, S, dtype=torch.float32, seed=10),
        "cu_seqlens_ptr": starts(LENGTHS),
        "states_ptr": torch.full((len(LENGTHS), H, D, S), 7.0),
        "initstates_ptr": randn(len(LENGTHS), H, D, S, dtype=torch.float32, seed=12) if initial else None,
    }


PLACE_AXES, TOKEN_AXES, STATE_AXES = "batch chunk head csize", "batch seqlen head hdim", "batch head hdim dstate"
AXES = {  # of the strides of each tensor, by the parameters' prefixes
    **dict.fromkeys(("dt", "dA_cumsum", "dt_out"), PLACE_AXES),
    **dict.fromkeys(("x", "out"), TOKEN_AXES),
    **dict.fromkeys(("b", "C"), "batch seqlen head dstate"),
    "seq_idx": "batch seqlen",
    "cb": "batch chunk head csize_m csize_k",
    "states": "batch chunk head hdim dstate",
    "initstates": STATE_AXES,
}
PREFIXES = {"dA_cumsum": "dA_cs", "initstates": "init_states"}


def strides(call: Arguments, **other: str) -> dict[str, int]:
    """Those of places are passed in the order of their parameters, [batch, head, chunk, csize] in memory."""
    given = {}
    for name, axes in {**AXES, **other}.items():
        tensor = call.get(f"{name}_ptr")
        names = axes.split()
        for place, axis in enumerate(names):
            at = (
                {1: 2, 2: 1}.get(place, place)
                if names[-3:] == ["chunk", "head", "csize"] and len(names) == 4
                else place
            )
            given[f"stride_{PREFIXES.get(name, name)}_{axis}"] = 0 if tensor is None else tensor.stride(at)
    return given


def runs(kernel: Launcher, grid: tuple[int, ...], fixed: Arguments, **other: str) -> Callable[..., None]:
    names = kernel.kernel.arg_names

    def run(**call: Any) -> None:
        flags = {"HAS_INITSTATES": call.get("initstates_ptr") is not None, "HAS_SEQ_IDX": True, "HAS_Z": False}
        sizes = {"batch": 1, "seqlen": TOKENS, "nheads": H, "hdim": D, "dstate": S, "chunk_size": C, "ngroups": G}
        sizes |= {"nheads_ngroups_ratio": H // G, **BLOCKS, **flags}
        every = {**sizes, **strides(call, **other), **fixed, **call}
        kernel[grid](**{name: value for name, value in every.items() if name in names})

    return run


def runs_cumsum(found: dict[str, Launcher]) -> Callable[..., None]:
    fixed = {
        "HAS_DT_BIAS": True,
        "BLOCK_SIZE_H": 2,
        "BLOCK_SIZE_CHUNK": C,
        "stride_A_head": 1,
        "stride_dt_bias_head": 1,
    }
    return runs(found["_chunk_cumsum_fwd_kernel"], (1, CHUNKS, H // 2), fixed, dt="batch seqlen head")


def runs_passing(found: dict[str, Launcher]) -> Callable[..., None]:
    fixed = {"dim": D * S, "nchunks": CHUNKS, "BLOCK_SIZE": 256}
    flat = dict.fromkeys(("states", "out"), "batch chunk head dim") | {
        "final_states": "batch head dim",
        "initstates": "",
    }

    def run(**call: Any) -> None:
        decays, initial = call["dA_cs_ptr"], call["initstates_ptr"]
        more = {
            f"stride_dA_cs_{axis}": decays.stride(at) for at, axis in enumerate(("batch", "head", "chunk", "csize"))
        }
        own = ("batch", "head", "dim")
        more |= {
            f"stride_initstates_{axis}": initial.stride(at) if initial is not None else 0 for at, axis in enumerate(own)
        }
        runs(found["_state_passing_fwd_kernel"], (1, 1, H), {**fixed, **more}, **flat)(**call)

    return run


def runs_bmm(found: dict[str, Launcher], dtype: torch.dtype) -> Callable[..., None]:
    import triton.language as tl

    dots = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

    def run(**call: Any) -> None:
        fixed = {"dot_dtype": dots[dtype], "K": S}
        for name in "ab":
            axes = (f"{name}_batch", f"{name}_seqlen", f"{name}_head", f"{name}k")
            fixed |= {f"stride_{axis}": call[f"{name}_ptr"].stride(at) for at, axis in enumerate(axes)}
        axes = ("out_batch", "out_chunk", "out_head", "outm", "outn")
        fixed |= {f"stride_{axis}": call["out_ptr"].stride(at) for at, axis in enumerate(axes)}
        runs(found["_bmm_chunk_fwd_kernel"], (1, 1, CHUNKS * G), fixed, out="")(**call)

    return run


def runs_scan(found: dict[str, Launcher]) -> Callable[..., None]:
    def run(**call: Any) -> None:
        skip, count = call["D_ptr"], CHUNKS if call["initstates_ptr"] is None else call["chunk_meta_num"]
        fixed = {"HAS_D": skip is not None, "D_HAS_HDIM": skip is not None and skip.dim() == 2, "IS_TRITON_22": True}
        fixed |= {"BLOCK_SIZE_DSTATE": S, "stride_D_head": 0 if skip is None else skip.stride(0)}
        fixed |= {f"stride_z_{axis}": 0 for axis in ("batch", "seqlen", "head", "hdim")}
        runs(found["_chunk_scan_fwd_kernel"], (1, count, H), fixed)(**call)

    return run


def runs_last(found: dict[str, Launcher]) -> Callable[..., None]:
    def run(**call: Any) -> None:
        places_ = ("chunk", "head", "csize")
        fixed = {
            f"stride_{name}_{axis}": call[key].stride({0: 1, 1: 0}.get(at, at))
            for name, key in (("dt", "dt_ptr"), ("dA_cs", "dA_cumsum_ptr"))
            for at, axis in enumerate(places_)
        }
        other = {"x": "seqlen head hdim", "b": "seqlen head dstate", "dt": "", "dA_cumsum": ""}
        other |= {"chunk_states": "chunk head hdim dstate", "states": "batch head hdim dstate"}
        runs(found["_chunk_state_varlen_kernel"], (1, len(LENGTHS), H), fixed, **other)(**call)

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_each_chunk_are_sglangs(found: dict[str, Launcher], dtype: torch.dtype) -> None:
    word = "" if dtype == torch.bfloat16 else "_fp32"
    assert agrees(CUMSUM, runs_cumsum(found), **cumsum(dtype)).name == f"mamba2_chunk_cumsum{word}_h4_c16"
    kernel = runs(found["_chunk_state_fwd_kernel"], (1, CHUNKS, H), {})
    assert agrees(STATE, kernel, **state(dtype)).family == "mamba2_joined_state"
    assert agrees(BMM, runs_bmm(found, dtype), **bmm(dtype)).name == f"mamba2_joined_bmm{word}_ng2_s16_c16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("initial", [False, True])
def test_states_are_passed_on_and_read_as_sglang_does(
    found: dict[str, Launcher], dtype: torch.dtype, initial: bool
) -> None:
    for operator, run, call in (
        (PASSING, runs_passing(found), passing(initial, dtype)),
        (SCAN, runs_scan(found), scan(initial, dtype)),
        (LAST, runs_last(found), last(initial, dtype)),
    ):
        kernel = agrees(operator, run, **call)
        assert ("_noinitial" in kernel.name) != initial and kernel.family == kernel.op_type
        inputs = {name: arg.get() for name, arg in kernel.inputs.items()}
        function, cost = cost_function_for(kernel.op_type), cost_of_instance(kernel)
        assert function is not None and function(CostInputs(checked(kernel), inputs)).bytes == cost.bytes > 0


@pytest.mark.parametrize("tokens", [5, 40])
def test_a_short_prompt_costs_its_own_pairs_of_tokens(tokens: int) -> None:
    size = 256
    chunks = {"cb": (1, size, size), "states": (H, D, S)}
    place, one = torch.ones(1, H, 1, size), torch.zeros(1, tokens, dtype=torch.int32)
    products = {"a_ptr": torch.ones(1, tokens, 1, S), "b_ptr": torch.ones(1, tokens, 1, S), "seq_idx_ptr": one}
    bmm = kernel_of(BMM, **products, out_ptr=torch.ones(1, 1, *chunks["cb"]), IS_CAUSAL=False)
    assert bmm.flops() == 2 * tokens**2 * S
    whole = scan(False) | {"cb_ptr": torch.ones(1, 1, *chunks["cb"]), "x_ptr": torch.ones(1, tokens, H, D)}
    whole |= {"out_ptr": torch.ones(1, tokens, H, D), "C_ptr": torch.ones(1, tokens, 1, S), "seq_idx_ptr": one}
    whole |= {"dt_ptr": place, "dA_cumsum_ptr": place, "states_ptr": torch.ones(1, 1, *chunks["states"])}
    assert kernel_of(SCAN, **whole).flops() == 2 * tokens * H * D * S + tokens * (tokens + 1) * H * D


def test_a_skip_of_each_channel_and_none(found: dict[str, Launcher]) -> None:
    for skip, word in ((randn(H, D, seed=14), "_Dhdim"), (None, "_noD")):
        assert word in agrees(SCAN, runs_scan(found), **scan(True, D_ptr=skip)).name


@pytest.mark.parametrize("initial", [False, True])
def test_factors_are_rounded_as_sglang_does(found: dict[str, Launcher], initial: bool) -> None:
    """An output in float32 shows it."""
    agrees(SCAN, runs_scan(found), **scan(initial, out_ptr=torch.full((1, TOKENS, H, D), 7.0)))


def test_what_is_declined() -> None:
    assert declined(CUMSUM, **cumsum(DT_SOFTPLUS=None))
    assert declined(BMM, **bmm(IS_CAUSAL=True)) and declined(SCAN, **scan(False, IS_CAUSAL=None))
    assert declined(SCAN, **scan(False, z_ptr=randn(1, TOKENS, H, D)))
    assert declined(PASSING, **{**passing(True), "IS_CONT_BATCHED": False})
    assert declined(STATE, **{**state(), "x_ptr": randn(2, TOKENS, H, D)})


@pytest.mark.parametrize("operator", [SCAN, PASSING, LAST])
def test_inputs_made_by_rule_are_pieces_of_sequences(operator: str) -> None:
    call = {SCAN: scan, PASSING: passing, LAST: last}[operator](True)
    axes = {"num_tokens": 70, "num_chunks": 5, "num_seqs": 4, "num_pieces": 7}
    draft = WorkloadDraft(
        checked(kernel_of(operator, **call)), axes, {}, torch.Generator().manual_seed(0), made_by_rule
    )
    assert draft["dA_cumsum"].diff(dim=-1).max() <= 0
    if operator == LAST:
        begins, ends = draft["seq_starts"], draft["seq_ends"]
        assert begins[0] == 0 and ends[-1] == 70 and torch.equal(begins[1:], ends[:-1]) and (ends - begins).min() > 0
        return
    changes = torch.nonzero(draft["seq_idx"].diff())[:, 0] + 1
    assert draft["seq_idx"].unique().tolist() == [0, 1, 2, 3] and int((changes % C > 0).sum()) == 2
    offsets = draft["chunk_offsets"]
    assert sorted(changes[changes % C > 0].tolist()) == sorted(
        (torch.cumsum((offsets == 0).long(), 0) * C - C + offsets)[offsets > 0].tolist()
    )
    if operator == SCAN:
        assert draft["chunk_indices"].diff().min() >= 0 and draft["chunk_indices"][-1] == 4
