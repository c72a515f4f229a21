"""weight_only_gemm: C = A @ W of a float A and a W of 4 or 8 bits (AWQ, GPTQ), by AWQ's, exllama's or Marlin's kernel,
or vLLM's for CPUs. On Hopper SGLang runs AWQ's and GPTQ's weights by Marlin's, packed as vLLM's are.

The Definition has W as it is packed for the kernel (`packed_weight`); dequantize_weight unpacks it alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.gemm.packed_weight import (
    PackedWeight,
    awq_weight,
    cpu_weight,
    gptq_weight,
    marlin_weight,
)
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, written_or_returned
from kcap.schemas.derive.kernel import KernelInstance, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.recording.values import TensorSpec


@family("weight_only_gemm", "_C::marlin_gemm", "_C::gptq_marlin_gemm")
def marlin_gemm(call: Invocation) -> KernelInstance:
    """`g_idx` and `perm` are empty unless GPTQ sorted the rows by activation; a bias is permuted as scales are."""
    call.refuse("a_scales", "global_scale", "global_scale_or_none", "is_zp_float")
    refuse_elements(call, "g_idx_or_none", "perm_or_none")
    a, scale = call.tensor("a"), call.tensor("b_scales")
    zero, bias = with_elements(call, "b_zeros_or_none"), with_elements(call, "b_bias_or_none")
    k, n = int(call.number("size_k")), int(call.number("size_n"))
    kind = int(call.number("b_type_id", "b_q_type_id", "b_q_type"))
    packed = marlin_weight(k, n, kind, call.tensor("b_q_weight"), scale, zero)
    return weight_only_instance(call, a, packed, bias, "c_or_none", "c", bias_text=MARLIN_BIAS)


SGLANG_MARLIN = (  # of `gptq_marlin.cuh`, compiled when it is first called: no argument has a name
    *("a", "b_q_weight", "b_scales", "global_scale", "b_zeros", "g_idx", "perm", "c", "c_tmp", "a_tmp", "workspace"),
    *("b_q_type", "is_k_full", "use_atomic_add", "use_fp32_reduce", "is_zp_float"),
)


@family("weight_only_gemm", "tvm::gptq_marlin_gemm")
def sglang_marlin_gemm(call: Invocation) -> KernelInstance:
    """SGLang's; an empty tensor stands for null."""
    if "arg0" in call.arguments:
        arguments = {name: call[f"arg{position}"] for position, name in enumerate(SGLANG_MARLIN)}
        call = Invocation(call.operator, arguments)
    call.refuse("is_zp_float")
    refuse_elements(call, "g_idx", "perm")
    if with_elements(call, "global_scale") is not None:
        raise Unrecognized("its weight is of floats")
    a, c, zero = call.tensor("a"), call.tensor("c"), with_elements(call, "b_zeros")
    kind = int(call.number("b_q_type"))
    packed = marlin_weight(a.shape[1], c.shape[1], kind, call.tensor("b_q_weight"), call.tensor("b_scales"), zero)
    return weight_only_instance(call, a, packed, None, "c")


@family("weight_only_gemm", *(f"sglang::unified_apply_gptq_marlin_gemm{word}" for word in ("", "_with_wtype")))
def unified_marlin_gemm(call: Invocation) -> KernelInstance:
    """The same in SGLang's graphs of prefills; AWQ's is not told the type, which has zero points and no bias."""
    call.refuse("is_zp_float")
    refuse_elements(call, "g_idx", "g_idx_sort_indices")
    b, zero = call.tensor("weight"), with_elements(call, "weight_zp")
    k, n = (int(call.number(f"{side}_size_per_partition")) for side in ("input", "output"))
    has_type = call.base.endswith("_with_wtype")
    kind = int(call.number("wtype_id")) if has_type else b.numel() * 32 // (k * n) << 8
    packed = marlin_weight(k, n, kind, b, call.tensor("weight_scale"), zero)
    return weight_only_instance(call, call.tensor("input"), packed, None)


@family("weight_only_gemm", "_C::awq_gemm")
def awq_gemm(call: Invocation) -> KernelInstance:
    """`split_k_iters` says how many parts of K are added up; the kernel adds them itself."""
    packed = awq_weight(*(call.tensor(name) for name in ("_kernel", "_scaling_factors", "_zeros")))
    return weight_only_instance(call, call.tensor("_in_feats"), packed, None)


