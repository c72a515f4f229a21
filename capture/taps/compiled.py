"""What the taps of compiled kernels' launches share: their methods wrapped, and whether they are on."""

from __future__ import annotations

from kcap.capture.taps.external import Externals
from kcap.capture.taps.methods import Methods


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

    def _hook_all(self) -> None:
        raise NotImplementedError

    def _health(self) -> tuple[str, str]:
        raise NotImplementedError
