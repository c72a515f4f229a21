"""sampling: all logits are read; of probabilities half, for a draw that nothing filters stops at what it finds."""

from __future__ import annotations

from kcap.replay.roofline.given import Given
from kcap.replay.roofline.kinds import kind
from kcap.schemas.families.cost import Cost


@kind("sampling")
def sampling(given: Given) -> Cost:
    return given.cost(given.read("logits") if "logits" in given else given.read("probs") // 2)
