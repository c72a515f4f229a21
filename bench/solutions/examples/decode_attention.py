"""Attention of one query a sequence over pages of keys and values, for the engine's own table of pages.

One program a sequence, head of keys and part of the sequence attends with all queries of that head; a second launch
joins the parts by their log-sum-exps. Caches may lie in any order: their strides are asked for. Pages are read only
where a sequence reaches, so that padding (length 0) and what is left in the table are harmless.
"""

import torch
import triton
import triton.language as tl

BLOCK, LEAST_ROWS, PROGRAMS = 64, 16, 512
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


@triton.jit
def attend(
    q, k_cache, v_cache, table, lengths, parts, lses, scale, token_q, head_q, row_table,
    page_k, token_k, head_k, dim_k, page_v, token_v, head_v, dim_v,
    PAGE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    size = tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK
    end = tl.minimum((split + 1) * size, length)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    heads, there = head * GROUP + row, row < GROUP
    query = tl.load(q + sequence * token_q + heads[:, None] * head_q + dim[None, :], mask=there[:, None], other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(split * size, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        reached = token < end
        page = tl.load(table + sequence * row_table + token // PAGE, mask=reached, other=0).to(tl.int64)
        at_k, at_v = page * page_k + token % PAGE * token_k, page * page_v + token % PAGE * token_v
        key = tl.load(k_cache + head * head_k + at_k[None, :] + dim[:, None] * dim_k, mask=reached[None, :], other=0.0)
        value = tl.load(
            v_cache + head * head_v + at_v[:, None] + dim[None, :] * dim_v, mask=reached[:, None], other=0.0
        )
        logits = tl.where(reached[None, :], tl.dot(query, key, input_precision="ieee") * scale, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        weights, fade = tl.exp2(logits - new_best[:, None]), tl.exp2(best - new_best)
        total = total * fade + tl.sum(weights, 1)
        output = output * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = new_best
    part = (sequence * tl.num_programs(1) * GROUP + heads) * SPLITS + split
    whole = tl.where(total > 0, total, 1.0)
    tl.store(parts + part[:, None] * DIM + dim[None, :], output / whole[:, None], mask=there[:, None])
    tl.store(lses + part, tl.where(total > 0, best + tl.log2(whole), float("-inf")), mask=there)


@triton.jit
def join(
    parts, lses, out, lse, token_out, head_out, head_lse, token_lse, LN_2: tl.constexpr, DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = (sequence * tl.num_programs(1) + head) * SPLITS + tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM)
    each = tl.load(lses + part)
    best = tl.max(each)
    share = tl.where(each > float("-inf"), tl.exp2(each - best), 0.0)
    total = tl.sum(share)
    whole = tl.where(total > 0, total, 1.0)
    output = tl.sum(share[:, None] * tl.load(parts + part[:, None] * DIM + dim[None, :]), 0) / whole
    tl.store(out + sequence * token_out + head * head_out + dim, output.to(out.dtype.element_ty))
    tl.store(lse + head * head_lse + sequence * token_lse, (best + tl.log2(whole)) * LN_2)


def run(q, k_cache, v_cache, block_table, seq_lens, sm_scale, output, lse):
    sequences, heads, dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    most = triton.cdiv(block_table.shape[1] * page, BLOCK)
    splits = triton.next_power_of_2(max(1, min(most, PROGRAMS // (sequences * kv_heads))))
    parts = torch.empty(sequences, heads, splits, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q.device)
    attend[(sequences, kv_heads, splits)](
        q, k_cache, v_cache, block_table, seq_lens, parts, lses, sm_scale * LOG2_E, q.stride(0), q.stride(1),
        block_table.stride(0), *k_cache.stride(), *v_cache.stride(), page, group,
        max(LEAST_ROWS, triton.next_power_of_2(group)), dim, splits, BLOCK,
    )  # fmt: skip
    join[(sequences, heads)](
        parts, lses, output, lse, output.stride(0), output.stride(1), *lse.stride(), LN_2, dim, splits, num_warps=1
    )
