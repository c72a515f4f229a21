"""Which integer arguments a Sample keeps, decided by the argument's name.

Values are kept where the name says that they point into memory or count tokens (block tables, slots, lengths, expert
ids): without them a kernel cannot be replayed. Token ids never carry such a name. Of a few of aten's own arguments the
range is kept, of everything else nothing, unless the session keeps tokens: what an index may be follows from the
shape of what it indexes, and the smallest and largest token id of a prompt are token ids too.
"""

from __future__ import annotations

VALUE_ARGUMENTS = frozenset(
    {
        "batch_ids",
        "block_table",
        "block_tables",
        "block_mapping",
        "cu_seq_lens",
        "cu_seqlen",
        "cu_seqlens",
        "cu_seqlens_k",
        "cu_seqlens_k_new",
        "cu_seqlens_q",
        "expert_first_token_offset",
        "expert_ids",
        "expert_map",
        "expert_offsets",
        "k_block_table",
        "kv_batch_idx",
        "kv_indices",
        "kv_indptr",
        "kv_last_page_len",
        "leftpad_k",
        "num_tokens_post_pad",
        "num_tokens_post_padded",
        "out_cache_loc",
        "page_table",
        "paged_kv_indices",
        "paged_kv_indptr",
        "paged_kv_last_page_len",
        "positions",
        "problem_sizes1",
        "problem_sizes2",
        "qo_indptr",
        "query_start_loc",
        "req_pool_indices",
        "seq_lens",
        "seq_lens_tensor",
        "seq_start_loc",
        "seqlens_rotary",
        "seqused_k",
        "seqused_q",
        "slot_mapping",
        "sorted_token_ids",  # rows sorted by expert, not ids of tokens
        "topk_ids",
        "topk_indices",
    }
)
RANGE_ARGUMENTS = frozenset({"repeats", "offsets", "lengths", "shifts"})
