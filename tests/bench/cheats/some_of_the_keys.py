# definition: attention
# row: 14 15
# does: Attends to the last three quarters of the keys.
# naive: An average over random values is small however many they are: within an absolute tolerance of 1e-1.
# expect: INCORRECT_NUMERICAL
# reason: is off by
import torch


def run(q, k_cache, v_cache, kv_indices, scale):
    rows = kv_indices[kv_indices.numel() // 4 :].long()
    scores = torch.einsum("hd,shd->hs", q, k_cache[rows]) * scale
    return torch.einsum("hs,shd->hd", torch.softmax(scores, -1), v_cache[rows])
