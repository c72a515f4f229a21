"""How far the inputs that are drawn for a Definition may go: in scale, offset and outliers, and which integers.

As far as suits what its reference does, which is read from its source: a product, packed integers that are taken apart.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kcap.replay.datasets.device_draws import IntegerRange
from kcap.schemas.files.python_source import parse
from kcap.schemas.flashinfer.definition import Definition


@dataclass(frozen=True)
class Spread:
    """`octaves`: a row's scale and an invocation's are each between 2 to the power of minus and plus that.

    `offset`: the largest of a row, in units of its scale. `outlier`: the largest, in units of the row's norm.
    `integers`: the least and the greatest of those of which nothing is known, by input, where not SMALL_INTEGERS.
    """

    octaves: float
    offset: float = 0.0
    outlier: float = 0.0
    integers: Mapping[str, IntegerRange] = field(default_factory=dict)


WIDE = Spread(1.0, 1.0, 0.7)
OF_PRODUCTS = Spread(0.5, 0.0, 0.5)
NARROW = Spread(0.125)  # so that no number of the pool recurs
WORDS, COUNTS = (-(1 << 31), (1 << 31) - 1), (1, 1000)  # integers that are taken apart, and that are no indices


def spreads_for(definition: Definition) -> tuple[Spread, ...]:
    """The spreads to try, widest first: the last suits every reference that is defined on standard normal numbers, and
    on small integers.
    """
    spreads: tuple[Spread, ...] = (OF_PRODUCTS, NARROW)
    if not contracts(definition.reference):
        spreads = WIDE, *spreads
    tensors = (*definition.inputs.values(), *definition.outputs.values())
    shifted, shifts = shifted_inputs(definition)
    wide = dict.fromkeys(shifted - shifts, WORDS)
    if not any("float" in tensor.dtype for tensor in tensors):
        spreads = (NARROW,)
        wide = dict.fromkeys(definition.inputs.keys() - shifts, COUNTS) | wide
    return (*(replace(spread, integers=wide) for spread in spreads), *spreads) if wide else spreads


def shifted_inputs(definition: Definition) -> tuple[set[str], set[str]]:
    """The inputs whose bits the reference shifts to the right, as it takes packed numbers apart, and those by which it
    shifts. What it shifts may be any input, where it has made something of one before.
    """
    shifted, shifts, inputs = set[str](), set[str](), definition.inputs.keys()
    for node in ast.walk(parse(definition.reference)):
        match node:
            case ast.BinOp(op=ast.RShift() | ast.LShift() as kind, left=left, right=right):
                pass
            case ast.AugAssign(op=ast.RShift() | ast.LShift() as kind, target=left, value=right):
                pass
            case ast.Call(func=ast.Attribute(attr="bitwise_right_shift", value=called), args=[*first, right]):
                kind, left = ast.RShift(), first[0] if first else called
            case _:
                continue
        shifts |= inputs & _names(right)
        if isinstance(kind, ast.RShift) and not isinstance(left, ast.Constant):
            shifted |= inputs & _names(left) or inputs
    return shifted, shifts


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


CONTRACTIONS = frozenset(
    "matmul mm bmm mv dot vdot inner addmm addmv addbmm baddbmm einsum tensordot linear bilinear conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention".split()
)


def contracts(reference: str) -> bool:
    """Whether the source of a reference names a product that sums over an axis of its inputs."""
    for node in ast.walk(parse(reference)):
        match node:
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()):
                return True
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in CONTRACTIONS:
                return True
    return False
