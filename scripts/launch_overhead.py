"""What kcap adds to a launch of inductor's Triton kernels, in microseconds: of sizes that it knows, and of new ones.

    python scripts/launch_overhead.py [--launches 20000] [--sizes 500]

Needs Triton and no GPU: a stand-in takes the place of inductor's autotuner, so that nothing but kcap's tap and its
recorder run. Each figure is the smallest of five rounds, less that of the same loop without kcap. Compiled code that is
in no CUDA graph (a mixed step of a size that none was captured for) launches some hundreds of kernels so.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.runtime import triton_heuristics

import kcap

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def add_one(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tl.store(out_ptr0 + xindex, tl.load(in_ptr0 + xindex, xmask) + 1, xmask)
"""
ROUNDS = 5


class Autotuner:
    """What the tap reads of inductor's, with a configuration that is chosen; it launches nothing."""

    def __init__(self, fn: Any) -> None:
        from triton import Config

        self.fn, self.launchers = fn, [SimpleNamespace(config=Config({"XBLOCK": 128}, num_warps=4, num_stages=1))]
        self.triton_meta: dict[str, Any] = {"constants": {}}
        self.inductor_meta = {"grid_type": "Grid1D"}

    def run(self, *args: Any, stream: int) -> None: ...

    def autotune_to_one_config(self, *args: Any) -> None: ...

    def coordinate_descent_tuning(self, *args: Any) -> None: ...


def kernel_in(folder: Path) -> Any:
    """`add_one`, from a file, for its source is read."""
    (folder / "kernels.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("kernels", folder / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.add_one


def us(launch: Callable[[int], None], sizes: list[int]) -> float:
    """Microseconds of a launch, over `sizes`."""
    began = time.perf_counter()
    for size in sizes:
        launch(size)
    return (time.perf_counter() - began) / len(sizes) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20_000, help="of one size, in a round")
    parser.add_argument("--sizes", type=int, default=500, help="new ones in a round")
    given = parser.parse_args()
    triton_heuristics.CachingAutotuner = Autotuner  # type: ignore[misc, assignment]
    x = torch.ones(8)
    known = [1024] * given.launches
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        tuner = Autotuner(kernel_in(Path(folder)))

        def launch(size: int) -> None:
            tuner.run(x, x, size, stream=0)

        bare = min(us(launch, known) for _ in range(ROUNDS))
        with kcap.record(Path(folder) / "recorded.kcap"), kcap.step("decode"):
            launch(1024)
            again = min(us(launch, known) for _ in range(ROUNDS))
            first = (range(2048 + number * given.sizes, 2048 + (number + 1) * given.sizes) for number in range(ROUNDS))
            new = min(us(launch, list(sizes)) for sizes in first)
    print(f"a launch of a known size  +{again - bare:6.2f} us")
    print(f"the first of a size       +{new - bare:6.2f} us")


if __name__ == "__main__":
    main()
