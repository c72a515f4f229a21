"""rope: rotary position embedding (Su et al., arXiv:2104.09864) with cosines and sines from a table.

Names of FlashInfer-Bench's op_type `rope`. Operators of vLLM, SGLang and FlashInfer. `mrope`: a token has three
positions (time, height, width; Qwen2-VL, arXiv:2409.12191), each of which turns some of its pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.index_arguments import cut_to_rows_in_use, set_indices_below
from kcap.schemas.derive.invocation import Invocation, Unrecognized, distinct_rows
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, lazy_arg, scalar_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

ROTATE = """import torch


def rotate(x, cos, sin, is_neox):
    x_rot = x[..., :{rot}].to(torch.float32)
    if is_neox:
        x1, x2 = x_rot.chunk(2, dim=-1)
    else:
        x1, x2 = x_rot[..., 0::2], x_rot[..., 1::2]
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y = torch.cat((y1, y2), dim=-1) if is_neox else torch.stack((y1, y2), dim=-1).flatten(-2)
    return torch.cat((y.to(x.dtype), x[..., {rot}:]), dim=-1)


"""

REFERENCE = (
    ROTATE
    + """@torch.no_grad()
def run({arguments}):
    assert q.shape[-1] == {size} and cos_sin_cache.shape[-1] == {rot}
    cos, sin = cos_sin_cache[positions.long()].to(torch.float32)[:, None, :].chunk(2, dim=-1)
    return {returned}
"""
)


@dataclass(frozen=True)
class Rope:
    """An invocation. `q`, `k`: [tokens, heads, head size], what they are after it: `q_out`, `k_out`.

    `copies`: it leaves `q` and `k` as they were, and so writes what it does not rotate, too.
    """

    q: torch.Tensor
    k: torch.Tensor | None
    cos_sin_cache: torch.Tensor
    positions: torch.Tensor
    is_neox: bool
    q_out: Callable[[], torch.Tensor]
    k_out: Callable[[], torch.Tensor]
    copies: bool = False


@family(
    "rope",
    "_C::rotary_embedding",
    "sgl_kernel::rotary_embedding",
    "sgl_kernel::rotary_embedding_cpu",
    "flashinfer::apply_rope_with_cos_sin_cache",
    "flashinfer::apply_rope_with_cos_sin_cache_inplace",
    "trtllm::flashinfer_apply_rope_with_cos_sin_cache_inplace",
)
def rotary_embedding(call: Invocation) -> KernelInstance:
    """In place, but for FlashInfer's that returns both. Heads lie side by side or in a dimension of their own.

    SGLang's on a CPU returns both, too, and may write them in place.
    """
    call.refuse("rope_dim_offset", "inverse")
    positions, size = call.tensor("positions"), int(call.number("head_size"))
    tokens, copies = positions.numel(), call.operator.endswith("_cos_sin_cache")
    returns = copies or call.base.endswith("_cpu")

    def heads(name: str) -> torch.Tensor:
        return call.tensor(name).reshape(tokens, -1, size)

    def after(name: str, position: int) -> torch.Tensor:
        result: torch.Tensor = call.result[position] if returns else call.tensor(name)
        return result.reshape(tokens, -1, size)

    return rope_instance(
        Rope(
            q=heads("query"),
            k=None if call["key"] is None else heads("key"),
            cos_sin_cache=call.tensor("cos_sin_cache"),
            positions=positions.flatten(),
            is_neox=bool(call["is_neox"]),
            q_out=lambda: after("query", 0),
            k_out=lambda: after("key", 1),
            copies=copies,
        )
    )


@family("rope", "sglang::apply_rope_inplace")
def sglang_rope(call: Invocation) -> KernelInstance:
    """In place; `q` and `k` may be the rotated part of wider heads."""
    cache = call.tensor("cos_sin_cache")
    if call["rope_dim"] not in (None, 0, cache.shape[-1]):
        raise Unrecognized("its table is wider than what it rotates")
    return rope_instance(
        Rope(
            q=call.tensor("q"),
            k=call.tensor("k"),
            cos_sin_cache=cache,
            positions=call.tensor("positions"),
            is_neox=bool(call["is_neox"]),
            q_out=lambda: call.tensor("q"),
            k_out=lambda: call.tensor("k"),
        )
    )


def rope_instance(rope: Rope) -> KernelInstance:
    """The kernel instance; its name says the dtype of a table that is not float32."""
    (tokens, heads, size), rot = rope.q.shape, rope.cos_sin_cache.shape[-1]
    rotated = {"q": (rope.q, "num_qo_heads", rope.q_out)}
    if rope.k is not None:
        rotated["k"] = (rope.k, "num_kv_heads", rope.k_out)
        heads += rope.k.shape[1]
    if rot > size or rot % 2 or (rope.k is not None and rope.k.dtype != rope.q.dtype):
        raise Unrecognized("it rotates more than a head")
    inputs: dict[str, TensorArg] = {
        name: tensor_arg(x, "num_tokens", axis, "head_size") for name, (x, axis, _) in rotated.items()
    }
    inputs["cos_sin_cache"] = tensor_arg(
        rope.cos_sin_cache, "max_seq_len", "rotary_dim", description="Cosines, then sines."
    )
    inputs["positions"] = tensor_arg(rope.positions, "num_tokens", description="Rows of cos_sin_cache.")
    inputs["is_neox"] = scalar_arg(rope.is_neox, "bool", "Halves of a head are rotated together, not neighbours.")
    words = abbreviate(rope.q.dtype, torch.bfloat16) + ("" if rope.k is not None else "_q")
    table = abbreviate(rope.cos_sin_cache.dtype, torch.float32)
    words += f"{table}cache" if table else ""
    width = 2 * heads * (size if rope.copies else rot) * rope.q.element_size() + rope.positions.element_size()
    row = rot * rope.cos_sin_cache.element_size()
    return KernelInstance(
        name=f"rope_with_cos_sin_cache_{'neox' if rope.is_neox else 'gptj'}_style{words}_d{size}_rd{rot}",
        op_type="rope",
        axes={
            "num_tokens": None,
            **{axis: None for _, axis, _ in rotated.values()},
            "max_seq_len": None,
            "head_size": size,
            "rotary_dim": rot,
        },
        inputs=inputs,
        outputs={
            f"{name}_out": lazy_arg(x.dtype, ("num_tokens", axis, "head_size"), out)
            for name, (x, axis, out) in rotated.items()
        },
        reference=REFERENCE.format(
            arguments=", ".join(inputs),
            size=size,
            rot=rot,
            returned=", ".join(f"rotate({name}, cos, sin, is_neox)" for name in rotated),
        ),
        description="Rotary position embedding of queries and keys.",
        flops=3 * tokens * heads * rot,
        touched=lambda: tokens * width + distinct_rows(rope.positions) * row,
    )


# They differ in how they compute their table, and rotate by it alike.
SGLANG_ROTARY_CLASSES = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "Gemma4RotaryEmbedding",
)


@family("rope", *(f"sglang_op::{name}" for name in SGLANG_ROTARY_CLASSES))
def sglang_rotary_class(call: Invocation) -> KernelInstance:
    """It returns new tensors. Heads lie side by side or in a dimension of their own."""
    call.refuse("offsets", "fused_set_kv_buffer_arg")
    positions, size = call.tensor("positions"), int(call.number("head_size"))
    table, tokens = call.tensor("cos_sin_cache"), positions.numel()
    if table.shape[-1] != call.number("rotary_dim"):
        raise Unrecognized("its table is of another width than what it rotates")

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(tokens, -1, size)

    return rope_instance(
        Rope(
            q=heads(call.tensor("query")),
            k=heads(call.tensor("key")),
            cos_sin_cache=table,
            positions=positions.flatten(),
            is_neox=bool(call["is_neox_style"]),
            q_out=lambda: heads(call.result[0]),
            k_out=lambda: heads(call.result[1]),
            copies=True,
        )
    )


@cost_function("rope")
def rope_cost(inputs: CostInputs) -> Cost:
    rows = len(inputs.index("positions").unique())
    read = inputs.read(*(name for name in ("q", "k") if name in inputs), "positions")
    return inputs.cost(read + rows * distinct_bytes(inputs["cos_sin_cache"][:1]))


MROPE = """import torch


