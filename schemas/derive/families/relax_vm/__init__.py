"""Kernels of a model library of TVM's: `kernels` of the compiler, `paged_cache` of the cache that MLC-LLM uses."""
