"""A fused kernel of inductor as plain PyTorch, written from the ATen operators that torch says it stands for.

The Recording keeps them beside the kernel (`Launch.fragment`). Nothing in them is run here: they are read by a grammar
(`text`), joined with the launch's arguments (`binding`) and written as a module (`write_run`).
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from kcap.errors import FormatError, kind_and_line
from kcap.schemas.derive.fragment.binding import CONVERT, VIEWS, Binding, Nodes, Pointer, bind_buffers
from kcap.schemas.derive.fragment.outputs import CAT, Outputs, written_nodes
from kcap.schemas.derive.fragment.text import Layout, Operation, read_fragment
from kcap.schemas.derive.fragment.values import FragmentError, FragmentValue, Ref, Size, Word
from kcap.schemas.derive.invocation import MISREADING
from kcap.schemas.recording.operators import OperatorError, check_operator_name, from_trace, why_not_called
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.values import TensorSpec, TorchConstant

SHORT = {CONVERT: "cast", "getitem": "part"}
TAKEN = frozenset({"torch", "run", "max", "min", "float"})
RANDOM = re.compile(r"rand|bernoulli|dropout|multinomial|normal_|seed", re.ASCII)
MEAN, SUM, DIVIDE = "aten.mean.dim", "aten.sum.dim_IntList", "aten.div.Tensor"
SUM_BUFFER = re.compile(r"buf\d+", re.ASCII)
ONLINE_SOFTMAX = "prims.prepare_softmax_online.default"  # torch/_inductor/inductor_prims.py
MISREAD = "its fragment is not as kcap reads it"
Variables = list[tuple[str, Layout | None]]  # of run, with what they are like


def write_run(nodes: Nodes, inputs: Mapping[str, str], parameters: Variables, outputs: list[str]) -> str:
    """The module's text. `inputs`: nodes that are parameters; `parameters`: all, one at least; `outputs`: nodes.

    Values are named after their operators, so that a kernel has the same text in whichever graph it was compiled.
    FragmentError: it cannot be written.
    """
    operations = nodes.needed(outputs)
    writer = _Writer(nodes, {**_names(operations), **inputs}, parameters)
    for operation in operations:
        writer.assign(operation)
    returned = [writer.returned(name, again=name in outputs[:place]) for place, name in enumerate(outputs)]
    lines = [f"def run({', '.join(name for name, _ in parameters)}):", *(f"    {line}" for line in writer.lines)]
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
        base = SHORT.get(operation.target) or operation.target.split(".")[-2:][0]
        base = f"{base}_" if base in TAKEN or keyword.iskeyword(base) else base
        names[operation.name] = f"{base}_{seen[base]}" if seen[base] else base
        seen[base] += 1
    return names


def _symbol_source(symbol: str, variables: Variables) -> str:
    """The expression that `run` has `symbol` from: a size of a variable that is it, or else a multiple of it."""
    sources = [
        (multiple, f"{name}.shape[{axis}]")
        for name, layout in variables
        for axis, size in enumerate(layout.shape if layout else ())
        if (multiple := _multiple(size, symbol))
    ]
    if not sources:
        raise FragmentError(f"no input, and nothing computed from one before it is needed, has the size {symbol}")
    multiple, source = min(sources, key=lambda item: item[0])
    return source if multiple == 1 else f"{source} // {multiple}"


def _multiple(size: Size | int, symbol: str) -> int:
    """How many times `symbol` the `size` is; 0 where it is another expression."""
    match size:
        case Size(operation="*", operands=(int(multiple), Size(operation=operation))) if operation == symbol:
            return max(multiple, 0)
        case Size(operation=operation):
            return int(operation == symbol)
    return 0


class _Writer:
    """Writes the `lines` of run. `names`: what run calls a node, `symbols`: what it calls a symbol of sizes,
    `variables`: those that it has so far."""

    def __init__(self, nodes: Nodes, names: dict[str, str], parameters: Variables) -> None:
        self.nodes = nodes
        self.names = names
        self.variables = [*parameters]
        self.lines: list[str] = []
        self.symbols: dict[str, str] = {}

    def assign(self, operation: Operation) -> None:
        name, call = self.names[operation.name], self._call(operation)
        self.lines.append(f"{name} = {call}")
        self.variables.append((name, operation.layout))

    def returned(self, name: str, again: bool) -> str:
        """The value of an output; a copy of it where it could be an input or a view of one, or is returned `again`."""
        return self._node_text(name) + ".clone()" * (again or self._shows_input(name))

    def _shows_input(self, name: str) -> bool:
        match self.nodes.find(name):
            case Operation() as operation:
                shows = operation.target in VIEWS or self.nodes.keeps_type(operation)
                return shows and any(map(self._shows_input, operation.refs()))
            case definition:
                return isinstance(definition, str)

    def _call(self, operation: Operation) -> str:
        if operation.target == "getitem":
            return f"{self.value(operation.args[0])}[{self.value(operation.args[1])}]"
        if operation.target == CONVERT and len(operation.args) == 2:
            return f"{self.value(self.nodes.unrounded(operation))}.to({self.value(operation.args[1])})"
        if operation.target == ONLINE_SOFTMAX:
            x, dim = map(self.value, operation.args)
            most = f"torch.ops.aten.amax.default({x}, [{dim}], True)"
            return f"({most}, torch.ops.aten.sum.dim_IntList(torch.ops.aten.exp.default({x} - {most}), [{dim}], True))"
        check_target(operation.target)
        arguments = [self.value(value) for value in operation.args]
        arguments += [f"{name}={self.value(value)}" for name, value in operation.kwargs.items()]
        return f"torch.ops.{operation.target}({', '.join(arguments)})"

    def value(self, value: FragmentValue) -> str:
        match value:
            case Ref(name=name):
                return self._node_text(name)
            case Size():
                for symbol in value.symbols():
                    self._define(symbol)
                return value.text(self.symbols)
            case Word(text=text):
                return repr(text)
            case TorchConstant(kind="device"):
                return f"{self.variables[0][0]}.device"
            case TorchConstant():
                return f"torch.{value.name}"
            case list():
                return f"[{', '.join(map(self.value, value))}]"
            case float():
                return f"float('{value}')" if value != value or value in (float("inf"), -float("inf")) else repr(value)
        return repr(value)

    def _define(self, symbol: str) -> None:
        if symbol not in self.symbols:
            self.symbols[symbol] = f"n{len(self.symbols)}"
            self.lines.append(f"{self.symbols[symbol]} = {_symbol_source(symbol, self.variables)}")

    def _node_text(self, name: str) -> str:
        definition = self.nodes.find(name)
        if isinstance(definition, Size | int):
            return self.value(definition)
        if definition is None:
            raise FragmentError(f"nothing says what its fragment's %{name} is")
        return self.names[definition if isinstance(definition, str) else name]


def check_target(target: str) -> None:
    """FragmentError unless this operator may stand in a reference: well-formed, deterministic, changing nothing."""
    try:
        check_operator_name(target)
    except OperatorError as error:
        raise FragmentError(error.reason) from None
    if reason := why_not_called(from_trace(target)) if not target.startswith("prims.") else None:
        raise FragmentError(reason)
    namespace, base = target.split(".")[:2]
    if namespace == "prims" and base not in torch._prims.__all__:
        raise FragmentError(f"{target} is there for torch's compiler alone")
    if RANDOM.search(base):
        raise FragmentError(f"{target} draws random numbers")
    if base.endswith("_") and not base.endswith("__"):
        raise FragmentError(f"{target} writes to its argument")


@dataclass(frozen=True)
class Port:
    """An input or output of `run`: its name, the path of its tensor in the Call's arguments, and what that is like.

    Names are those of the kernel's parameters; what is read and written is `in_out_ptr0`, and `in_out_ptr0_out`. What a
    kernel that reads nothing fills is an input, too: its content does not matter, its sizes do.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FragmentReference:
    """`source` is a module whose `run` takes `inputs` and returns `outputs` (one: the tensor itself), in order.

    `scratch`: paths of arguments that the kernel writes and no ATen operator returns (partial sums of a reduction).
    """

    source: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    scratch: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unknown:
    """There is no reference, and why."""

    reason: str


