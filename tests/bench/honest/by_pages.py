# definition: attention
# does: Attention in blocks of keys, by a running maximum.
import torch


def run(q, k_cache, v_cache, kv_indices, scale):
    top = torch.full((q.shape[0], 1), float("-inf"), device=q.device)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for rows in kv_indices.long().split(128):
        scores = torch.einsum("hd,shd->hs", q, k_cache[rows]) * scale
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - new), torch.exp(top - new)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.einsum("hs,shd->hd", weights, v_cache[rows])
        top = new
    return out / total
