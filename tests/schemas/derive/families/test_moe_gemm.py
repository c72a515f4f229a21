"""moe_gemm: vLLM's Triton kernel, block by block as it runs, against the reference; names, bytes, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import kernels

from kcap.schemas.derive.families.moe.gemm import block_size

KERNEL = "triton::fused_moe_kernel.s5cd60b9f"


def aligned(ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens by expert in blocks, the experts of blocks, the number of tokens with padding. Buffers are longer."""
    flat, tokens, owners = ids.flatten(), [], []
    for expert in range(experts):
        own = torch.nonzero(flat == expert).flatten().flip(0)
        blocks = -(-len(own) // block)
        tokens.append(torch.cat([own, torch.full((blocks * block - len(own),), flat.numel())]))
        owners += [expert] * blocks
    used = torch.cat(tokens)
    spare = (len(owners) + 3) * block - 1  # the last block is cut
    buffer = torch.full((spare,), flat.numel(), dtype=torch.int32)
    buffer[: len(used)] = used
    owners = torch.tensor(owners + [0] * (-(-spare // block) - len(owners)), dtype=torch.int32)
    return buffer, owners, torch.tensor([len(used)], dtype=torch.int32)


def kernel(block: int, top_k: int) -> Any:
    """The kernel, a block at a time."""

    def run(a_ptr: Any, b_ptr: Any, c_ptr: Any, topk_weights_ptr: Any, **pointers: Any) -> None:
        tokens, experts = pointers["sorted_token_ids_ptr"], pointers["expert_ids_ptr"]
        c, weights = c_ptr.view(-1, c_ptr.shape[-1]), topk_weights_ptr
        for i in range(int(pointers["num_tokens_post_padded_ptr"]) // block):
            rows = torch.tensor([i]) if tokens is None else tokens[block * i : block * (i + 1)].long()
            rows = rows[rows < len(c)]
            product = a_ptr[rows // top_k].double() @ b_ptr[int(experts[i])].double().T
            c[rows] = (product * (weights.flatten()[rows, None] if weights is not None else 1)).to(c.dtype)

    return run


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block"), [(5, 4, 2, 16), (33, 8, 3, 16), (64, 4, 1, 32), (7, 16, 8, 64)]
)
def test_sorted_tokens(weighted: bool, tokens: int, experts: int, top_k: int, block: int):
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).argsort(-1)[:, :top_k]
    buffer, owners, total = aligned(ids, experts, block)
    rows, each = (tokens * top_k, 1) if weighted else (tokens, top_k)
    instance = agrees(
        KERNEL,
        kernel(block, each),
        a_ptr=randn(rows, 48),
        b_ptr=randn(experts, 32, 48, seed=1),
        c_ptr=torch.empty(tokens, top_k, 32, dtype=torch.bfloat16),
        topk_weights_ptr=torch.rand(tokens, top_k) if weighted else None,
        sorted_token_ids_ptr=buffer,
        expert_ids_ptr=owners,
        num_tokens_post_padded_ptr=total,
    )
    assert torch.equal(instance.inputs["topk_ids"].get(), ids.reshape(rows, each).int())
    assert instance.name == f"moe_gemm{'_weighted' if weighted else ''}_topk{each}_e{experts}_n32_k48"


@pytest.mark.parametrize(("groups", "size"), [((2, 3), (128, 128)), ((192, 1), (1, 384))])
def test_scales_of_blocks_and_of_channels(groups: tuple[int, int], size: tuple[int, int]):
    ids = torch.tensor([[3, 0], [1, 2], [0, 1]], dtype=torch.int32)
    a, b = randn(3, 384).to(torch.float8_e4m3fn), randn(4, 192, 384, seed=1).to(torch.float8_e4m3fn)
    a_scale, b_scale = torch.rand(3, groups[1]) + 0.1, torch.rand(4, *groups) + 0.1

    def run(a_ptr: Any, b_ptr: Any, a_scale_ptr: Any, b_scale_ptr: Any, **pointers: Any) -> None:
        rows, columns = torch.arange(192)[:, None] // size[0], torch.arange(384) // size[1]
        scaled = {
            "a_ptr": a_ptr.double() * a_scale_ptr[:, columns],
            "b_ptr": b_ptr.double() * b_scale_ptr[:, rows, columns],
        }
        kernel(1, 2)(**scaled, **pointers)

    instance = agrees(
        KERNEL,
        run,
        a_ptr=a,
        b_ptr=b,
        c_ptr=torch.empty(3, 2, 192, dtype=torch.bfloat16),
        a_scale_ptr=a_scale,
        b_scale_ptr=b_scale,
        topk_weights_ptr=None,
        sorted_token_ids_ptr=None,
        expert_ids_ptr=ids.flatten(),
        num_tokens_post_padded_ptr=torch.tensor([6]),
    )
    assert instance.name == "moe_gemm_float8_e4m3fn_topk2_e4_n192_k384"
    assert instance.tags == ("quantization:float8_e4m3fn",)


FP8 = torch.float8_e4m3fn
SCALES = {  # shapes of A's and B's by what has one, for 5 tokens, 4 experts, 64 rows and 256 columns
    None: None,
    "tensor": ((1,), (4,)),
    "channel": ((5, 1), (4, 64, 1)),
    "block": ((5, 2), (4, 1, 2)),
}


def quantized(per: str | None) -> tuple[dict[str, Any], dict[str, int], dict[str, Any]]:
    """Of a launch with scales for each `per`: its matrices, scales and weights; their strides; its constants."""
    scales = SCALES[per] and tuple(torch.rand(shape) + 0.1 for shape in SCALES[per])
    a, b = (matrix.to(FP8) if scales else matrix for matrix in (randn(5, 256), randn(4, 64, 256, seed=1)))
    tensors = {"a_ptr": a, "b_ptr": b, "topk_weights_ptr": torch.rand(5, 2)}
    tensors |= dict(zip(("a_scale_ptr", "b_scale_ptr"), scales or (None, None), strict=True))
    strides = {"stride_am": 256, "stride_ak": 1, "stride_be": 64 * 256, "stride_bk": 1, "stride_bn": 256}
    strides |= dict.fromkeys(("stride_asm", "stride_ask", "stride_bse", "stride_bsk", "stride_bsn"), 0)
    if scales and per != "tensor":
        (strides["stride_asm"], strides["stride_ask"]) = scales[0].stride()
        (strides["stride_bse"], strides["stride_bsn"], strides["stride_bsk"]) = scales[1].stride()
    strides |= {"stride_bse": 1} if per == "tensor" else {}
    fixed: dict[str, Any] = {"group_n": 128, "group_k": 128} if per == "block" else {"group_n": 0, "group_k": 0}
    fixed |= {"use_fp8_w8a8": per is not None, "use_int8_w8a8": False, "use_int8_w8a16": False}
    return tensors, strides, {**fixed, "per_channel_quant": per == "channel"}


@pytest.mark.filterwarnings("ignore:divide by zero")  # by blocks of no columns, where there are none
@pytest.mark.parametrize("per", SCALES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("few", [False, True])
def test_vllms_triton_kernel_itself(per: str | None, with_bias: bool, few: bool):
    """Interpreted, with the arguments of `invoke_fused_moe_triton_kernel`."""
    triton = pytest.importorskip("triton")
    launcher = kernels("vllm", "model_executor/layers/fused_moe/fused_moe.py")["fused_moe_kernel"]
    ids = torch.tensor([[3, 0], [1, 2], [0, 1], [3, 2], [1, 0]])
    matrices, strides, fixed = quantized(per)
    buffer, owners, total = aligned(ids, 4, 16)
    tensors = {**matrices, "c_ptr": torch.empty(5, 2, 64, dtype=torch.bfloat16)}
    tensors["b_bias_ptr"] = randn(4, 64, seed=2) if with_bias else None
    tensors["sorted_token_ids_ptr"] = None if few else buffer
    tensors["expert_ids_ptr"] = ids.flatten().int() if few else owners
    tensors["num_tokens_post_padded_ptr"] = torch.tensor([160], dtype=torch.int32) if few else total
    fixed |= {
        "naive_block_assignment": few,
        "MUL_ROUTED_WEIGHT": True,
        "top_k": 2,
        "compute_type": triton.language.bfloat16,
    }
    fixed["HAS_BIAS"] = with_bias

    def run(a_ptr: torch.Tensor, b_ptr: torch.Tensor, **rest: Any) -> None:
        blocks = {
            "BLOCK_SIZE_M": 16,
            "BLOCK_SIZE_N": 64,
            "BLOCK_SIZE_K": 64,
            "GROUP_SIZE_M": 1,
            "SPLIT_K": 1,
            "SWAP_AB": False,
        }
        sizes = {"N": 64, "K": 256, "EM": 160 if few else len(buffer), "num_valid_tokens": 10}
        others = {"stride_cm": 64, "stride_cn": 1, "stride_bbe": 64, "stride_bbn": 1}
        a, b = a_ptr.float(), b_ptr.float()  # the interpreter has no products of float8
        launcher[16,](a_ptr=a, b_ptr=b, **rest, **sizes, **others, **strides, **blocks)

    instance = agrees(KERNEL, run, **tensors, **fixed)
    words = f"{'_bias' if with_bias else ''}{'_float8_e4m3fn' if per else ''}{'_per_tensor' if per == 'tensor' else ''}"
    assert instance.name == f"moe_gemm_weighted{words}_topk2_e4_n64_k256"


@pytest.mark.filterwarnings("ignore:divide by zero")  # by blocks of no columns, where there are none
@pytest.mark.parametrize("per", SCALES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_sglangs_triton_kernel_itself(per: str | None, with_bias: bool):
    """Interpreted, with the arguments of its `invoke_fused_moe_kernel`; one token's expert is another rank's."""
    triton = pytest.importorskip("triton")
    launcher = kernels("sglang", "kernels/ops/moe/fused_moe_triton_kernels.py")["fused_moe_kernel"]
    ids = torch.tensor([[3, 0], [1, 2], [0, 1], [3, 2], [1, 0]])
    matrices, strides, fixed = quantized(per)
    buffer, owners, total = aligned(ids, 4, 16)
    owners[owners == 2] = -1
    tensors = {**matrices, "c_ptr": torch.empty(10, 64, dtype=torch.bfloat16)}
    tensors["bias_ptr"] = randn(4, 64, seed=2) if with_bias else None
    tensors |= {"sorted_token_ids_ptr": buffer, "expert_ids_ptr": owners, "num_tokens_post_padded_ptr": total}
    fixed |= {"MUL_ROUTED_WEIGHT": True, "top_k": 2, "compute_type": triton.language.bfloat16}
    fixed |= {"even_Ks": True, "ROUTER_TOPK": 2}
    none = dict.fromkeys(("a_desc", "b_desc", "add_mask_ptr"))
    flags = ("c_sorted", "swap_ab", "FUSE_ADD_TO_OUTPUT", "MASK_OUTPUT", "FUSE_SUM_ALL_REDUCE")
    fixed |= none | dict.fromkeys(flags, False)

    def run(a_ptr: torch.Tensor, b_ptr: torch.Tensor, **rest: Any) -> None:
        blocks = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
        sizes = {"N": 64, "K": 256, "EM": len(buffer), "num_valid_tokens": 10}
        others = {"stride_cm": 64, "stride_cn": 1, "stride_bias_e": 64, "stride_bias_n": 1}
        a, b = a_ptr.float(), b_ptr.float()  # the interpreter has no products of float8
        launcher[16,](a_ptr=a, b_ptr=b, **rest, **sizes, **others, **strides, **blocks)

    instance = agrees(KERNEL, run, **tensors, **fixed)
    words = f"{'_bias' if with_bias else ''}{'_float8_e4m3fn' if per else ''}{'_per_tensor' if per == 'tensor' else ''}"
    assert instance.name == f"moe_gemm_weighted{words}_topk2_e4_n64_k256"


def test_few_tokens_have_an_expert_each():
    ids = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    agrees(
        KERNEL,
        kernel(1, 2),
        a_ptr=randn(2, 48),
        b_ptr=randn(4, 32, 48, seed=1),
        c_ptr=torch.empty(2, 2, 32, dtype=torch.bfloat16),
        topk_weights_ptr=None,
        sorted_token_ids_ptr=None,
        expert_ids_ptr=ids.flatten(),
        num_tokens_post_padded_ptr=torch.tensor([4]),
    )


def test_block_sizes_as_recorded():
    assert [block_size(6016, 188), block_size(1024, 64), block_size(14208, 222)] == [32, 16, 64]
    assert block_size(22416, 176) == 128  # the last block is cut
    assert block_size(17, 2) == 16


def qwen3(**other: Any) -> dict[str, Any]:
    """The second launch for Qwen3-30B-A3B, of 8 tokens."""
    shapes = {"a_ptr": (64, 768), "b_ptr": (128, 2048, 768), "c_ptr": (8, 8, 2048)}
    call_arguments = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    numbers = {"sorted_token_ids_ptr": 1024, "expert_ids_ptr": 64, "num_tokens_post_padded_ptr": 1}
    ints = {name: torch.empty(count, dtype=torch.int32, device="meta") for name, count in numbers.items()}
    return {**call_arguments, **ints, "topk_weights_ptr": torch.empty(8, 8, device="meta"), **other}


def test_names_of_qwen3():
    kernel = kernel_of(KERNEL, **qwen3())
    definition = checked(kernel)
    assert definition.name == "moe_gemm_weighted_topk1_e128_n2048_k768"
    assert definition.var_axes == ["num_rows"]
    assert definition.inputs["topk_ids"].shape == definition.inputs["topk_weights"].shape == ["num_rows", "top_k"]
    assert kernel.touched is not None
    assert kernel.touched() == 2 * (64 * 768 + 8 * 8 * 2048 + 2048 * 768)  # one expert at least: no Sample tells


def test_a_kernel_compiled_without_weights_ignores_them():
    without = kernel_of(KERNEL, **qwen3(MUL_ROUTED_WEIGHT=False))
    assert without.name == "moe_gemm_topk1_e128_n2048_k768"
    assert without.key == kernel_of(KERNEL, **qwen3(topk_weights_ptr=None)).key
    assert kernel_of(KERNEL, **qwen3(MUL_ROUTED_WEIGHT=True)).key == kernel_of(KERNEL, **qwen3()).key


def test_what_is_not_modelled_is_declined():
    assert declined(KERNEL, **qwen3(b_scale_ptr=torch.empty(128)))
    assert declined(KERNEL, **qwen3(b_bias_ptr=torch.empty(128, 2047)))
    assert declined(KERNEL, **qwen3(a_desc=torch.empty(64, 768)))
    assert declined(KERNEL, **qwen3(A_OUTPUT_SLICES=2))
    assert declined(KERNEL, **qwen3(FUSE_SUM_ALL_REDUCE=True))
    assert declined(KERNEL, **qwen3(c_ptr=torch.empty(9, 7, 2048, dtype=torch.bfloat16)))
