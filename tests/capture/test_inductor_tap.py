"""Inductor's C++ kernels on the CPU, compiled for real in a process of its own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from fake_graphs import health

import kcap
from kcap.schemas.recording.recording import Call, Recording
from kcap.schemas.recording.values import TensorSpec

Record = Callable[..., Recording]
PROGRAM = """
import sys
from pathlib import Path
import orjson, torch, kcap
from torch._dynamo.utils import counters

records, out = sys.argv[1] == "record", Path(sys.argv[2])
torch.manual_seed(0)
x, w = torch.randn(8, 64), torch.randn(64)

def body(x, w):
    y = torch.nn.functional.rms_norm(x, (64,), w)
    return torch.nn.functional.silu(y[:, :32]) * y[:, 32:]

def after(x):
    return torch.relu(x) + 1

class nothing:
    def __enter__(self): return self
    def __exit__(self, *_): return None
    def step(self, phase): return nothing()

def record(name):
    return kcap.record(out / name) if records else nothing()

results = []
with torch.no_grad():
    early = torch.compile(after)
    results.append(early(x))
    with record("first") as recorder:
        with recorder.step("other"):
            results.append(early(x))
        f = torch.compile(body)
        with recorder.step("prefill"):
            results.append(f(x, w))
        for _ in range(3):
            with recorder.step("decode"):
                results += [f(x, w), x @ x.T]
        torch._dynamo.reset()
        f = torch.compile(body)
        with recorder.step("mixed"):
            results.append(f(x, w))
    between = f(x, w)
    with record("second") as recorder:
        with recorder.step("decode"):
            results += [f(x, w), early(x)]
    results.append(early(x))
groups = ("stats", "frames", "recompiles", "graph_break", "unimplemented")
found = {"results": [r.tolist() for r in results], "counters": {group: dict(counters[group]) for group in groups}}
print(orjson.dumps(found).decode())
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program found with and without recording; where its recordings are."""
    directory = tmp_path_factory.mktemp("inductor")
    script = directory / "program.py"
    script.write_text(PROGRAM)
    found: dict[str, Any] = {"directory": directory}
    for how in ("plain", "record"):
        done = subprocess.run([sys.executable, script, how, directory], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found[how] = orjson.loads(done.stdout)
    return found


@pytest.fixture
def recorded(ran: dict[str, Any]) -> Callable[[str], Recording]:
    return lambda name: kcap.load(ran["directory"] / name)


def cpp(recording: Recording) -> list[Call]:
    return [call for call in recording.calls if call.operator.startswith("cpp::")]


def test_a_cpp_kernel_counts_in_every_step_under_a_name_for_people(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("first")
    _, call = cpp(recording)
    assert call.operator.startswith("cpp::add_mean_mul_pow_rsqrt_silu_slice.s")
    assert {count.phase: count.count for count in call.counts} == {"prefill": 1, "decode": 3, "mixed": 1}
    assert [argument.name for argument in call.args] == ["in_ptr0", "in_ptr1", "out_ptr0", "out_ptr1"]
    assert [argument.value for argument in call.args][:2] == [
        TensorSpec((8, 64), "float32"),
        TensorSpec((64,), "float32", storage=1),
    ]
    assert health(recording, "inductor_cpp").status == "ok"


def test_a_step_that_compiles_has_the_calls_of_one_that_does_not(recorded: Callable[[str], Recording]) -> None:
    """The first step compiles, `mixed` finds its code in a cache, and a step of `decode` compiles nothing."""
    ran: dict[str, dict[str, int]] = {"prefill": {}, "decode": {}, "mixed": {}}
    recording = recorded("first")
    for call in recording.calls:
        for count in call.counts:
            if count.phase in ran and call.operator not in ("aten::matmul", "aten::mm", "aten::numpy_T"):
                ran[count.phase][call.operator] = count.count
    assert ran["prefill"] == ran["mixed"] == {name: count // 3 for name, count in ran["decode"].items()}
    assert health(recording, "dynamo").status == "ok"


def test_a_kernel_compiled_anew_is_the_same_operator_with_its_source(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("first")
    _, call = cpp(recording)
    assert call.launch is not None and call.launch.language == "cpp" and call.launch.kernel is not None
    text = recording.source(call.launch)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert call.launch.kernel == f"{digest}.cpp" and call.operator.endswith(f".s{digest[:8]}")
    assert 'extern "C"' in text


def test_what_was_compiled_before_recording_began_is_recorded(recorded: Callable[[str], Recording]) -> None:
    first, second = recorded("first"), recorded("second")
    early, body = cpp(first)
    assert early.operator.startswith("cpp::add_relu.s") and early.total == 1
    assert {call.operator: call.total for call in cpp(second)} == {early.operator: 1, body.operator: 1}
    assert health(second, "inductor_cpp").status == "ok"
    tap = health(first, "inductor_cpp")
    assert (tap.status, tap.detail) == ("ok", "3 kernels, 1 without the ATen operators that they stand for")


def test_results_and_compilations_are_the_same_with_and_without_recording(ran: dict[str, Any]) -> None:
    assert ran["record"] == ran["plain"]
    assert ran["plain"]["counters"]["stats"]["unique_graphs"] == 4
