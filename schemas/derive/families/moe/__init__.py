"""Mixtures of experts, in the order of a step: `routing`, `align`, then `fused` (both matrices) or `gemm` (one)."""
