"""What all that commands print has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Output(BaseModel):
    """Part of what a command prints; a member with a default may be left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")
