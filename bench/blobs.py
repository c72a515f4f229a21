"""By which the blobs of Workloads are known again: what their files hold, whenever and by whom these were written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress

from kcap.errors import FormatError
from kcap.schemas.dataset import Dataset
from kcap.schemas.workload import SafetensorsInput, Workload


def digest(dataset: Dataset, workloads: Iterable[Workload]) -> str:
    """The SHA-256 of all blobs that `workloads` name, each read once and a part at a time."""
    inputs = [one for workload in workloads for one in workload.inputs.values()]
    blobs = {one.path: one for one in inputs if isinstance(one, SafetensorsInput)}
    return hashlib.sha256(b"".join(_digest(dataset, one) for one in blobs.values())).hexdigest()


def _digest(dataset: Dataset, given: SafetensorsInput) -> bytes:
    """Zeros for one that cannot be read."""
    with suppress(FormatError, OSError):
        if (path := dataset.blob_file(given)).is_file():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
    return bytes(hashlib.sha256().digest_size)
