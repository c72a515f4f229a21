"""Norms of rows: `rmsnorm` with what is fused around it, `dynamic_quant` too, `layernorm` with its gated kinds."""
