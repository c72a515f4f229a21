"""Inductor's Triton launcher, by a stand-in for its class: what torch 2.11 and 2.13 give it, told as launches."""

from __future__ import annotations

import contextlib
import importlib
import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kcap.capture.taps.kernels.inductor import Inductor, InductorCpp

pytest.importorskip("triton")
MODULE = "torch._inductor.runtime.triton_heuristics"
REAL = pytest.importorskip(MODULE)


class Heard:
    """Keeps what a tap tells."""

    def __init__(self) -> None:
        self.listening, self.ignored = True, 0
        self.launched_with: list[tuple[int, int, tuple[Any, ...]]] = []
        self.launches: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.sources: set[str] = set()

    def ignoring(self) -> contextlib.nullcontext[None]:
        self.ignored += 1
        return contextlib.nullcontext()

    def failed(self, tap: str, error: BaseException) -> None:
        self.failures.append(f"{tap}: {error}")

    def operator(self, name: str, arguments: Any, work: bool = True) -> int:
        return 0

    def launch(self, fields: dict[str, Any]) -> int:
        self.launches.append(fields)
        return len(self.launches) - 1

    def source(self, name: str, text: bytes) -> None:
        self.sources.add(name)

    def kernel_name(self, name: str, function: str) -> None: ...

    def launched(self, operator: int, launch: int, values: Any, enter: bool = False) -> bool:
        self.launched_with.append((operator, launch, tuple(values)))
        return True


def test_a_kernel_whose_source_nobody_knows_is_told_once_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    generated = ModuleType("generated")
    kernel = vars(generated)["cpp_fused_0"] = math.sqrt
    cache = SimpleNamespace(PyCodeCache=SimpleNamespace(modules=[generated]))
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", cache)
    monkeypatch.setattr("kcap.capture.taps.kernels.inductor._is_kernel", lambda value: value is kernel)
    tap = InductorCpp(Heard())  # type: ignore[arg-type]
    tap.on = True
    tap.refresh()
    assert tap.health() == ("ok", "1 kernels")
    assert vars(generated)["cpp_fused_0"](4.0) == 2.0
    assert tap.health() == ("off", "1 calls of kernels that were compiled before recording began are not recorded")
    tap.uninstall()
    assert vars(generated)["cpp_fused_0"] is kernel


class Function:
    """A `@triton.jit` function whose source cannot be read."""

    def __init__(self, *names: str, constexprs: tuple[int, ...]) -> None:
        self.__name__ = "triton_poi_fused_add_0"
        self.arg_names, self.constexprs = list(names), list(constexprs)


GENERATED = """
import triton
import triton.language as tl


@triton.jit
def triton_poi_fused_add_0(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tl.store(out_ptr0 + xindex, tl.load(in_ptr0 + xindex, xmask) + 1, xmask)
"""


