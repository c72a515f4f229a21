"""lora_shrink and lora_expand: the two products of low-rank adapters (LoRA, arXiv:2106.09685), each token with its own.

vLLM's Triton kernels, after Punica (arXiv:2310.18547): tokens are sorted by adapter; a token without one keeps what was
there. The slices of a merged layer (q, k and v) run in one launch, which is given a table of their weights' addresses:
no argument shows these weights. A single slice's weight is the argument itself; of an expansion it is the first
adapter's, which the others follow in memory. Slices of an expansion may have sizes of their own, in a table.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import cost_function, family, valid_input
from kcap.schemas.derive.families.attention.pages import starts_of
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, require_values, total_bytes
from kcap.schemas.derive.kernel import (
    KernelInstance,
    TensorArg,
    abbreviate,
    dtype_name,
    lazy_arg,
    scalar_arg,
    tensor_arg,
)
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.descriptions import BEFORE

ROWS = """    begins, counts = lora_token_start_loc.tolist(), num_tokens_per_lora.tolist()
    for lora, start, count in zip(lora_ids.tolist(), begins, counts):
        if lora == -1:
            continue
        rows = token_indices_sorted_by_lora_ids[start : start + count].long()
"""

SHRINK = """import torch


@torch.no_grad()
def run({inputs}):
    assert lora_a.shape[2:] == ({r}, {k}) and shrunk.shape[0] == {s}
    shrunk_out = shrunk.clone(memory_format=torch.contiguous_format)
{rows}        product = torch.einsum("tk,srk->str", x[rows].to(torch.float32), lora_a[:, lora].to(torch.float32))
        shrunk_out[:, rows] = ({before}product * scaling).to(shrunk.dtype)
    return shrunk_out
"""

EXPAND = """import torch


@torch.no_grad()
def run({inputs}):
    assert lora_b.shape[-2:] == ({n}, {r}) and shrunk.shape[0] == {s}
    output_out = output.clone(memory_format=torch.contiguous_format)
{rows}        for part in range({s}):
            columns = {columns}
            a = shrunk[part, rows]{cast}.to(torch.float32)
            product = (a @ lora_b[{weight}].to(torch.float32).T).to(output.dtype)
            output_out[rows, columns] = {before}product
    return output_out
"""
EQUAL_COLUMNS = "slice({offset} + part * {n}, {offset} + (part + 1) * {n})"

INDICES = {
    "token_indices_sorted_by_lora_ids": ("num_tokens", "Rows of tokens, those of one adapter together."),
    "num_tokens_per_lora": ("max_active", "How many tokens each of `lora_ids` has."),
    "lora_token_start_loc": ("len_start_loc", "Where the rows of each of `lora_ids` begin."),
    "lora_ids": ("max_active", "The adapters; -1: tokens without one, or nothing."),
}
SHRUNK = ("num_slices", "num_tokens", "rank")
CONSTRAINTS = ("len_start_loc == max_active + 1",)
AXES = dict.fromkeys(("num_tokens", "num_loras", "max_active", "len_start_loc"))


def index_inputs(call: Invocation) -> dict[str, TensorArg]:
    return {name: tensor_arg(call.tensor(name), axis, description=text) for name, (axis, text) in INDICES.items()}


def adapters(call: Invocation, slices: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The weights, [slices, adapters, rows, columns]; without data where no argument shows them."""
    weight = call.tensor("lora_ptr")
    if slices > 1 or weight.dim() == 2:
        return call.weight("lora", (slices, adapter_count(call), rows, columns), dtype)
    if weight.dtype != dtype or weight.shape[-2:] != (rows, columns):
        raise Unrecognized("its adapters are not of its layer's shape")
    return weight.reshape(1, -1, rows, columns)


def adapter_count(call: Invocation) -> int:
    """As many as `lora_ids` has room for, but for the tokens that have none."""
    return len(call.tensor("lora_ids")) - 1


def adapted(lora_ids: torch.Tensor, num_tokens_per_lora: torch.Tensor) -> tuple[int, int]:
    """How many tokens have an adapter, and how many adapters have tokens."""
    counts = require_values(num_tokens_per_lora, "tokens of each adapter")
    counts = torch.where(require_values(lora_ids, "adapters") >= 0, counts, 0)
    return int(counts.sum()), int((counts > 0).sum())


