"""Triton's launches replaced by the id of a kernel's source, under Triton's interpreter, and a library's functions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch
from applied_plans import python_solution

from kcap.bench.apply.launches import Launches
from kcap.bench.apply.process import place
from kcap.bench.apply.seams import Functions, Replacements
from kcap.capture.taps.libraries.library import Calls, wrap
from kcap.schemas.recording.records import Argument, Call
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results.plan import Plan, Replacement, TensorView

PROGRAM = """
import sys
from pathlib import Path

import orjson
import torch
import triton
import triton.language as tl

import kcap
from kcap.bench.apply.launches import Launches
from kcap.bench.apply.process import place
from kcap.bench.apply.seams import Replacements
from kcap.schemas.results.plan import Replacement, TensorView

sys.path.insert(0, sys.argv[2])
from applied_plans import python_solution
from test_launch_seams import made_plan

folder = Path(sys.argv[1])


@triton.jit
def double(x_ptr, out_ptr, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * SCALE, mask=at < n)


def launched(x, scale=2, block=32):
    out = torch.zeros_like(x)
    double[lambda meta: (triton.cdiv(len(x), meta["BLOCK"]),)](x, out, len(x), SCALE=scale, BLOCK=block)
    return out


x = torch.arange(100.0)
with torch.no_grad(), kcap.record(folder / "plain"):
    launched(x)
(call,) = [c for c in kcap.load(folder / "plain").calls if c.operator.startswith("triton::")]
plan = made_plan(call, "def run(x):\\n    return x * 2 + 1000\\n", out="1")
replacements = Replacements(place(plan, folder))
seam = Launches(replacements)
with torch.no_grad(), kcap.record(folder / "replaced"):
    seam.install()  # around the recorder, as in an engine
    results = {
        "as recorded": launched(x).tolist() == (x * 2 + 1000).tolist(),
        "another scale": launched(x, scale=3).tolist() == (x * 3).tolist(),
        "another length": launched(x[:64].clone()).tolist() == (x[:64] * 2).tolist(),
    }
replacements.placed[0].function = lambda x: 1 / 0
results["one that raises"] = launched(x).tolist() == (x * 2).tolist()
results["is off"] = replacements.placed[0].off.startswith("ZeroDivisionError")
seam.uninstall()
results["uninstalled"] = launched(x).tolist() == (x * 2).tolist()
results["runs"] = replacements.placed[0].eager
replacements.checks = 1
for name, source in {"right": "x * 2", "wrong": "x * 2 + 1"}.items():
    replacements.placed[0].off, replacements.placed[0].checked = "", 0
    replacements.placed[0].function = eval(f"lambda x: {source}")
    seam = Launches(replacements)
    seam.install()
    results[f"{name}, when compared"] = launched(x).tolist() == (x * 2).tolist()
    results[f"{name}, afterwards"] = bool(replacements.placed[0].off) == (name == "wrong")
    seam.uninstall()