def reference_of(call: Call, recording: Recording) -> FragmentReference | Unknown:
    """The reference of the fused kernel that `call` launches, for these arguments."""
    if call.launch is None:
        return Unknown("it is no launch of a kernel with a source of its own")
    try:
        text = recording.fragment(call.launch)
    except FormatError as error:
        return Unknown(error.reason)
    if text is None:
        return Unknown("torch's wrapper told no operators of it, or was not there")
    return reference_from(call, text)


def reference_from(call: Call, text: str) -> FragmentReference | Unknown:
    """The reference for `call` that the fragment `text` describes. One of a torch that writes it in another way costs
    its own Definition alone, whatever reading it raises."""
    try:
        nodes = _with_read_sums(Nodes(read_fragment(text)))
        nodes, binding = _with_read_joints(nodes, bind_buffers(call, nodes))
        outputs = written_nodes(nodes, binding)
        if not outputs:
            raise FragmentError("none of what it writes is one of its fragment's operators")
        return _reference(_with_sums(nodes, binding, outputs), binding, outputs)
    except FragmentError as error:
        return Unknown(str(error))
    except MISREADING as error:
        return Unknown(f"{MISREAD}: {kind_and_line(error, 160)}")


def _reference(nodes: Nodes, binding: Binding, outputs: Outputs) -> FragmentReference:
    results = [name for name, _ in outputs]
    used = _used(nodes, results)
    if unused := [name for name in binding.reads if name not in used]:
        raise FragmentError(f"it reads %{unused[0]}, which none of its fragment's operators takes")
    if missing := used - binding.reads.keys():
        raise FragmentError(f"none of its arguments is its fragment's %{min(missing)}")
    reads = sorted(binding.reads.items(), key=lambda item: int(item[1].path))
    inputs = reads or outputs  # of what is only filled the sizes are taken, as of the argument of aten.zero_
    parameters = [(pointer.name, nodes.layout(name)) for name, pointer in inputs]
    output_paths = {pointer.path for _, pointer in outputs}
    return FragmentReference(
        write_run(nodes, {name: pointer.name for name, pointer in reads}, parameters, results),
        tuple(_port(pointer.name, pointer) for _, pointer in inputs),
        tuple(_port(pointer.name + "_out" * (pointer.read or not reads), pointer) for _, pointer in outputs),
        tuple(sorted({pointer.path for pointer in binding.writes.values()} - output_paths, key=int)),
    )


