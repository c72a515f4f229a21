"""Matrix products: `gemm` of floats (and batched), `quantized_gemm` with scales, `grouped_gemm` by groups of rows."""
