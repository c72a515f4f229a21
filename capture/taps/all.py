"""Every tap beside the dispatcher: installed and taken away together, each with its own health."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import orjson

from kcap.capture.taps import cuda_graphs, external, fused

if TYPE_CHECKING:  # both import torch, which kcap brings into no process by itself
    from kcap.capture.taps.libraries.library import Calls, LibraryTap, Listener


class Tap(Protocol):
    """`install` may find that its library is not there; `health` says so: ok, off, failed or absent, and a detail."""

    name: str

    def install(self) -> None: ...
    def uninstall(self) -> None: ...
    def refresh(self) -> None:
        """Recording starts: look at what came since."""

    def health(self) -> tuple[str, str]: ...


class Host(external.Host, cuda_graphs.Host, Protocol):
    """The window, as taps see it."""


class Library:
    """The tap of a library's functions."""

    def __init__(self, name: str, install: Callable[[Listener], LibraryTap], listener: Listener) -> None:
        self.name = name
        self._install, self._listener = install, listener
        self._tap: LibraryTap | None = None

    def install(self) -> None:
        self._tap = self._install(self._listener)

    def uninstall(self) -> None:
        if self._tap is not None:
            self._tap.undo()

    def refresh(self) -> None:
        if self._tap is not None:
            self._tap.refresh()

    @property
    def calls(self) -> Calls | None:
        return self._tap.calls if self._tap is not None else None

    def health(self) -> tuple[str, str]:
        if self._tap is None or self._tap.calls.off:
            return "failed", ""
        return ("ok", f"{len(self._tap)} functions") if len(self._tap) else ("absent", f"{self.name} was not imported")


class Taps:
    """The taps of a window."""

    def __init__(self, host: Host, directory: Path) -> None:
        self._host = host
        self.externals = external.Externals(host, directory)
        self.graphs = cuda_graphs.CudaGraphs(host)
        self.fused = fused.FusedOperators(self.externals)
        self._all: list[Tap] = []
        self._libraries: list[Tap] = []
        self._modules = 0

    def install(self) -> None:
        """Install each that is not yet; one that fails is noted and left out."""
        from kcap.capture.taps.kernels.ahead_of_time import AheadOfTime
        from kcap.capture.taps.kernels.dynamo import Dynamo
        from kcap.capture.taps.kernels.inductor import Inductor, InductorCpp
        from kcap.capture.taps.kernels.triton import Triton
        from kcap.capture.taps.libraries import deep_gemm, flashinfer, pynccl, tvm_ffi
        from kcap.capture.taps.python_operators import PythonOperators

        if self._all:
            return
        kinds = (Triton, Inductor, InductorCpp, AheadOfTime, Dynamo, PythonOperators)
        kernels = [kind(self.externals) for kind in kinds]
        libraries = (flashinfer, deep_gemm, tvm_ffi, pynccl)
        self._libraries = [Library(module.PACKAGE, module.install, self.externals) for module in libraries]
        self._all = [self.graphs, self.fused, *kernels, *self._libraries]
        self._each(lambda tap: tap.install())

    def add(self, tap: Tap, instead_of: str = "") -> None:
        """Install an engine's own tap; `instead_of`: the one that would see the same calls, which is taken away."""
        replaced = [other for other in self._all if other.name == instead_of]
        self._all = [*(other for other in self._all if other not in replaced), tap]
        self._libraries = [other for other in self._libraries if other not in replaced]
        self._each(lambda other: other.uninstall(), replaced)
        self._each(lambda added: added.install(), [tap])

    def library_calls(self) -> list[Calls]:
        """The way of each library's calls."""
        return [tap.calls for tap in self._libraries if isinstance(tap, Library) and tap.calls is not None]

    def refresh(self) -> None:
        self._modules = len(sys.modules)
        self._each(lambda tap: tap.refresh())

    def look(self) -> None:
        """Find what libraries imported since: cheap enough for every step and capture."""
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._each(lambda tap: tap.refresh(), self._libraries)

    def uninstall(self) -> None:
        self._each(lambda tap: tap.uninstall())

    def lines(self) -> list[bytes]:
        """A shard's line for each tap that has anything to say."""
        healths = [(tap.name, *tap.health()) for tap in self._all]
        return [
            orjson.dumps({"t": "tap", "name": name, "status": status, "detail": detail})
            for name, status, detail in healths
            if status != "failed"  # its failure is noted already
        ]

    def _each(self, act: Callable[[Tap], None], taps: list[Tap] | None = None) -> None:
        for tap in self._all if taps is None else taps:
            try:
                act(tap)
            except Exception as error:
                self._host.tap_failed(tap.name, error)
