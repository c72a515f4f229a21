"""A Solution's sources as files."""

from __future__ import annotations

from pathlib import Path

from kcap.bench.build.failure import BuildFailed
from kcap.schemas.solution import Solution


def write_sources(solution: Solution, folder: Path) -> Path:
    """`folder`, absolute, with the sources in it, those that were there already left as they are."""
    folder = folder.absolute()
    for source in solution.sources:
        path, content = folder / source.path, source.content.encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise BuildFailed(f"sources: {source.path[:100]} cannot be written: {why}") from None
    return folder
