"""Requests of which some decode while others prefill."""

import torch

# vLLM's library for a CPU without AVX-512 has no collectives of its own, and products of float32 alone.
AVX512 = torch.cpu._is_avx512_supported()
AMX = torch.cpu._is_amx_tile_supported()
# With AMX small weights are packed, the others oneDNN's.
LINEARS = ("_C::onednn_mm", "_C::weight_packed_linear" if AVX512 else "aten::linear")
LINEAR = "linear"


def plain(operator: str) -> str:
    """LINEAR for any operator that is a linear layer on some CPU; others by their own name."""
    return LINEAR if operator in LINEARS else operator


LAYERS = 2
PROMPTS = [[(seed * 7919 + i * 104_729) % 50_000 for i in range(48)] for seed in range(8)]
OUTPUT = 12
BLOCKS = 64  # of a cache, which is filled with zeros as the engine starts: a gigabyte for seconds
# More prompts than a step takes.
ARGUMENTS = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": False}
