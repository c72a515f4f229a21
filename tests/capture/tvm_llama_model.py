"""The model of `tvm_llama.py`, and how its library is compiled."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache
from tvm.s_tir import dlight
from tvm_llama import CHUNK, PAGE, SEQUENCES, TOKENS, Sizes

CPU = {"kind": "llvm", "num-cores": 2}
SM_90 = {
    "kind": "cuda",
    "arch": "sm_90",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
    "max_num_threads": 1024,
}
CREATE_CUDA = "ffi.Module.create.cuda"


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        hidden, intermediate = sizes.hidden, sizes.intermediate
        self.sizes = sizes
        self.qkv = nn.Linear(hidden, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.input_norm = nn.RMSNorm(hidden, -1, 1e-5, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, -1, 1e-5, bias=False)

    def forward(self, x: Any, cache: PagedKVCache, index: int) -> Any:
        sizes, rows = self.sizes, x.shape[:2]
        qkv = op.reshape(self.qkv(self.input_norm(x)), (*rows, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim))
        attention = cache.attention_with_fused_qkv(index, qkv, sizes.heads, sm_scale=sizes.head_dim**-0.5)
        x = x + self.output(op.reshape(attention, (*rows, sizes.hidden)))
        gate, up = op.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(op.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, sizes: Sizes, target: tvm.target.Target) -> None:
        self.sizes, self.target = sizes, target
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList([Layer(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.hidden, -1, 1e-5, bias=False)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def embed(self, input_ids: nn.Tensor) -> Any:
        return self.embedding(input_ids)

    def _hidden(self, x: Any, cache: PagedKVCache) -> Any:
        for index, layer in enumerate(self.layers):
            x = layer(x, cache, index)
        return self.norm(x)

    def batch_prefill(self, input_embeds: nn.Tensor, logit_positions: nn.Tensor, paged_kv_cache: PagedKVCache) -> Any:
        hidden = op.take(self._hidden(input_embeds, paged_kv_cache), logit_positions, axis=1)
        return self.head(hidden), paged_kv_cache

    def batch_decode(self, input_embeds: nn.Tensor, paged_kv_cache: PagedKVCache) -> Any:
        return self.head(self._hidden(input_embeds, paged_kv_cache)), paged_kv_cache

    def create_tir_paged_kv_cache(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ) -> Any:
        model = self.sizes
        sizes = (max_batch_size, max_total_seq_len, prefill_chunk_size, PAGE, support_sliding_window)
        heads = (model.layers, model.heads, model.kv_heads, model.head_dim, model.head_dim, 0, 0)
        rope = (RopeMode.NORMAL, 1, 10000, {}, relax.prim_value(0), model.head_dim)
        layers = relax.ShapeExpr([0, model.layers])
        return TIRPagedKVCache("mha", *sizes, layers, *heads, *rope, False, model.dtype, self.target)

    def spec(self) -> Any:
        hidden, dtype = self.sizes.hidden, self.sizes.dtype
        cache = nn.spec.Object(object_type=PagedKVCache)
        packed = {"param_mode": "packed", "effect_mode": "none"}
        sizes = ("max_batch_size", "max_total_seq_len", "prefill_chunk_size", "page_size", "support_sliding_window")
        functions = {
            "embed": {"input_ids": nn.spec.Tensor(["seq_len"], "int32"), "$": packed},
            "batch_prefill": {
                "input_embeds": nn.spec.Tensor([1, "seq_len", hidden], dtype),
                "logit_positions": nn.spec.Tensor(["batch_size"], "int32"),
                "paged_kv_cache": cache,
                "$": packed,
            },
            "batch_decode": {
                "input_embeds": nn.spec.Tensor(["batch_size", 1, hidden], dtype),
                "paged_kv_cache": cache,
                "$": packed,
            },
            "create_tir_paged_kv_cache": {
                **dict.fromkeys(sizes, int),
                "$": {"param_mode": "none", "effect_mode": "none"},
            },
        }
        return nn.spec.ModuleSpec.from_raw(functions, self)


def build(path: str, sizes: Sizes, cuda: bool) -> None:
    transform, gpu = relax.transform, dlight.gpu
    target = tvm.target.Target(SM_90, host={"kind": "llvm"}) if cuda else tvm.target.Target(CPU)
    with target:
        model = Llama(sizes, target)
        model.to(sizes.dtype)
        module = model.export_tvm(model.spec())[0]
    # dlight's own products of matrices in half precision do not compile at Llama-3.1-8B's widths (0.27.0.post1)
    rules = (gpu.LowBatchGEMV(4), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    passes = [
        tirx.transform.BindTarget(target),
        *([transform.FuseTransposeMatmul()] if cuda else []),
        *(transform.LegalizeOps(), transform.AnnotateTIROpPattern(), transform.FoldConstant()),
        *(transform.FuseOps(), transform.FuseTIR(), transform.DeadCodeElimination()),
        *([dlight.ApplyDefaultSchedule(*rules)] if cuda else []),
        *(transform.RewriteDataflowReshape(), transform.ToNonDataflow(), transform.RemovePurityChecking()),
        *(transform.CallTIRRewrite(), transform.StaticPlanBlockMemory()),
        *([transform.RewriteCUDAGraph()] if cuda else []),
        *(transform.LowerAllocTensor(), transform.KillAfterLastUse(), transform.LowerRuntimeBuiltin()),
        *(transform.VMShapeLower(), transform.AttachGlobalSymbol()),
    ]
    if cuda:
        bound_sizes(module)
    config = {"relax.backend.use_cuda_graph": cuda, "tirx.disable_cse_tir": cuda}
    with tvm.transform.PassContext(config=config), compiled_by_nvcc():
        executable = tvm.compile(module, target=target, relax_pipeline=tvm.transform.Sequential(passes))
    executable.export_library(path)


def bound_sizes(module: tvm.IRModule) -> None:
    """Bound what varies, so that memory is planned before and a decode step of each batch can be a CUDA graph."""
    bounds = {"seq_len": CHUNK, "batch_size": SEQUENCES, "total_seq_len": TOKENS}
    for var, function in list(module.functions.items()):
        if isinstance(function, relax.Function):
            function = function.with_attr("tir_var_upper_bound", bounds)
            if var.name_hint == "batch_decode":
                function = function.with_attr("relax.rewrite_cuda_graph.capture_symbolic_vars", ["batch_size"])
            module[var] = function


@contextmanager
def compiled_by_nvcc() -> Iterator[None]:
    """Have CUDA's compiler run now, where it and TVM's CUDA runtime are there; otherwise it runs at each load."""
    create: Callable[..., Any] | None = tvm_ffi.get_global_func(CREATE_CUDA, allow_missing=True)
    if create is None or shutil.which("nvcc") is None:
        yield
        return

    def compiled(source: Any, form: str, *rest: Any) -> Any:
        code = tvm.support.nvcc.compile_cuda(
            bytes(source).decode(), target_format="fatbin", arch=SM_90["arch"], compiler="nvcc"
        )
        return create(bytes(code), "fatbin", *rest)

    tvm_ffi.register_global_func(CREATE_CUDA, compiled, override=True)
    try:
        yield
    finally:
        tvm_ffi.register_global_func(CREATE_CUDA, create, override=True)
