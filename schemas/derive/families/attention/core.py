"""What the attention families share: the core of their references, and how much work an invocation is."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized

MakeTensor = Callable[[], torch.Tensor]

ATTEND = '''CHUNK = 512  # queries at once: bounds the memory that logits take


def attend(q, k, v, sm_scale):
    """q: [num_q, heads, dim], k and v: [num_kv, kv_heads, dim], float32; the last query stands at the last key."""
    num_q, num_kv, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    kv_pos = torch.arange(num_kv, device=q.device)
    q_pos = torch.arange(num_q, device=q.device) + num_kv - num_q
    outputs, lses = [], []
    for start in range(0, num_q, CHUNK):
        rows = slice(start, start + CHUNK)
        logits = torch.einsum("qhd,khd->qhk", q[rows], k) * sm_scale
{cap}{mask}        outputs.append(torch.einsum("qhk,khd->qhd", torch.softmax(logits, dim=-1), v))
        lses.append(torch.logsumexp(logits, dim=-1) / math.log(2.0))
    return torch.cat(outputs), torch.cat(lses)
'''

SCALE_DESCRIPTION = "Softmax scale. Default is (1/sqrt(head_dim))."
LSE_DESCRIPTION = "The 2-based log-sum-exp of attention logits."
CAP = "        logits = {softcap} * torch.tanh(logits / {softcap})\n"
MASK = '        logits.masked_fill_(({hidden})[:, None, :], float("-inf"))\n'
LATER = "kv_pos[None, :] > q_pos[rows, None]"
EARLIER = "(kv_pos[None, :] < q_pos[rows, None] - {window})"


def attend_source(causal: bool, window: int, softcap: float = 0.0) -> str:
    """The text of `attend`. `window`: keys before the query's own that it sees; -1: all. `softcap`: the bound that a
    tanh keeps the logits in (Gemma 2, arXiv:2408.00118); 0: none."""
    hidden = [f"({LATER})" if window >= 0 else LATER] if causal else []
    hidden += [EARLIER.format(window=window)] if window >= 0 else []
    mask = MASK.format(hidden=" | ".join(hidden)) if hidden else ""
    return ATTEND.format(mask=mask, cap=CAP.format(softcap=softcap) if softcap else "")


def window_and_cap(window: int, softcap: float) -> str:
    """Both in a Definition's name."""
    return (f"_window{window}" if window >= 0 else "") + (f"_softcap{softcap:g}" if softcap else "")


def base2_lse(lse: torch.Tensor) -> torch.Tensor:
    """A natural log-sum-exp [heads, tokens] as FlashInfer returns it: base 2, [tokens, heads]."""
    return (lse / math.log(2.0)).transpose(0, 1)


def attended_pairs(lengths: torch.Tensor, queries: torch.Tensor, causal: bool, window: int) -> int:
    """Pairs of a query and a key that it sees, over all sequences; `lengths`, `queries`: [sequences]."""
    queries, ends = queries.long(), lengths.long().repeat_interleave(queries.long())
    firsts = (queries.cumsum(0) - queries).repeat_interleave(queries)
    own = ends - queries.repeat_interleave(queries) + torch.arange(len(ends), device=ends.device) - firsts
    begin = (own - window).clamp(min=0) if window >= 0 else torch.zeros_like(own)
    return int(((own + 1 if causal else ends) - begin).clamp(min=0).sum())


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
