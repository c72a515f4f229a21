"""How far the inputs that are drawn for a Definition may go: in scale, offset and outliers, and which integers.

As far as suits what its reference does, which is read from its source: a product, packed integers that are taken apart.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kcap.replay.rebuild.rebuild import SMALL_INTEGERS, IntegerRange
from kcap.schemas.files.python_source import parse
from kcap.schemas.flashinfer.definition import Definition


@dataclass(frozen=True)
class Spread:
    """`octaves`: a row's scale and an invocation's are each between 2 to the power of minus and plus that.

    `offset`: the largest of a row, in units of its scale. `outlier`: the largest, in units of the row's norm.
    `integers`: the least and the greatest of those of which nothing is known, by input, where not SMALL_INTEGERS.
    `factors`: what the floats of an input are multiplied by, where that is not 1.
    """

    octaves: float
    offset: float = 0.0
    outlier: float = 0.0
    integers: Mapping[str, IntegerRange] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)


WIDE = Spread(1.0, 1.0, 0.7)
OF_PRODUCTS = Spread(0.5, 0.0, 0.5)
NARROW = Spread(0.125)  # so that no number of the pool recurs
WORDS, COUNTS = (-(1 << 31), (1 << 31) - 1), (1, 1000)  # integers that are taken apart, and that count
INDEXING = frozenset({"gather", "index_select", "take", "take_along_dim"})  # the first operand, or `self`, is indexed


def spreads_for(definition: Definition) -> tuple[Spread, ...]:
    """The spreads to try, widest first: the last suits every reference that is defined on standard normal numbers, and
    on small integers.
    """
    spreads: tuple[Spread, ...] = (OF_PRODUCTS, NARROW)
    if not contracts(definition.reference):
        spreads = WIDE, *spreads
    tensors = (*definition.inputs.values(), *definition.outputs.values())
    shifted, shifts = shifted_inputs(definition)
    integers = [name for name, tensor in definition.inputs.items() if "int" in tensor.dtype and name not in shifts]
    wide = {name: WORDS for name in integers if name in shifted}
    if not any("float" in tensor.dtype for tensor in tensors):
        spreads = (NARROW,)
        wide = dict.fromkeys(integers, COUNTS) | wide
    each = [{name: span} for name, span in wide.items()] if len(wide) > 1 else []  # the others may be indices
    return (*(replace(spread, integers=one) for one in (wide, *each) if one for spread in spreads), *spreads)


def within_axes(spans: Mapping[str, IntegerRange], sizes: Iterable[int]) -> dict[str, IntegerRange]:
    """`spans`, of which COUNTS are shorter than the shortest axis of `sizes`: they may yet be indices. Axes that small
    integers would exceed are no bound.
    """
    most = SMALL_INTEGERS[1]
    bound = min((size - 1 for size in sizes if size > most), default=most)
    return {name: (span[0], min(span[1], bound)) if span == COUNTS else span for name, span in spans.items()}


def shifted_inputs(definition: Definition) -> tuple[set[str], set[str]]:
    """The inputs whose bits the reference shifts to the right, as it takes packed numbers apart, and those by which it
    shifts. Where it shifts what it has computed before, that may be of any input.
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
    """What a value is made of; what it is indexed by is left out."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Subscript(value=value):
            return _names(value)
        case ast.Call(func=ast.Attribute(attr=attr, value=value), args=args) if attr in INDEXING:
            return _names(value) - {"torch"} or _names(args[0])
    return {name for child in ast.iter_child_nodes(node) for name in _names(child)}


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
