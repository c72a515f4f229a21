"""Triton's launches, by its real interpreter in a process of its own."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch
from fake_graphs import health

import kcap
from kcap.capture.taps.kernels.launches import Kernel
from kcap.capture.taps.kernels.triton import Triton, _stored
from kcap.schemas.recording.recording import Call, Recording
from kcap.schemas.recording.seal import holds
from kcap.schemas.recording.values import TensorSpec, TorchConstant

pytest.importorskip("triton")
PROGRAM = """
import contextlib, sys
from pathlib import Path
import orjson, torch, triton, triton.language as tl
import triton.runtime.interpreter as interpreter
import kcap
out, results = Path(sys.argv[1]), {}

@triton.jit
def add(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)

@triton.jit
def scale(x_ptr, n, factor=3.0, BLOCK: tl.constexpr = 32, KIND: tl.constexpr = tl.float32):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n).to(KIND) * factor, mask=i < n)

def bench(kernel_call, quantiles):
    kernel_call()
    return [1.0, 1.0, 1.0]

configs = [triton.Config({"BLOCK": size}, num_warps=2) for size in (16, 64)]
tuned = triton.autotune(configs, key=["n"], do_bench=bench)(add)
guessed = triton.heuristics({"BLOCK": lambda args: 128 if args["n"] > 64 else 64})(add)
namespace = dict(triton=triton, tl=tl)
exec('''
def hidden(x_ptr, n, BLOCK: tl.constexpr):
    pass
''', namespace)
unread = interpreter.InterpretedFunction(namespace["hidden"])
interpreter.InterpretedFunction.rewritten_fn[namespace["hidden"]] = lambda x_ptr, n, BLOCK: None

torch.library.define("kct::outer", "(Tensor x) -> Tensor")
torch.library.impl("kct::outer", "CPU")(lambda x: (add[(4,)](x, 100, BLOCK=32), x + 1)[1])

def grids(x):
    add[(4,)](x, 100, BLOCK=32)
    add[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100, BLOCK=32)
    add[(2, 1, 1)](x, 100, 64)
    add[(4,)](x, 100, BLOCK=32)

def defaults(x):
    scale[(4,)](x, 100)
    scale[(4,)](x, n=100, factor=2.0, num_warps=8)
    scale[(2,)](x, 100, 2.0, 64, tl.float16)

def autotuned(x):
    tuned[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
    tuned[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)

def heuristics(x):
    guessed[(1,)](x, 100)
    guessed[(1,)](x, 50)

def warm(x):
    add.warmup(x, 100, BLOCK=32, grid=(4,))
    add.run(x, 100, BLOCK=32, grid=(4,), warmup=True)

def exec_(x):
    unread[(1,)](x, 100, BLOCK=32)
    add[(4,)](x, 100, BLOCK=32)

def region(x):
    torch.ops.kct.outer(x)

def equal(x):
    add[(4,)](x, 100, BLOCK=32)
    scale[(4,)](x, 100, 1.0, 32)
    scale[(4,)](x, 100, 1, 32)

def wrong(x):
    for launch in (lambda: add[(4,)](x, 100, SIZE=3), lambda: add[lambda meta: 1 / 0](x, 100, BLOCK=32)):
        try:
            launch()
            raise SystemExit("it did not raise")
        except (TypeError, ZeroDivisionError):
            pass
    add[(4,)](x, 100, BLOCK=32)

def broken(x):
    kind = interpreter.InterpretedFunction
    del interpreter.InterpretedFunction
    add.run  # the class is still there, where nobody finds it
    return lambda: setattr(interpreter, "InterpretedFunction", kind)

before = dict(vars(interpreter.InterpretedFunction))
for scenario in (grids, defaults, autotuned, heuristics, warm, exec_, region, equal, wrong):
    plain, x = torch.zeros(100), torch.zeros(100)
    scenario(plain)
    tuned.cache.clear()
    with torch.no_grad(), kcap.record(out / scenario.__name__) as recorder, recorder.step("decode"):
        scenario(x)
        torch.relu(x)
    tuned.cache.clear()
    results[scenario.__name__] = torch.equal(plain, x) and x.any().item() == plain.any().item()
restore = broken(None)
with torch.no_grad(), kcap.record(out / "broken"):
    torch.relu(x)
    add[(4,)](x, 100, BLOCK=32)
restore()
results["restored"] = dict(vars(interpreter.InterpretedFunction)) == before
print(orjson.dumps(results).decode())
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bool]]:
    """Where the recordings are, and what the program found."""
    directory = tmp_path_factory.mktemp("triton")
    script = directory / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(directory)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return directory, orjson.loads(done.stdout)


