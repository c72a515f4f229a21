"""Lookups: positions within their table, token ids within their vocabulary, masks that leave something."""

from __future__ import annotations

import torch

from kcap.replay.definitions.draft import Draft
from kcap.replay.definitions.valid import rule

LONGEST = 4096  # positions where no table bounds them


@rule("positions", "pos_ids", "position_ids")
def positions(draft: Draft, name: str) -> torch.Tensor:
    """A position each, within the table of cosines and sines, or the pages of a sequence, if there are any."""
    if pages := draft.first("block_table", "block_tables"):
        return draft.integers(
            0, draft.shape(pages)[1] * (draft.size("page_size", "block_size") or 1), draft.shape(name)
        )
    table = draft.first("cos_sin_cache", "cos_cache", "cos", "freqs_cis")
    return draft.integers(0, draft.shape(table)[0] if table else LONGEST, draft.shape(name))


@rule("input_ids", "token_ids", "ids", "indices", op_types=("embedding",))
def token_ids(draft: Draft, name: str) -> torch.Tensor | None:
    table = draft.first("weight", "table", "embedding")
    return draft.integers(0, draft.shape(table)[0], draft.shape(name)) if table else None


@rule("index", "indices_*", op_types=("index", "index_select"))
def rows(draft: Draft, name: str) -> torch.Tensor | None:
    """Within every axis of what is indexed, whichever it is."""
    if "self" not in draft or not (sizes := draft.shape("self")):
        return None
    return draft.integers(0, min(sizes), draft.shape(name))


@rule("mask", "*_mask")
def mask(draft: Draft, name: str) -> torch.Tensor | None:
    """Random, but the first of each row is kept: a row without any has no softmax."""
    if draft.definition.inputs[name].dtype != "bool":
        return None
    made = draft.reals(0, 1, draft.shape(name)) < 0.5
    if made.numel():
        made[..., 0] = True
    return made
