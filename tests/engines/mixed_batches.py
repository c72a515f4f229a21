"""Requests of which some decode while others prefill."""

import torch

# vLLM's library for a CPU without AVX-512 has neither products nor collectives of its own.
AVX512 = torch.cpu._is_avx512_supported()
LINEAR = "_C::onednn_mm" if AVX512 else "aten::linear"
LAYERS = 2
PROMPTS = [[(seed * 7919 + i * 104_729) % 50_000 for i in range(48)] for seed in range(8)]
OUTPUT = 12
# More prompts than a step takes.
ARGUMENTS = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": False}
