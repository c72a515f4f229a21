"""Replay of the products of low-rank adapters: their weights, which no argument shows, and the tables of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, table_of_addresses
from kcap.schemas.derive.families import ReplayRule, rebuilt_argument, replay_rule
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.values import TensorSpec


@dataclass(frozen=True)
class HiddenAdapters:
    """Weights behind a table of addresses, [slices, adapters, rows, columns]; of slices that differ
    [adapters, rows of all slices, columns], and apart from it those that the table names."""

    lora: torch.Tensor
    by_slice: Sequence[torch.Tensor]

    @classmethod
    def random(cls, sizes: Sequence[int], count: int, columns: int, dtype: torch.dtype, device: Any) -> HiddenAdapters:
        def matrices(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, columns, device=device) * columns**-0.5).to(dtype)

        if len(set(sizes)) == 1:
            lora = matrices(len(sizes), count, sizes[0])
            return cls(lora, lora.unbind())
        by_slice = [matrices(count, size) for size in sizes]
        return cls(torch.cat(by_slice, 1), by_slice)


class LoraRule(ReplayRule):
    """The weights are made anew, behind one argument or a table of addresses: recorded addresses are never used."""

    rebuilt_args: tuple[str, ...] = ("lora_ptr", "slice_start_loc")
    added_to = ("out_ptr",)

    def slices(self, bound: BoundCall) -> tuple[list[int], int, str]:
        """The rows of each slice's weight, its columns and dtype."""
        raise NotImplementedError

    def prepare(self, bound: BoundCall) -> None:
        """A single slice's weights are an argument like others."""
        sizes, columns, dtype = self.slices(bound)
        if any(bound[name] not in (sizes[0] * columns, None) for name in ("lora_d0_stride", "lora_strides_d0")):
            raise Skip("its weights do not lie one behind the other")
        if len(sizes) == 1:
            storage = 1 + max(spec.storage for _, spec in bound.tensors())
            shape = (self.count(bound), sizes[0], columns)
            weight = TensorSpec(shape, dtype, device=bound.spec("input_ptr").device, storage=storage)
            bound.set_value("lora_ptr", weight)

    def count(self, bound: BoundCall) -> int:
        """As many adapters as `lora_ids` has room for, and as it names."""
        named = bound.content("lora_ids")
        room = bound.spec("lora_ids").shape[0] - 1
        return max(room, 1, 0 if named is None or not named.numel() else int(named.max()) + 1)

    def extra_bytes(self, bound: BoundCall) -> int:
        sizes, columns, dtype = self.slices(bound)
        size = torch_dtype(dtype, Skip).itemsize
        return sum(sizes) * self.count(bound) * columns * size if len(sizes) > 1 else 0

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        sizes, columns, dtype = self.slices(bound)
        if len(sizes) == 1:
            return {}
        device = rebuilt_argument(bound, inputs, "input_ptr").device
        weights = HiddenAdapters.random(sizes, self.count(bound), columns, torch_dtype(dtype, Skip), device)
        inputs.keep.append(weights)
        table = table_of_addresses(weights.by_slice, device)
        starts = torch.tensor([*accumulate(sizes[:-1], initial=0)], dtype=torch.uint64, device=device)
        return {"lora_ptr": table, "slice_start_loc": starts}


@replay_rule("triton::_lora_shrink_kernel")
class ShrinkRule(LoraRule):
    def slices(self, bound: BoundCall) -> tuple[list[int], int, str]:
        x, (slices, _, rank) = bound.spec("input_ptr"), bound.spec("out_ptr").shape
        return [rank] * slices, x.shape[1], x.dtype


STRIDES = ("ls_d0_ptr", "ls_d1_ptr", "ls_d2_ptr")


@replay_rule("triton::_lora_expand_kernel")
class ExpandRule(LoraRule):
    rebuilt_args = (*LoraRule.rebuilt_args, *STRIDES)

    def slices(self, bound: BoundCall) -> tuple[list[int], int, str]:
        """Sizes of slices that differ (a layer's queries, keys and values) lie in a table."""
        (slices, _, rank), out = bound.spec("input_ptr").shape, bound.spec("out_ptr")
        sizes = [bound.integer("N")] * slices
        if slices > 1 and isinstance(bound["output_hs_ptr"], TensorSpec):
            held = bound.content("output_hs_ptr")
            if held is None:
                raise Skip("its slices have sizes of their own, of which no Sample holds the numbers")
            sizes = [int(size) for size in held.tolist()]
        if slices > 1 and sum(sizes) != out.shape[1]:
            raise Skip("its slices do not fill the rows of its output")
        return sizes, rank, out.dtype

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        """Beside the weights, their strides, where those are in tables, too."""
        sizes, rank, _ = self.slices(bound)
        device = rebuilt_argument(bound, inputs, "input_ptr").device
        tables = ([size * rank for size in sizes], [rank] * len(sizes), [1] * len(sizes))
        strides = {
            name: torch.tensor(table, device=device)
            for name, table in zip(STRIDES, tables, strict=True)
            if rebuilt_argument(bound, inputs, name) is None
        }
        return super().rebuild_args(bound, inputs) | (strides if len(sizes) > 1 else {})
