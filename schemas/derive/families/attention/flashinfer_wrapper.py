"""FlashInfer's wrapper classes as their tap records them: the run's arguments, `plan.…` and `init.…`."""

from __future__ import annotations

from typing import Any

import torch

from kcap.schemas.derive.families.attention.core import refuse_unless_one
from kcap.schemas.derive.invocation import Invocation, Unrecognized

UNMODELLED = ("custom_mask", "packed_custom_mask", "prefix_len_ptr", "token_pos_in_items_ptr")
SCALES = ("q_scale", "k_scale", "v_scale", "o_scale")


def refuse_unmodelled_run(call: Invocation) -> None:
    """Unrecognized if the run or its plan asks for what no family models."""
    if not call.operator.endswith(".run"):
        raise Unrecognized(f"{call.operator} is no run of a wrapper")
    call.refuse("sinks", "profiler_buffer", *(f"plan.{name}" for name in UNMODELLED))
    refuse_unless_one(call, *SCALES)
    if call["plan.pos_encoding_mode"] not in (None, "NONE") or call["q_len_per_req"] not in (None, 1):
        raise Unrecognized(f"{call.operator} encodes positions, or has several queries a sequence")


def wrapper_kv_cache(call: Invocation) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [pages, rows of a page, heads, dim]: passed as a pair or as one tensor [pages, 2, …]."""
    layout = call["init.kv_layout"] or call["kv_layout"] or "NHD"
    match call["paged_kv_cache"]:
        case torch.Tensor() as cache if cache.dim() == 5:
            pair = cache.unbind(1)
        case [torch.Tensor() as k, torch.Tensor() as v]:
            pair = (k, v)
        case _:
            raise Unrecognized(f"{call.operator} has no paged cache")
    k, v = pair if layout == "NHD" else tuple(half.transpose(1, 2) for half in pair)
    return k, v


def planned_softmax_scale(call: Invocation, dim: int) -> float:
    """The softmax scale that was planned, or FlashInfer's default for queries of `dim`."""
    return dim**-0.5 if call["plan.sm_scale"] is None else float(call.number("plan.sm_scale"))


def planned_window(call: Invocation) -> int:
    """Keys before its own that a query sees; -1: all."""
    window = next((call[n] for n in ("window_left", "plan.window_left") if call[n] is not None), -1)
    if not isinstance(window, int):
        raise Unrecognized(f"{call.operator}: its window drifts")
    return window


def wrapper_result(call: Invocation, index: int) -> Any:
    """The output (0) or the log-sum-exp (1) that the run returned."""
    return call.result[index] if call["return_lse"] else call.result


def planned_softcap(call: Invocation) -> float:
    """The bound that a tanh keeps the logits in; 0: none."""
    name = next((name for name in ("logits_soft_cap", "plan.logits_soft_cap") if call[name]), None)
    return float(call.number(name)) if name else 0.0
