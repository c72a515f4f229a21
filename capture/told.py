"""What a session's shards tell of its windows, and of what happened around its engine."""

from __future__ import annotations

from kcap.capture.config import Session
from kcap.capture.shards import STEPS, Shard

NEVER_OPENED = "the window was never opened: kcap window start DIR opens it, and so does SIGUSR1 to kcap record"


def windows(recording: list[Shard]) -> list[dict[str, int]]:
    """Of the first process: each window's `first` step, of all that the engine began, and how many `steps` count."""
    shard = next((shard for shard in recording if shard.lines.get("window")), None)
    if shard is None:
        return []
    lines = shard.lines["window"]
    ends = [line["recorded"] for line in lines[1:]] + [shard.header(STEPS)]
    return [
        {"first": line["first"], "steps": max(0, end - line["recorded"])} for line, end in zip(lines, ends, strict=True)
    ]


def notes(session: Session, shards: list[Shard]) -> list[str]:
    """What was noted while the engine ran, and a window that never opened."""
    told = [line["detail"] for shard in shards for line in shard.lines.get("note", [])]
    recording = [shard for shard in shards if shard.process]
    if recording and not session.opens and not session.window_file.exists():
        told.append(NEVER_OPENED)
    return told