@family("weight_only_gemm", "_C::gptq_gemm")
def gptq_gemm(call: Invocation) -> KernelInstance:
    """As exllama runs it: shuffled by `gptq_shuffle`, without an order of activation. Without it rows have no order."""
    refuse_elements(call, "b_g_idx")
    if call["bit"] != 4 or call["use_exllama"] is not True:
        raise Unrecognized("not of four bits, or not shuffled for exllama")
    b, scale, zero = (call.tensor(name) for name in ("b_q_weight", "b_gptq_scales", "b_gptq_qzeros"))
    packed = gptq_weight(b, scale, zero, offset=0 if call["use_v2_format"] else 1)
    return weight_only_instance(call, call.tensor("a"), packed, None)


@family("weight_only_gemm", "sgl_kernel::gptq_gemm")
def sglang_gptq_gemm(call: Invocation) -> KernelInstance:
    """SGLang's until 0.5.15, of GPTQ's first format alone."""
    settings = {"use_exllama": call["use_shuffle"], "use_v2_format": False}
    named = Invocation("_C::gptq_gemm", {**call.arguments, **settings})
    instance = gptq_gemm(named)
    return replace(instance, outputs={"C": replace(instance.outputs["C"], value=lambda: call.result)})


@family("weight_only_gemm", "_C::cpu_gemm_wna16")
def cpu_gemm(call: Invocation) -> KernelInstance:
    """`isa_hint` says by which instructions."""
    if call["pack_factor"] != 8:
        raise Unrecognized("not of four bits")
    packed = cpu_weight(call.tensor("q_weight"), call.tensor("scales"), call.optional("zeros"))
    return weight_only_instance(call, call.tensor("input"), packed, call.optional("bias"), "output")


@family("weight_only_gemm", "_C::allspark_w8a16_gemm", "_C::cutlass_w4a8_mm")
def prepacked_gemm(call: Invocation) -> KernelInstance:
    raise Unrecognized(f"{call.operator}: its weight lies as CUTLASS's layouts for this device want it")


def with_elements(call: Invocation, name: str) -> torch.Tensor | None:
    """The tensor called `name`; None where it is null or has no elements, which vLLM passes for null."""
    tensor = call.optional(name)
    return tensor if tensor is not None and tensor.numel() else None


def refuse_elements(call: Invocation, *names: str) -> None:
    for name in names:
        if with_elements(call, name) is not None:
            raise Unrecognized(f"{call.operator}: {name} orders the rows by activation")


MARLIN_BIAS = "bias.unflatten(-1, (-1, 4, 4, 2)).transpose(-2, -3).flatten(-4)"


def weight_only_instance(
    call: Invocation,
    a: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    *outputs: str,
    bias_text: str = "bias",
) -> KernelInstance:
    """`a`: [M, K]; `bias`: [N], in order once it is `bias_text`; `outputs`: the argument that is written, if there is
    one."""
    if a.dtype not in FLOATS or a.dim() != 2 or a.shape[1] != packed.k:
        raise Unrecognized("not a product with a matrix of floats")
    m, k, n = len(a), packed.k, packed.n
    inputs = {"A": tensor_arg(a, "M", "K"), **packed.inputs()}
    if bias is not None:
        inputs["bias"] = tensor_arg(bias, "N")
    addend = "" if bias is None else f" + {bias_text}.to(torch.float32)"
    product = f"A.to(torch.float32) @ w{addend}"
    return KernelInstance(
        name=f"weight_only_gemm{'_bias' if bias is not None else ''}_{packed.name(a.dtype)}",
        op_type="weight_only_gemm",
        axes={"M": None, "K": k, **packed.axes()},
        inputs=inputs,
        outputs={"C": lazy_arg(a.dtype, ("M", "N"), lambda: written_or_returned(call, *outputs))},
        reference=packed.reference(list(inputs), f"return ({product}).to(A.dtype)"),
        description=f"C = A @ W of a W of {packed.bits} bits with a scale for each {packed.group} rows.",
        tags=(f"quantization:int{packed.bits}",),
        flops=2 * m * n * k,
    )


@family("dequantize_weight", "_C::awq_dequantize")
def awq_dequantize(call: Invocation) -> KernelInstance:
    """What vLLM multiplies by where there are many tokens."""
    packed = awq_weight(*(call.tensor(name) for name in ("_kernel", "_scaling_factors", "_zeros")))
    return dequantize_instance(call, packed)


@family("dequantize_weight", "sglang::awq_dequantize", "sgl_kernel::awq_dequantize")
def sglang_awq_dequantize(call: Invocation) -> KernelInstance:
    """Before each product, where Marlin's kernel does not take an AWQ weight."""
    packed = awq_weight(*(call.tensor(name) for name in ("qweight", "scales", "qzeros")))
    return dequantize_instance(call, packed)


