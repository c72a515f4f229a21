"""What the attention families share: the core of their references, how much work an invocation is, and FlashInfer's
wrapper classes as their tap records them (the run's arguments, `plan.…` and `init.…`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized
from kcap.schemas.derive.kernel import TensorArg, tensor_arg

MakeTensor = Callable[[], torch.Tensor]

ATTEND = '''CHUNK = 512  # queries at once: bounds the memory that logits take


def attend(q, k, v, sm_scale{more}):
    """q: [num_q, heads, dim], k and v: [num_kv, kv_heads, dim], float32; the last query stands at the last key."""
    num_q, num_kv, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    kv_pos = torch.arange(num_kv, device=q.device)
    q_pos = torch.arange(num_q, device=q.device) + num_kv - num_q
    outputs, lses = [], []
    for start in range(0, num_q, CHUNK):
        rows = slice(start, start + CHUNK)
        logits = torch.einsum("qhd,khd->qhk", q[rows], k) * sm_scale
{cap}{bias}{mask}{sink}        outputs.append(torch.einsum("qhk,khd->qhd", torch.softmax(logits, dim=-1){keys}, v))
        lses.append(torch.logsumexp(logits, dim=-1) / math.log(2.0))
    return torch.cat(outputs), torch.cat(lses)
'''

PREFILL = "prefill: hardly a batch has the sizes of another"  # why no kernel of it can be replaced
SCALE_DESCRIPTION = "Softmax scale. Default is (1/sqrt(head_dim))."
LSE_DESCRIPTION = "The 2-based log-sum-exp of attention logits."
SINKS_DESCRIPTION = "A logit of each head that no key has: it takes its share of the softmax."
SLOPES_DESCRIPTION = "Of each head, by how much a logit falls with each key between it and the query."
CAP = "        logits = {softcap} * torch.tanh(logits / {softcap})\n"
BIAS = "        logits += alibi_slopes[:, None] * (kv_pos[None, None, :] - q_pos[rows, None, None])\n"
MASK = '        logits.masked_fill_(({hidden})[:, None, :], float("-inf"))\n'
LATER = "kv_pos[None, :] > q_pos[rows, None]{right}"
EARLIER = "kv_pos[None, :] < q_pos[rows, None] - {window}"
SINK = "        logits = torch.cat((logits, sinks.to(torch.float32)[:, None].expand(*logits.shape[:2], 1)), dim=-1)\n"


@dataclass(frozen=True)
class AttentionVariant:
    """What a kernel adds to plain attention, as FlashInfer calls it: which keys a query sees, what its logits become.

    `window`, `right`: keys before and after the query's own that it sees, -1: all; under a causal mask none after it.
    `softcap`: the bound that a tanh keeps the logits in (Gemma 2, arXiv:2408.00118), 0: none. `sinks`: a logit of each
    head that no key has, [heads] (gpt-oss, arXiv:2508.10925). `alibi_slopes`: by how much a logit falls with each
    key between it and the query, [heads] (ALiBi, arXiv:2108.12409).
    """

    causal: bool = True
    window: int = -1
    right: int = -1
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    @property
    def words(self) -> str:
        """All of it but the causal mask, in a Definition's name."""
        words = f"_window{self.window}" if self.window >= 0 else ""
        words += f"_right{self.right}" if self.right >= 0 and not self.causal else ""
        words += (f"_softcap{self.softcap:g}" if self.softcap else "") + ("_sinks" if self.has_sinks else "")
        return words + ("_alibi" if self.alibi_slopes is not None else "")

    @property
    def has_sinks(self) -> bool:
        return self.sinks is not None

    def inputs(self) -> dict[str, TensorArg]:
        """The inputs of a Definition that it adds, last in order."""
        added = {"sinks": (self.sinks, SINKS_DESCRIPTION), "alibi_slopes": (self.alibi_slopes, SLOPES_DESCRIPTION)}
        return {
            name: tensor_arg(tensor, "num_qo_heads", description=description)
            for name, (tensor, description) in added.items()
            if tensor is not None
        }

    @property
    def arguments(self) -> str:
        """Those inputs as further arguments of a call."""
        return "".join(f", {name}" for name in self.inputs())

    def attend_source(self) -> str:
        """The text of `attend`."""
        hidden = [LATER.format(right="")] if self.causal else []
        hidden += [LATER.format(right=f" + {self.right}")] if self.right >= 0 and not self.causal else []
        hidden += [EARLIER.format(window=self.window)] if self.window >= 0 else []
        any_hidden = " | ".join(f"({text})" for text in hidden) if len(hidden) > 1 else "".join(hidden)
        return ATTEND.format(
            more=self.arguments,
            cap=CAP.format(softcap=self.softcap) if self.softcap else "",
            bias=BIAS if self.alibi_slopes is not None else "",
            mask=MASK.format(hidden=any_hidden) if hidden else "",
            sink=SINK if self.has_sinks else "",
            keys="[..., :num_kv]" if self.has_sinks else "",
        )

    def pairs(self, lengths: torch.Tensor, queries: torch.Tensor) -> int:
        """Pairs of a query and a key that it sees, over all sequences; `lengths`, `queries`: [sequences]."""
        return attended_pairs(lengths, queries, self.causal, self.window, self.right)


