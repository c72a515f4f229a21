"""embedding: rows of a table, of which only those read are touched."""

from __future__ import annotations

import torch
from agreement import agrees, checked, kernel_of, randn


def run(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> torch.Tensor:
    return torch.ops.aten.embedding.default(weight, indices, padding_idx)


def test_reference_is_atens_operator():
    for seed, (rows, hidden, tokens) in enumerate([(10, 8, (3,)), (100, 32, (1,)), (7, 5, (4, 6)), (64, 64, (0,))]):
        ids = torch.randint(0, rows, tokens, generator=torch.Generator().manual_seed(seed))
        for dtype in (torch.int64, torch.int32):
            agrees("aten::embedding", run, weight=randn(rows, hidden, seed=seed), indices=ids.to(dtype), padding_idx=-1)


def test_names_of_llama_and_the_bytes_of_the_rows_read():
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    kernel = kernel_of("aten::embedding", weight=weight, indices=torch.empty(64, dtype=torch.int64, device="meta"))
    definition = checked(kernel)
    assert definition.name == "embedding_v128256_h4096"
    assert definition.var_axes == ["num_tokens"]
    assert list(definition.inputs) == ["input_ids", "weight"]
    assert kernel.touched is not None and kernel.touched() == (64 + 1) * 4096 * 2 + 64 * 8  # ids may all be one
    assert kernel_of("aten::embedding", weight=weight, indices=torch.empty(64, dtype=torch.int32)).name == (
        "embedding_int32_v128256_h4096"
    )
