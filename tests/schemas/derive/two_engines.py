"""Recordings of Llama-3.1-8B's decode as vLLM and SGLang run it on a GPU, written by hand, of 16 sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, write_recording
from kcap.schemas.recording.values import TensorSpec

LAYERS, BATCH = 32, 16
LINEARS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
LOGITS = (128256, 4096)


def tensor(*shape: int, dtype: str = "bfloat16", **more: Any) -> TensorSpec:
    return TensorSpec(shape, dtype, **more)


def call(operator: str, per_step: int, steps: int, phase: str = "decode", **arguments: Any) -> Call:
    """Its id is given when it is written. An argument of None is left out."""
    parts = [Argument(name=name, value=value) for name, value in arguments.items()]
    return Call(id=0, operator=operator, args=parts, counts=[Count(phase=phase, count=per_step * steps, mode="graph")])


def vllm(steps: int, batch: int = BATCH) -> Iterator[Call]:
    hidden, slots = tensor(batch, 4096), tensor(batch, dtype="int64")
    for n, k in LINEARS:
        weight = tensor(k, n, strides=(1, k))
        yield call("aten::mm.out", LAYERS, steps, self=tensor(batch, k), mat2=weight, out=tensor(batch, n))
    yield call("aten::linear", 1, steps, input=hidden, weight=tensor(*LOGITS), bias=None)
    norm = {"input": hidden, "weight": tensor(4096), "epsilon": 1e-5}
    yield call("_C::rms_norm", 1, steps, result=hidden, **norm)
    yield call("_C::fused_add_rms_norm", 2 * LAYERS, steps, residual=hidden, **norm)
    yield call("_C::silu_and_mul", LAYERS, steps, result=tensor(batch, 14336), input=tensor(batch, 28672))
    yield call(
        "_C::rotary_embedding",
        LAYERS,
        steps,
        positions=slots,
        query=hidden,
        key=tensor(batch, 1024),
        head_size=128,
        cos_sin_cache=tensor(131072, 128),
        is_neox=True,
    )
    caches = {"key_cache": tensor(3000, 16, 8, 128), "value_cache": tensor(3000, 16, 8, 128)}
    new = {"key": tensor(batch, 8, 128), "value": tensor(batch, 8, 128)}
    yield call("_C_cache_ops::reshape_and_cache_flash", LAYERS, steps, **new, **caches, slot_mapping=slots)
    yield call(
        "_vllm_fa3_C::fwd",
        LAYERS,
        steps,
        q=tensor(batch, 32, 128),
        k=tensor(3000, 16, 8, 128),
        v=tensor(3000, 16, 8, 128),
        out=tensor(batch, 32, 128),
        cu_seqlens_q=tensor(batch + 1, dtype="int32"),
        seqused_k=tensor(batch, dtype="int32"),
        page_table=tensor(batch, 64, dtype="int32"),
        max_seqlen_q=1,
        is_causal=True,
        window_size_left=-1,
        window_size_right=-1,
        softmax_scale=128**-0.5,
    )


def sglang(steps: int, batch: int = BATCH) -> Iterator[Call]:
    hidden, slots = tensor(batch, 4096), tensor(batch, dtype="int64")
    for n, k in LINEARS:
        yield call("aten::linear", LAYERS, steps, input=tensor(batch, k), weight=tensor(n, k), bias=None)
    yield call("aten::matmul", 1, steps, self=hidden, other=tensor(4096, 128256, strides=(1, 4096)))
    norm = {"input": hidden, "weight": tensor(4096), "eps": 1e-5}
    yield call("flashinfer::rmsnorm", 1, steps, **norm, out=None)
    yield call("flashinfer::fused_add_rmsnorm", 2 * LAYERS, steps, residual=hidden, **norm)
    gate = {"input": tensor(batch, 28672), "out": tensor(batch, 14336)}
    yield call("sglang::_run_activation_inplace", LAYERS, steps, op_name="silu", **gate)
    heads = {"q": tensor(batch, 32, 128), "k": tensor(batch, 8, 128), "cos_sin_cache": tensor(131072, 128)}
    yield call("sglang::apply_rope_inplace", LAYERS, steps, **heads, positions=slots, is_neox=True, rope_dim=0)
    caches = {name: tensor(48000, 1024) for name in ("k_cache", "v_cache")}
    new = {"k": tensor(batch, 1024), "v": tensor(batch, 1024)}
    yield call("sglang::store_cache", LAYERS, steps, **new, **caches, indices=slots, reserved_skip_index=0)
    for stage in ("_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2"):
        yield call(f"triton::{stage}.s01234567", LAYERS, steps, Q=tensor(batch, 32, 128))


def write(path: Path, calls: list[Call], framework: str, decodes: int, batch: int = BATCH, **more: Any) -> Path:
    """`decodes`: steps of that phase, each a batch of `batch` tokens."""
    sizes = {"padded": batch, "sequences": batch, "tokens": batch}
    batches = [{"phase": "decode", "mode": "full", **sizes, "steps": decodes}]
    model = {"model": "meta-llama/Llama-3.1-8B", "layers_recorded": LAYERS, "layers_model": LAYERS}
    fields = {**model, "steps": {"decode": decodes}, "batches": batches, "device": "NVIDIA H200"}
    metadata = Metadata(framework=framework, **(fields | more))
    write_recording(path, metadata, [each.model_copy(update={"id": number}) for number, each in enumerate(calls)])
    return path
