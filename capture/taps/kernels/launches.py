"""Kernels launched from sources of their own, as calls: the operator that names one, and what a launch fixes.

`CompiledKernels` is what the taps of such launches share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

from kcap.capture.hooks.identity import ByIdentity
from kcap.capture.hooks.patching import Methods
from kcap.capture.recorder.arguments import encode
from kcap.capture.taps.external import MOST_LAUNCHES, Externals
from kcap.capture.taps.kernels.fragments import fragment_file
from kcap.capture.taps.kernels.triton_source import Unreadable, read_source


class CompiledKernels:
    """A tap that wraps methods of a compiler's own classes, as these are imported."""

    name: str

    def __init__(self, listener: Externals) -> None:
        self.listener = listener
        self.failed = listener.failed
        self.on = False
        self._methods = Methods()

    def install(self) -> None:
        """Wrap what is there, and the rest as it is imported."""
        self.on = True
        self._hook_all()

    def uninstall(self) -> None:
        self.on = False
        self._methods.undo()

    def refresh(self) -> None:
        """Nothing: classes are wrapped as they are imported."""

    def health(self) -> tuple[str, str]:
        return self._health() if self.on else ("failed", "")

    def _ignored(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around what compiles or tunes: nothing that it runs is recorded."""
        with self.listener.ignoring():
            return original(*args, **kwargs)

    def _hook_all(self) -> None:
        raise NotImplementedError

    def _health(self) -> tuple[str, str]:
        raise NotImplementedError


Parameters = Callable[[], tuple[list[str], list[str]]]


Fragment = Callable[[], str | None]


UNREAD = "unread"  # the id of a kernel whose source could not be read


ABSENT: Any = object()  # in the place of a constexpr that a launch does not tell


def picker(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """What takes the values of `keys` out of a mapping, or those at `keys` out of a tuple."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda values: [values[key] for key in keys]


@dataclass(frozen=True)
class Kernel:
    """A kernel: its operator's number, its run-time parameters and constexprs, and the launch's fixed fields.

    `options`: the names of options among those that it is launched with, as far as it was.
    """

    operator: int
    parameters: list[str]
    constexprs: list[str]
    fields: dict[str, Any]
    options: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    @cached_property
    def _pickers(self) -> tuple[Callable[[Any], Sequence[Any]], Callable[[Any], Sequence[Any]]]:
        return picker(self.parameters), picker(self.constexprs)

    def values_in(self, arguments: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The values of its parameters and of its constexprs; in the place of a missing one None, or ABSENT."""
        values, constants = self._pickers
        try:
            return values(arguments), constants(arguments)
        except KeyError:
            parameters = [arguments.get(name) for name in self.parameters]
            return parameters, [arguments.get(name, ABSENT) for name in self.constexprs]


@dataclass(frozen=True)
class Specialization:
    """What a kernel was compiled for, where Triton would go by the values: the `types` of numbers, and the parameters
    that are `unspecialized`."""

    types: tuple[tuple[str, str], ...] = ()
    unspecialized: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        fields = {"types": dict(self.types), "unspecialized": list(self.unspecialized)}
        return {name: value for name, value in fields.items() if value}


class Launches:
    """The kernels seen by one tap, and their launches."""

    def __init__(self, listener: Externals) -> None:
        self._listener = listener
        # By identity: what asks a function of Triton for its hash has it read its source and globals, and one from
        # inductor's cache may have lost these (torch 2.11's has no lock for it either).
        self._kernels = ByIdentity[Kernel]()
        self._known: dict[Any, int | None] = {}
        self.unread: dict[str, str] = {}  # kernel -> why its source could not be read
        self._named: set[str] = set()  # kernels of which it was told whose they are
        self.kernels = self.lost = 0
        self.untold = 0  # kernels of inductor's of which nothing tells what they stand for

    def kernel(self, fn: Any, parameters: Parameters, fragment: Fragment | None = None) -> Kernel:
        """The kernel that the `@triton.jit` function `fn` is; `parameters` names its parameters and constexprs.

        `fragment` finds the ATen operators that a kernel of inductor's stands for.
        """
        kernel = self._kernels.get(fn)
        if kernel is None:
            told = fragment() if fragment else None
            kernel = self._kernels[fn] = self._read(fn, *parameters(), told)
            self.kernels += 1
            self.untold += fragment is not None and told is None
        return kernel

    def compiled(self, fn: Any, name: str | None) -> None:
        """A kernel of the function `fn`, which was launched, is called `name`."""
        kernel = self._kernels.get(fn)
        if kernel is None or not name or name in self._named:
            return
        self._named.add(name)
        if name != (function := kernel.fields["function"]):
            self._listener.kernel_name(name, function)

    def _read(self, fn: Any, parameters: list[str], constexprs: list[str], fragment: str | None) -> Kernel:
        try:
            source = read_source(fn)
        except Unreadable as error:
            name = getattr(fn, "__name__", "kernel")
            self.unread[name] = str(error)
            fields = {"function": name, "unread": str(error)}
            return Kernel(
                self._listener.operator(f"triton::{name}.{UNREAD}", parameters), parameters, constexprs, fields
            )
        self._listener.source(source.file, source.text.encode())
        if (compiled_as := getattr(fn, "__name__", source.function)) != source.function:
            self._listener.kernel_name(compiled_as, source.function)
        operator = self._listener.operator(f"triton::{source.name}.{source.id}", parameters)
        fields = {"kernel": source.file, "function": source.function, **keep_fragment(self._listener, fragment)}
        return Kernel(operator, parameters, constexprs, fields)

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        constexprs: Sequence[Any],
        warps: int | None,
        stages: int | None,
        options: dict[str, Any],
        specialization: Specialization | None = None,
    ) -> int | None:
        """The number of a launch; None when there are too many different ones.

        `constexprs`: the values of the kernel's, ABSENT where one is not told.
        """
        kinds = tuple(map(type, constexprs))  # 1, 1.0 and True are equal
        compiled = (tuple(constexprs), kinds, warps, stages, tuple(options.items()), specialization)
        key = (kernel.operator, kernel.fields.get("fragment"), tuple(grid), *compiled)
        try:
            return self._known[key]
        except (KeyError, TypeError) as error:
            number = self._listener.launch(
                {
                    **kernel.fields,
                    "grid": [int(size) for size in grid],
                    "constexprs": {
                        name: constant_value(value)
                        for name, value in zip(kernel.constexprs, constexprs, strict=True)
                        if value is not ABSENT
                    },
                    **({} if warps is None else {"num_warps": int(warps)}),
                    **({} if stages is None else {"num_stages": int(stages)}),
                    **(
                        {"options": {name: constant_value(value) for name, value in options.items()}} if options else {}
                    ),
                    **(specialization.fields() if specialization else {}),
                }
            )
            if number is None:
                self.lost += 1
            elif isinstance(error, KeyError):  # else it holds a value that cannot be a key
                if len(self._known) >= MOST_LAUNCHES:
                    self._known.clear()
                self._known[key] = number
            return number

    def health(self) -> tuple[str, str]:
        """Status and detail of the tap that sees these kernels."""
        summary = f"{self.kernels} kernels{self.unread_text()}{untold_text(self.untold)}"
        if self.lost:
            return "off", f"{summary}; {self.lost} launches are not recorded: too many different ones"
        return "ok", summary

    def unread_text(self) -> str:
        """What to say of the sources that could not be read."""
        if not self.unread:
            return ""
        name, reason = next(iter(self.unread.items()))
        return f", {len(self.unread)} without a source ({name}: {reason})"


def untold_text(kernels: int) -> str:
    """What to say of kernels of inductor's whose comments are not there: they were compiled without kcap."""
    return f", {kernels} without the ATen operators that they stand for" if kernels else ""


def keep_fragment(listener: Externals, fragment: str | None) -> dict[str, str]:
    """The field of a launch that names the kernel's `fragment`, which is kept."""
    if fragment is None:
        return {}
    listener.source(fragment_file(fragment), fragment.encode())
    return {"fragment": fragment_file(fragment)}


def constant_value(value: Any) -> Any:
    """A constexpr in the shard's form: a Triton dtype by its name, everything else as an argument."""
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if type(value).__module__.startswith("triton") and type(value).__name__ == "dtype":
        return {"triton": value.name}
    if isinstance(value, list | tuple):
        return [constant_value(item) for item in value]
    return encode(value, {})
