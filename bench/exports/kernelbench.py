"""`kernelbench`: `level{N}/{id}_{Name}.py` with Model, get_inputs and get_init_inputs, the most often invoked first.

Source: KernelBench's `src/kernelbench/eval.py`. It casts every tensor that get_inputs or get_init_inputs returns,
integers too, to one float dtype, and compares one output tensor. Integers that are drawn are small enough for every
float dtype, and `forward` casts them back; recorded ones are buffers, which `Module.to(dtype)` leaves alone; scalars
are arguments of `__init__`. A problem whose get_inputs would be empty is lost: its result would be a constant. Level 2
is what a Definition's tags call fused.
"""

from __future__ import annotations

import keyword
import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zlib import compress

import torch

from kcap.bench.check.draws import BOUNDS, TargetDraw
from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.bench.exports.common.cases import BOUNDED, NO_BLOB, SAMPLES, Account, Case
from kcap.replay.rebuild.memory import raw_bytes
from kcap.schemas.derive import families
from kcap.schemas.flashinfer.definition import DefinitionTensor, RandomInput, ScalarInput, WorkloadInput
from kcap.schemas.results.export_loss import ExportLoss

DRAWN_INTEGERS = (1, 7)  # may index and divide, and every float dtype holds them
DRAW = TargetDraw("KernelBench", integers=DRAWN_INTEGERS, tolerated=("inf", "-inf"))
CONSTANT = "all its inputs are recorded values or scalars: KernelBench would compare one constant result each time"
CAST = "dtypes of floats: KernelBench casts all to one"


@exporter("kernelbench")
class KernelBench(Exporter):
    """One file for each Call's sizes; of its Samples the first."""

    needs = "in a clone of KernelBench"
    takes = "definitions"

    def write(self, request: ExportRequest) -> ExportLoss:
        account, numbers = Account(request, DRAW), Counter[int]()
        taken = sorted(account.taken_cases(_refuse, samples=False), key=lambda case: -case.count)
        for case in taken:
            numbers[case.level] += 1
            folder = request.output / f"level{case.level}"
            folder.mkdir(exist_ok=True)
            path = folder / f"{numbers[case.level]}_{case.definition.name}.py"
            path.write_text(model_source(case, request.contents.metadata.model), encoding="utf-8")
            _reduce(account, case)
        return account.loss("kernelbench")

    def following(self, output: Path) -> str:
        files = sorted(output.glob("level*/1_*.py"))
        first = files[0] if files else output / "level1" / "1_NAME.py"
        origin = f"ref_origin=local ref_arch_src_path={shlex.quote(str(first.resolve()))}"
        return f"python scripts/run_and_check.py {origin} kernel_src_path=MODEL_NEW.py"


def _refuse(case: Case) -> str | None:
    outputs = list(case.definition.outputs.values())
    if len(outputs) != 1 or outputs[0].shape is None:
        return f"KernelBench compares one output tensor: this has {len(outputs)} outputs"
    if case.lacks_blob():
        return NO_BLOB
    for name, tensor, workload_input in case.tensors():
        if tensor.dtype.startswith(("float8", "float4")):
            return f"KernelBench has no {tensor.dtype}"
        if isinstance(workload_input, RandomInput) and _is_special(case, name):
            return f"KernelBench draws its inputs by no rule, and {name} has one of its own"
        if name in case.blob and stored_bytes(case.blob[name]) > MAX_STORED:
            return f"more than {MAX_STORED >> 20} MiB of recorded values: too many for a source file"
    return None if any(_is_drawn(case, *item) for item in case.tensors()) else CONSTANT


def _is_drawn(case: Case, name: str, tensor: DefinitionTensor, workload_input: WorkloadInput | None) -> bool:
    """Whether get_inputs gives it anew in each trial; an empty tensor is the same each time."""
    return isinstance(workload_input, RandomInput) and name not in case.blob and 0 not in case.sizes(tensor)


def _is_special(case: Case, name: str) -> bool:
    return next(families.input_rules_for(case.definition.op_type, name), None) is not None


def _reduce(account: Account, case: Case) -> None:
    floats = {tensor.dtype for _, tensor, _ in case.tensors() if tensor.shape is not None and tensor.dtype in FLOATS}
    reasons = {CAST: len(floats) > 1, SAMPLES: bool(case.blob), BOUNDED: bool(case.bounded)}
    for reason, holds in reasons.items():
        if holds:
            account.reduce(case, reason)


FLOATS = ("float32", "float16", "bfloat16")
MAX_STORED = 1 << 20  # bytes of text
MAX_RATIO = 1032  # of zlib
TAKEN = frozenset({"self", "run", "torch", "nn", "b64decode", "decompress", "stored", "Model"})
IMPORTS = "import torch\nfrom torch import nn\n"

STORED = '''from base64 import b64decode
from zlib import decompress

import torch
from torch import nn


def stored(text, dtype, shape):
    """The recorded values that `text` holds: base64 of zlib."""
    return torch.frombuffer(bytearray(decompress(b64decode(text))), dtype=dtype).reshape(shape)
'''


