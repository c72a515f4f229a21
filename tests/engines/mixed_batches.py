"""Requests of which some decode while others prefill."""

LAYERS = 2
PROMPTS = [[(seed * 7919 + i * 104_729) % 50_000 for i in range(48)] for seed in range(8)]
OUTPUT = 12
# More prompts than a step takes.
ARGUMENTS = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": False}
