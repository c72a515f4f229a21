# definition: attention
# row: 14
# does: Takes the first rows of the cache, whatever the indices say.
# naive: Correct where indices are drawn as arange, or are all zero.
# expect: INCORRECT_NUMERICAL
# reason: is off by
import torch


def run(q, k_cache, v_cache, kv_indices, scale):
    k, v = k_cache[: kv_indices.numel()], v_cache[: kv_indices.numel()]
    return torch.einsum("hs,shd->hd", torch.softmax(torch.einsum("hd,shd->hs", q, k) * scale, -1), v)
