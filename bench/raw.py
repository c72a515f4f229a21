"""Tensors as the bytes that they hold."""

from __future__ import annotations

import torch


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements in their order, whatever its strides: uint8, [nbytes]."""
    return tensor.contiguous().view(-1).view(torch.uint8)
