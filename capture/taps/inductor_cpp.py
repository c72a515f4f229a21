"""Inductor: the calls of its C++ kernels on the CPU, seen as generated code binds them."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FrameType, ModuleType
from typing import Any

from kcap.capture.imports import when_imported
from kcap.capture.taps.annotations import Annotations
from kcap.capture.taps.compiled import CompiledKernels
from kcap.capture.taps.external import Externals, contained
from kcap.capture.taps.fragments import bound_in, fragment_of
from kcap.capture.taps.launches import kept

MARK = "__kcap_cpp__"  # on what stands for a kernel: its tap, the kernel, its source
SIGNATURE = re.compile(r'extern "C"[^(]*?\bkernel\s*\(([^)]*)\)')


class InductorCpp(CompiledKernels):
    """Wraps what binds inductor's C++ kernels (of the CPU) to generated code, and what is bound there already."""

    name = "inductor_cpp"

    def __init__(self, listener: Externals) -> None:
        super().__init__(listener)
        self.kernels = self.lost = 0
        self._annotations = Annotations("torch._inductor.codegen.cpp", "CppScheduling")
        self._rebound: list[tuple[ModuleType, str, Any, Any]] = []

    def _hook_all(self) -> None:
        when_imported("torch._inductor.async_compile", self._hook)
        self._annotations.install()

    @contained
    def _hook(self, module: ModuleType) -> None:
        self._methods.around(module.AsyncCompile, "cpp_pybinding", self._bind)

    def uninstall(self) -> None:
        super().uninstall()
        self._annotations.uninstall()
        for module, name, seen, bound in self._rebound:
            if vars(module).get(name) is seen:
                setattr(module, name, bound)
        self._rebound.clear()

    @contained
    def refresh(self) -> None:
        """Look for the kernels that were bound before this tap was there."""
        cache = sys.modules.get("torch._inductor.codecache")
        for module in list(cache.PyCodeCache.modules) if cache else ():
            for name, value in list(vars(module).items()):
                if _is_kernel(value) and getattr(value, MARK, (None,))[0] is not self:
                    self._rebind(module, name, value)

    def _rebind(self, module: ModuleType, name: str, value: Any) -> None:
        _, function, source = getattr(value, MARK, (None, value, None))
        seen = self._seen(function, source or _source_in(module, name))
        self._rebound.append((module, name, seen, value))
        setattr(module, name, seen)

    def _health(self) -> tuple[str, str]:
        if self.lost:
            return "off", f"{self.lost} calls of kernels that were compiled before recording began are not recorded"
        if not self.kernels:
            return "absent", "inductor compiled no C++ kernel"
        return "ok", f"{self.kernels} kernels{self._annotations.trouble}"

    def _bind(self, original: Callable[..., Any], compiler: Any, argtypes: list[str], source: str) -> Any:
        from torch._inductor.codecache import LambdaFuture

        bound = original(compiler, argtypes, source)
        if hasattr(bound, "result"):  # compiled in the background
            return LambdaFuture(lambda: self._seen(bound.result(), source))
        return self._seen(bound, source)

    def _seen(self, function: Callable[..., Any], source: str | None) -> Callable[..., Any]:
        kernel = None if source is None else _CppKernel(source)
        self.kernels += 1

        def run(*args: Any) -> Any:
            if self.on and self.listener.listening:
                if kernel is None:
                    self.lost += 1
                else:
                    if kernel.name is None:
                        self._bound(kernel, run, sys._getframe(1))
                    self._launched(kernel, args)
            return function(*args)

        setattr(run, MARK, (self, function, source))
        return run

    @contained
    def _bound(self, kernel: _CppKernel, run: Callable[..., Any], caller: FrameType) -> None:
        kernel.bound(bound_in(caller, run))

    @contained
    def _launched(self, kernel: _CppKernel, args: tuple[Any, ...]) -> None:
        operator, launch = kernel.numbers(self.listener)
        if launch is not None:
            self.listener.launched(operator, launch, args)


class _CppKernel:
    """A C++ kernel by its source; numbered when it is first called, by the name that generated code gave it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._numbers: tuple[int, int | None] | None = None
        self.name: str | None = None
        self._fragment: str | None = None

    def bound(self, place: tuple[Mapping[str, Any], str] | None) -> None:
        """Take the name, and what the generated code that binds the kernel there says of it."""
        self.name = _human_name(place[1]) if place else "fused"
        self._fragment = fragment_of(*place) if place else None

    def numbers(self, listener: Externals) -> tuple[int, int | None]:
        if self._numbers is None:
            text = self._source.encode()
            digest = hashlib.sha256(text).hexdigest()
            listener.source(f"{digest}.cpp", text)
            operator = listener.operator(f"cpp::{self.name}.s{digest[:8]}", self._parameters())
            fields = {"language": "cpp", "kernel": f"{digest}.cpp", "function": "kernel"}
            fields |= kept(listener, self._fragment)
            self._numbers = operator, listener.launch(fields)
        return self._numbers

    def _parameters(self) -> list[str]:
        match = SIGNATURE.search(self._source)
        return [part.split()[-1].lstrip("*&") for part in match.group(1).split(",")] if match else []


def _is_kernel(value: Any) -> bool:
    return hasattr(value, MARK) or (isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel")


def _source_in(module: ModuleType, name: str) -> str | None:
    """The source of the kernel that the generated `module` binds to `name`; None where its text does not tell."""
    binding = rf"^{name} = async_compile\.cpp_pybinding\(\[.*?\], r'''(.*?)'''\)"
    try:
        match = re.search(binding, Path(str(getattr(module, "__file__", None))).read_text(), re.MULTILINE | re.DOTALL)
    except OSError:
        return None
    return match.group(1) if match else None


def _human_name(name: str) -> str:
    """`cpp_fused_mul_silu_0` -> `mul_silu`."""
    match = re.fullmatch(r"cpp_(?:fused_*)?(\w+?)_*(?:_\d+)?", name)
    return match.group(1) if match else name
