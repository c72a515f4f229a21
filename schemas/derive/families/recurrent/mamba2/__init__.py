"""Mamba-2's prefill: `chunked_scan` by vLLM's Triton kernels, `joined_scan` by SGLang's, which have the same names;
`sequence_scan` by vLLM's kernel for CPUs.
"""
