"""What a Definition says of its axes and tensors where a family says nothing itself.

FlashInfer-Bench's validator warns of each that has no description. Names that mean the same in all families are
explained in words; of any other axis it is said which dimensions it is, of any other tensor whose argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BEFORE = "What is there before."  # of a tensor that is written in parts
FOR_ITS_LENGTH = "For its length: it is written only."

AXES = {
    "M": "Rows of A and of the product.",
    "N": "Columns of the product.",
    "K": "Reduced dimension of the product.",
    "G": "Groups.",
    "batch_size": "Sequences, or rows, of one invocation.",
    "num_tokens": "Tokens of one invocation.",
    "seq_len": "Tokens of one invocation.",
    "hidden_size": "Elements of one token's hidden state.",
    "intermediate_size": "Elements of one token between both products of an MLP.",
    "gate_up_size": "Elements of gate and up projection together.",
    "vocab_size": "Tokens of the vocabulary.",
    "head_dim": "Elements of one attention head.",
    "head_size": "Elements of one attention head.",
    "head_dim_ckv": "Elements of the compressed key and value.",
    "head_dim_kpe": "Elements of the key that carry the position.",
    "rotary_dim": "Elements of a head that are rotated.",
    "num_qo_heads": "Heads of the query and of the output.",
    "num_kv_heads": "Heads of key and value.",
    "num_pages": "Pages of the cache.",
    "page_size": "Tokens of one page of the cache.",
    "len_indptr": "Sequences and one: offsets of a ragged batch.",
    "num_kv_indices": "Pages of all sequences together.",
    "total_q": "Query tokens of all sequences together.",
    "total_kv": "Key and value tokens of all sequences together.",
    "num_experts": "Experts.",
    "top_k": "Experts that one token is routed to.",
    "world_size": "Processes of the group.",
    "max_seq_len": "Positions that the table holds.",
}

TENSORS = {
    "A": "Left matrix.",
    "B": "Right matrix.",
    "C": "Product.",
    "A_scale": "Scales of A.",
    "B_scale": "Scales of B.",
    "bias": "Added to each row.",
    "hidden_states": "Hidden states, a row for each token.",
    "residual": "Residual, added to the hidden states.",
    "weight": "Weight of the layer.",
    "eps": "Added before the root, against division by zero.",
    "logits": "Logits, a row for each sequence.",
    "probs": "Probabilities, a row for each sequence.",
    "samples": "Token that is taken, one for each row.",
    "q": "Queries.",
    "k": "Keys.",
    "v": "Values.",
    "q_nope": "Queries without their position.",
    "q_pe": "The part of the queries that carries the position.",
    "k_cache": "Paged cache of keys.",
    "v_cache": "Paged cache of values.",
    "kv_cache": "Paged cache of keys and values.",
    "ckv_cache": "Paged cache of compressed keys and values.",
    "kpe_cache": "Paged cache of the part of the keys that carries the position.",
    "qo_indptr": "First query token of each sequence, and their number.",
    "kv_indptr": "Where each sequence's pages, or keys and values, begin, and their number.",
    "kv_indices": "Pages of each sequence, one sequence after another.",
    "kv_last_page_len": "Tokens in the last page of each sequence.",
    "sm_scale": "Scale of the logits before the softmax.",
    "lse": "Logarithm, to base 2, of the sum of the exponentials of the logits.",
    "slot_mapping": "Slot of the cache for each token; negative: none.",
    "positions": "Position of each token in its sequence.",
    "cos_sin_cache": "Cosines and sines, a row for each position.",
    "input_ids": "Ids of tokens.",
    "topk_ids": "Experts of each token.",
    "topk_weights": "Weight of each of a token's experts.",
    "routing_logits": "Logits of the router, a row for each token.",
    "gemm1_weights": "Weights of gate and up projection, by expert.",
    "gemm2_weights": "Weights of the down projection, by expert.",
}


def describe_axis(name: str, shapes: Mapping[str, Sequence[str] | None]) -> str:
    """`shapes`: of each input and output by its name."""
    if name in AXES:
        return AXES[name]
    uses = [
        f"dimension {dimension} of {tensor}"
        for tensor, shape in shapes.items()
        for dimension, axis in enumerate(shape or ())
        if axis == name
    ]
    text = ", ".join(uses) or "of no input or output"
    return f"{text[0].upper()}{text[1:]}."


def describe_tensor(name: str, is_output: bool) -> str:
    if name in TENSORS:
        return TENSORS[name]
    return "What the recorded operator returns or writes." if is_output else f"The recorded operator's argument {name}."
