"""Notes of the GPU's clock that say what is in its times."""

from __future__ import annotations

HOST_IN_IT = "the host's time is in it: it waits for the GPU"
GAVE_UP = "the host's time is in it: the kernel that holds the GPU back gave up"
