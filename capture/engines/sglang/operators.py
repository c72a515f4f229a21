"""SGLang's own operators: those that it calls past the dispatcher, and those that it fuses by name alone.

`register_custom_op` calls an operator's function directly, for plain tensors of a GPU, unless something watches: a
mode, or the profiler. While kcap listens the function tells of such a call, as the dispatcher would of `sglang::NAME`,
which takes several microseconds more; an operator with lists or texts comes through the dispatcher then. Where a
Solution may stand there in an operator's place, all always do. What runs below (kernels of tvm-ffi modules, FlashInfer,
Triton) has taps of its own.

FlashInfer's `fast_decode_plan` is told from other plans by identity, also after kcap has given its functions back: what
SGLang keeps of it stays one object.

`BaseFusedOp` and the older `MultiPlatformOp` keep the method that they chose as `_forward_method`. Where they run
`forward_native`, which is PyTorch's operators, the call is a region: `sglang_op::RMSNorm`.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any

from kcap.capture.taps.external import Externals
from kcap.capture.taps.fused import Fused
from kcap.capture.window.window import Window

MODULE = "sglang.srt.utils.custom_op"
SHORTCUT, WATCHED = "_call_directly_in_eager", "_profiling"
FUSED = (("sglang.kernels.fused_op", "BaseFusedOp"), ("sglang.srt.layers.utils.multi_platform", "MultiPlatformOp"))
CHOSEN, NATIVE = "_forward_method", "forward_native"
TAP = "sglang_operators"
PLANNING, PLAN = "sglang.srt.layers.attention.flashinfer_backend", "fast_decode_plan"


def hook_operators(module: ModuleType, window: Window) -> None:
    """Have operators that are registered from now on tell of calls past the dispatcher, if this SGLang has such."""
    shortcut = getattr(module, SHORTCUT, None)
    if shortcut is None:
        return
    known = getattr(module, WATCHED, None) is not None and _asks(shortcut.__code__, WATCHED)
    if not known or len(inspect.signature(shortcut).parameters) != 2:
        error = RuntimeError("operators that this SGLang calls past the dispatcher are not recorded")
        window.tap_failed(TAP, error)
        return
    if window.session.plan:
        setattr(module, WATCHED, lambda: True)
        return

    def shortcut_that_tells(function: Callable[..., Any], operator: Any) -> Any:
        return shortcut(_telling(function, operator, window), operator)

    setattr(module, SHORTCUT, shortcut_that_tells)


MISSING = object()


def _is_tensor(kind: type) -> bool:
    import torch

    return issubclass(kind, torch.Tensor)


PLAIN: Mapping[str, Callable[[type], bool]] = {
    "Tensor": _is_tensor,
    "Optional[Tensor]": lambda kind: kind is type(None) or _is_tensor(kind),
    "int": lambda kind: kind is int,
    "float": lambda kind: kind is float,
    "bool": lambda kind: kind is bool,
}  # which types of values the dispatcher passes on as they are, by the type of a parameter
Left = tuple[Sequence[str], Sequence[Any]]  # parameters that are not positional in a call: names and defaults


class Parameters:
    """Those of an operator, all of PLAIN types. `number`: the operator's."""

    def __init__(self, number: int, arguments: Sequence[Any]) -> None:
        self.number = number
        self._names = [one.name for one in arguments]
        self._types = [str(one.type) for one in arguments]
        self._defaults = [one.default_value if one.has_default_value() else MISSING for one in arguments]
        self._positional = sum(not one.kwarg_only for one in arguments)
        self._left: dict[tuple[Any, ...], Left | None] = {}  # by how many are positional, and the others' names
        self._plain: dict[tuple[type, ...], bool] = {}

    @classmethod
    def of(cls, operator: Any, externals: Externals) -> Parameters | None:
        """None where the dispatcher is to tell of its calls."""
        schema = getattr(getattr(operator, "default", None), "_schema", None)
        if schema is None or any(str(one.type) not in PLAIN for one in schema.arguments):
            return None
        number = externals.dispatched(schema.name)
        return None if number < 0 else cls(number, schema.arguments)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The value of each; None where the dispatcher would convert one, or refuse the call."""
        form = (len(args), *kwargs)
        if form not in self._left:
            self._left[form] = self._left_by(len(args), kwargs)
        left = self._left[form]
        if left is None:
            return None
        values = [*args, *map(kwargs.get, *left)]
        types = tuple(map(type, values))
        if types not in self._plain:
            self._plain[types] = all(PLAIN[name](kind) for name, kind in zip(self._types, types, strict=True))
        return values if self._plain[types] else None

    def _left_by(self, positional: int, names: Iterable[str]) -> Left | None:
        left = self._names[positional:]
        fits = positional <= self._positional and all(name in left for name in names)
        return (left, self._defaults[positional:]) if fits else None


def _telling(function: Callable[..., Any], operator: Any, window: Window) -> Callable[..., Any]:
    """`function`, which is called in the place of `operator`."""
    externals = window.taps.externals

    @functools.cache
    def parameters() -> Parameters | None:
        try:
            return Parameters.of(operator, externals)
        except Exception as error:
            window.tap_failed(TAP, error)
            return None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not externals.listening:
            return function(*args, **kwargs)
        known = parameters()
        values = known.bind(args, kwargs) if known else None
        if known is None or values is None:
            return operator(*args, **kwargs)
        entered = externals.enter_dispatched(known.number, values)
        try:
            return function(*args, **kwargs)
        finally:
            if entered:
                externals.leave()

    return call


def hook_plan(module: Any) -> None:
    """Have SGLang keep a function of its own for FlashInfer's plan, which finds the recorded one while there is one."""
    plan = getattr(module, PLAN, None)
    if plan is None:
        return
    library = sys.modules[plan.__module__]

    def fast_decode_plan(*args: Any, **kwargs: Any) -> Any:
        return getattr(library, PLAN)(*args, **kwargs)

    setattr(module, PLAN, fast_decode_plan)


def _asks(code: CodeType, name: str) -> bool:
    """Whether `code`, or a function made in it, reads the global `name`."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(_asks(constant, name) for constant in inner)


def name_fused(window: Window) -> None:
    """Of the model that has been loaded: before its graphs are captured."""
    try:
        window.taps.fused.record(fused_functions(), "this SGLang has none")
    except Exception as error:
        window.taps.fused.fail(error)


def fused_functions() -> Iterator[Fused]:
    """The operators that SGLang has made, where they run as PyTorch's: kernels, too, may fall back to that."""
    bases = tuple(getattr(sys.modules[module], name) for module, name in FUSED if module in sys.modules)
    for operator in gc.get_objects():
        if issubclass(type(operator), bases):
            for attribute in _attributes(operator):
                yield Fused(operator, attribute, f"sglang_op::{type(operator).__name__}", stateful=True)


def _attributes(operator: Any) -> tuple[str, ...]:
    """`forward_native`, and what an object that has chosen it keeps of it."""
    chosen = vars(operator).get(CHOSEN)
    return (NATIVE, CHOSEN) if getattr(chosen, "__name__", "") == NATIVE else (NATIVE,)
