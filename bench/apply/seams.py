"""Puts Solutions in the place of an engine's kernels, where the engine lets them in, and takes them out again.

A registered operator is overridden for its device, below the compiler: its code is not compiled anew and calls what is
registered then. A Triton launch is met where Triton or inductor launches it, by the source of its kernel. What is not
exactly as a Call in the plan runs the engine's own, and so does everything while `Replacements.on` is None.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kcap.bench.accuracy import SAME, compare
from kcap.bench.apply.matching import Matching, Values, with_items
from kcap.capture.taps.libraries.library import Calls
from kcap.errors import KcapError
from kcap.schemas.recording.operators import DEFAULT, to_trace
from kcap.schemas.results.plan import NewTensor, Replacement, Scalar, TensorView

Function = Callable[..., Any]
MOST_COPIED = 256 << 20  # bytes, for one comparison: a cache of gigabytes is not copied
SPOILT = "the engine's own read, that once, what it may have written in place"
KEYS = {"cpu": "CPU", "cuda": "CUDA"}  # torch's dispatch keys, by type of device


class NoSeam(KcapError):
    """The engine lacks what a plan replaces."""


@dataclass
class Placed:
    """A Solution in the place of one Call. `destination`: it takes its outputs.

    `eager`, `captured`: how often it ran outside and inside a capture. `checked`: how often it was compared with the
    engine's own instead. `misses`: how often an invocation of the operator was not as the Call, by the first
    difference. `off`: why it is not used any more. `plan`: of several plans, by their order.
    """

    replacement: Replacement
    function: Function
    destination: bool
    eager: int = 0
    captured: int = 0
    checked: int = 0
    off: str = ""
    plan: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    matching: Matching = field(init=False)

    def __post_init__(self) -> None:
        self.matching = Matching(self.replacement.call, self.replacement.free, self.replacement.hints)

    def run(self, values: Values) -> Any:
        """Run the Solution on the call's arguments, and return what the operator would."""
        one = self.replacement
        results = [
            torch.empty_strided(new.shape, new.strides, dtype=getattr(torch, new.dtype), device=self._device(values))
            if isinstance(new, NewTensor)
            else _view(new, values, ())
            for new in one.returned
        ]
        inputs = [_input(source, values) for source in one.inputs]
        outputs = [_view(view, values, results) for view in one.outputs]
        if self.destination:
            self.function(*inputs, *outputs)
        else:
            self._take(self.function(*inputs), outputs)
        return (tuple(results) if one.several else results[0]) if one.returned else None

    def check(
        self, values: Values, original: Callable[[], Any], unseen: Callable[[], AbstractContextManager[None]]
    ) -> Any:
        """Run the Solution on copies of what is written and the original on what the engine passes, and compare; what
        the original returns. The Solution is off where they differ."""
        self.checked += 1
        written = {str(index) for index, one in enumerate(self.replacement.call.args) if one.written}
        written |= {view.argument.partition(".")[0] for view in self.replacement.outputs if view.argument is not None}
        copies = copies_of(values, written)
        if copies is None:
            return original()
        with unseen():
            returned = self.run(copies)
        result = original()
        self.off = why_different(self.outputs(copies, returned), self.outputs(values, result))
        return result

    def outputs(self, values: Values, result: Any) -> list[torch.Tensor]:
        """The Definition's outputs, where the operator, or the Solution, has left them; zeros in padding."""
        results = list(result) if isinstance(result, tuple | list) else [result]
        outputs = [_view(view, values, results) for view in self.replacement.outputs]
        padding = self.replacement.padding
        if padding is None:
            return outputs
        places = (_view(padding.lengths, values, ()) == 0).nonzero().flatten()
        return [
            output if dim is None else output.index_fill(dim, places.to(output.device), 0)
            for output, dim in zip(outputs, padding.dims, strict=True)
        ]

    def _take(self, made: Any, outputs: Sequence[torch.Tensor]) -> None:
        """Put what the Solution returned where the engine looks for it; what was written in place is there already."""
        parts = list(made) if isinstance(made, tuple | list) else [made]
        if len(parts) != len(outputs):
            raise ValueError(f"returned {len(parts)} of {len(outputs)} outputs")
        for part, output in zip(parts, outputs, strict=True):
            if part.shape != output.shape or part.dtype != output.dtype:
                raise ValueError(f"returned {part.dtype}{list(part.shape)} for {output.dtype}{list(output.shape)}")
            if part.data_ptr() != output.data_ptr() or part.stride() != output.stride():
                output.copy_(part)

    def _device(self, values: Values) -> torch.device:
        return next(value.device for value in values.values() if isinstance(value, torch.Tensor))


