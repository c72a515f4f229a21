"""A Call with the values of one Sample, before anything is allocated, and the replay rules that read and change it.

`bind_call` makes a BoundCall, `invocation_of_bound` shows it to a family; `Inputs` are the arguments once they are
built, `Skip` says why a Call is not replayed. Families register a ReplayRule for an operator with `replay_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch

from kcap.schemas.derive.invocation import Invocation, invocation_of, torch_dtype
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Argument, Sample, SampledTensor
from kcap.schemas.recording.records import Call, Launch
from kcap.schemas.recording.values import Drift, Group, TensorSpec, Value, tensors
from kcap.system.registry import Registry, import_plugins


class Skip(Exception):
    """This Call cannot be replayed here; the message is the reason, which is no error of the Call."""


LoadValues = Callable[[SampledTensor], "torch.Tensor | None"]


@dataclass
class BoundCall:
    """A Call whose arguments all have values. Keys of `contents` and `ranges` are argument paths (`"3"`, `"2.1"`).

    `contents` holds integer tensors' values (on the CPU, of the tensor's shape or of its leading part);
    `ranges` the smallest and largest value where only these were recorded. `constants`: a Triton kernel's constexprs.
    `routing`: for a number of experts how often each was chosen in a batch that was sampled, [experts].
    `drawn`: the paths of contents that a rule drew where any bits are valid. `timed`: it is rebuilt to be timed, not
    to compare what it writes.
    """

    operator: str
    args: list[Argument]
    contents: dict[str, torch.Tensor] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    constants: Mapping[str, Value] = field(default_factory=dict)
    routing: Mapping[int, torch.Tensor] = field(default_factory=dict)
    drawn: set[str] = field(default_factory=set)
    timed: bool = False

    @property
    def namespace(self) -> str:
        return self.operator.split("::")[0]

    @property
    def base(self) -> str:
        """The operator's name without namespace, overload and the mark of an in-place variant."""
        return self.operator.split("::")[-1].split(".")[0].rstrip("_")

    @property
    def in_group(self) -> bool:
        """Whether it is a collective's: integers that it moves are numbers to it, and nothing is indexed by them."""
        return any(isinstance(argument.value, Group) for argument in self.args)

    def index(self, name: str) -> int | None:
        return next((i for i, argument in enumerate(self.args) if argument.name == name), None)

    def __getitem__(self, name: str) -> Value:
        """The Value of the argument or constant called `name`; None if the Call has none of that name."""
        index = self.index(name)
        return self.constants.get(name) if index is None else self.args[index].value

    def spec(self, name: str) -> TensorSpec:
        """The tensor called `name`; Skip if the argument is no tensor."""
        value = self[name]
        if not isinstance(value, TensorSpec):
            raise Skip(f"its argument '{name}' is not a tensor")
        return value

    def integer(self, name: str) -> int:
        value = self[name]
        if not isinstance(value, int):
            raise Skip(f"its argument '{name}' is not an integer")
        return value

    def content(self, name: str) -> torch.Tensor | None:
        """The values of the tensor called `name`; None if they were not recorded or set. Floats are never recorded."""
        return self.contents.get(str(self.index(name)))

    def range_of(self, name: str, otherwise: tuple[int, int]) -> tuple[int, int]:
        """The smallest and largest value of the tensor called `name`; `otherwise` if they were not recorded."""
        return self.ranges.get(str(self.index(name)), otherwise)

    def set_content(self, name: str, values: torch.Tensor) -> None:
        self.contents[str(self.index(name))] = values

    def set_value(self, name: str, value: Value) -> None:
        """Give the argument called `name` another Value, if the Call has such an argument."""
        index = self.index(name)
        if index is not None:
            self.args[index] = self.args[index].model_copy(update={"value": value})

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        return tensors([argument.value for argument in self.args])

    def holder(self, path: str) -> Argument:
        """The argument that holds the tensor at `path`."""
        return self.args[int(path.split(".")[0])]

    def integers(self) -> Iterator[tuple[str, TensorSpec]]:
        """The integer tensors among the arguments, with their paths."""
        return ((path, spec) for path, spec in self.tensors() if BY_NAME[spec.dtype].kind == "int")


