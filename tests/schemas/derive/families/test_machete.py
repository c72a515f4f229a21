"""Machete's product: its reference, and the weight as it was before it was prepacked. The kernel needs a Hopper."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, declined

from kcap.schemas.derive.families.gemm.machete import before_prepacking, packed, unpacked

U4, U4B8 = 4 << 8 | 1 << 50, 4 << 8 | 8 << 17 | 1 << 50  # vLLM's ids of uint4 and uint4b8
K, N, GROUP = 128, 64, 32


def shuffle(words: torch.Tensor, *_: object) -> torch.Tensor:
    """Moves every element somewhere else, as prepacking does."""
    order = torch.randperm(words.numel() * 8, generator=torch.Generator().manual_seed(7))
    return packed(unpacked(words)[order], words.shape)


def test_a_prepacked_weight_is_put_back_in_order() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (K // 8, N)).to(torch.int32)
    assert torch.equal(before_prepacking(shuffle(words), shuffle), words)
    assert not torch.equal(shuffle(words), words)


@pytest.fixture
def prepacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops._C, "machete_prepack_B", shuffle, raising=False)


def product(kind: int, dtype: torch.dtype, zeros: bool) -> dict[str, object]:
    """The arguments of an invocation; the weight's elements are kept beside them, as plain numbers."""
    scale = torch.rand(K // GROUP, N).to(dtype) / 8
    return {
        "A": torch.randn(3, K).to(dtype),
        "q": torch.randint(0, 16, (K, N)),
        "b_type": kind,
        "out_type": None,
        "group_scales": scale,
        "group_zeros": (-scale * torch.randint(0, 16, scale.shape)).to(dtype) if zeros else None,
        "group_size": GROUP,
        "channel_scales": None,
        "token_scales": None,
        "schedule": None,
    }


@pytest.mark.usefixtures("prepacking")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "bias"), [(U4, 0), (U4B8, 8)])
def test_a_product_is_with_scaled_and_shifted_elements(kind: int, bias: int, dtype: torch.dtype) -> None:
    arguments = product(kind, dtype, zeros=not bias)
    q = arguments.pop("q")
    assert isinstance(q, torch.Tensor)
    plain = packed(q.reshape(K // 8, 8, N).transpose(1, 2).flatten().to(torch.int32), torch.Size((K // 8, N)))

    def run(A: torch.Tensor, group_scales: torch.Tensor, group_zeros: torch.Tensor | None, **_: object) -> torch.Tensor:
        w = torch.zeros(K, N, dtype=torch.float64)
        for row in range(K):
            w[row] = (q[row] - bias) * group_scales[row // GROUP].double()
            w[row] += 0 if group_zeros is None else group_zeros[row // GROUP].double()
        return (A.double() @ w).to(dtype)

    kernel = agrees("_C::machete_mm", run, **arguments, B=shuffle(plain))
    assert kernel.family == "weight_only_gemm" and torch.equal(kernel.inputs["B"].get(), plain)


def test_scales_of_tokens_or_channels_are_not_modelled() -> None:
    arguments = product(U4B8, torch.bfloat16, zeros=False)
    del arguments["q"]
    b = torch.zeros(K // 8, N, dtype=torch.int32)
    assert declined("_C::machete_mm", **{**arguments, "token_scales": torch.ones(3)}, B=b)
    assert declined("_C::machete_mm", **{**arguments, "b_type": 8 << 8 | 128 << 17}, B=b)
