"""Matrix products: `gemm` of floats (and batched), `quantized_gemm` with scales, `grouped_gemm` by groups of rows,
`lora` of low-rank adapters, `weight_only` with weights of few bits (as `packed_weight` lays them out); `conv`."""
