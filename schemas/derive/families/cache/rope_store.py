"""SGLang's rope kernel that also stores the rotated keys, and the values, in the cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import cost_function, family, replay_rule
from kcap.schemas.derive.families.cache.replay_rules import slots_in_use
from kcap.schemas.derive.families.cache.update import ROW_AXES, rows_written
from kcap.schemas.derive.families.rope import ROTATE, SglangRopeRule, sglang_rope
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, lazy_arg, tensor_arg

REFERENCE = (
    ROTATE
    + """@torch.no_grad()
def run(q, k, v, k_cache, v_cache, cos_sin_cache, positions, slot_mapping, is_neox):
    assert q.shape[-1] == cos_sin_cache.shape[-1] == {rot} and k_cache.shape[1] == v_cache.shape[1] == 1
    cos, sin = cos_sin_cache[positions.long()].to(torch.float32)[:, None, :].chunk(2, dim=-1)
    q_out, k_out, slots = rotate(q, cos, sin, is_neox), rotate(k, cos, sin, is_neox), slot_mapping.long()
    k_cache_out = k_cache.clone(memory_format=torch.contiguous_format)
    v_cache_out = v_cache.clone(memory_format=torch.contiguous_format)
    k_cache_out.flatten(0, 1)[slots], v_cache_out.flatten(0, 1)[slots] = k_out, v
    return q_out, k_out, k_cache_out, v_cache_out
"""
)

CACHE = ("num_pages", "page_size", "num_kv_heads", "head_size")


@family("rope", "sglang::apply_rope_inplace_with_kvcache")
def rope_and_store(call: Invocation) -> KernelInstance:
    """In place; the caches are [slots, heads · dim], pages of one row, and every token has a slot."""
    rope, k = sglang_rope(call), call.tensor("k")
    v, slots = call.tensor("v").reshape(k.shape), call.tensor("out_loc")
    if k.shape[-1] != call.tensor("cos_sin_cache").shape[-1] or v.dtype != k.dtype:
        raise Unrecognized("it rotates part of a head, or its values are of another type")

    def cache(name: str) -> torch.Tensor:
        return call.tensor(name).reshape(-1, 1, *k.shape[1:])

    if {cache("k_cache").dtype, cache("v_cache").dtype} != {k.dtype}:
        raise Unrecognized("its caches are quantized")
    rope_inputs = rope.inputs
    inputs = {
        "q": rope_inputs["q"],
        "k": rope_inputs["k"],
        "v": tensor_arg(v, "num_tokens", "num_kv_heads", "head_size"),
    }
    inputs |= {name: tensor_arg(cache(name), *CACHE) for name in ("k_cache", "v_cache")}
    inputs |= {name: rope_inputs[name] for name in ("cos_sin_cache", "positions")}
    inputs |= {
        "slot_mapping": tensor_arg(slots, "num_tokens", description=f"{ROW_AXES}."),
        "is_neox": rope_inputs["is_neox"],
    }
    written = {f"{name}_out": lazy_arg(k.dtype, CACHE, partial(cache, name)) for name in ("k_cache", "v_cache")}
    rotated = rope.touched
    return replace(
        rope,
        name=rope.name.replace("rope_with", "rope_store_with", 1),
        op_type="rope_store",
        axes={**rope.axes, "num_pages": None, "page_size": 1},
        inputs=inputs,
        outputs={**rope.outputs, **written},
        reference=REFERENCE.format(rot=k.shape[-1]),
        description="Rotary position embedding of queries and keys; keys and values are written to a cache.",
        touched=lambda: (
            (rotated() if rotated else 0)
            + rows_written(slots) * (total_bytes(k[:1]) + 2 * total_bytes(v[:1]))
            + total_bytes(slots)
        ),
    )


@cost_function("rope_store")
def rope_store_cost(inputs: CostInputs) -> Cost:
    """What it rotates is written, as are the tokens' rows of the caches, which may be written in place."""
    rows, written = len(inputs.index("positions").unique()), rows_written(inputs.index("slot_mapping"))
    rotated, k, v = inputs.read("q", "k"), distinct_bytes(inputs["k"][:1]), distinct_bytes(inputs["v"][:1])
    read = rotated + written * v + inputs.read("positions", "slot_mapping")
    read += rows * distinct_bytes(inputs["cos_sin_cache"][:1])
    return Cost(read + rotated + written * (k + v), read, 0, inputs.dtype)


@replay_rule("sglang::apply_rope_inplace_with_kvcache")
class RopeAndStoreRule(SglangRopeRule):
    """It rotates, and stores the rotated keys and the values: positions and slots."""

    idempotent_writes = ("k_cache", "v_cache")

    def prepare(self, bound: BoundCall) -> None:
        super().prepare(bound)
        slots_in_use(bound, "out_loc", -1, self.idempotent_writes)