def bind_call(call: Call, sample: Sample | None, schema: Any | None, load: LoadValues) -> BoundCall:
    """`call` with the values that `sample` holds; Skip if a drifting value has none."""
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    args = [_named(argument, index, names) for index, argument in enumerate(call.args)]
    args = [a.model_copy(update={"value": _with_sample(a.value, str(i), sample)}) for i, a in enumerate(args)]
    bound = BoundCall(call.operator, args, constants=call.launch.constexprs if call.launch else {})
    for path, sampled in (sample.tensors if sample else {}).items():
        if (values := load(sampled)) is not None:
            bound.contents[path] = values
        if sampled.low is not None and sampled.high is not None:
            bound.ranges[path] = (sampled.low, sampled.high)
    return bound


def _named(argument: Argument, index: int, names: list[str]) -> Argument:
    """A positional argument without a name takes its schema's."""
    if argument.name is not None or argument.keyword or index >= len(names):
        return argument
    return argument.model_copy(update={"name": names[index]})


def _with_sample(value: Value, path: str, sample: Sample | None) -> Value:
    if isinstance(value, list):
        return [_with_sample(item, f"{path}.{index}", sample) for index, item in enumerate(value)]
    if isinstance(value, Drift):
        if sample is None or path not in sample.scalars:
            raise Skip(f"no Sample holds the value of its argument {path}")
        return sample.scalars[path]  # type: ignore[no-any-return]
    if isinstance(value, TensorSpec) and value.offset is None:
        if sample is None or path not in sample.offsets:
            raise Skip(f"no Sample holds the storage offset of its argument {path}")
        return replace(value, offset=sample.offsets[path])
    return value


def invocation_of_bound(bound: BoundCall, launch: Launch | None = None) -> Invocation:
    """The invocation without data but for the values of its tensors of integers and of bools."""
    specs = {path: spec for path, spec in bound.tensors() if BY_NAME[spec.dtype].kind in ("int", "bool")}
    contents = {path: pad_to_shape(values, specs[path]) for path, values in bound.contents.items() if path in specs}
    return invocation_of(Call(id=0, operator=bound.operator, args=bound.args, launch=launch), contents)


