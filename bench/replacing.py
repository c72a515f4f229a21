"""An output directory that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(output: Path, private: bool = False) -> Iterator[Path]:
    """A folder beside `output` that takes its place at the end, or goes if something fails.

    `private`: for its owner alone (mode 0700), as a Recording is.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield folder
        if output.exists():
            shutil.rmtree(output)
        if not private:
            folder.chmod(0o777 & ~_umask())
        folder.rename(output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
