"""qk_rmsnorm: the reference against PyTorch's norm of each head, names, what is declined."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, declined, randn


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 8, 128), (4, 4, 64), (3, 1, 256)])
def test_each_head_is_normed_in_its_place(heads: int, kv_heads: int, d: int):
    """Queries and keys lie in one matrix with the values, as SGLang's layers have them."""

    def run(q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> None:
        for x, weight in ((q, q_weight), (k, k_weight)):
            x.copy_(torch.nn.functional.rms_norm(x.float(), [d], weight.float(), eps))

    qkv, weights = randn(5, (heads + 2 * kv_heads) * d), [randn(d, seed=seed) for seed in (1, 2)]
    q, k = (part.view(5, -1, d) for part in qkv.split([heads * d, kv_heads * d, kv_heads * d], dim=-1)[:2])
    kernel = agrees("sglang::fused_inplace_qknorm", run, q=q, k=k, q_weight=weights[0], k_weight=weights[1], eps=1e-6)
    assert kernel.name == f"qk_rmsnorm_eps1e-06_h{heads}_kv{kv_heads}_d{d}"


def test_what_has_no_heads_is_declined():
    x, weight = torch.empty(4, 128, device="meta"), torch.empty(128, device="meta")
    rest = {"q_weight": weight, "k_weight": weight, "eps": 1e-6}
    assert declined("sglang::fused_inplace_qknorm", q=x, k=x, **rest)
    assert declined("sglang::fused_inplace_qknorm", q=x[:, None], k=x[:2, None], **rest)
    assert declined("sglang::fused_inplace_qknorm", q=x[:, None], k=x[:, None], head_dim=64, **rest)