CAUSAL = AttentionVariant()


def base2_lse(lse: torch.Tensor) -> torch.Tensor:
    """A natural log-sum-exp [heads, tokens] as FlashInfer returns it: base 2, [tokens, heads]."""
    return (lse / math.log(2.0)).transpose(0, 1)


def attended_pairs(
    lengths: torch.Tensor, queries: torch.Tensor, causal: bool, window: int = -1, right: int = -1
) -> int:
    """As `AttentionVariant.pairs`."""
    queries, ends = queries.long(), lengths.long().repeat_interleave(queries.long())
    firsts = (queries.cumsum(0) - queries).repeat_interleave(queries)
    own = ends - queries.repeat_interleave(queries) + torch.arange(len(ends), device=ends.device) - firsts
    begin = (own - window).clamp(min=0) if window >= 0 else torch.zeros_like(own)
    end = own + 1 if causal else ends if right < 0 else torch.minimum(own + right + 1, ends)
    return int((end - begin).clamp(min=0).sum())


def first_key_seen(lengths: torch.Tensor, queries: torch.Tensor, window: int) -> torch.Tensor:
    """The first key of each sequence that one of its queries sees; its length where it has no query."""
    lengths, queries = lengths.long(), queries.long()
    first = (lengths - queries - window).clamp(min=0) if window >= 0 else torch.zeros_like(lengths)
    return torch.where(queries > 0, first, lengths)


def refuse_quantized(queries: torch.Tensor, *cached: torch.Tensor) -> None:
    """Unrecognized unless all are floats of one dtype: float8 queries have scales of their own, too."""
    if queries.dtype not in FLOATS or {tensor.dtype for tensor in cached} != {queries.dtype}:
        raise Unrecognized("its queries or its caches are quantized")


def refuse_unless_one(call: Invocation, *names: str) -> None:
    """Unrecognized if one of these scales is set to something else than 1."""
    for name in names:
        if isinstance(call[name], torch.Tensor) or call[name] not in (None, 1, 1.0):
            raise Unrecognized(f"{call.operator}: {name} is set")


def refuse_unmodelled_slots(call: Invocation, *names: str) -> None:
    """Unrecognized for what SGLang's Triton kernels do besides attention over a list of slots, one to a page.

    `names`: of a kernel's own switches.
    """
    call.refuse("SCORE_MOD", *names)
    if call["PAGE_SIZE"] not in (None, 1) or (call["xai_temperature_len"] or 0) > 0:
        raise Unrecognized(f"{call.operator}: its slots are of pages, or its logits have a temperature of their own")


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
