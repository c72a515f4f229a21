"""bmm: C[b] = A[b] @ B[b], as the absorbed projections of latent attention call it."""

from __future__ import annotations

import torch

from kcap.schemas.families import family
from kcap.schemas.families.form import Form, abbreviate, made, of
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.results import FLOATS, result_dtype, written

REFERENCE = """import torch


@torch.no_grad()
def run(A, B):
    assert B.shape[1:] == ({k}, {n})
    return torch.bmm(A.to(torch.float32), B.to(torch.float32)).to(A.dtype)
"""


@family("bmm", "aten::bmm")
def bmm(call: Invocation) -> Form:
    """`self`: [batch_size, M, K], `mat2`: [batch_size, K, N]; the batch is often the heads."""
    a, b = call.tensor("self"), call.tensor("mat2")
    if a.dtype not in FLOATS or result_dtype(call, a.dtype) != a.dtype:
        raise Unrecognized("not a product of floats of one dtype")
    (batch, m, k), n = a.shape, b.shape[2]
    return Form(
        name=f"bmm{abbreviate(a.dtype, torch.bfloat16)}_n{n}_k{k}",
        op_type="bmm",
        axes={"batch_size": None, "M": None, "N": n, "K": k},
        inputs={"A": of(a, "batch_size", "M", "K"), "B": of(b, "batch_size", "K", "N")},
        outputs={"C": made(a.dtype, ("batch_size", "M", "N"), lambda: written(call, "out"))},
        reference=REFERENCE.format(n=n, k=k),
        description="Batched matrix multiply, C[b] = A[b] @ B[b].",
        flops=2 * batch * m * n * k,
    )
