"""The place of each row's greatest number, the first of equals, in two passes over many programs.

torch gives a row of a whole vocabulary to few blocks; here many read it at once, and a second launch takes the best of
each part.
"""

import torch
import triton
import triton.language as tl

PART = 4096


@triton.jit
def best_of_part(logits, best, place, width, stride, parts, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf"))
    most, where = tl.max(values, 0, return_indices=True)
    tl.store(best + row * parts + part, most)
    tl.store(place + row * parts + part, part * PART + where)


@triton.jit
def best_of_row(best, place, out, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    values = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    _, where = tl.max(values, 0, return_indices=True)
    tl.store(out + row, tl.load(place + row * parts + where).to(tl.int64))


def run(logits, samples):
    rows, width = logits.shape
    parts = triton.cdiv(width, PART)
    best = torch.empty(rows, parts, dtype=logits.dtype, device=logits.device)
    place = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    best_of_part[(rows, parts)](logits, best, place, width, logits.stride(0), parts, PART, num_warps=8)
    best_of_row[(rows,)](best, place, samples, parts, triton.next_power_of_2(parts), num_warps=1)
