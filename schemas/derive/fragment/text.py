"""Reads the graph fragment of a kernel of inductor: the buffers it reads, its ATen operators, what it writes.

    %arg0_1 : Tensor "bf16[s72, 64][64, 1]cpu" = PlaceHolder[target=arg0_1]
    %add : Tensor "bf16[s72, 64][64, 1]cpu"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = …
    return %add
    %add = buf3
    reuse(buf3, buf1)
    call(arg0_1, buf1, buf3, 64*s72, stream=stream0)

The lines to `return` are torch's (`torch._inductor.utils.get_kernel_metadata`), those after it kcap's: which of the
wrapper's buffers (or sizes) is which node's, which lies in another's memory, and how the kernel is first called.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from kcap.schemas.derive.fragment.values import SYMBOL, FragmentError, FragmentValue, Parser, Ref, Size
from kcap.schemas.recording.dtypes import BY_NAME, BY_WORD

LONGEST = 1 << 20
_NAME = r"[A-Za-z_]\w*"
_SPEC = r'"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\]\[(?P<strides>[^\]]*)\](?P<device>[\w:]+)"'
_PLACEHOLDER = re.compile(rf"%(?P<name>{_NAME}) : Tensor (?:{_SPEC})? ?= PlaceHolder\[target=\w+\]", re.ASCII)
_OPERATION = re.compile(
    rf"%(?P<name>{_NAME}) : (?:Tensor {_SPEC} ?)?\[num_users=(?P<users>\d{{1,9}})\] = call_function"
    r"\[target=(?P<target>[\w.]+)\]\(args = (?P<args>.*), kwargs = (?P<kwargs>\{.*\})\)",
    re.ASCII,
)
_ALIAS = re.compile(rf"%(?P<name>{_NAME}) = (?P<value>.+)", re.ASCII)
_REUSE = re.compile(rf"reuse\(({_NAME}), ({_NAME})\)", re.ASCII)
# torch abbreviates as BackendBench does, and these:
_ABBREVIATED = {"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e4m3fnuz": "float8_e4m3fnuz"}
_ABBREVIATED |= {"f8e5m2fnuz": "float8_e5m2fnuz", "f8e8m0fnu": "float8_e8m0fnu", "f4e2m1fnx2": "float4_e2m1fn_x2"}
_ABBREVIATED |= {name: word.name for name, word in BY_WORD.items()}
_ABBREVIATED |= {"u16": "uint16", "u32": "uint32", "u64": "uint64"}


@dataclass(frozen=True)
class Layout:
    """What a tensor is like, its sizes and strides (in elements) symbolic."""

    dtype: str
    shape: tuple[Size | int, ...]
    strides: tuple[Size | int, ...]
    device: str


@dataclass(frozen=True)
class Operation:
    """One node: an operator (`aten.add.Tensor`; `getitem`), its arguments, and its result where that is one tensor."""

    name: str
    target: str
    args: list[FragmentValue]
    kwargs: dict[str, FragmentValue]
    layout: Layout | None
    users: int = 1

    def refs(self) -> list[str]:
        """The nodes that it takes, in their order."""
        return list(dict.fromkeys(self._taken()))

    def takes(self, name: str) -> int:
        """How often it takes the node called `name`."""
        return self._taken().count(name)

    def _taken(self) -> list[str]:
        return [ref.name for value in (*self.args, *self.kwargs.values()) for ref in _refs(value)]


@dataclass
class Fragment:
    """A fragment. `reads` in torch's order, with what is known of them; `writes` likewise.

    `buffers`: what the wrapper calls a node's or a placeholder's buffer; `sizes`: nodes that are sizes; `call`: the
    wrapper's names of the kernel's arguments, None for an expression.
    """

    reads: dict[str, Layout | None] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    buffers: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, Size | int] = field(default_factory=dict)
    reused: dict[str, str] = field(default_factory=dict)
    call: list[str | None] = field(default_factory=list)

    def buffer(self, name: str) -> str:
        """What the wrapper calls the buffer of a node or placeholder; its own name where nothing else is known."""
        return self.buffers.get(name, name)


@lru_cache(maxsize=8)  # a kernel's is read for its reference and for its family
def read_fragment(text: str) -> Fragment:
    """The Fragment in `text`; FragmentError names the line that is not understood."""
    if len(text) > LONGEST:
        raise FragmentError(f"longer than {LONGEST} characters")
    fragment = Fragment()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            _read_line(fragment, line.strip())
        except FragmentError as error:
            raise FragmentError(f"line {number} of its fragment: {error}") from None
    return fragment


def _read_line(fragment: Fragment, line: str) -> None:
    if match := _PLACEHOLDER.fullmatch(line):
        fragment.reads[match["name"]] = _layout(match)
    elif match := _OPERATION.fullmatch(line):
        fragment.operations[match["name"]] = _operation(match)
    elif line.startswith("return "):
        fragment.writes = list(
            dict.fromkeys(_written(name) for name in line.removeprefix("return ").split(",") if name)
        )
    elif match := _ALIAS.fullmatch(line):
        _alias(fragment, match["name"], match["value"])
    elif match := _REUSE.fullmatch(line):
        fragment.reused[match[1]] = match[2]
    elif line.startswith("call(") and line.endswith(")"):
        fragment.call = _arguments(line.removeprefix("call(")[:-1])
    elif line:
        raise FragmentError(f"{line[:60]!r} is none of the lines known")


def _written(name: str) -> str:
    if not re.fullmatch(f"%{_NAME}", name.strip(), re.ASCII):
        raise FragmentError(f"{name[:40]!r} is no node")
    return name.strip()[1:]


def _alias(fragment: Fragment, name: str, text: str) -> None:
    if re.fullmatch(_NAME, text, re.ASCII) and not SYMBOL.fullmatch(text):
        fragment.buffers[name] = text
        return
    value = Parser(text).whole()
    if not isinstance(value, Size) and type(value) is not int:
        raise FragmentError(f"%{name} is {text[:40]!r}, no buffer and no size")
    fragment.sizes[name] = value


def _layout(match: re.Match[str]) -> Layout | None:
    if match["dtype"] is None:
        return None
    if match["dtype"] not in _ABBREVIATED or _ABBREVIATED[match["dtype"]] not in BY_NAME:
        raise FragmentError(f"unknown dtype {match['dtype'][:40]}")
    return Layout(_ABBREVIATED[match["dtype"]], _sizes(match["shape"]), _sizes(match["strides"]), match["device"])


def _sizes(text: str) -> tuple[Size | int, ...]:
    values = Parser(f"[{text}]").whole()
    assert isinstance(values, list)
    if not all(isinstance(value, Size) or type(value) is int for value in values):
        raise FragmentError(f"[{text[:40]}] are no sizes")
    return tuple(value for value in values if isinstance(value, Size | int))


def _operation(match: re.Match[str]) -> Operation:
    args = Parser(match["args"]).whole(tuples=True)
    if not isinstance(args, list):
        raise FragmentError(f"{match['args'][:40]!r} are no arguments")
    kwargs = Parser(match["kwargs"]).mapping()
    target = match["target"].removeprefix("torch.ops.")
    target = "getitem" if target in ("operator.getitem", "_operator.getitem") else target
    return Operation(match["name"], target, args, kwargs, _layout(match), int(match["users"]))


def _refs(value: FragmentValue) -> list[Ref]:
    if isinstance(value, list):
        return [ref for item in value for ref in _refs(item)]
    return [value] if isinstance(value, Ref) else []


def _arguments(text: str) -> list[str | None]:
    """The top-level arguments of a call in generated code; those that are names."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    arguments = [part.strip() for part in parts if part.strip() and not re.match(rf"\s*{_NAME}=[^=]", part)]
    return [part if re.fullmatch(_NAME, part, re.ASCII) else None for part in arguments]