@dataclass(frozen=True)
class Argument:
    """An input of the reference: `expression`, the expression of its value, and where the module gets it from.

    `cast`: the dtype that `forward` gives it back, where KernelBench takes it away.
    """

    name: str
    expression: str
    source: Literal["forward", "init", "buffer", "none"]
    cast: str | None = None

    @property
    def passed(self) -> str:
        if self.source == "forward":
            return f"{self.name}.to(torch.{self.cast})" if self.cast else self.name
        return "None" if self.source == "none" else f"self.{self.attribute}"

    @property
    def attribute(self) -> str:
        return f"given_{self.name}"


def model_source(case: Case, model: str | None) -> str:
    """The file's text. Names and values from the Definition are quoted or checked; its reference is as it is."""
    arguments = list(_arguments(case))
    parts = [
        _comment(case, model),
        case.definition.reference.strip("\n"),
        "\n",
        STORED if any(argument.expression.startswith("stored(") for argument in arguments) else IMPORTS,
        _module(arguments),
        _returns("get_inputs", [argument.expression for argument in arguments if argument.source == "forward"]),
        _returns("get_init_inputs", [argument.expression for argument in arguments if argument.source == "init"]),
    ]
    return "\n".join(parts)


def _comment(case: Case, model: str | None) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in case.workload.axes.items())
    whose = f" of {model}" if model else ""
    text = f"{case.definition.name} ({axes}): {case.count:,} invocations{whose}"
    return f"# {text if text.isprintable() else ascii(text)}"


def _arguments(case: Case) -> Iterator[Argument]:
    used: set[str] = set()
    for number, (name, tensor, workload_input) in enumerate(case.tensors()):
        free = name.isidentifier() and name.isascii() and not keyword.iskeyword(name) and name not in TAKEN | used
        name, key = (name if free else f"input_{number}"), name
        used.add(name)
        yield _argument(case, name, key, tensor, workload_input)


def _argument(
    case: Case, name: str, key: str, tensor: DefinitionTensor, workload_input: WorkloadInput | None
) -> Argument:
    if workload_input is None:
        return Argument(name, "None", "none")
    if isinstance(workload_input, ScalarInput):
        return Argument(name, repr(workload_input.value), "init")
    if key in case.blob:
        return Argument(name, _stored(case.blob[key]), "forward" if tensor.dtype in FLOATS else "buffer")
    drawn = _drawn(tensor.dtype, case.sizes(tensor), key in case.bounded)
    return Argument(name, drawn, "forward", None if tensor.dtype in FLOATS else tensor.dtype)


def _drawn(dtype: str, sizes: tuple[int, ...], bounded: bool) -> str:
    """An expression for a tensor whose content does not matter."""
    if dtype in FLOATS and bounded:
        low, high = BOUNDS
        return f"torch.empty({sizes}).uniform_({low}, {high}).to(torch.{dtype})"
    if dtype in FLOATS:
        return f"torch.randn({sizes}, dtype=torch.{dtype})"
    low, high = {"bool": (0, 1), "int8": (-128, 127)}.get(dtype, DRAWN_INTEGERS)
    return f"torch.randint({low}, {high + 1}, {sizes}).to(torch.{dtype})"


def _packed(tensor: torch.Tensor) -> str:
    content = raw_bytes(tensor).numpy().tobytes()
    return b64encode(compress(content, 9)).decode()


def stored_bytes(tensor: torch.Tensor) -> int:
    """The size of `tensor` in a source file; of one too large for MAX_STORED, no more than the least it could be."""
    least = tensor.nbytes // MAX_RATIO
    return least if least > MAX_STORED else len(_packed(tensor))


def _stored(tensor: Any) -> str:
    if not tensor.numel():
        return f"torch.empty({tuple(tensor.shape)}, dtype={tensor.dtype})"
    return f'stored("{_packed(tensor)}", {tensor.dtype}, {tuple(tensor.shape)})'


def _module(arguments: list[Argument]) -> str:
    parameters = [argument.name for argument in arguments if argument.source == "init"]
    attributes = [argument for argument in arguments if argument.source in ("init", "buffer")]
    lines = ["", "class Model(nn.Module):", f"    def __init__({', '.join(['self', *parameters])}):"]
    lines += ["        super().__init__()", *(f"        {_kept(argument)}" for argument in attributes), ""]
    passed = ", ".join(argument.passed for argument in arguments)
    forward = ", ".join(["self", *(argument.name for argument in arguments if argument.source == "forward")])
    lines += [f"    def forward({forward}):", f"        outputs = run({passed})"]
    lines += ["        return outputs[0] if isinstance(outputs, (tuple, list)) else outputs", ""]
    return "\n".join(lines)


def _kept(argument: Argument) -> str:
    if argument.source == "init":
        return f"self.{argument.attribute} = {argument.name}"
    return f'self.register_buffer("{argument.attribute}", {argument.expression})'


def _returns(name: str, values: list[str]) -> str:
    body = "".join(f"        {value},\n" for value in values)
    return f"\ndef {name}():\n    return [\n{body}    ]\n" if values else f"\ndef {name}():\n    return []\n"
