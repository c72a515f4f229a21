"""The fidelity of a Recording in JSON: all that the table has, in microseconds of one step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kcap.replay.fidelity.compare import KERNEL, SHARE, TOTAL, Compared, Missing, Row
from kcap.replay.fidelity.verdict import SPAN, Fidelity, KindFidelity
from kcap.schemas.signature import call_key, signature

BOUNDS = {"total": TOTAL, "kernel": KERNEL, "kernel_share": SHARE, "span": SPAN}


def document(found: Fidelity) -> dict[str, Any]:
    """Times at the top are of all profiled steps."""
    return {
        "holds": found.holds,
        "bounds": BOUNDS,
        "engine_us": found.engine_us(),
        "replayed_us": found.replayed_us(),
        "missing_us": found.missing_us(),
        "error": found.error,
        "total_by": dict(found.by_state()),
        "kinds": [_kind(kind) for kind in found.kinds],
    }


def _kind(kind: KindFidelity) -> dict[str, Any]:
    return {
        **asdict(kind.kind),
        "steps": kind.steps,
        "sm_mhz": kind.sm_mhz,
        "outside": list(kind.outside()),
        "holds_by": [state.state for state in kind.holding],
        "total_by": kind.best.state,
        "states": {state.state: _state(state) for state in (kind.serving, kind.in_program)},
        "span": {**asdict(kind.span), "own_us": kind.span.own_us} if kind.span else None,
        "program": {**asdict(kind.program), "over_span": kind.span_ratio},
    }


def _state(state: Compared) -> dict[str, Any]:
    return {
        "engine_us": state.engine_us,
        "replayed_us": state.replayed_us,
        "missing_us": state.missing_us,
        "error": state.error,
        "kernels": [_row(row) for row in state.rows],
        "missing": [_missing(one) for one in state.missing],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "call": row.call.id,
        "key": call_key(row.call),
        "operator": row.call.operator,
        "signature": signature(row.call.args),
        "count": row.count,
        "share": row.share,
        "engine_us": row.engine_us,
        "replayed_us": row.replayed_us,
        "ratio": row.ratio,
        "within": row.within if row.judged else None,
        "other_kernels": row.other,
        "sample": row.replayed.sample,
        "context": row.replayed.context,
        "how": asdict(row.replayed.how),
        "warm": row.replayed.how.warm,
    }


def _missing(one: Missing) -> dict[str, Any]:
    return {
        "name": one.name,
        "call": one.call.id if one.call else None,
        "reason": one.reason,
        "count": one.count,
        "share": one.share,
        "engine_us": one.engine_us,
        "how": asdict(one.replayed.how),
    }
