"""Norms of rows: `rmsnorm` with what is fused around it, `layernorm` with its gated and grouped kinds."""
