"""The ATen operators of a graph fragment as a module of plain PyTorch: `run(*inputs)` gives the outputs."""

from __future__ import annotations

import ast
import keyword
import re
from collections import Counter
from collections.abc import Mapping

from kcap.schemas.families.fragment_nodes import CONVERT, Nodes
from kcap.schemas.families.fragment_text import Layout, Operation
from kcap.schemas.families.fragment_values import FragmentError, FragmentValue, Ref, Size, Word
from kcap.schemas.operators import OperatorError, check_operator_name, from_trace, why_not_called
from kcap.schemas.values import TorchConstant

SHORT = {CONVERT: "cast", "getitem": "part"}
TAKEN = frozenset({"torch", "run", "max", "min", "float"})
RANDOM = re.compile(r"rand|bernoulli|dropout|multinomial|normal_|seed", re.ASCII)
Parameters = Mapping[str, tuple[str, Layout | None]]


def write_run(nodes: Nodes, inputs: Parameters, outputs: list[str]) -> str:
    """The module's text. `inputs`: nodes with the names and layouts of run's parameters; `outputs`: nodes.

    Values are called by their operators, so that one kernel has one text in whatever graph it was compiled.
    FragmentError: it cannot be written.
    """
    operations = nodes.needed(outputs)
    parameters = [parameter for parameter, _ in inputs.values()]
    writer = _Writer(nodes, {**_names(operations), **{name: known for name, (known, _) in inputs.items()}})
    body = [f"{writer.names[operation.name]} = {writer.call(operation)}" for operation in operations]
    returned = [writer.value(Ref(name)) for name in outputs]
    sizes = [f"{short} = {_shown(symbol, inputs)}" for symbol, short in writer.symbols.items()]
    lines = [f"def run({', '.join(parameters)}):", *(f"    {line}" for line in [*sizes, *body])]
    text = "import torch\n\n\n" + "\n".join([*lines, f"    return {', '.join(returned)}", ""])
    try:
        ast.parse(text)
    except SyntaxError as error:  # a keyword for a name
        raise FragmentError(f"its fragment makes no Python: {error.msg}") from None
    return text


def _names(operations: list[Operation]) -> dict[str, str]:
    """A name for each: `add`, `add_1`."""
    seen: Counter[str] = Counter()
    names = {}
    for operation in operations:
        base = SHORT.get(operation.target) or operation.target.split(".")[1]
        base = f"{base}_" if base in TAKEN or keyword.iskeyword(base) else base
        names[operation.name] = f"{base}_{seen[base]}" if seen[base] else base
        seen[base] += 1
    return names


def _shown(symbol: str, inputs: Parameters) -> str:
    """The expression that `run` has `symbol` from."""
    for name, layout in inputs.values():
        for axis, size in enumerate(layout.shape if layout else ()):
            if isinstance(size, Size) and size.operation == symbol:
                return f"{name}.shape[{axis}]"
    raise FragmentError(f"the size {symbol} is none of its inputs'")


class _Writer:
    """Writes expressions. `names`: what run calls a node, `symbols`: what it calls those that were written."""

    def __init__(self, nodes: Nodes, names: dict[str, str]) -> None:
        self.nodes = nodes
        self.names = names
        self.given = next((names[name] for name in nodes.given if name in names), None)  # on whose device the rest is
        self.symbols: dict[str, str] = {}

    def call(self, operation: Operation) -> str:
        if operation.target == "getitem":
            return f"{self.value(operation.args[0])}[{self.value(operation.args[1])}]"
        if operation.target == CONVERT and len(operation.args) == 2:
            return f"{self.value(self.nodes.unrounded(operation))}.to({self.value(operation.args[1])})"
        check_target(operation.target)
        given = [self.value(value) for value in operation.args]
        given += [f"{name}={self.value(value)}" for name, value in operation.kwargs.items()]
        return f"torch.ops.{operation.target}({', '.join(given)})"

    def value(self, value: FragmentValue) -> str:
        match value:
            case Ref(name=name):
                return self._found(name)
            case Size():
                for symbol in value.symbols():
                    self.symbols.setdefault(symbol, f"n{len(self.symbols)}")
                return value.text(self.symbols)
            case Word(text=text):
                return repr(text)
            case TorchConstant(kind="device"):
                return f"{self.given}.device" if self.given else f"torch.device({value.name!r})"
            case TorchConstant():
                return f"torch.{value.name}"
            case list():
                return f"[{', '.join(map(self.value, value))}]"
            case float():
                return f"float('{value}')" if value != value or value in (float("inf"), -float("inf")) else repr(value)
        return repr(value)

    def _found(self, name: str) -> str:
        found = self.nodes.find(name)
        if isinstance(found, Size | int):
            return self.value(found)
        if found is None:
            raise FragmentError(f"nothing says what its fragment's %{name} is")
        return self.names[found if isinstance(found, str) else name]


def check_target(target: str) -> None:
    """FragmentError unless this operator may stand in a reference: well-formed, deterministic, changing nothing."""
    try:
        check_operator_name(target)
    except OperatorError as error:
        raise FragmentError(error.reason) from None
    if reason := why_not_called(from_trace(target)) if not target.startswith("prims.") else None:
        raise FragmentError(reason)
    base = target.split(".")[1]
    if RANDOM.search(base):
        raise FragmentError(f"{target} draws random numbers")
    if base.endswith("_") and not base.endswith("__"):
        raise FragmentError(f"{target} writes to its argument")