def why_different(outputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> str:
    """In what a Solution's outputs are not the engine's own, by the judge's rule; "" if they are."""
    for number, (out, truth) in enumerate(zip(outputs, own, strict=True)):
        if (error := compare(out.cpu(), truth.cpu()).error) > SAME:
            return f"its output {number} is off by {error:.3g} times what is allowed from the engine's own kernel"
    return ""


def copies_of(values: Values, written: Collection[str]) -> dict[str, Any] | None:
    """The arguments with copies of all memory that those at the places `written` share; None where that is more than
    MOST_COPIED bytes."""
    tensors = {path: value for path, value in values.items() if isinstance(value, torch.Tensor)}
    to_copy = {_address(tensor) for path, tensor in tensors.items() if path.partition(".")[0] in written}
    shared = {path: tensor for path, tensor in tensors.items() if _address(tensor) in to_copy}
    storages = {_address(tensor): tensor.untyped_storage() for tensor in shared.values()}
    if sum(storage.nbytes() for storage in storages.values()) > MOST_COPIED:
        return None
    cloned = {address: storage.clone() for address, storage in storages.items()}
    return dict(values) | {
        path: torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            cloned[_address(tensor)], tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        for path, tensor in shared.items()
    }


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _input(source: TensorView | Scalar, values: Values) -> Any:
    return source.scalar if isinstance(source, Scalar) else _view(source, values, ())


def _view(view: TensorView, values: Values, results: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = values[view.argument] if view.argument is not None else results[view.result or 0]
    shape = [size if size >= 0 else whole.shape[-1 - size] for size in view.shape]
    return whole.as_strided(shape, view.strides, whole.storage_offset() + view.offset)


class Around(Protocol):
    """What is done around a Solution while it runs: a recorder's region, a count."""

    def __call__(self, placed: Placed, values: Values, run: Callable[[], Any]) -> Any: ...


def _plainly(placed: Placed, values: Values, run: Callable[[], Any]) -> Any:
    return run()


class Replacements:
    """All Solutions of this process, by the operator whose calls they replace.

    `on`: those of one plan, by its order, are used; None: none are. `checks`: so many invocations of each, outside a
    capture and while `checking`, are compared with the engine's own, on copies of its numbers, `unseen` by a recorder.
    `around`: runs each. `failed`: is told of one that raised or differed, which is off from then on; while a graph is
    captured, what was raised goes on to the engine, for the capture is lost.
    """

    def __init__(self, placed: Iterable[Placed], around: Around = _plainly, checks: int = 0) -> None:
        self.placed = list(placed)
        self.checks = checks
        self.unseen: Callable[[], AbstractContextManager[None]] = nullcontext
        self.on: int | None = 0
        self.checking: Callable[[], bool] = lambda: True
        self.around = around
        self.failed: Callable[[Placed, BaseException], None] = lambda placed, error: None
        self._by_operator: dict[str, list[Placed]] = defaultdict(list)
        for one in self.placed:
            self._by_operator[one.replacement.call.operator].append(one)
        self._local = threading.local()

    def operators(self, seam: str) -> list[str]:
        return [name for name, those in self._by_operator.items() if those[0].replacement.seam == seam]

    def of(self, operator: str) -> list[Placed]:
        return self._by_operator.get(operator, [])

    @property
    def active(self) -> bool:
        """Whether Solutions are used now, on this thread: what one calls itself is the engine's own."""
        return self.on is not None and not getattr(self._local, "inside", False)

    def find(self, operator: str, values: Values, constants: Mapping[str, Any] | None = None) -> Placed | None:
        """The Solution for exactly this invocation; None where the engine's own is to run."""
        if not self.active:
            return None
        for one in self.of(operator):
            if one.off or one.plan != self.on:
                continue
            if not (mismatch := one.matching.mismatch(values, constants)):
                return one
            one.misses[mismatch] += 1
        return None

    def find_named(
        self, operator: str, named: Mapping[str, Any], constants: Mapping[str, Any] | None = None
    ) -> tuple[Placed, Values] | None:
        """The same where arguments are known by name, with the arguments by their paths."""
        those = self.of(operator)
        if not those or not self.active:
            return None
        values: dict[str, Any] = {}
        for index, argument in enumerate(those[0].replacement.call.args):
            values |= with_items(str(index), named.get(argument.name or ""))
        one = self.find(operator, values, constants)
        return None if one is None else (one, values)

    def run(self, one: Placed, values: Values, original: Callable[[], Any]) -> Any:
        """Run the Solution; should it raise where nothing is captured, the original."""
        capturing = _is_capturing()
        to_check = one.checked < self.checks and not capturing and self.checking()
        self._local.inside = True
        try:
            if to_check:
                return self._check(one, values, original)
            result = self.around(one, values, lambda: one.run(values))
        except Exception as error:
            one.off = f"{type(error).__name__}: {error}"
            if one.replacement.in_place and not to_check:
                one.off += f" ({SPOILT})"
            self.failed(one, error)
            if capturing:
                raise
            self._local.inside = False
            return original()
        finally:
            self._local.inside = False
        one.captured += capturing
        one.eager += not capturing
        return result

    def _check(self, one: Placed, values: Values, original: Callable[[], Any]) -> Any:
        result = one.check(values, original, self.unseen)
        if one.off:
            self.failed(one, ValueError(one.off))
        return result


def _is_capturing() -> bool:
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class Seam(Protocol):
    """A way into the engine."""

    def install(self) -> None: ...
    def uninstall(self) -> None: ...


class Operators:
    """The seam of registered operators: each is overridden for the device of its replacements."""

    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements
        self._libraries: list[torch.library.Library] = []

    def install(self) -> None:
        """Override them; NoSeam where one is not registered, or has no kernel for the device."""
        for operator in self._replacements.operators("operator"):
            self._override(operator)

    def uninstall(self) -> None:
        """Give each its own kernel back; nothing is compiled anew."""
        while self._libraries:
            self._libraries.pop()._destroy()

    def _override(self, operator: str) -> None:
        namespace, base, overload = to_trace(operator).split(".")
        name = f"{namespace}::{base}" + ("" if overload == DEFAULT else f".{overload}")
        key = KEYS[_device_of(self._replacements, operator)]
        if name not in torch._C._dispatch_get_all_op_names():
            raise NoSeam(f"{operator}: is no registered operator of this engine")
        schema = torch._C._get_schema(f"{namespace}::{base}", "" if overload == DEFAULT else overload)
        replacements = self._replacements
        for one in replacements.of(operator):
            if reason := why_not_overridden(schema, one.replacement):
                raise NoSeam(f"{operator}: {reason}")
        try:
            original = torch.library.get_kernel(name, key)
        except RuntimeError as error:
            raise NoSeam(f"{operator}: has no kernel for {key} to be replaced ({error})") from None

        def override(keys: Any, *args: Any, **kwargs: Any) -> Any:
            def run_original() -> Any:
                return without_none(original.call_boxed(keys, *args, **kwargs))

            if not replacements.active:
                return run_original()
            values = values_of(schema, args, kwargs)
            one = replacements.find(operator, values)
            if one is None:
                return run_original()
            result = replacements.run(one, values, run_original)
            return written_returns(schema, values) if result is None and schema.returns else result

        library = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it overrides a kernel, as is meant
            library.impl(name, override, key, with_keyset=True, allow_override=True)
        self._libraries.append(library)


def why_not_overridden(schema: Any, one: Replacement) -> str:
    """Why a registered operator of this schema cannot be overridden by the replacement; "" if it can."""
    base = schema.name.split("::")[-1]
    if torch._C._should_allow_numbers_as_tensors(base):
        return "torch passes numbers to it as tensors, which a kernel in Python does not get as such"
    if one.several and len(schema.returns) == 1:
        return ""  # a list, whose length no schema tells
    new = sum(returned.alias_info is None for returned in schema.returns)
    known = sum(isinstance(returned, NewTensor) for returned in one.returned)
    if new != known:
        return f"it returns {new} new tensors, of which the Definition has {known}"
    return ""


def without_none(result: Any) -> Any:
    """What an operator returned, with empty tensors for undefined ones in a list: torch takes those from C++ alone."""
    return [torch.empty(0) if item is None else item for item in result] if isinstance(result, list) else result


def written_returns(schema: Any, values: Values) -> Any:
    """What an operator returns that returns the arguments it writes."""
    by_alias = {
        name: str(index)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        for name in argument.alias_info.before_set
    }
    found = [values[next(by_alias[name] for name in returned.alias_info.before_set)] for returned in schema.returns]
    return found[0] if len(found) == 1 else tuple(found)


def _device_of(replacements: Replacements, operator: str) -> str:
    """The type of device of its tensors."""
    call = next(one.replacement.call for one in replacements.placed if one.replacement.call.operator == operator)
    devices = {spec.device.partition(":")[0] for _, spec in call.tensors()}
    on_gpu = sorted(devices - {"cpu"})
    if len(on_gpu) > 1 or not devices or (on_gpu and on_gpu[0] not in KEYS):
        raise NoSeam(f"{operator}: its tensors are on {', '.join(sorted(devices)) or 'no device'}")
    return on_gpu[0] if on_gpu else "cpu"


def values_of(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by their paths in a Call (`"3"`, `"2.1"`); torch leaves out those that equal their default."""
    values: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        values |= with_items(str(index), value)
    return values


class Functions:
    """The seam of a library's Python functions, which kcap's taps wrap already."""

    def __init__(self, replacements: Replacements, taps: Iterable[Calls]) -> None:
        self._replacements = replacements
        self._taps = list(taps)

    def install(self) -> None:
        if self._replacements.operators("function"):
            for calls in self._taps:
                calls.divert = self._divert

    def uninstall(self) -> None:
        for calls in self._taps:
            calls.divert = None

    def _divert(self, operator: str, named: Mapping[str, Any], original: Callable[[], Any]) -> Any:
        one = self._replacements.find_named(operator, named)
        return original() if one is None else self._replacements.run(*one, original)
