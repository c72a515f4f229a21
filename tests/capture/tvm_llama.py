"""A small Llama for TVM's Relax VM, with the entry points of MLC-LLM's model libraries; and a program that runs it.

python tvm_llama.py build FILE    compiles it (3 to 20 s)
python tvm_llama.py run FILE      two sequences: prefill, two decodes, then a third that is prefilled beside them
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache
from tvm_ffi import Shape

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, VOCABULARY, PAGE = 4, 2, 16, 128, 2, 256, 16
HIDDEN = HEADS * HEAD_DIM
DTYPE = "float32"
TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})


class Layer(nn.Module):
    def __init__(self) -> None:
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.input_norm = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)
        self.mlp_norm = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)

    def forward(self, x: Any, cache: PagedKVCache, index: int) -> Any:
        rows = x.shape[:2]
        qkv = op.reshape(self.qkv(self.input_norm(x)), (*rows, HEADS + 2 * KV_HEADS, HEAD_DIM))
        attention = cache.attention_with_fused_qkv(index, qkv, HEADS, sm_scale=HEAD_DIM**-0.5)
        x = x + self.output(op.reshape(attention, (*rows, HIDDEN)))
        gate, up = op.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(op.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

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
        sizes = (max_batch_size, max_total_seq_len, prefill_chunk_size, PAGE, support_sliding_window)
        heads = (LAYERS, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, 0, 0)
        rope = (RopeMode.NORMAL, 1, 10000, {}, relax.prim_value(0), HEAD_DIM)
        return TIRPagedKVCache("mha", *sizes, relax.ShapeExpr([0, LAYERS]), *heads, *rope, False, DTYPE, TARGET)

    def spec(self) -> Any:
        cache = nn.spec.Object(object_type=PagedKVCache)
        packed = {"param_mode": "packed", "effect_mode": "none"}
        sizes = ("max_batch_size", "max_total_seq_len", "prefill_chunk_size", "page_size", "support_sliding_window")
        functions = {
            "embed": {"input_ids": nn.spec.Tensor(["seq_len"], "int32"), "$": packed},
            "batch_prefill": {
                "input_embeds": nn.spec.Tensor([1, "seq_len", HIDDEN], DTYPE),
                "logit_positions": nn.spec.Tensor(["batch_size"], "int32"),
                "paged_kv_cache": cache,
                "$": packed,
            },
            "batch_decode": {
                "input_embeds": nn.spec.Tensor(["batch_size", 1, HIDDEN], DTYPE),
                "paged_kv_cache": cache,
                "$": packed,
            },
            "create_tir_paged_kv_cache": {
                **dict.fromkeys(sizes, int),
                "$": {"param_mode": "none", "effect_mode": "none"},
            },
        }
        return nn.spec.ModuleSpec.from_raw(functions, self)


def build(path: str) -> None:
    transform = relax.transform
    with TARGET:
        model = Llama()
        model.to(DTYPE)
        module = model.export_tvm(model.spec())[0]
    passes = [
        tirx.transform.BindTarget(TARGET),
        *(transform.LegalizeOps(), transform.AnnotateTIROpPattern(), transform.FoldConstant()),
        *(transform.FuseOps(), transform.FuseTIR(), transform.DeadCodeElimination()),
        *(transform.RewriteDataflowReshape(), transform.ToNonDataflow(), transform.RemovePurityChecking()),
        *(transform.CallTIRRewrite(), transform.StaticPlanBlockMemory(), transform.LowerAllocTensor()),
        *(transform.KillAfterLastUse(), transform.LowerRuntimeBuiltin(), transform.VMShapeLower()),
        transform.AttachGlobalSymbol(),
    ]
    executable = tvm.compile(module, target=TARGET, relax_pipeline=tvm.transform.Sequential(passes))
    executable.export_library(path)


class Engine:
    """What MLC-LLM's engine does with a library: the global loader, the VM, the cache, its sequences."""

    def __init__(self, path: str) -> None:
        self.vm = tvm_ffi.load_module(path)["vm_load_executable"]()
        self.vm["vm_initialization"](1, 0, 2)
        model = Llama()
        model.to(DTYPE)
        draw = np.random.default_rng(0)
        shapes = [[int(size) for size in parameter.shape] for _, parameter in model.named_parameters()]
        self.weights = [tvm.runtime.tensor((draw.standard_normal(shape) * 0.05).astype(DTYPE)) for shape in shapes]
        self.cache = self.vm["create_tir_paged_kv_cache"](*(Shape([size]) for size in (4, 256, 64, PAGE, 0)))

    def add(self, sequence: int) -> None:
        tvm.get_global_func("vm.builtin.kv_state_add_sequence")(self.cache, sequence)

    def forward(self, tokens: dict[int, list[int]]) -> Any:
        """The logits after the new `tokens` of each sequence."""
        call = tvm.get_global_func
        flat = np.concatenate(list(tokens.values())).astype("int32")
        lengths = [len(new) for new in tokens.values()]
        embedded = self.vm["embed"](tvm.runtime.tensor(flat), self.weights)
        call("vm.builtin.kv_state_begin_forward")(self.cache, Shape(list(tokens)), Shape(lengths))
        if set(lengths) == {1}:
            embedded = call("vm.builtin.reshape")(embedded, Shape([len(lengths), 1, HIDDEN]))
            logits = self.vm["batch_decode"](embedded, self.cache, self.weights)[0]
        else:
            embedded = call("vm.builtin.reshape")(embedded, Shape([1, len(flat), HIDDEN]))
            last = tvm.runtime.tensor(np.cumsum(lengths).astype("int32") - 1)
            logits = self.vm["batch_prefill"](embedded, last, self.cache, self.weights)[0]
        call("vm.builtin.kv_state_end_forward")(self.cache)
        return logits.numpy()


def run(path: str) -> None:
    import hashlib

    engine = Engine(path)
    engine.add(0)
    engine.add(1)
    outputs = [engine.forward({0: [1, 2, 3, 4, 5], 1: [6, 7, 8]})]
    outputs += [engine.forward({0: [token], 1: [token + 1]}) for token in (9, 11)]
    engine.add(2)
    outputs.append(engine.forward({2: [5, 6, 7], 0: [1], 1: [2]}))
    print("outputs", hashlib.sha256(b"".join(map(np.ndarray.tobytes, outputs))).hexdigest())


if __name__ == "__main__":
    {"build": build, "run": run}[sys.argv[1]](sys.argv[2])
