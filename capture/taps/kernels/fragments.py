"""Inductor: the ATen operators that a fused kernel stands for, as the wrapper around it has them in a comment.

torch writes that comment above its Triton kernels. While a kernel is compiled `annotate` adds what the comment leaves
out, and writes one above C++ kernels. So that whatever is read from a cache has it, too, what is compiled here is
cached apart from what is compiled without kcap: by CACHE_TAG in the keys of torch's own caches, in folders of that name
in an engine's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from kcap.capture.hooks.patching import Methods
from kcap.version import __version__

# Another text of this file is another comment.
CACHE_TAG = f"kcap-{__version__}-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"


HEAD = "# Graph fragment:"


LINE = "#   "  # begins each line below it


REUSE = re.compile(r"^\s+(\w+) = (?:reinterpret_tensor\()?(\w+)\b.*  # reuse$", re.MULTILINE | re.ASCII)


LONGEST = 1 << 20  # characters


MOST_FRAMES = 16


def fragment_file(fragment: str) -> str:
    """Its name in a Recording's kernels/."""
    return f"{hashlib.sha256(fragment.encode()).hexdigest()}.txt"


def fragment_of(scope: Mapping[str, Any], name: str) -> str | None:
    """The fragment of the kernel that the generated module of this `scope` calls `name`, and what it is called with.

    `%add : Tensor … = call_function[target=…](args = …)` a line, then `call(arg0_1, buf0, 64)`: what the kernel is
    first called with, by the wrapper's names; before it `reuse(buf4, buf1)` for each of these that took over another's
    memory. None where the wrapper's text is not there or has no such comment.
    """
    try:
        return _in_text(_text(str(scope.get("__file__"))), name)
    except (OSError, UnicodeDecodeError):
        return None


def bound_in(frame: FrameType | None, value: object) -> tuple[Mapping[str, Any], str] | None:
    """The globals of the nearest caller that hold `value`, and its name there."""
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        for name, held in list(frame.f_globals.items()):
            if held is value:
                return frame.f_globals, name
        frame = frame.f_back
    return None


