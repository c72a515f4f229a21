"""Scales of quantized tensors: positive, near one."""

from __future__ import annotations

import torch

from kcap.replay.definitions.draft import Draft
from kcap.replay.definitions.valid import rule


@rule("*_scale", "*_scales", "*_scale_inv", "*_scales_scalar", "*_scales_gate_scalar", "scale_a", "scale_b")
def scales(draft: Draft, name: str) -> torch.Tensor | None:
    if not draft.definition.inputs[name].dtype.startswith("float"):
        return None
    return draft.reals(0.5, 1.5, draft.shape(name))
