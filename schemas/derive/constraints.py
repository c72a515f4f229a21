"""The constraints of a Definition, worked out over axes and inputs without running them.

A constraint is one Python expression, as FlashInfer-Bench's documents have it: `len_indptr == batch_size + 1`,
`num_kv_indices == kv_indptr[-1].item()`, `gemm1_weights.shape[1] == 2 * intermediate_size`. Its syntax tree is walked;
what is not named here is refused.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from kcap.errors import KcapError
from kcap.schemas.files.python_source import parse

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
METHODS = frozenset({"item", "numel", "dim", "size", "sum", "min", "max", "long", "int"})  # of a tensor
FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "min": min, "max": max, "abs": abs}
LARGEST = 1 << 63  # a product beyond it is no size


class BrokenConstraint(KcapError):
    """A constraint does not hold, or cannot be worked out; the message has it word for word."""


def check(constraints: list[str], values: Mapping[str, Any], where: str) -> None:
    """Broken unless each of `constraints` holds of `values` (axes' sizes and inputs by name)."""
    for constraint in constraints:
        try:
            holds = evaluate(constraint, values)
        except (ValueError, TypeError, IndexError, ArithmeticError, RuntimeError) as error:
            raise BrokenConstraint(f"{where}: its constraint {constraint!r} cannot be worked out: {error}") from None
        if not holds:
            raise BrokenConstraint(
                f"{where}: its constraint {constraint!r} does not hold{_values_of(constraint, values)}"
            )


def names(constraint: str) -> frozenset[str]:
    """The axes and inputs that `constraint` speaks of."""
    return frozenset(n.id for n in ast.walk(_tree(constraint)) if isinstance(n, ast.Name)) - FUNCTIONS.keys()


def solved_axis(constraint: str) -> tuple[str, str] | None:
    """`len_indptr == batch_size + 1` as ("len_indptr", "batch_size + 1"); None if neither side is one axis alone."""
    match _tree(constraint):
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[other]):
            return name, ast.unparse(other)
        case ast.Compare(left=other, ops=[ast.Eq()], comparators=[ast.Name(id=name)]):
            return name, ast.unparse(other)
    return None


def evaluate(expression: str, values: Mapping[str, Any]) -> Any:
    """What `expression` is of `values`; ValueError, or what torch raises, if it cannot be worked out."""
    return _value(_tree(expression), values)


@cache
def _tree(expression: str) -> ast.expr:
    tree = parse(expression.strip(), "eval")
    assert isinstance(tree, ast.Expression)
    return tree.body


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return _bounded(BINARY[type(op)](_value(left, values), _value(right, values)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values)
        case ast.BoolOp(op=op, values=parts):
            return (all if isinstance(op, ast.And) else any)(_value(part, values) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARE for op in ops):
            sides = [_value(side, values) for side in (left, *others)]
            return all(COMPARE[type(op)](*pair) for op, pair in zip(ops, pairwise(sides), strict=True))
        case ast.Subscript(value=of, slice=index):
            return _value(of, values)[_value(index, values)]
        case ast.Attribute(value=of, attr="shape"):
            return tuple(_tensor(_value(of, values)).shape)
        case ast.Call(func=func, args=arguments, keywords=[]):
            return _call(func, [_value(argument, values) for argument in arguments], values)
    raise ValueError(f"{ast.unparse(node)!r} is no axis, no input and nothing that a constraint may say")


def _call(func: ast.expr, arguments: list[Any], values: Mapping[str, Any]) -> Any:
    match func:
        case ast.Name(id=name) if name in FUNCTIONS:
            return FUNCTIONS[name](*arguments)
        case ast.Attribute(value=of, attr=name) if name in METHODS:
            return getattr(_tensor(_value(of, values)), name)(*arguments)
    raise ValueError(f"{ast.unparse(func)!r} may not be called in a constraint")


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{value!r} is no tensor")
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError("a number in it is larger than any size")
    return value


def _values_of(constraint: str, values: Mapping[str, Any]) -> str:
    """What its names are, so that the reader sees which one is wrong: ` (len_indptr=4, batch_size=2)`."""
    texts = [f"{name}={_short(values[name])}" for name in sorted(names(constraint)) if name in values]
    return f" ({', '.join(texts)})" if texts else ""


def _short(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    last = f", last {value.flatten()[-1].item()}" if value.numel() and not value.is_meta else ""
    return f"{list(value.shape)}{last}"
