"""Attention: over a paged cache (gqa_paged, mla_paged) and over keys and values as they are (gqa_ragged).

Read `core` and `pages`, which the others share, then a kernel's file; `flash_attention` makes each of them.
`split_decode` has decodes in two launches, `merge` what joins two sets of keys, `masked` attention under a mask that is
an argument; `cost`, `valid_inputs` and `replay_rules` are shared by all attention kernels.
"""
