"""What kcap adds to what reaches no dispatcher, in microseconds: to a launch of a Triton kernel (inductor's, of sizes
that it knows and of new ones; an engine's own with as many parameters as attention has), to a library's call of five
tensors, and to a launch of a CUDA graph.

    python scripts/launch_overhead.py [--launches 20000] [--sizes 500]

Needs Triton and no GPU: stand-ins take the places of inductor's autotuner, of `JITFunction.run`, of the library and of
the graph, so that nothing but kcap's taps and its recorder run. Each figure is the smallest of five rounds, less that
of the same loop without kcap. Compiled code that is in no CUDA graph (a mixed step of a size that none was captured
for) launches some hundreds of kernels so.
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
from triton.runtime.jit import JITFunction

from kcap.capture.session import Session
from kcap.capture.taps.libraries.library import Calls, wrap
from kcap.capture.window.step import StepShape
from kcap.capture.window.window import Window

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def add_one(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tl.store(out_ptr0 + xindex, tl.load(in_ptr0 + xindex, xmask) + 1, xmask)


@triton.jit
def attend({parameters}, {constexprs}):
    pass
"""
TENSORS, NUMBERS, CONSTEXPRS = 9, 18, 13  # of SGLang's attention over a prefill
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


class Graph:
    """What the tap sees of `torch.cuda.CUDAGraph`."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


def store(keys: Any, values: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    """As a library has it."""


def bound(fn: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """What the tap sees of `JITFunction.run`: the grid is asked for when all arguments are bound."""
    grid(dict(zip(fn.arg_names, args, strict=False)) | {name: kwargs[name] for name in fn.arg_names[len(args) :]})


def kernels_in(folder: Path) -> Any:
    """The kernels, from a file, for their sources are read."""
    parameters = ", ".join(f"p{i}" for i in range(TENSORS + NUMBERS))
    constexprs = ", ".join(f"c{i}: tl.constexpr" for i in range(CONSTEXPRS))
    text = SOURCE.replace("{parameters}", parameters).replace("{constexprs}", constexprs)
    (folder / "kernels.py").write_text(text)
    spec = importlib.util.spec_from_file_location("kernels", folder / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    JITFunction.run = bound  # type: ignore[assignment, method-assign]
    x = torch.ones(8)
    known = [1024] * given.launches
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        kernels = kernels_in(Path(folder))
        tuner, values = Autotuner(kernels.add_one), [*[x] * TENSORS, *range(NUMBERS)]
        fixed = {f"c{i}": i for i in range(CONSTEXPRS)} | {"num_warps": 8, "num_stages": 1}

        def launch(size: int) -> None:
            tuner.run(x, x, size, stream=0)

        def launch_own(_: int) -> None:
            kernels.attend.run(*values, grid=lambda _: (1, 32, 4), warmup=False, **fixed)

        session, graph = Session(folder), Graph()
        window = Window(session)
        stored = wrap(store, "library::store", Calls("library", window.taps.externals))

        def call(_: int) -> None:
            stored(x, x, x, x, x)

        def replay(_: int) -> None:
            graph.replay()

        runs = (launch, launch_own, call, replay)
        bare = [min(us(run, known) for _ in range(ROUNDS)) for run in runs]
        window.register()
        window.taps.graphs.install(Graph)
        window.start()
        graph.capture_begin()
        torch.relu(x)
        graph.capture_end()
        window.begin(StepShape("decode", [1], [1]))
        again, own, library, replayed = (
            min(us(run, known) for _ in range(ROUNDS)) - without for run, without in zip(runs, bare, strict=True)
        )
        first = (range(2048 + number * given.sizes, 2048 + (number + 1) * given.sizes) for number in range(ROUNDS))
        new = min(us(launch, list(sizes)) for sizes in first) - bare[0]
        window.end()
        window.close()
    print(f"a launch of a known size  +{again:6.2f} us")
    print(f"the first of a size       +{new:6.2f} us")
    print(f"one of 40 parameters      +{own:6.2f} us, not inductor's")
    print(f"a library's call          +{library:6.2f} us")
    print(f"a CUDA graph's launch     +{replayed:6.2f} us")


if __name__ == "__main__":
    main()
