"""weight_only_gemm: weights packed as vLLM's own utilities and Triton's kernels have them; names, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn
from interpreted import kernels

from kcap.schemas.derive.bound_call import BoundCall, Skip, replay_rule_for
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

UINT4, UINT4B8, UINT8B128, FLOAT8 = 0x4000000000400, 0x4000000100400, 0x4000001000800, 0xA000000010304
EMPTY = torch.empty(0, dtype=torch.int32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's: the column that each nibble of a word has


def marlin(**other: Any) -> dict[str, Any]:
    """What vLLM 0.22.1 passes beside the matrices (`apply_gptq_marlin_linear`)."""
    settings = {"is_k_full": True, "use_atomic_add": False, "use_fp32_reduce": True, "is_zp_float": False}
    empty = {"c_or_none": None, "b_bias_or_none": None, "a_scales": None, "global_scale": None}
    order = {"b_zeros_or_none": EMPTY, "g_idx_or_none": EMPTY, "perm_or_none": EMPTY}
    return {**empty, **order, "workspace": torch.zeros(132, dtype=torch.int32), **settings, **other}


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, -1), (8, 128), (4, 64)])
def test_marlins_weight_as_vllm_packs_it(bits: int, group: int) -> None:
    utilities = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_test")
    types = pytest.importorskip("vllm.scalar_type").scalar_types
    kind = types.uint4b8 if bits == 4 else types.uint8b128
    assert kind.id == (UINT4B8 if bits == 4 else UINT8B128)
    m, n, k = 5, 192, 256
    w, b, scale, *_ = utilities.marlin_quantize(randn(k, n, dtype=torch.float16), kind, group)
    a, sizes = randn(m, k, dtype=torch.float16), {"size_m": m, "size_n": n, "size_k": k, "b_type_id": kind.id}
    kernel = agrees(
        "_C::marlin_gemm",
        lambda a, **_: (a.double() @ w.double()).to(a.dtype),
        **marlin(a=a, b_q_weight=b, b_scales=scale, **sizes),
    )
    word = "" if bits == 4 else "_int8"
    assert kernel.name == f"weight_only_gemm_marlin{word}_fp16_n{n}_k{k}_g{group if group > 0 else k}"


@pytest.mark.parametrize("group", [128, 32])
def test_marlins_zero_points_and_bias_as_vllm_permutes_them(group: int) -> None:
    utilities = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_test")
    layout = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils")
    kind = pytest.importorskip("vllm.scalar_type").scalar_types.uint4
    assert kind.id == UINT4
    m, n, k = 3, 128, 256
    w, b, scale, zero = utilities.awq_marlin_quantize(randn(k, n, dtype=torch.float16), kind, group)
    a, bias = randn(m, k, dtype=torch.float16), randn(n, dtype=torch.float16, seed=1)
    matrices = {"a": a, "b_q_weight": b, "b_scales": scale, "b_zeros_or_none": zero}
    settings = marlin(**matrices, b_bias_or_none=layout.marlin_permute_bias(bias), b_type_id=UINT4)
    kernel = agrees(
        "_C::marlin_gemm",
        lambda a, **_: (a.double() @ w.double() + bias.double()).to(a.dtype),
        **settings,
        size_m=m,
        size_n=n,
        size_k=k,
    )
    assert kernel.name == f"weight_only_gemm_bias_marlin_zp_fp16_n{n}_k{k}_g{group}"


def packed(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Nibbles of eight columns in a word, in this order."""
    parts = values.unflatten(-1, (-1, 8))[..., list(order)].to(torch.int64) << torch.arange(0, 32, 4)
    return parts.sum(-1).to(torch.int32)


