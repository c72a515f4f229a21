"""A model library: its file, and what its kernels are called, in the library and in a Recording."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

CREATE_CACHE = "vm.builtin.paged_attention_kv_cache_create"
FIRST_CACHE_KERNEL = 13  # where the cache's kernels begin among the arguments of CREATE_CACHE
FIRST_ROPE, ROPE_CONSTANTS = 9, ("rope_scale", "rope_theta")  # and what they have compiled in

PAGES = ("page_table_indptr", "page_table_values", "length_info", "k_rope_pos_offset", "q_rope_position")
ROPE = ("rotary_mode", "rope_scale", "rope_theta", "sm_scale")
PREFILL = ("q", "q_indptr", "pages", *PAGES, "output", "lse", "causal", *ROPE)
DECODE = ("q", "pages", *PAGES, "output", "lse", *ROPE)
# The cache's kernels and their parameters, as `tvm.relax.frontend.nn.llm.kv_cache` (0.27) builds them; empty: arg0 ….
CACHE_KERNELS: Mapping[str, tuple[str, ...]] = {
    "transpose_append_mha": ("pages", "k", "v", "position_map"),
    "transpose_append_mla": ("pages", "kv", "position_map"),
    "attention_prefill_ragged": (
        *("q", "q_indptr", "k", "v", "kv_indptr", "q_rope_position", "k_rope_pos_offset", "output", "lse", "causal"),
        *ROPE,
    ),
    "attention_prefill": PREFILL,
    "attention_decode": DECODE,
    "attention_prefill_sliding_window": PREFILL,
    "attention_decode_sliding_window": DECODE,
    "attention_prefill_with_tree_mask_paged_kv": (),
    "attention_prefill_with_tree_mask": (),
    "mla_prefill": (),
    "merge_inplace": ("v", "s", "v_other", "s_other"),
    "split_rotary": ("qkv", "position_map", "q", "k", "v", "apply_rope"),
    "copy_single_page": (),
    "debug_get_kv": (),
    "compact_copy": (),
}


@dataclass(frozen=True)
class Library:
    """`file`: its name among a Recording's kernels. `text`: its bytecode, as TVM writes it; empty where it cannot be
    asked for."""

    file: str
    text: str = field(repr=False)

    @property
    def functions(self) -> list[str]:
        """Of the VM, and what those call."""
        return re.findall(r"^@(\S+?):", self.text, re.MULTILINE)

    def operator(self, kernel: str) -> str:
        return f"tvm::{re.sub(r'[^A-Za-z0-9_]', '_', kernel)}.{self.file[:8]}"

    @cached_property
    def cache_symbols(self) -> dict[str, str]:
        """The library's own name of each of the cache's kernels, where its bytecode has one way to make a cache."""
        made = re.findall(rf"^  call  {re.escape(CREATE_CACHE)} in: (.*?) dst:", self.text, re.MULTILINE)
        if len(made) != 1:
            return {}
        before = self.text[: self.text.index(made[0])]
        pattern = r"^  call  vm\.builtin\.make_tuple in: (?:c\[\d+\], )?f\[(\S+?)\].*? dst: (%\d+)$"
        by_register = {register: symbol for symbol, register in re.findall(pattern, before, re.MULTILINE)}
        symbols = {}
        for kernel, argument in zip(CACHE_KERNELS, made[0].split(", ")[FIRST_CACHE_KERNEL:], strict=False):
            symbol = argument[2:-1] if argument.startswith("f[") else by_register.get(argument, "")
            if symbol:
                symbols[kernel] = symbol
        return symbols


def parameters(cache_kernel: str, arguments: int) -> Sequence[str]:
    """What the arguments of a kernel are called; those of another kernel than the cache's have numbers."""
    names = CACHE_KERNELS.get(cache_kernel, ())
    return names if len(names) == arguments else [f"arg{index}" for index in range(arguments)]
