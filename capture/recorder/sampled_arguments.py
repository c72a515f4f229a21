"""Which integer arguments a Sample keeps, decided by the argument's name.

Values are kept where the name says that they point into memory or count tokens (block tables, slots, lengths, expert
ids): without them a kernel cannot be replayed. Token ids never carry such a name, but for two (`EXPERTS_OR_TOKENS`) in
calls from Python, where another argument must tell that experts are meant. Of a few of aten's own arguments the range
is kept, of everything else nothing, unless the session keeps tokens: what an index may be follows from the shape of
what it indexes, and the smallest and largest token id of a prompt are token ids too.
"""

from __future__ import annotations

from collections.abc import Iterable

VALUE_ARGUMENTS = frozenset(
    {
        "actual_seq_lens_kv",
        "actual_seq_lens_q",
        "batch_ids",
        "batch_indices",
        "batch_offsets_k",
        "batch_offsets_o",
        "batch_offsets_q",
        "batch_offsets_stats",
        "batch_offsets_v",
        "block_mapping",
        "block_table",
        "block_tables",
        "context_lens",
        "cu_seq_lens",
        "cu_seqlen",
        "cu_seqlen_ke",
        "cu_seqlen_ks",
        "cu_seqlens",
        "cu_seqlens_k",
        "cu_seqlens_k_new",
        "cu_seqlens_q",
        "cum_seq_lens_kv",
        "cum_seq_lens_q",
        "dst_state_batch_indices",
        "expanded_idx_to_permuted_idx",
        "expert_first_token_offset",
        "expert_ids",
        "expert_map",
        "expert_offsets",
        "grouped_layout",
        "indptr",
        "initial_state_indices",
        "intermediate_state_indices",
        "k_block_table",
        "kv_batch_idx",
        "kv_indices",
        "kv_indices_d",
        "kv_indices_p",
        "kv_indptr",
        "kv_indptr_d",
        "kv_indptr_p",
        "kv_last_page_len",
        "kv_len",
        "kv_len_arr",
        "kv_lens",
        "kv_lens_buffer",
        "kv_segment_offsets",
        "last_page_len",
        "last_page_len_d",
        "last_page_len_p",
        "leftpad_k",
        "m_indices",
        "m_indptr",
        "mask_indptr",
        "masked_m",
        "num_tokens_post_pad",
        "num_tokens_post_padded",
        "o_indptr",
        "out_cache_loc",
        "output_state_indices",
        "page_table",
        "paged_kv_indices",
        "paged_kv_indices_arr",
        "paged_kv_indptr",
        "paged_kv_indptr_arr",
        "paged_kv_last_page_len",
        "permuted_idx_to_expanded_idx",
        "plan.indices",  # FlashInfer's pages; anybody else's `indices` may be token ids
        "pos_ids",
        "positions",
        "problem_sizes1",
        "problem_sizes2",
        "qo_indptr",
        "qo_indptr_arr",
        "qo_indptr_d",
        "qo_indptr_p",
        "qo_segment_offsets",
        "query_start_loc",
        "req_pool_indices",
        "row_starts",
        "seg_indptr",
        "seq_lens",
        "seq_lens_kv",
        "seq_lens_q",
        "seq_lens_tensor",
        "seq_start_loc",
        "seqlens_rotary",
        "seqused_k",
        "seqused_q",
        "shared_kv_indptr",
        "slot_mapping",
        "sorted_token_ids",  # rows sorted by expert, not ids of tokens
        "src_page_table",
        "state_batch_indices",
        "tile_idx_to_expert_idx",
        "tile_idx_to_mn_limit",
        "token_selected_experts",
        "topk_ids",
        "topk_indices",
        "unique_kv_indices",
        "unique_kv_indptr",
        "unique_kv_last_page_len",
        "v_indptr",
        "weight_indices",
    }
)
RANGE_ARGUMENTS = frozenset({"repeats", "offsets", "lengths", "shifts"})


EXPERTS_OR_TOKENS = frozenset({"topk_ids", "topk_indices"})  # vLLM ranks a vocabulary under this name too


def keeps_values(argument: str, beside: Iterable[str] | None = None) -> bool:
    """Whether the values of an argument of this name are kept: `plan.kv_indptr` and `block_table_ptr` are too.

    `beside`: the names of all arguments, of a call from Python.
    """
    plain = argument.rpartition(".")[2].removesuffix("_ptr")
    if beside is not None and plain in EXPERTS_OR_TOKENS:
        return any("expert" in name.lower() for name in beside if name != argument)
    return argument in VALUE_ARGUMENTS or plain in VALUE_ARGUMENTS