@torch.no_grad()
def run({arguments}):
    assert q.shape[-1] == {size} and cos_sin_cache.shape[-1] == {rot} and positions.shape[0] == 3
    axis = torch.tensor({axes}, device=q.device)  # of the three positions, for each pair
    rows = cos_sin_cache[positions.long()].unflatten(-1, (2, {half}))
    pair = torch.arange({half}, device=q.device)
    cos, sin = (rows[axis, :, part, pair].T[:, None] for part in (0, 1))

    def rotate(x):
        x1, x2 = (part.to(cos.dtype) for part in (x[..., {first}], x[..., {second}]))
        y = x.clone()
        y[..., {first}] = (x1 * cos - x2 * sin).to(x.dtype)
        y[..., {second}] = (x2 * cos + x1 * sin).to(x.dtype)
        return y

    return rotate(q), rotate(k)
"""
MROPE_KERNEL = "triton::_triton_mrope_forward_fused"


@family("mrope", MROPE_KERNEL)
def sglang_mrope(call: Invocation) -> KernelInstance:
    """SGLang's, in place: `q_ptr`, `k_ptr`: [tokens, heads * head size], perhaps views of one projection;
    `positions_ptr`: [3, tokens]. It computes in the table's dtype."""
    call.refuse("is_interleaved_glm")
    neox, interleaved = call["is_neox_style"], call["is_interleaved"]
    if not isinstance(neox, bool) or not isinstance(interleaved, bool):
        raise Unrecognized("its constants are not known")
    size, rot, *sections = (int(call.number(name)) for name in ("hd", "rd", *(f"mrope_section_{a}" for a in "thw")))
    q, k = (call.tensor(f"{name}_ptr").unflatten(-1, (-1, size)) for name in "qk")
    table, positions, half = call.tensor("cos_sin_cache_ptr"), call.tensor("positions_ptr"), rot // 2
    if table.shape[-1] != rot or rot > size or positions.dim() != 2 or len(positions) != 3:
        raise Unrecognized("its table is of another width than what it rotates, or a token has no three positions")
    t, h, w = sections
    within = f"1 if i % 3 == 1 and i <= {3 * h} else 2 if i % 3 == 2 and i <= {3 * w} else 0"
    axes = f"[{within} for i in range({half})]" if interleaved else f"[0] * {t} + [1] * {h} + [2] * {half - t - h}"
    heads = {"q": (q, "num_qo_heads"), "k": (k, "num_kv_heads")}
    inputs = {name: tensor_arg(x, "num_tokens", axis, "head_size") for name, (x, axis) in heads.items()}
    inputs["cos_sin_cache"] = tensor_arg(table, "max_seq_len", "rotary_dim", description="Cosines, then sines.")
    text = "Of each token in time, height and width: rows of cos_sin_cache."
    inputs["positions"] = tensor_arg(positions, "three", "num_tokens", description=text)
    words = ("_neox" if neox else "_gptj") + "_style" + ("_interleaved" if interleaved else "")
    words += abbreviate(q.dtype, torch.bfloat16)
    words += f"{abbreviate(table.dtype, q.dtype)}cache" if table.dtype != q.dtype else ""
    return KernelInstance(
        name=f"mrope{words}_d{size}_rd{rot}_t{t}_h{h}_w{w}",
        op_type="mrope",
        axes={
            "num_tokens": None,
            "num_qo_heads": q.shape[1],
            "num_kv_heads": k.shape[1],
            "max_seq_len": None,
            "head_size": size,
            "rotary_dim": rot,
            "three": 3,
        },
        inputs=inputs,
        outputs={f"{name}_out": tensor_arg(x, "num_tokens", axis, "head_size") for name, (x, axis) in heads.items()},
        reference=MROPE.format(
            arguments=", ".join(inputs),
            size=size,
            rot=rot,
            half=half,
            axes=axes,
            first=f":{half}" if neox else f":{rot}:2",
            second=f"{half}:{rot}" if neox else f"1:{rot}:2",
        ),
        description="Rotary position embedding of queries and keys by three positions of each token.",
        flops=3 * rotated_numbers(q, k, rot),
        touched=lambda: 2 * rotated_numbers(q, k, rot) * q.element_size() + read_by_positions(table, positions),
    )


