"""A Recording whose one kernel can be replaced."""

from __future__ import annotations

import pytest
import torch

import kcap as package
from kcap.schemas.recording.recording import Recording


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Of a ReLU of a matrix of 4 rows and 8 columns."""
    output = tmp_path_factory.mktemp("recorded") / "out.kcap"
    with torch.no_grad(), package.record(output):
        torch.relu(torch.randn(4, 8))
    return package.load(output)
