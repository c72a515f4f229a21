"""embedding: rows of a table by token id. Of the table only the rows read are touched."""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.form import Form, abbreviate, made, of
from kcap.schemas.families.invocation import Invocation
from kcap.schemas.families.results import distinct, size

REFERENCE = """import torch


@torch.no_grad()
def run(input_ids, weight):
    assert weight.shape == ({vocabulary}, {hidden})
    return weight[input_ids.to(torch.int64)]
"""


@family("embedding", "aten::embedding")
def embedding(call: Invocation) -> Form:
    """`indices`: any shape, joined to [num_tokens]; `weight`: [vocab_size, hidden_size]."""
    weight, ids = call.tensor("weight"), call.tensor("indices").reshape(-1)
    vocabulary, hidden = weight.shape
    row = hidden * weight.element_size()
    word = abbreviate(weight.dtype, torch.bfloat16) + abbreviate(ids.dtype, torch.int64)
    return Form(
        name=f"embedding{word}_v{vocabulary}_h{hidden}",
        op_type="embedding",
        axes={"num_tokens": None, "vocab_size": vocabulary, "hidden_size": hidden},
        inputs={"input_ids": of(ids, "num_tokens"), "weight": of(weight, "vocab_size", "hidden_size")},
        outputs={"output": made(weight.dtype, ("num_tokens", "hidden_size"), lambda: call.result.reshape(-1, hidden))},
        reference=REFERENCE.format(vocabulary=vocabulary, hidden=hidden),
        description="Rows of the embedding table. Token ids are in [0, vocab_size).",
        touched=lambda: (ids.numel() + distinct(ids)) * row + size(ids),
    )
