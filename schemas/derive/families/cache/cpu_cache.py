"""vLLM's caches on CPU: [pages, heads, rows of a page, dim] by name, each head's page laid out for the instruction set.

Read in vLLM's csrc/cpu/cpu_attn_{vec,vec16,amx}.hpp: vectors have keys as [dim, rows] and values as [rows, dim]; AMX
has keys in groups of 16 rows and values in groups of 16 dims, both in words of 4 bytes along what is multiplied.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.invocation import Unrecognized

AMX, VEC, VEC16 = "amx", "vec", "vec16"
CODES = {0: AMX, 1: VEC, 2: VEC16}  # cpu_attention::ISA
CODE_AT = 64  # bytes from the start of cpu_attention::AttentionMetadata
GROUP = 16


TILED = "its cache may lie in AMX's tiles, of which no view has tokens and heads"


def may_be_tiled(unpacked: torch.Tensor) -> bool:
    """Whether vLLM lays such a cache, [pages, rows of a page, heads, dim], out for AMX where a machine has that."""
    rows, dim = unpacked.shape[1], unpacked.shape[3]
    return unpacked.dtype == torch.bfloat16 and not rows % 32 and not dim % 32


def unpacked_caches(
    key: torch.Tensor, value: torch.Tensor, layout: torch.Tensor | str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both caches as [pages, rows of a page, heads, dim]: views where vectors laid them out, copies where AMX did.

    `layout`: an instruction set, or the scheduler's metadata, which names it. Without it only the shapes are valid.
    """
    isa = _read(layout) if isinstance(layout, torch.Tensor) else layout or VEC
    if isa in (VEC, VEC16):
        return _cells(key, (-1, key.shape[2]), (key.shape[2], 1)).permute(0, 3, 1, 2), value.permute(0, 2, 1, 3)
    if isa != AMX:
        raise Unrecognized(f"the caches are laid out for {isa}")
    return _amx_keys(key), _amx_values(value)


def _read(metadata: torch.Tensor) -> str:
    if metadata.is_meta:
        return VEC
    code = int(metadata[CODE_AT : CODE_AT + 4].view(torch.int32))
    return CODES.get(code, f"instruction set {code}")


def _cells(cache: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """`cache` with each head's page as `shape` and `strides`; -1 means the dim."""
    dim = cache.shape[3]
    if not cache[0, 0].is_contiguous():
        raise Unrecognized("a head's page is not one block of memory")
    inner = tuple(dim if size == -1 else size for size in shape)
    return cache.as_strided((*cache.shape[:2], *inner), (*cache.stride()[:2], *strides))


def _amx_keys(cache: torch.Tensor) -> torch.Tensor:
    rows, dim = cache.shape[2:]
    word = 4 // cache.element_size()
    shape = (rows // GROUP, dim // word, GROUP, word)
    cells = _cells(cache, shape, (GROUP * dim, GROUP * word, word, 1))  # [pages, heads, group, word, row, element]
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(len(cache), rows, -1, dim)


def _amx_values(cache: torch.Tensor) -> torch.Tensor:
    rows, dim = cache.shape[2:]
    word = 4 // cache.element_size()
    shape = (dim // GROUP, rows // word, GROUP, word)
    cells = _cells(cache, shape, (rows * GROUP, GROUP * word, word, 1))  # [pages, heads, group, word, dim, row]
    return cells.permute(0, 3, 5, 1, 2, 4).reshape(len(cache), rows, -1, dim)