@lru_cache(maxsize=2)
def _text(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")


def _in_text(text: str, name: str) -> str | None:
    start = text.find(f"\n{name} = async_compile.")
    head = text.rfind(HEAD, 0, max(start, 0))
    if head < 0:
        return None
    lines = text[head:start].splitlines()[1:]
    if not lines or len(text[head:start]) > LONGEST or not all(line.startswith(LINE) for line in lines):
        return None  # the comment of another kernel
    call = re.compile(rf"^\s+{re.escape(name)}(?:\.run)?(\((?!\*).*\))$", re.MULTILINE | re.ASCII).search(text, start)
    found = [line[len(LINE) :] for line in lines]
    if call:
        given = set(re.findall(r"\w+", call[1]))
        reused = [f"reuse({new}, {old})" for new, old in REUSE.findall(text, start, call.start()) if new in given]
        found += [*reused, f"call{call[1]}"]
    return "\n".join([*found, ""])


MOST_VIEWS = 16  # one of the other


class Annotations:
    """Completes the comments of the kernels that a class of inductor's defines; failing costs only those."""

    def __init__(self, module: str, scheduling: str) -> None:
        self._module = module
        self._scheduling = scheduling
        self._methods = Methods()
        self.trouble = ""  # for the tap's health

    def install(self) -> None:
        self._methods.when_imported(self._module, self._hook)

    def uninstall(self) -> None:
        self._methods.undo()

    def _hook(self, module: ModuleType) -> None:
        owner = getattr(module, self._scheduling, None)
        if self._methods.on and hasattr(owner, "define_kernel"):
            self._methods.around(owner, "define_kernel", self._define)

    def _define(self, original: Callable[..., str], scheduling: Any, *args: Any, **kwargs: Any) -> str:
        name = original(scheduling, *args, **kwargs)
        try:
            annotate(name, args[1])
        except Exception as error:
            self.trouble = f", comments not completed ({type(error).__name__}: {str(error)[:120]!r})"
        return name


def keep_apart(methods: Methods) -> None:
    """Have torch keep what is compiled, until `methods` are undone, apart from what is compiled without kcap."""

    def hook_keys(module: ModuleType) -> None:
        if details := getattr(module, "FxGraphHashDetails", None):  # AOTAutograd's are a subclass
            methods.around(details, "__init__", _tag)

    def hook_folder(module: ModuleType) -> None:
        cache = getattr(module, "DiskDynamoCache", None)
        if hasattr(cache, "path_prefix"):
            methods.around(cache, "path_prefix", _own_folder)

    methods.when_imported("torch._inductor.codecache", hook_keys)
    methods.when_imported("torch._dynamo.package", hook_folder)


def _tag(original: Callable[..., None], details: Any, *args: Any, **kwargs: Any) -> None:
    original(details, *args, **kwargs)
    details.kcap = CACHE_TAG  # the key is made of all that it holds


def _own_folder(original: Callable[..., str], cache: Any) -> str:
    return str(Path(original(cache), CACHE_TAG))


def annotate(name: str, nodes: Any) -> None:
    """Complete the comment of the kernel called `name`, which inductor's wrapper has just defined for `nodes`."""
    from torch._inductor.utils import get_kernel_metadata
    from torch._inductor.virtualized import V

    wrapper = V.graph.wrapper_code
    line: Any = wrapper.lines[-1] if wrapper.lines else None
    if getattr(line, "kernel_name", None) != name or not hasattr(line, "metadata") or wrapper.comment != "#":
        return  # what was defined before is only called again
    single = [part for node in nodes if hasattr(node, "get_nodes") for part in node.get_nodes()]
    comment = line.metadata or ""
    if HEAD not in comment:  # a C++ kernel has none, and of several kernels that run as one torch writes only the head
        comment = "\n".join(get_kernel_metadata(single, wrapper))
    if HEAD in comment:
        line.metadata = _comment("\n".join([comment, *(LINE + text for text in _missing(single))]))


def _comment(text: str) -> str:
    """ValueError where a line of it would be code: an operator's text arguments stand in it without quotes."""
    if not all(line.startswith("#") and line.isprintable() for line in text.splitlines()):
        raise ValueError("a line of it is no comment")
    return text


def _missing(single: list[Any]) -> Iterator[str]:
    """`%empty = buf4`: the wrapper's name of a node or buffer; `%arg0_1 = s72`; the nodes that torch left out."""
    reads = dict(_buffers(single, "reads"))
    writes = dict(_buffers(single, "writes"))
    yield from (f"%{name} = {real}" for name, real in {**reads, **writes}.items() if name != real)
    origins = {node for part in single if part.node for node in part.node.origins if node.op == "call_function"}
    reached = _Reached({node.name for node in origins} | (set(reads) - set(writes)))
    for node in sorted(origins, key=lambda node: node.name):
        for operand in node.all_input_nodes:
            reached.reach(operand, MOST_VIEWS)
    yield from filter(None, reached.lines.values())


def _buffers(single: list[Any], accesses: str) -> Iterator[tuple[str, str]]:
    """What the fragment and its nodes call each buffer that is read (written), and what the wrapper calls it."""
    from torch._inductor.virtualized import V

    real_names = V.graph.scheduler.mutation_real_name
    for part in single:
        for access in getattr(part.read_writes, accesses):
            real = real_names.get(access.name, access.name)
            yield access.name, real
            for name in dict.fromkeys((access.name, real)):
                if (node := _origin(V.graph.try_get_buffer(name))) is not None:
                    yield node.name, real


def _origin(buffer: Any) -> Any:
    """The torch.fx node that inductor made `buffer` for, where it knows one."""
    while buffer is not None and hasattr(buffer, "data") and type(buffer).__name__ in ("TensorBox", "StorageBox"):
        buffer = buffer.data
    return getattr(buffer, "origin_node", None)


class _Reached:
    """Nodes that can be had from `known` ones without computing, with their lines; None: not."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.lines: dict[str, str | None] = {}

    def reach(self, node: Any, depth: int) -> bool:
        if node.name in self.known:
            return True
        if node.name not in self.lines:
            self.lines[node.name] = None
            self.lines[node.name] = self._line(node, depth)
        return self.lines[node.name] is not None

    def _line(self, node: Any, depth: int) -> str | None:
        if type(value := node.meta.get("val")).__name__ == "SymInt":
            return f"%{node.name} = {value}"
        operands = node.all_input_nodes
        if node.op != "call_function" or not operands or not depth or not _selects(node.target):
            return None
        reached = [self.reach(operand, depth - 1) for operand in operands]
        return node.format_node(include_tensor_metadata=True) if all(reached) else None


def _selects(target: Any) -> bool:
    """Whether an operator gives a view or a part of what it is given."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return getattr(target, "__name__", "") == "getitem"
    return any(argument.alias_info and not argument.alias_info.is_write for argument in schema.arguments)