def rotated_numbers(q: torch.Tensor, k: torch.Tensor, rot: int) -> int:
    return int(len(q) * (q.shape[1] + k.shape[1]) * rot)


def read_by_positions(table: torch.Tensor, positions: torch.Tensor) -> int:
    """Of the table at least as many rows as the axis of the fewest positions has."""
    rows = min(distinct_rows(axis) for axis in positions)
    return int(positions.numel() * positions.element_size() + rows * distinct_bytes(table[:1]))


@cost_function("mrope")
def mrope_cost(inputs: CostInputs) -> Cost:
    q, k, table = (inputs[name] for name in ("q", "k", "cos_sin_cache"))
    numbers = rotated_numbers(q, k, table.shape[-1])
    turned = numbers * q.element_size()
    read = turned + read_by_positions(table, inputs["positions"])
    return Cost(read + turned, read, 3 * numbers, inputs.dtype)


LONGEST_SEQUENCE = 4096  # positions where no table bounds them


@valid_input("positions", "pos_ids", "position_ids")
def positions(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """A position each, within the table of cosines and sines, or the pages of a sequence, if there are any."""
    if pages := draft.first("block_table", "block_tables"):
        return draft.integers(
            0, draft.shape(pages)[1] * (draft.size("page_size", "block_size") or 1), draft.shape(name)
        )
    table = draft.first("cos_sin_cache", "cos_cache", "cos", "freqs_cis")
    return draft.integers(0, draft.shape(table)[0] if table else LONGEST_SEQUENCE, draft.shape(name))


@replay_rule("_C::rotary_embedding")
class VllmRopeRule(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_indices_below(bound, "positions", bound.spec("cos_sin_cache").shape[0])

    def trim_tables(self, bound: BoundCall) -> None:
        cut_to_rows_in_use(bound, "cos_sin_cache", "positions")


@replay_rule("sglang::apply_rope_inplace", *(f"sglang_op::{name}" for name in SGLANG_ROTARY_CLASSES))
class SglangRopeRule(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_indices_below(bound, "positions", bound.spec("cos_sin_cache").shape[0])

    def trim_tables(self, bound: BoundCall) -> None:
        cut_to_rows_in_use(bound, "cos_sin_cache", "positions")


@replay_rule(MROPE_KERNEL)
class MropeRule(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_indices_below(bound, "positions_ptr", bound.spec("cos_sin_cache_ptr").shape[0])

    def trim_tables(self, bound: BoundCall) -> None:
        cut_to_rows_in_use(bound, "cos_sin_cache_ptr", "positions_ptr")