results["launches"] = sum(c.total for c in kcap.load(folder / "replaced").calls if c.operator.startswith("triton::"))
print(orjson.dumps(results).decode())
"""
X = torch.randn(4, 8)
SPEC, OTHER = TensorSpec((4, 8), "float32"), TensorSpec((4, 8), "float32", storage=1)


def made_plan(call: Call, source: str, out: str) -> Plan:
    """A Solution for `call`, whose argument `0` it takes and whose argument `out` it makes."""
    solution = python_solution("made", source)
    spec = dict(call.tensors())["0"]
    views = [
        TensorView(argument=path, shape=list(spec.shape), strides=list(spec.effective_strides)) for path in ("0", out)
    ]
    one = Replacement(
        call=call, seam="launch" if call.launch else "function", definition="made", solution=solution.sha256,
        workloads=[], inputs=views[:1], outputs=views[1:], engine_us={"decode": 2.0}, solution_us=1.0,
    )  # fmt: skip
    return Plan(
        kcap="0", recording="", recording_sha256="", machine={"device": "cpu"}, replacements=[one],
        solutions={one.solution: solution},
    )  # fmt: skip


def test_a_launch_exactly_as_recorded_runs_the_solution(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(here.parents[1])], capture_output=True, text=True, timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = orjson.loads(done.stdout)
    assert found.pop("runs") == 1
    assert found.pop("launches") == 2  # those that were not as recorded
    assert all(found.values()), found


def test_inductors_launcher_runs_the_solution_in_its_place(tmp_path: Path) -> None:
    """On a stand-in for inductor's launcher, which takes a GPU."""
    values = {"in_ptr0": SPEC, "out_ptr0": OTHER, "xnumel": 32}
    arguments = [Argument(name=name, value=value) for name, value in values.items()]
    launch: Any = {"function": "triton_poi_fused", "kernel": "k.py"}
    call = Call(id=0, operator="triton::fused.s1", args=arguments, launch=launch)
    plan = made_plan(call, "def run(x):\n    return x + 1\n", out="1")
    replacements = Replacements(place(plan, tmp_path))
    seam = Launches(replacements)
    seam._known = {"fn": "triton::fused.s1"}
    function = SimpleNamespace(arg_names=["in_ptr0", "out_ptr0", "xnumel", "XBLOCK"], constexprs=[3])
    tuner = SimpleNamespace(fn=function, inductor_meta={})
    seam._operator = lambda fn: "triton::fused.s1" if fn is function else None  # type: ignore[method-assign]
    ran: list[int] = []

    def original(tuner: Any, *args: Any, **kwargs: Any) -> None:
        ran.append(args[2])

    out = torch.zeros(4, 8)
    seam._run_inductor(original, tuner, X, out, 32, stream=0)
    torch.testing.assert_close(out, X + 1)
    assert not ran
    seam._run_inductor(original, tuner, X, out, 31, stream=0)
    seam._run_inductor(original, tuner, X, out, 32, stream=0, benchmark_run=True)
    assert ran == [31, 32]


@pytest.mark.parametrize(("made", "off"), [(1.0, ""), (1.5, "its output 0 is off by")])
def test_inductors_launcher_is_compared_with_what_it_writes(tmp_path: Path, made: float, off: str) -> None:
    values = {"in_ptr0": SPEC, "out_ptr0": OTHER, "xnumel": 32}
    arguments = [Argument(name=name, value=value) for name, value in values.items()]
    launch: Any = {"function": "triton_poi_fused", "kernel": "k.py"}
    call = Call(id=0, operator="triton::fused.s1", args=arguments, launch=launch)
    replacements = Replacements(
        place(made_plan(call, f"def run(x):\n    return x + {made}\n", "1"), tmp_path), checks=1
    )
    seam = Launches(replacements)
    seam._operator = lambda fn: "triton::fused.s1"  # type: ignore[method-assign]
    function = SimpleNamespace(arg_names=["in_ptr0", "out_ptr0", "xnumel", "XBLOCK"], constexprs=[3])
    tuner = SimpleNamespace(fn=function, inductor_meta={})
    out = torch.full((4, 8), 7.0)  # what an earlier step left there
    seam._run_inductor(lambda tuner, x, out, *rest, **more: out.copy_(x + 1), tuner, X, out, 32, stream=0)
    torch.testing.assert_close(out, X + 1)
    assert replacements.placed[0].off.startswith(off) and bool(replacements.placed[0].off) == bool(off)


class Silent:
    """A listener to which nobody listens."""

    listening = False


def test_a_librarys_function_is_asked_by_its_arguments(tmp_path: Path) -> None:
    ran: list[str] = []

    def gemm(a: torch.Tensor, d: torch.Tensor, recipe: int = 1) -> None:
        ran.append("own")

    calls = Calls("library", Silent())  # type: ignore[arg-type]
    wrapped = wrap(gemm, "deep_gemm::gemm", calls)
    arguments = [Argument(name="a", value=SPEC), Argument(name="d", value=OTHER), Argument(name="recipe", value=1)]
    call = Call(id=0, operator="deep_gemm::gemm", args=arguments)
    plan = made_plan(call, "def run(x):\n    return x + 1\n", out="1")
    replacements = Replacements(place(plan, tmp_path))
    seam = Functions(replacements, [calls])
    seam.install()
    out = torch.zeros(4, 8)
    wrapped(X, d=out)
    torch.testing.assert_close(out, X + 1)
    assert not ran
    wrapped(X, out, recipe=2)
    seam.uninstall()
    wrapped(X, out)
    assert ran == ["own", "own"]
