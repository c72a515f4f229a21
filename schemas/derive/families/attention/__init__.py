"""Attention: over a paged cache (gqa_paged, mla_paged) and over keys and values as they are (gqa_ragged).

Read `core` and `pages`, which the others share, then a kernel's file; `flash_attention` makes each of them.
`flashinfer_wrapper` and `cpu_cache` read arguments that FlashInfer and vLLM's CPU build lay out in their own way;
`parts` has attention that is made of several launches; `cost`, `valid_inputs` and `replay_rules` are shared by all
attention kernels.
"""