def adapted_by(call: Invocation) -> tuple[int, int]:
    return adapted(call.tensor("lora_ids"), call.tensor("num_tokens_per_lora"))


@family("lora_shrink", "triton::_lora_shrink_kernel")
def shrink(call: Invocation) -> KernelInstance:
    """`input_ptr`: [tokens, hidden], `out_ptr`: [slices, tokens, rank], to which several splits of K are added."""
    call.refuse("STORE_PARTIALS")
    x, out, splits = call.tensor("input_ptr"), call.tensor("out_ptr"), call.number("SPLIT_K")
    if x.dim() != 2 or out.dim() != 3 or x.dtype not in FLOATS:
        raise Unrecognized("no tokens and slices of a low rank")
    (s, _, r), k = out.shape, x.shape[1]
    a = adapters(call, s, r, k, x.dtype)
    inputs = {
        "x": tensor_arg(x, "num_tokens", "hidden_size"),
        "lora_a": tensor_arg(a, "num_slices", "num_loras", "rank", "hidden_size"),
        "shrunk": tensor_arg(out, *SHRUNK, description="What is there before; zeros."),
        **index_inputs(call),
        "scaling": scalar_arg(call.number("scaling"), description="Of the product."),
    }
    row = k * x.element_size() + (1 if splits == 1 else 2) * s * r * out.element_size()
    return KernelInstance(
        name=f"lora_shrink{'_add' if splits > 1 else ''}{abbreviate(x.dtype, torch.bfloat16)}_s{s}_r{r}_k{k}",
        op_type="lora_shrink",
        axes={**AXES, "num_slices": s, "rank": r, "hidden_size": k},
        inputs=inputs,
        outputs={"shrunk_out": lazy_arg(out.dtype, SHRUNK, lambda: call.tensor("out_ptr"))},
        reference=SHRINK.format(
            inputs=", ".join(inputs),
            rows=ROWS,
            s=s,
            r=r,
            k=k,
            before="shrunk[:, rows] + " if splits > 1 else "",
        ),
        description="Each token's row times the first matrix of its low-rank adapter.",
        constraints=CONSTRAINTS,
        flops=lambda: 2 * s * r * k * adapted_by(call)[0],
        touched=lambda: adapted_by(call)[0] * row + adapted_by(call)[1] * s * r * k * a.element_size(),
    )


@family("lora_expand", "triton::_lora_expand_kernel")
def expand(call: Invocation) -> KernelInstance:
    """`input_ptr`: [slices, tokens, rank], `out_ptr`: [tokens, columns of all slices], to which ADD_INPUTS adds."""
    x, out, n = call.tensor("input_ptr"), call.tensor("out_ptr"), int(call.number("N"))
    if x.dim() != 3 or out.dim() != 2 or out.dtype not in FLOATS or not isinstance(call["ADD_INPUTS"], bool):
        raise Unrecognized("no slices of a low rank and their columns, or its constants are not known")
    s, _, r = x.shape
    sizes = slice_sizes(call, s, n)
    total, width = sum(sizes), out.shape[1]
    if s > 1 and width != total:
        raise Unrecognized("its slices do not fill the rows of its output")
    offset = int(call.number("slice_start_loc")) if s == 1 else 0
    adds, equal = call["ADD_INPUTS"], len(set(sizes)) == 1
    if equal:
        lora_b = tensor_arg(adapters(call, s, n, r, out.dtype), "num_slices", "num_loras", "slice_size", "rank")
    else:
        joined = call.weight("lora", (adapter_count(call), total, r), out.dtype)
        lora_b = tensor_arg(joined, "num_loras", "output_size", "rank")
    inputs = {
        "shrunk": tensor_arg(x, *SHRUNK),
        "lora_b": lora_b,
        "output": tensor_arg(out, "num_tokens", "output_size", description=BEFORE),
        **index_inputs(call),
    }
    words = ("_add" if adds else "") + abbreviate(out.dtype, torch.bfloat16) + abbreviate(x.dtype, torch.float32)
    row = s * r * x.element_size() + (2 if adds else 1) * total * out.element_size()
    ends = [*accumulate(sizes)]
    columns = f"({', '.join(f'slice({end - size}, {end})' for size, end in zip(sizes, ends, strict=True))})[part]"
    return KernelInstance(
        name=f"lora_expand{words}_s{s}_n{n if equal else '_'.join(map(str, sizes))}_r{r}"
        + (f"_at{offset}of{width}" if width != total else ""),
        op_type="lora_expand",
        axes={**AXES, "num_slices": s, "rank": r, "output_size": width, **({"slice_size": n} if equal else {})},
        inputs=inputs,
        outputs={"output_out": lazy_arg(out.dtype, ("num_tokens", "output_size"), lambda: call.tensor("out_ptr"))},
        reference=EXPAND.format(
            inputs=", ".join(inputs),
            rows=ROWS,
            s=s,
            r=r,
            n=n if equal else total,
            columns=EQUAL_COLUMNS.format(offset=offset, n=n) if equal else columns,
            weight="part, lora" if equal else "lora, columns",
            cast=f".to(torch.{dtype_name(out.dtype)})" if x.dtype != out.dtype else "",
            before="output[rows, columns] + " if adds else "",
        ),
        description="Each token's row of a low rank times the second matrix of its adapter.",
        constraints=CONSTRAINTS,
        flops=lambda: 2 * r * total * adapted_by(call)[0],
        touched=lambda: adapted_by(call)[0] * row + adapted_by(call)[1] * total * r * out.element_size(),
    )