def pad_to_shape(values: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """`values`, of which only the rows in use were kept, in the shape of `spec`: zeros in the rest."""
    values = values.to(torch_dtype(spec.dtype))
    if values.shape == spec.shape:
        return values
    if values.dim() != len(spec.shape) or any(n > m for n, m in zip(values.shape, spec.shape, strict=True)):
        raise Skip(f"the recorded values have shape {list(values.shape)}, the tensor {list(spec.shape)}")
    full = values.new_zeros(spec.shape)
    full[tuple(slice(n) for n in values.shape)] = values
    return full


StorageKey: TypeAlias = "tuple[str, int]"  # device, storage index


@dataclass
class Inputs:
    """The arguments of one invocation. `keep` holds memory that they point into and torch does not know about."""

    args: list[Any]
    kwargs: dict[str, Any]
    buffers: dict[StorageKey, torch.Tensor]
    keep: list[Any] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Bytes of all buffers."""
        return sum(len(buffer) for buffer in self.buffers.values())


REPLAY_RULES: Registry[str, ReplayRule] = Registry("operator with a replay rule")


Name = TypeVar("Name", str, str | None)


class ReplayRule:
    """How to make valid arguments for one operator; each method's default leaves it to generic rebuilding."""

    unnamed_args: tuple[str, ...] = ()  # its first arguments, where nothing names them (`_0` or `arg0` …)
    rebuilt_args: tuple[str, ...] = ()  # opaque arguments that `rebuild_args` makes; the recorded ones are dropped
    idempotent_writes: tuple[str, ...] = ()  # arguments that are written with the same content each time
    added_to: tuple[str, ...] = ()  # arguments called outputs that are read, too: the operator adds to them

    def named(self, names: Sequence[Name]) -> list[Name]:
        """The `names` of a call's arguments, with `unnamed_args` where nothing names them."""
        named = list(names)
        if names and names[0] in ("_0", "arg0"):
            named[: len(self.unnamed_args)] = self.unnamed_args[: len(names)]
        return named

    def prepare(self, bound: BoundCall) -> None:
        """Before anything is allocated: set integer values, shrink what is too large, or raise Skip."""

    def chosen_experts(self, bound: BoundCall) -> torch.Tensor | None:
        """How often its Sample chose each expert, [experts]; None if it does not say."""
        return None

    def trim_tables(self, bound: BoundCall) -> None:
        """Cut a table down to the rows that are read, so that copies of it fit into memory: for timing only."""

    def extra_bytes(self, bound: BoundCall) -> int:
        """Bytes that `rebuild_args` will allocate on the device."""
        return 0

    def touched(self, bound: BoundCall, total: int) -> int:
        """How many of the `total` bytes of a set of inputs one invocation can reach."""
        return total

    def rebuild_args(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        """The arguments named in `rebuilt_args`, from the others (read with `rebuilt_argument`)."""
        return {}


def replay_rule(*operators: str) -> Callable[[type[ReplayRule]], type[ReplayRule]]:
    """Register a ReplayRule for these operators."""

    def register(rule: type[ReplayRule]) -> type[ReplayRule]:
        for operator in operators:
            REPLAY_RULES.add(operator, rule())
        return rule

    return register


def replay_rule_for(operator: str) -> ReplayRule:
    """The ReplayRule of `operator`, or the one that does nothing."""
    import_plugins("kcap.schemas.derive.families")
    return REPLAY_RULES.get(operator) or ReplayRule()


def rebuilt_argument(bound: BoundCall, inputs: Inputs, name: str) -> Any:
    """The rebuilt argument called `name`; None if the Call has none of that name."""
    index = bound.index(name)
    if index is None:
        return None
    return inputs.kwargs[name] if bound.args[index].keyword else inputs.args[index]


def table_of_addresses(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Where each of `tensors` begins, uint64 [tensors]; it keeps none of them alive."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64, device=device)


RANDOM_BLOCK = 1 << 22  # elements drawn for a large buffer; the rest are copies


def fill_random(buffer: torch.Tensor, dtype: str, unit: bool = False) -> None:
    """Overwrite the whole buffer (bytes) with random numbers of `dtype`; `unit` takes them from [0, 1)."""
    low, high = {"float4_e2m1fn_x2": (0, 256), "float8_e8m0fnu": (120, 131)}.get(dtype, (0, 0))  # e8m0: 127 is 2**0
    if high:
        size = (min(RANDOM_BLOCK, len(buffer)),)
        fill_repeating(buffer, torch.randint(low, high, size, dtype=torch.uint8, device=buffer.device))
        return
    cells = _real_view(buffer, dtype)
    block = torch.rand if unit else torch.randn
    fill_repeating(cells, block(min(RANDOM_BLOCK, len(cells)), device=cells.device).to(cells.dtype))


def _real_view(buffer: torch.Tensor, dtype: str) -> torch.Tensor:
    """`buffer` as real numbers: a complex number is two of them."""
    halves = {"complex32": torch.float16, "complex64": torch.float32, "complex128": torch.float64}
    return buffer.view(halves.get(dtype) or torch_dtype(dtype, Skip))


def fill_repeating(cells: torch.Tensor, block: torch.Tensor) -> None:
    """Fill the flat `cells` with copies of `block`."""
    for start in range(0, len(cells), len(block)):
        part = cells[start : start + len(block)]
        part.copy_(block[: len(part)])