def quantized(k: int, n: int, group: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [k, n], zero points and scales [k / group, n]."""
    generator = torch.Generator().manual_seed(seed)
    values, zero = (torch.randint(0, 16, (rows, n), generator=generator) for rows in (k, k // group))
    return values, zero, (torch.rand(k // group, n, generator=generator) / 8 + 0.01).to(torch.float16)


def dequantized(values: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    group = len(values) // len(scale)
    return torch.stack([(row - zero[i // group]) * scale[i // group].double() for i, row in enumerate(values)])


def test_awqs_weight_is_unpacked_as_vllms_triton_kernel_does() -> None:
    awq = kernels("vllm", "model_executor/layers/quantization/awq_triton.py")["awq_dequantize_kernel"]
    values, zero, scale = quantized(128, 64, 64)

    def run(qweight_ptr: Any, scales_ptr: Any, zeros_ptr: Any, result_ptr: Any, **rest: Any) -> None:
        awq[2, 4](qweight_ptr, scales_ptr, zeros_ptr, result_ptr=result_ptr, **rest, BLOCK_SIZE_X=4, BLOCK_SIZE_Y=32)

    words = {"qweight_ptr": packed(values, AWQ_ORDER), "zeros_ptr": packed(zero, AWQ_ORDER), "scales_ptr": scale}
    sizes = {"group_size": 64, "num_cols": 8, "num_rows": 128}
    result = torch.empty(128, 64, dtype=torch.float16)
    kernel = agrees("triton::awq_dequantize_kernel", run, **words, result_ptr=result, **sizes)
    assert kernel.name == "dequantize_weight_awq_zp_fp16_n64_k128_g64"
    assert torch.allclose(result.double(), dequantized(values, zero, scale), rtol=1e-3)


def test_awqs_own_kernels() -> None:
    values, zero, scale = quantized(256, 64, 128)
    w = dequantized(values, zero, scale)
    words = {"_kernel": packed(values, AWQ_ORDER), "_zeros": packed(zero, AWQ_ORDER), "_scaling_factors": scale}
    a = randn(5, 256, dtype=torch.float16)
    kernel = agrees(
        "_C::awq_gemm", lambda _in_feats, **_: (_in_feats.double() @ w).half(), _in_feats=a, **words, split_k_iters=8
    )
    assert kernel.name == "weight_only_gemm_awq_zp_fp16_n64_k256_g128"
    agrees("_C::awq_dequantize", lambda **_: w.half(), **words, split_k_iters=0, thx=0, thy=0)


def shuffled(values: torch.Tensor) -> torch.Tensor:
    """As exllama's `gptq_shuffle` leaves eight rows of a column in a word: the even ones in its low half."""
    words = torch.zeros(len(values) // 8, values.shape[1], dtype=torch.int64)
    for i in range(8):
        words |= values[i::8].long() << 4 * (i // 2 + 4 * (i % 2))
    return words.to(torch.int32)


@pytest.mark.parametrize("second_format", [False, True])
def test_gptqs_weight_shuffled_for_exllama(second_format: bool) -> None:
    values, zero, scale = quantized(256, 64, 128)
    zero = zero.clamp(min=1)
    stored = packed(zero if second_format else zero - 1, tuple(range(8)))
    w, a = dequantized(values, zero, scale), randn(5, 256, dtype=torch.float16)
    words = {"b_q_weight": shuffled(values), "b_gptq_qzeros": stored, "b_gptq_scales": scale, "b_g_idx": EMPTY}
    settings = {"use_exllama": True, "use_v2_format": second_format, "bit": 4}
    kernel = agrees("_C::gptq_gemm", lambda a, **_: (a.double() @ w).half(), a=a, **words, **settings)
    assert kernel.name == f"weight_only_gemm_gptq{'_v2' if second_format else ''}_zp_fp16_n64_k256_g128"


@pytest.mark.parametrize("with_zero", [False, True])
def test_the_weight_that_vllm_packs_for_cpus(with_zero: bool) -> None:
    """By its own kernel, where this vLLM is built for a CPU."""
    load_vllm_kernels()
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM has this operator for CPUs alone, of x86 those with AVX-512")
    values, zero, scale = quantized(128, 64, 64)
    a, bias, scale = randn(5, 128), randn(64, seed=1), scale.bfloat16()
    words = packed(values, tuple(range(8))).unflatten(1, (4, 2)).transpose(0, 1).flatten(1)  # as `CPUWNA16LinearKernel`
    zeros = packed(zero, tuple(range(8))) if with_zero else None
    matrices = {"input": a, "q_weight": words.contiguous(), "output": torch.empty(5, 64, dtype=a.dtype)}
    others = {"scales": scale, "zeros": zeros, "bias": bias, "pack_factor": 8, "isa_hint": "vec"}
    kernel = agrees(
        "_C::cpu_gemm_wna16", lambda **all_: torch.ops._C.cpu_gemm_wna16(*all_.values()), **matrices, **others
    )
    assert kernel.name == f"weight_only_gemm_bias_cpu{'_zp' if with_zero else ''}_n64_k128_g64"


SETTINGS = {"use_atomic_add": False, "use_fp32_reduce": True, "is_zp_float": False}


def unnamed(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, kind: int) -> dict[str, Any]:
    """What SGLang passes to the kernel that it compiles, `tvm::gptq_marlin_gemm`."""
    none, c = torch.empty(0), torch.full((len(a), scale.shape[1]), 7.0, dtype=a.dtype)
    tensors = (a, b, scale, none, zero, EMPTY, EMPTY, c, none, none, torch.zeros(132, dtype=torch.int32))
    return {f"arg{place}": value for place, value in enumerate((*tensors, kind, True, *SETTINGS.values()))}


@pytest.mark.parametrize("with_zero", [True, False])
def test_marlins_weight_as_sglang_passes_it(with_zero: bool) -> None:
    utilities = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_test")
    types = pytest.importorskip("vllm.scalar_type").scalar_types
    kind, m, n, k = types.uint4 if with_zero else types.uint4b8, 3, 128, 256
    made = (utilities.awq_marlin_quantize if with_zero else utilities.marlin_quantize)(
        randn(k, n, dtype=torch.float16), kind, 64
    )
    (w, b, scale), zero, a = made[:3], made[3] if with_zero else EMPTY, randn(m, k, dtype=torch.float16)
    product = (a.double() @ w.double()).half()
    call = unnamed(a, b, scale, zero, kind.id)
    kernel = agrees("tvm::gptq_marlin_gemm", lambda **call: call["arg7"].copy_(product), **call)
    assert kernel.name == f"weight_only_gemm_marlin{'_zp' if with_zero else ''}_fp16_n128_k256_g64"
    sizes = {"output_size_per_partition": n, "input_size_per_partition": k, "wtype_id": kind.id}
    weight = {"input": a, "weight": b, "weight_scale": scale, "weight_zp": zero, "workspace": call["arg10"]}
    unified = {**weight, "g_idx": EMPTY, "g_idx_sort_indices": EMPTY, **sizes, **SETTINGS}
    for name in ("_with_wtype", "") if with_zero else ("_with_wtype",):
        again = agrees(f"sglang::unified_apply_gptq_marlin_gemm{name}", lambda **_: product, **unified)
        assert again.name == kernel.name
    order = torch.zeros(k, dtype=torch.int32)
    assert declined("tvm::gptq_marlin_gemm", **{**call, "arg5": order, "arg6": order})
    assert declined("tvm::gptq_marlin_gemm", **{**call, "arg3": torch.ones(1)})
    assert declined("sglang::unified_apply_gptq_marlin_gemm_with_wtype", **{**unified, "wtype_id": FLOAT8})


def test_sglangs_other_kernels_of_four_bits() -> None:
    """GPTQ's of 0.5.15, and AWQ's weight before a product."""
    values, zero, scale = quantized(256, 64, 128)
    zero = zero.clamp(min=1)
    w, a = dequantized(values, zero, scale), randn(5, 256, dtype=torch.float16)
    words = {"b_q_weight": shuffled(values), "b_gptq_qzeros": packed(zero - 1, tuple(range(8)))}
    call = {"a": a, **words, "b_gptq_scales": scale, "b_g_idx": EMPTY, "use_shuffle": True, "bit": 4}
    kernel = agrees("sgl_kernel::gptq_gemm", lambda a, **_: (a.double() @ w).half(), **call)
    assert kernel.name == "weight_only_gemm_gptq_zp_fp16_n64_k256_g128"
    assert declined("sgl_kernel::gptq_gemm", **{**call, "use_shuffle": False})
    weight = {"qweight": packed(values, AWQ_ORDER), "scales": scale, "qzeros": packed(zero, AWQ_ORDER)}
    for name in ("sglang", "sgl_kernel"):
        assert agrees(f"{name}::awq_dequantize", lambda **_: w.half(), **weight).op_type == "dequantize_weight"


def test_names_of_qwen3_and_what_is_declined() -> None:
    a, b, scale = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (((7, 4096), torch.bfloat16), ((256, 12288), torch.int32), ((32, 6144), torch.bfloat16))
    )
    usual = marlin(a=a, b_q_weight=b, b_scales=scale, size_m=7, size_n=6144, size_k=4096, b_type_id=UINT4B8)
    kernel = kernel_of("_C::marlin_gemm", **usual)
    definition = checked(kernel)
    assert definition.name == "weight_only_gemm_marlin_n6144_k4096_g128"
    assert definition.var_axes == ["M"] and definition.inputs["B"].shape == ["B_rows", "B_columns"]
    assert kernel.flops == 2 * 7 * 6144 * 4096
    order = torch.zeros(4096, dtype=torch.int32)
    assert declined("_C::marlin_gemm", **{**usual, "g_idx_or_none": order, "perm_or_none": order})
    assert declined("_C::marlin_gemm", **{**usual, "b_type_id": FLOAT8})
    assert declined("_C::marlin_gemm", **{**usual, "b_type_id": UINT4})  # zero points are missing
    assert declined("_C::marlin_gemm", **{**usual, "a_scales": torch.ones(7)})
    assert declined("_C::machete_mm", A=a, B=b)


def test_a_cpus_weight_is_made_up_in_replay() -> None:
    specs = {"q_weight": TensorSpec((4, 256), "int32"), "zeros": TensorSpec((2, 8), "int32", storage=1)}
    bound = BoundCall("_C::cpu_gemm_wna16", [Argument(name=name, value=spec) for name, spec in specs.items()])
    replay_rule_for(bound.operator).prepare(bound)
    assert all((content := bound.content(name)) is not None and len(content.unique()) > 10 for name in specs)


def test_sglangs_weight_is_made_up_in_replay_unless_its_type_is_not_told() -> None:
    shapes = {"weight": (16, 128), "weight_zp": (0,), "g_idx": (0,), "workspace": (132,)}
    specs = {name: TensorSpec(shape, "int32", storage=i) for i, (name, shape) in enumerate(shapes.items())}
    name, args = "sglang::unified_apply_gptq_marlin_gemm", [Argument(name=n, value=spec) for n, spec in specs.items()]
    bound = BoundCall(f"{name}_with_wtype", args)
    replay_rule_for(bound.operator).prepare(bound)
    assert (words := bound.content("weight")) is not None and len(words.unique()) > 1000
    assert (locks := bound.content("workspace")) is not None and not locks.any()
    with pytest.raises(Skip, match="type of its weight"):
        replay_rule_for(name).prepare(BoundCall(name, args))


def test_marlins_locks_are_free_in_replay_and_its_weight_is_made_up() -> None:
    shapes = {"b_q_weight": (16, 128), "b_zeros_or_none": (0,), "g_idx_or_none": (0,), "workspace": (132,)}
    specs = {name: TensorSpec(shape, "int32", storage=i) for i, (name, shape) in enumerate(shapes.items())}
    bound = BoundCall("_C::marlin_gemm", [Argument(name=name, value=spec) for name, spec in specs.items()])
    replay_rule_for(bound.operator).prepare(bound)
    contents = {name: bound.content(name) for name in shapes}
    assert contents["workspace"] is not None and not contents["workspace"].any()
    assert contents["b_q_weight"] is not None and len(contents["b_q_weight"].unique()) > 1000
    assert all(content is not None and content.shape == shapes[name] for name, content in contents.items())
