"""Keys and values of new tokens, written in place into the pages of a cache, each token to its slot.

One program a token copies both; a negative slot is of padding, and nothing is written for it.
"""

import triton
import triton.language as tl


@triton.jit
def write_token(
    k, v, k_cache, v_cache, slots, stride_k, stride_v, page_k, page_v, token_k, token_v, head_k, head_v,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        page, place = slot // PAGE, slot % PAGE
        head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
        here = head * DIM + dim
        key, value = tl.load(k + token * stride_k + here), tl.load(v + token * stride_v + here)
        tl.store(k_cache + page * page_k + place * token_k + head * head_k + dim, key)
        tl.store(v_cache + page * page_v + place * token_v + head * head_v + dim, value)


def run(k, v, k_cache, v_cache, slot_mapping):
    heads, dim = k.shape[1:]
    (page_k, token_k, head_k, _), (page_v, token_v, head_v, _) = k_cache.stride(), v_cache.stride()
    write_token[(len(slot_mapping),)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), page_k, page_v, token_k, token_v, head_k,
        head_v, k_cache.shape[1], heads, dim, num_warps=4,
    )  # fmt: skip
    return k_cache, v_cache
