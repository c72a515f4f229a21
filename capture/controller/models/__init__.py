"""Configurations of well-known models, so that dummy weights can be recorded without a hub."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent
OWN = "kcap/"  # begins the names of models that no hub has


def find_config(model_id: str) -> Path | None:
    """The directory with the `config.json` of `model_id` (a hub id, in any case), or None if kcap has none."""
    names = {name.lower(): name for name in model_names()}
    name = names.get(model_id.lower())
    return ROOT / name if name else None


def model_names() -> list[str]:
    """The hub ids that `find` knows."""
    return sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*/config.json"))