@pytest.fixture
def recorded(ran: tuple[Path, dict[str, bool]]) -> Callable[[str], Recording]:
    return lambda scenario: kcap.load(ran[0] / scenario)


def launches(recording: Recording) -> list[Call]:
    return [call for call in recording.calls if call.operator.startswith("triton::")]


def arguments(call: Call) -> dict[str | None, Any]:
    return {argument.name: argument.value for argument in call.args}


X = TensorSpec((100,), "float32")


def test_each_grid_is_a_call_of_one_operator_however_it_is_given(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("grids")
    calls = launches(recording)
    assert [(call.launch.grid, call.launch.constexprs, call.total) for call in calls if call.launch] == [
        ([4], {"BLOCK": 32}, 3),
        ([2, 1, 1], {"BLOCK": 64}, 1),
    ]
    assert len({call.operator for call in calls}) == 1 and calls[0].operator.startswith("triton::add.s")
    assert [arguments(call) for call in calls] == 2 * [{"x_ptr": X, "n": 100}]
    assert health(recording, "triton") == ("ok", "1 kernels")


def test_defaults_keywords_and_options_are_told_as_triton_binds_them(recorded: Callable[[str], Recording]) -> None:
    calls = launches(recorded("defaults"))
    assert [arguments(call) for call in calls] == [{"x_ptr": X, "n": 100, "factor": f} for f in (3.0, 2.0, 2.0)]
    known = [(call.launch.constexprs, call.launch.num_warps) for call in calls if call.launch]
    fp32, fp16 = TorchConstant("triton", "fp32"), TorchConstant("triton", "fp16")
    assert known == [
        ({"BLOCK": 32, "KIND": fp32}, None),
        ({"BLOCK": 32, "KIND": fp32}, 8),
        ({"BLOCK": 64, "KIND": fp16}, None),
    ]


def test_an_autotuners_benchmarks_are_no_launches(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("autotuned")
    (call,) = launches(recording)
    assert [call.operator for call in recording.kernels()] == [call.operator, "aten::relu"]
    assert call.launch is not None
    assert (call.total, call.launch.constexprs, call.launch.grid) == (2, {"BLOCK": 16}, [7])
    assert call.launch.num_warps == 2


def test_heuristics_are_constexprs(recorded: Callable[[str], Recording]) -> None:
    calls = launches(recorded("heuristics"))
    assert [call.launch.constexprs for call in calls if call.launch] == [{"BLOCK": 128}, {"BLOCK": 64}]
    assert len({call.operator for call in calls}) == 1


def test_a_warm_up_is_no_launch(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("warm")
    assert launches(recording) == []
    assert [call.operator for call in recording.kernels()] == ["aten::relu"]


def test_a_kernel_without_a_source_is_recorded_and_said(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("exec_")
    hidden, add = launches(recording)
    assert hidden.operator == "triton::hidden.unread" and hidden.total == 1
    assert hidden.launch is not None and hidden.launch.kernel is None and hidden.launch.unread
    status, detail = health(recording, "triton")
    assert status == "ok" and detail == f"2 kernels, 1 without a source (hidden: {hidden.launch.unread})"
    assert add.launch is not None and add.launch.unread is None


def test_a_launch_inside_a_custom_operator_makes_it_a_region(recorded: Callable[[str], Recording]) -> None:
    found = {call.operator.split(".")[0]: (call.kind, call.parent) for call in recorded("region").calls if call.work}
    assert found == {
        "kct::outer": ("region", None),
        "triton::add": ("kernel", "kct::outer"),
        "aten::add": ("kernel", "kct::outer"),
        "aten::relu": ("kernel", None),
    }


def test_what_the_interpreter_computes_with_is_none_of_the_steps_calls(recorded: Callable[[str], Recording]) -> None:
    for scenario in ("grids", "defaults", "heuristics"):
        assert [call.operator for call in recorded(scenario).calls if "triton" not in call.operator] == ["aten::relu"]


def test_results_are_the_same_with_and_without_recording(ran: tuple[Path, dict[str, bool]]) -> None:
    assert ran[1] == dict.fromkeys(ran[1], True) and len(ran[1]) == 10


def test_an_integer_is_not_the_float_it_equals(recorded: Callable[[str], Recording]) -> None:
    factors = [arguments(call).get("factor") for call in launches(recorded("equal"))]
    assert [(type(factor), factor) for factor in factors if factor] == [(float, 1.0), (int, 1)]


def test_sources_are_kept_by_their_hash_and_sealed(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("equal")
    files = sorted(path.name for path in (recording.path / "kernels").iterdir())
    named = sorted({call.launch.kernel for call in launches(recording) if call.launch and call.launch.kernel})
    assert files == named and len(files) == 2
    for call in launches(recording):
        assert call.launch is not None and call.launch.kernel is not None
        text = recording.source(call.launch)
        digest = hashlib.sha256(text.encode()).hexdigest()
        assert call.launch.kernel == f"{digest}.py"
        assert call.operator == f"triton::{call.launch.function}.s{digest[:8]}"
        assert f"def {call.launch.function}(" in text
    assert holds(recording.metadata.seal, files)
    assert not holds(recording.metadata.seal, [*files, "another.py"])


def test_a_wrong_launch_raises_as_triton_does_and_the_tap_goes_on(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("wrong")
    assert sum(call.total for call in launches(recording)) == 1
    assert health(recording, "triton") == ("ok", "1 kernels")


def test_a_triton_without_a_class_costs_its_tap_and_nothing_else(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("broken")
    status, detail = health(recording, "triton")
    assert status == "failed" and "InterpretedFunction" in detail
    assert not recording.metadata.complete
    assert "aten::relu" in {call.operator for call in recording.calls}
    assert launches(recording) == []
    assert {tap.status for tap in recording.metadata.taps if tap.name != "triton"} <= {"ok", "absent"}


def test_a_value_that_cannot_be_a_key_is_a_launch_all_the_same() -> None:
    from kcap.capture.taps.kernels.launches import Kernel, Launches

    heard: list[dict[str, Any]] = []

    class Listener:
        def launch(self, fields: dict[str, Any]) -> int | None:
            heard.append(fields)
            return len(heard) if len(heard) < 4 else None

    known = Launches(Listener())  # type: ignore[arg-type]
    kernel = Kernel(0, [], ["N"], {"function": "f"})
    numbers = [known.launch(kernel, (1,), [n], None, None, {}) for n in ([1, 2], 1, True, 1, 2.0, 3)]
    assert numbers == [1, 2, 3, 2, None, None]
    assert heard[0]["constexprs"] == {"N": [1, 2]}
    assert known.health() == ("off", "0 kernels; 2 launches are not recorded: too many different ones")


def test_arguments_that_a_launch_does_not_tell_are_missing() -> None:
    from kcap.capture.taps.kernels.launches import ABSENT, Kernel

    kernel = Kernel(0, ["x", "n"], ["B", "C"], {})
    assert [list(values) for values in kernel.values_in({"C": 2, "n": 3, "x": 1, "B": 4})] == [[1, 3], [4, 2]]
    assert [list(values) for values in kernel.values_in({"x": 1, "C": 2})] == [[1, None], [ABSENT, 2]]


def test_a_constexpr_that_a_launch_does_not_tell_is_not_its_own() -> None:
    from kcap.capture.taps.kernels.launches import ABSENT, Kernel, Launches

    told: list[dict[str, Any]] = []
    listener: Any = SimpleNamespace(launch=lambda fields: told.append(fields) or len(told))
    launches, kernel = Launches(listener), Kernel(0, [], ["B", "C"], {"function": "f"})
    assert [launches.launch(kernel, (1,), constexprs, None, None, {}) for constexprs in ([ABSENT, 2], [4, 2])] == [1, 2]
    assert [launch["constexprs"] for launch in told] == [{"C": 2}, {"B": 4, "C": 2}]


def test_launches_of_ever_new_grids_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from kcap.capture.taps.kernels import launches as module

    monkeypatch.setattr(module, "MOST_LAUNCHES", 3)
    listener: Any = SimpleNamespace(launch=lambda fields: fields["grid"][0])
    launches, kernel = module.Launches(listener), module.Kernel(0, [], [], {"function": "f"})
    for grid in [*range(1, 9), 1]:
        assert launches.launch(kernel, (grid,), [], None, None, {}) == grid
        assert len(launches._known) <= 3


def test_an_option_is_one_that_this_kernel_does_not_take() -> None:
    from kcap.capture.taps.kernels.launches import Kernel

    told: list[Any] = []
    listener: Any = SimpleNamespace(
        launch=lambda fields: told.append(fields.get("options")) or len(told),
        launched=lambda *_: True,
        failed=pytest.fail,
    )
    tap, one, other = Triton(listener), Named(), Named()
    tap.launches._kernels[one] = Kernel(0, ["x"], [], {"function": "one"})
    tap.launches._kernels[other] = Kernel(0, ["x"], ["num_ctas"], {"function": "other"})
    for kernel, keywords in (
        (one, {"num_ctas": 2}),
        (one, {"maxnreg": 64, "num_warps": 4}),
        (one, {}),
        (other, {"num_ctas": 2}),
    ):
        tap._tell(kernel, {"x": 1, **(keywords if kernel is other else {})}, (1,), None, None, keywords)
    assert told == [{"num_ctas": 2}, {"maxnreg": 64}, None, None]


class Named:
    """As `@triton.jit(repr=...)` makes one."""

    _repr = str


def test_a_function_that_names_its_kernels_itself_is_known_by_these_names() -> None:
    """The profiler sees the name, the recorder the function. Only a GPU compiles it."""
    told: list[tuple[str, str]] = []
    listener: Any = SimpleNamespace(
        kernel_name=lambda name, function: told.append((name, function)), failed=pytest.fail, listening=True
    )
    tap, fn = Triton(listener), Named()
    tap.on = True
    tap.launches._kernels[fn] = Kernel(0, [], [], {"function": "matmul"})
    for name in ("matmul_bf16", "matmul_bf16", "matmul", "matmul_fp8"):
        compiled = SimpleNamespace(name=name)
        run = tap._running(lambda *args, result=compiled, **kwargs: result)
        assert run(fn, grid=(1,), warmup=False) is compiled
    assert told == [("matmul_bf16", "matmul"), ("matmul_fp8", "matmul")]


def test_a_launch_keeps_nothing_that_it_was_given() -> None:
    """Until Python's collector comes: an engine's memory is full before."""
    listener: Any = SimpleNamespace(failed=pytest.fail, listening=True, operator=lambda *_: 0, launch=lambda _: None)
    tap, given = Triton(listener), Named()
    tap.on = True
    tap.launches._kernels[Named] = Kernel(0, ["x"], [], {"function": "matmul"})
    run = tap._running(lambda *args, grid, **kwargs: grid({"x": kwargs["x"]}))
    kept = weakref.ref(given)
    gc.disable()
    try:
        run(Named, x=given, grid=(1,), warmup=False)
        del given
        assert kept() is None
    finally:
        gc.enable()


def test_a_tensor_in_a_wrapper_is_recorded_as_the_tensor_that_it_is() -> None:
    tensor = torch.ones(3)
    wrapped = SimpleNamespace(storage=SimpleNamespace(data=tensor, layout=None), dtype=None)
    assert _stored(wrapped) is tensor
    assert [_stored(value) for value in (7, None, 2.5, "text")] == [7, None, 2.5, "text"] and _stored(tensor) is tensor