class CachingAutotuner:
    """The parts of inductor's that the tap reads; its first run finds the configuration, as inductor's does."""

    def __init__(self, fn: Function, configs: list[Any], meta: dict[str, Any], constants: dict[Any, Any]) -> None:
        self.fn, self.configs, self.launchers = fn, configs, list[Any]()
        self.triton_meta, self.inductor_meta = {"constants": constants}, meta
        self.ran: list[tuple[Any, ...]] = []

    def run(self, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> str:
        if not self.launchers and not benchmark_run:
            self.autotune_to_one_config(*args, stream=stream)
        self.ran.append(args)
        return "result"

    def autotune_to_one_config(self, *args: Any, stream: Any) -> None:
        for _ in self.configs:
            self.run(*args, stream=stream, benchmark_run=True)
        self.launchers = [SimpleNamespace(config=self.configs[-1])]

    def coordinate_descent_tuning(self) -> None: ...


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def tap(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inductor]:
    """Installed over the stand-in; the classes of grids are inductor's own."""
    fake = ModuleType(MODULE)
    vars(fake).update(CachingAutotuner=CachingAutotuner, GridExpr=REAL.GridExpr)
    monkeypatch.setitem(sys.modules, MODULE, fake)
    found = Inductor(heard)  # type: ignore[arg-type]
    found.install()
    yield found
    found.uninstall()


def config(stages: int = 1, **kwargs: int) -> Any:
    from triton import Config

    return Config(kwargs, num_warps=4, num_stages=stages)


def pointwise(*configs: Any, grid: str = "Grid1D", **meta: Any) -> CachingAutotuner:
    fn = Function("in_ptr0", "out_ptr0", "xnumel", "XBLOCK", constexprs=(3,))
    return CachingAutotuner(fn, list(configs), {"grid_type": grid, **meta}, {})


X, Y = torch.ones(4), torch.ones(4)


def test_the_run_that_finds_the_configuration_counts_once_and_its_benchmarks_never(heard: Heard, tap: Inductor) -> None:
    tuner = pointwise(config(XBLOCK=64), config(XBLOCK=128, stages=3))
    assert [tuner.run(X, Y, 1000, stream=0) for _ in range(3)] == 3 * ["result"]
    assert (len(tuner.ran), heard.ignored) == (5, 1)
    assert heard.launched_with == 3 * [(0, 0, (X, Y, 1000))]
    (launch,) = heard.launches
    assert (launch["grid"], launch["constexprs"]) == ([8, 1, 1], {"XBLOCK": 128})
    assert (launch["num_warps"], launch["num_stages"]) == (4, 3)
    assert tap.health()[0] == "ok" and not heard.failures


def test_what_inductor_compiled_for_without_the_values_is_kept(heard: Heard, tap: Inductor) -> None:
    """A size is an i64 that 16 need not divide, `xnumel` an i32 that it divides; one input is not aligned."""
    fn = Function("in_ptr0", "in_ptr1", "out_ptr0", "ks0", "xnumel", "XBLOCK", constexprs=(5,))
    meta = {"grid_type": "Grid1D", "assert_indirect_indexing": True}
    tuner = CachingAutotuner(fn, [config(XBLOCK=64)], meta, {})
    pointers = dict.fromkeys(("in_ptr0", "in_ptr1", "out_ptr0"), "*bf16")
    divisible = [["tt.divisibility", 16]]
    tuner.triton_meta |= {
        "signature": {**pointers, "ks0": "i64", "xnumel": "i32", "XBLOCK": "constexpr"},
        "configs": [{(0,): divisible, (2,): divisible, (4,): divisible}],
        "enable_fp_fusion": True,
    }
    tuner.run(X, X, Y, 48, 960, stream=0)
    (launch,) = heard.launches
    assert launch["types"] == {"ks0": "i64"} and launch["unspecialized"] == ["in_ptr1", "ks0"]
    assert launch["options"] == {"debug": True, "sanitize_overflow": False, "enable_fp_fusion": True}
    other = CachingAutotuner(fn, [config(XBLOCK=64)], {**meta, "assert_indirect_indexing": False}, {})
    other.run(X, X, Y, 48, 960, stream=0)
    assert not heard.launches[1].keys() & {"types", "unspecialized", "options"}, "one source, compiled in two ways"


def test_a_benchmark_asked_for_is_no_launch(heard: Heard, tap: Inductor) -> None:
    pointwise(config(XBLOCK=64)).run(X, Y, 1000, stream=0, benchmark_run=True)
    assert not heard.launched_with


def test_nobody_is_told_where_nobody_listens(heard: Heard, tap: Inductor) -> None:
    heard.listening = False
    pointwise(config(XBLOCK=64)).run(X, Y, 1000, stream=0)
    assert not heard.launched_with and not heard.launches


def test_the_grid_follows_the_numbers_that_it_is_launched_with(heard: Heard, tap: Inductor) -> None:
    tuner = pointwise(config(XBLOCK=64))
    for numel in (64, 65, 64):
        tuner.run(X, Y, numel, stream=0)
    assert [launch["grid"] for launch in heard.launches] == [[1, 1, 1], [2, 1, 1]]
    assert [launch for _, launch, _ in heard.launched_with] == [0, 1, 0]


def test_a_grid_of_two_dimensions(heard: Heard, tap: Inductor) -> None:
    fn = Function("in_ptr0", "ynumel", "xnumel", "YBLOCK", "XBLOCK", constexprs=(3, 4))
    CachingAutotuner(fn, [config(XBLOCK=16, YBLOCK=8)], {"grid_type": "Grid2D"}, {}).run(X, 20, 40, stream=0)
    assert heard.launches[0]["grid"] == [3, 3, 1]


def test_arguments_that_only_the_grid_needs_are_none_of_the_kernels(heard: Heard, tap: Inductor) -> None:
    """As a user's own Triton kernel that inductor launches: its grid comes after its arguments."""
    fixed = {"fixed_grid": ["_grid_0", "_grid_1", "_grid_2"], "extra_launcher_args": ["_grid_0", "_grid_1", "_grid_2"]}
    tuner = pointwise(config(XBLOCK=64), grid="FixedGrid", **fixed)
    tuner.run(X, Y, 1000, 5, 6, 7, stream=0)
    tuner.run(X, Y, 1000, 5, 6, 8, stream=0)
    assert [launch["grid"] for launch in heard.launches] == [[5, 6, 7], [5, 6, 8]]
    assert heard.launched_with[0][2] == (X, Y, 1000)


@pytest.mark.parametrize("key", [(2,), 2, "xnumel"])
def test_an_argument_specialized_away_is_a_constexpr_of_the_launch(key: Any, heard: Heard, tap: Inductor) -> None:
    """`xnumel` equal to one is a constexpr that generated code does not pass."""
    fn = Function("in_ptr0", "out_ptr0", "xnumel", "XBLOCK", constexprs=(2, 3))
    tuner = CachingAutotuner(
        fn, [config(XBLOCK=1)], {"grid_type": "FixedGrid", "fixed_grid": ["1", "1", "1"]}, {key: 1}
    )
    tuner.run(X, Y, stream=0)
    assert heard.launches[0]["constexprs"] == {"xnumel": 1, "XBLOCK": 1}
    assert heard.launched_with[0][2] == (X, Y)


def test_a_constant_that_is_passed_all_the_same_stays_an_argument(heard: Heard, tap: Inductor) -> None:
    """`xnumel` equal to one, which the kernel does not declare a constexpr."""
    tuner = pointwise(config(XBLOCK=64))
    tuner.triton_meta["constants"] = {"xnumel": 1, "XBLOCK": 64}
    tuner.run(X, Y, 1, stream=0)
    assert heard.launches[0]["constexprs"] == {"XBLOCK": 64}
    assert heard.launched_with == [(0, 0, (X, Y, 1))]


def test_arguments_that_cannot_be_named_switch_the_tap_off_with_the_reason(heard: Heard, tap: Inductor) -> None:
    tuner = pointwise(config(XBLOCK=64))
    assert tuner.run(X, Y, 1000, 7, stream=0) == "result"
    assert tuner.run(X, Y, 1000, stream=0) == "result"
    assert not heard.launched_with
    (failure,) = heard.failures
    assert failure.startswith("inductor: triton_poi_fused_add_0 takes") and "was given 4 arguments" in failure
    assert tap.health() == ("failed", "")


def test_a_launch_that_raises_raises_and_is_no_launch(heard: Heard, tap: Inductor) -> None:
    tuner = pointwise(config(XBLOCK=64))
    tuner.configs = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        tuner.run(X, Y, 1000, stream=0)
    assert not heard.launched_with and not heard.failures


def test_the_interpreters_runs_are_left_to_triton(heard: Heard, tap: Inductor) -> None:
    tuner = pointwise(config(XBLOCK=64))
    tuner.triton_interpret = True  # type: ignore[attr-defined]
    tuner.run(X, Y, 1000, stream=0)
    assert not heard.launched_with


def test_the_class_is_inductors_own_again_afterwards(heard: Heard, tap: Inductor) -> None:
    assert hasattr(CachingAutotuner.run, "__wrapped__")
    tap.uninstall()
    assert not hasattr(CachingAutotuner.run, "__wrapped__")


def test_a_grid_of_no_blocks_launches_nothing(heard: Heard, tap: Inductor) -> None:
    tuner = pointwise(config(XBLOCK=64))
    for numel in (0, 64, 0):
        tuner.run(X, Y, numel, stream=0)
    assert [values for _, _, values in heard.launched_with] == [(X, Y, 64)] and tap.health()[0] == "ok"


def test_an_argument_that_was_none_is_none_and_no_number(heard: Heard, tap: Inductor) -> None:
    """Generated code hands a number over in the place of a None that the kernel was compiled for."""
    fn = Function("in_ptr0", "mask_ptr", "xnumel", "XBLOCK", constexprs=(3,))
    tuner = CachingAutotuner(fn, [config(XBLOCK=64)], {"grid_type": "Grid1D"}, {"mask_ptr": None})
    tuner.run(X, -1, 64, stream=0)
    assert [values for _, _, values in heard.launched_with] == [(X, 64)]
    assert heard.launches[0]["constexprs"] == {"XBLOCK": 64, "mask_ptr": None}


def test_a_kernel_from_inductors_cache_has_the_source_that_it_was_compiled_from(
    heard: Heard, tap: Inductor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch pickles it without its function, globals and lock; 2.11 gives it no other lock."""
    (tmp_path / "compiled_before.py").write_text(GENERATED)
    monkeypatch.syspath_prepend(tmp_path)
    compiled = importlib.import_module("compiled_before").triton_poi_fused_add_0
    CachingAutotuner(compiled, [config(XBLOCK=64)], {"grid_type": "Grid1D"}, {}).run(X, Y, 1000, stream=0)
    REAL.CachingAutotuner.prepare_for_pickle(SimpleNamespace(fn=compiled, launchers=[], benchmark_failure_reasons={}))
    monkeypatch.setitem(sys.modules, MODULE, REAL)
    revived = pickle.loads(pickle.dumps(compiled))
    assert revived._hash_lock is None
    CachingAutotuner(revived, [config(XBLOCK=64)], {"grid_type": "Grid1D"}, {}).run(X, Y, 1000, stream=0)
    assert tap.health()[1].startswith("2 kernels") and not heard.failures
    assert len(heard.sources) == 1 and heard.launched_with == 2 * [(0, 0, (X, Y, 1000))]


def test_an_autotuner_is_known_as_long_as_it_lives_and_as_it_is_tuned(heard: Heard, tap: Inductor) -> None:
    tuner = pointwise(config(XBLOCK=64))
    tuner.run(X, Y, 1000, stream=0)
    tuner.launchers = [SimpleNamespace(config=config(XBLOCK=128))]  # by coordinate descent
    tuner.run(X, Y, 1000, stream=0)
    assert [launch["grid"][0] for launch in heard.launches] == [16, 8] and len(tap._tuned) == 1
    del tuner
    assert not tap._tuned