def _port(name: str, pointer: Pointer) -> Port:
    return Port(name, pointer.path, pointer.tensor.shape, pointer.tensor.dtype)


def _used(nodes: Nodes, results: list[str]) -> set[str]:
    """The input buffers that `results` are computed from, by name."""
    taken = set(results).union(*(nodes.takes(operation) for operation in nodes.needed(results)))
    return {definition for name in taken if isinstance(definition := nodes.find(name), str)}


def _with_read_sums(nodes: Nodes) -> Nodes:
    """Inductor sums in one kernel and divides in those that read the mean: what is no node's buffer is such a sum.

    Several are the means' in their order, where there are as many. What has no layout is what a library's kernel wrote.
    """
    fragment = nodes.fragment
    sums = sorted(
        (name for name, layout in fragment.reads.items() if layout and SUM_BUFFER.fullmatch(name)), key=_number
    )
    means = [operation for operation in fragment.operations.values() if operation.target == MEAN]
    read = {}
    for buffer, mean in zip(sums, means, strict=False) if len(sums) == len(means) else ():
        layout, size = nodes.input_buffers.get(buffer), _reduced(nodes, mean)
        if layout is not None and mean.layout is not None and layout.shape == mean.layout.shape and size:
            read[mean.name] = replace(mean, target=DIVIDE, args=[Ref(buffer), size], kwargs={})
    return Nodes(replace(fragment, operations={**fragment.operations, **read})) if read else nodes


