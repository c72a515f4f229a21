"""Replay rules of matrix products: oneDNN's handles, behind which vLLM's CPU build hides the weight (read in vllm/_custom_ops.py)."""

from __future__ import annotations

from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, fill_random, torch_dtype_or_skip
from kcap.schemas.derive.families import ReplayRule, replay_rule

PRIMITIVES = 32  # oneDNN primitives that vLLM keeps per weight


class OneDnnHandle:
    """A oneDNN matmul: its raw pointer lives as long as this object, and so does the weight."""

    def __init__(self, pointer: int, weight: torch.Tensor) -> None:
        self.tensor = torch.tensor(pointer, dtype=torch.int64)
        self.weight = weight

    def __del__(self) -> None:
        torch.ops._C.release_dnnl_matmul_handler(self.tensor.item())


@replay_rule("_C::onednn_mm")
class OneDnnMm(ReplayRule):
    """The weight hides behind the handler: K is the activation's last dimension, N the output's."""

    remade = ("handler_tensor",)

    def _weight(self, bound: BoundCall) -> tuple[int, int]:
        return bound.spec("c").shape[-1], bound.spec("a").shape[-1]

    def extra_bytes(self, bound: BoundCall) -> int:
        n, k = self._weight(bound)
        return 2 * n * k * bound.spec("a").bits // 8  # the weight, and oneDNN's own packed copy of it

    def remake(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        n, k = self._weight(bound)
        dtype = bound.spec("a").dtype
        flat = torch.empty(n * k, dtype=torch_dtype_or_skip(dtype))
        fill_random(flat.view(torch.uint8), dtype)
        weight = flat.view(n, k)
        handle = OneDnnHandle(torch.ops._C.create_onednn_mm_handler(weight.t(), PRIMITIVES), weight)
        inputs.keep.append(handle)
        return {"handler_tensor": handle.tensor}


@replay_rule("_C::onednn_scaled_mm")
class OneDnnScaledMm(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        raise Skip("its oneDNN handler hides an int8 weight and its scales, which are no arguments")
