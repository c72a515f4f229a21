"""Which integer arguments a Sample keeps, decided by the argument's name.

Values are kept where the name says that a kernel walks memory by them (block tables, slots, offsets, lengths, states'
numbers): without them it cannot be replayed. A name is read word by word, `cu_chunk_seqlens_ptr` and `seqLens` too:

- with a word of PRIVATE it is decided by the lists alone: ids may be token ids, and addresses say nothing later;
- with a word of COUNTS it says how many there are, or where each begins, of tokens too;
- else, unless a word of TOKENS is there, a word of PLACES is enough, or one of INDICES beside one of OWNERS: `seq_idx`,
  `state_table`; anybody's `indices` may be token ids.

What no rule tells is listed. Token ids carry no such name, but for those of VOUCHED in calls from Python,
where another argument must tell what is meant. Of a few of aten's own arguments the range is kept, of
everything else nothing, unless the session keeps tokens: what an index may be follows from the shape of what it
indexes, and the smallest and largest token id of a prompt are token ids too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

VALUE_ARGUMENTS = frozenset(
    {
        *("ExptData", "ExptHist", "ExptIndx", "ExptOffs", "ExptOffsSum"),  # OpenAI's triton_kernels: tokens by expert
        *("ExptTileOffs", "XBlockOffs", "XBlockSchedule", "XSliceOffs"),
        *("GatherIndx", "InIndx", "NonzeroIndx", "ScatterSrcIndx", "WriteBackIndx"),
        "Req_to_tokens",  # vLLM's pages, SGLang's slots
        "batch_ids",
        "block_ids",
        "expanded_idx_mapping",
        "expanded_idx_to_permuted_idx",
        "expert_ids",
        "grouped_layout",
        "idx_mapping",
        "inv_permuted_idx",  # the row of each token and expert
        "leftpad_k",
        "lora_ids",  # numbers of adapters
        "lora_ranks",
        "lora_token_start_loc",
        "m_indices",
        "masked_m",
        "n_offs",  # where slices of a product begin, SGLang's LoRA
        "output_hs",  # the sizes of slices of a product, vLLM's LoRA
        "permutation",  # rows sorted by adapter, SGLang's LoRA
        "permuted_idx_to_expanded_idx",
        "plan.indices",  # FlashInfer's pages; anybody else's `indices` may be token ids
        "pos_ids",
        "problem_sizes1",
        "problem_sizes2",
        "recv_topk",  # experts of tokens that other ranks sent
        "recv_topk_ids",
        "sorted_token_ids",  # rows sorted by expert, not ids of tokens
        "tile_idx_to_mn_limit",
        "token_indices_sorted_by_lora_ids",  # rows
        "token_selected_experts",
        "token_to_seq",
        "topk_ids",
        "topk_indices",
        "uneven_batch",  # a flag: SGLang's longest sequence has a fourth more keys than its shortest
        "weight_indices",
    }
)
RANGE_ARGUMENTS = frozenset({"repeats", "offsets", "lengths", "shifts"})

PRIVATE = frozenset({"id", "ids", "ptrs"})
COUNTS = frozenset(
    {"cu", "cum", "cumsum", "indptr", "len", "length", "lengths", "lens", "num", "offset", "offsets", "reach", "seqlen"}
    | {"seqlens", "seqused", "sizes"}  # and no `counts`: of a vocabulary they tell which tokens there were
)
TOKENS = frozenset({"prompt", "text", "tok", "token", "tokens", "toks", "vocab", "word", "words"})
PLACES = frozenset({"block", "blocks", "loc", "locs", "page", "pages", "pos", "position", "positions", "slot", "slots"})
INDICES = frozenset({"end", "ends", "idx", "index", "indices", "map", "mapping", "start", "starts", "table", "tables"})
OWNERS = frozenset(
    {"batch", "cache", "chunk", "chunks", "expert", "experts", "group", "groups", "head", "heads", "kv", "lora"}
    | {"query", "req", "reqs", "request", "requests", "row", "rows", "seq", "seqs", "state", "states"}
)
NAME_GROUPS = (VALUE_ARGUMENTS, RANGE_ARGUMENTS, PRIVATE, COUNTS, TOKENS, PLACES, INDICES, OWNERS)  # as operators.h has


VOUCHED = {  # kept in calls from Python only where another argument's name holds this
    **dict.fromkeys(("topk_ids", "topk_indices"), "expert"),  # vLLM ranks a vocabulary under these names too
    "batch": "query_start_loc",  # the sequence of each program
}


def keeps_values(argument: str, beside: Iterable[str] | None = None) -> bool:
    """Whether the values of an argument of this name are kept: `plan.kv_indptr` and `block_table_ptr` are too.

    `beside`: the names of all arguments, of a call from Python.
    """
    plain = argument.rpartition(".")[2].removesuffix("_ptr")
    if beside is not None and plain in VOUCHED:
        return any(VOUCHED[plain] in name.lower() for name in beside if name != argument)
    return argument in VALUE_ARGUMENTS or plain in VALUE_ARGUMENTS or walks_memory(plain)


def walks_memory(name: str) -> bool:
    """Whether the words of `name` say that memory is walked by its values."""
    words = set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))
    if words & PRIVATE:
        return False
    if words & COUNTS:
        return True
    return not words & TOKENS and bool(words & PLACES or (words & INDICES and words & OWNERS))