def slice_sizes(call: Invocation, slices: int, largest: int) -> list[int]:
    """The columns of each slice of an expansion: all `largest`, or by a table."""
    if slices == 1 or call["SAME_STRIDE"] is True:
        return [largest] * slices
    return [int(size) for size in require_values(call.tensor("output_hs_ptr"), "sizes of its slices").tolist()]


@cost_function("lora_shrink", "lora_expand")
def lora_cost(inputs: CostInputs) -> Cost:
    """Tokens with an adapter read and write their rows, and each adapter with tokens is read once."""
    tokens, used = adapted(inputs.index("lora_ids"), inputs.index("num_tokens_per_lora"))
    shrinks = "lora_a" in inputs
    weight, shrunk = inputs["lora_a" if shrinks else "lora_b"], inputs["shrunk"]
    weight = weight if weight.dim() == 4 else weight[None]
    row = inputs["x"][:1] if shrinks else shrunk[:, :1]
    written = shrunk[:, :1] if shrinks else inputs["output"][:1, : weight.shape[0] * weight.shape[2]]
    read = tokens * total_bytes(row) + used * total_bytes(weight[:, :1])
    flops = 2 * tokens * weight[:, :1].numel()
    return Cost(read + tokens * total_bytes(written), read, flops, inputs.dtype)


ADAPTERS = ("lora_shrink", "lora_expand")


@valid_input("num_tokens_per_lora", op_types=ADAPTERS)
def num_tokens_per_lora(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """All tokens, in random parts to as many adapters as there are, none of which has none if it can be."""
    weight = draft.first("lora_a", "lora_b") or ""
    (room,), tokens = draft.shape(name), draft.shape("token_indices_sorted_by_lora_ids")[0]
    used = max(min(room, draft.shape(weight)[-3]), 1)
    counts = torch.zeros(room, dtype=torch.int64)
    counts[:used] = draft.parts(tokens, torch.full((used,), int(used <= tokens)), torch.full((used,), tokens))
    return counts


@valid_input("lora_ids", op_types=ADAPTERS)
def lora_ids(draft: WorkloadDraft, name: str) -> torch.Tensor:
    counts = draft["num_tokens_per_lora"]
    return torch.where(counts > 0, torch.arange(len(counts)), -1)


@valid_input("lora_token_start_loc", op_types=ADAPTERS)
def lora_token_start_loc(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return starts_of(draft["num_tokens_per_lora"])


@valid_input("token_indices_sorted_by_lora_ids", op_types=ADAPTERS)
def token_indices(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Each token once, in any order."""
    (tokens,) = draft.shape(name)
    return draft.distinct(tokens, tokens)
