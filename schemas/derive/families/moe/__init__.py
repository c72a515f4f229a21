"""Mixtures of experts, in the order of a step: `routing` (with its product: `router`), `align` or `permute`, then both
matrices or each of them.

Both: `fused`. One: by Triton (`gemm`), Marlin (`marlin`) or OpenAI's package (`matmul_ogs`, `triton_kernels`), which
sorts tokens in `bitmatrix` and `ragged`.
"""
