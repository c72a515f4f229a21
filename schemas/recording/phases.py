"""The phases of a step. Shards and counters number them in this order; an engine's process imports this file."""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal["prefill", "decode", "mixed", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)
ALL_PHASES = "all"  # phases together: the serving mix that was recorded