def _number(buffer: str) -> int:
    return int(buffer.removeprefix("buf"))


def _reduced(nodes: Nodes, mean: Operation) -> int | None:
    """How many elements each of its results is the mean of; None where that varies."""
    match mean.args:
        case [Ref(name=name), [*dims], *_]:
            operand = nodes.find(name)
            layout = operand.layout if isinstance(operand, Operation) else None
            sizes = [layout.shape[dim] for dim in dims if isinstance(dim, int)] if layout else []
            known = [size for size in sizes if isinstance(size, int)]
            return math.prod(known) if known and len(known) == len(dims) else None
    return None


def _with_sums(nodes: Nodes, binding: Binding, outputs: Outputs) -> Nodes:
    """Inductor sums in one kernel and divides in those that read the mean: what is no node's buffer holds the sum."""
    unnamed = {pointer.path for name, pointer in binding.writes.items() if nodes.stored_node(name) is None}
    operations = nodes.fragment.operations
    written = [operations[node] for node, pointer in outputs if pointer.path in unnamed and node in operations]
    sums = {operation.name: replace(operation, target=SUM) for operation in written if operation.target == MEAN}
    return Nodes(replace(nodes.fragment, operations={**operations, **sums})) if sums else nodes


def _with_read_joints(nodes: Nodes, binding: Binding) -> tuple[Nodes, Binding]:
    """Inductor's loops write the parts of a concatenation where they lie in it. What reads it in the same kernel has no
    input there.
    """
    joints = {}
    for name, pointer in binding.reads.items():
        parts = sorted(
            (
                (other.tensor.offset or 0, nodes.stored_node(written) or "", other.tensor)
                for written, other in binding.writes.items()
                if other.kind == "out" and other.tensor.storage == pointer.tensor.storage
            ),
            key=lambda part: part[:2],
        )
        dim = _joint_of([tensor for *_, tensor in parts], pointer.tensor)
        own = nodes.fragment.operations.get(name)
        if dim is not None and all(node for _, node, _ in parts):
            args: list[FragmentValue] = [[Ref(node) for _, node, _ in parts], dim]
            joints[name] = Operation(name, CAT, args, {}, nodes.input_buffers[name])
        elif dim is not None and own is not None and own.target == CAT:
            joints[name] = own  # some of its parts are views, which are no nodes of buffers
    if not joints:
        return nodes, binding
    fragment = nodes.fragment
    reads = {name: layout for name, layout in fragment.reads.items() if name not in joints}
    fragment = replace(fragment, operations={**fragment.operations, **joints}, reads=reads)
    return Nodes(fragment), replace(binding, reads={n: p for n, p in binding.reads.items() if n not in joints})


def _joint_of(parts: Sequence[TensorSpec], whole: TensorSpec) -> int | None:
    """The dimension along which `parts`, in their order, are all of `whole`."""
    for dim, size in enumerate(whole.shape):
        stride = whole.strides[dim] if whole.strides else math.prod(whole.shape[dim + 1 :])
        begins = [*accumulate((part.shape[dim : dim + 1] or (0,))[0] for part in parts)]
        offsets = [(whole.offset or 0) + begin * stride for begin in (0, *begins[:-1])]
        rest = (whole.dtype, *whole.shape[:dim], *whole.shape[dim + 1 :])
        if (
            len(parts) > 1
            and begins[-1] == size
            and offsets == [part.offset for part in parts]
            and all((part.dtype, *part.shape[:dim], *part.shape[dim + 1 :]) == rest for part in parts)
        ):
            return dim
    return None