@family("dequantize_weight", "triton::awq_dequantize_kernel")
def awq_dequantize_of_triton(call: Invocation) -> KernelInstance:
    packed = awq_weight(*(call.tensor(name) for name in ("qweight_ptr", "scales_ptr", "zeros_ptr")))
    return dequantize_instance(call, packed, "result_ptr")


def dequantize_instance(call: Invocation, packed: PackedWeight, *outputs: str) -> KernelInstance:
    inputs, dtype = packed.inputs(), packed.scale.dtype
    return KernelInstance(
        name=f"dequantize_weight_{packed.name(dtype)}",
        op_type="dequantize_weight",
        axes={"K": packed.k, **packed.axes()},
        inputs=inputs,
        outputs={"W": lazy_arg(dtype, ("K", "N"), lambda: written_or_returned(call, *outputs))},
        reference=packed.reference(list(inputs), "return w.to(B_scale.dtype)"),
        description=f"W, from {packed.bits} bits and a scale for each {packed.group} rows.",
        tags=(f"quantization:int{packed.bits}",),
    )


@cost_function("weight_only_gemm")
def weight_only_cost(inputs: CostInputs) -> Cost:
    return inputs.whole(2 * inputs.sizes["M"] * inputs.sizes["N"] * inputs.sizes["K"])


cost_function("dequantize_weight")(CostInputs.whole)  # FLOPs are few, and not counted


@valid_input("B", "B_zero", op_types=("weight_only_gemm", "dequantize_weight", "moe"))
def packed_words(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Any bits are a weight."""
    if draft.definition.inputs[name].dtype != "int32":
        return None
    return draft.integers(-(1 << 31), 1 << 31, draft.shape(name))


@replay_rule("_C::marlin_gemm", "_C::gptq_marlin_gemm")
class MarlinGemm(ReplayRule):
    """`workspace` holds the locks of the blocks that add up one tile: free (zero) before, and after."""

    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "b_q_weight", "b_zeros_or_none")
        set_zeros(bound, "workspace", "g_idx_or_none", "perm_or_none")


@replay_rule("tvm::gptq_marlin_gemm")
class SglangMarlinGemm(ReplayRule):
    unnamed_args = SGLANG_MARLIN

    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "b_q_weight", "b_zeros")
        set_zeros(bound, "workspace", "g_idx", "perm")


@replay_rule("sglang::unified_apply_gptq_marlin_gemm_with_wtype")
class UnifiedMarlinGemm(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "weight", "weight_zp")
        set_zeros(bound, "workspace", "g_idx", "g_idx_sort_indices")


@replay_rule("sglang::unified_apply_gptq_marlin_gemm")
class UntypedMarlinGemm(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        raise Skip("it takes the type of its weight from the engine's configuration")


@replay_rule(
    *("_C::awq_gemm", "_C::awq_dequantize", "triton::awq_dequantize_kernel", "triton::awq_gemm_kernel"),
    *("sglang::awq_dequantize", "sgl_kernel::awq_dequantize"),
)
class AwqWeight(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "_kernel", "_zeros", "qweight_ptr", "b_ptr", "zeros_ptr", "qweight", "qzeros")


@replay_rule("_C::cpu_gemm_wna16")
class CpuGemm(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "q_weight", "zeros")


@replay_rule("_C::gptq_gemm", "sgl_kernel::gptq_gemm")
class GptqGemm(ReplayRule):
    """Without an order of activation the kernel reads no `b_g_idx`; with one each row has its group."""

    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "b_q_weight", "b_gptq_qzeros")
        index = bound["b_g_idx"]
        if isinstance(index, TensorSpec) and index.numel and bound.content("b_g_idx") is None:
            groups = bound.spec("b_gptq_scales").shape[0]
            exllama = True in (bound["use_exllama"], bound["use_shuffle"])  # then it says from where each row comes
            rows = torch.arange(index.numel)
            bound.set_content("b_g_idx", rows if exllama else rows * groups // index.numel)


def set_words(bound: BoundCall, *names: str) -> None:
    """Random bits for packed weights, whose values are never recorded."""
    for name in names:
        spec = bound[name]
        if isinstance(spec, TensorSpec) and bound.content(name) is None:
            words = torch.randint(-(1 << 31), 1 << 31, spec.shape, dtype=torch.int64)
            bound.set_content(name, words.to(torch.int32))
            bound.drawn.add(str(bound.index(name)))
