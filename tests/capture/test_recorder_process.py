"""What the recorder must not do to the program around it: compile, fork, memory. Each in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

import kcap
from kcap.capture.shards.counts import CLOSED, FAILED, MAX_CALLS, MAX_EXACT, OVERFLOW
from kcap.capture.shards.lines import CallLine, ShapesLine
from kcap.capture.shards.reader import read_shard, stems

Python = Callable[..., "subprocess.CompletedProcess[str]"]
both = pytest.mark.parametrize("recorder", ["native", "python"])

COMPILED = """
import contextlib, sys
import orjson, torch, kcap
from torch._dynamo.utils import counters
recorder, backend, output = sys.argv[1:]
torch.manual_seed(0)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
    def forward(self, x):
        x = x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))
        return x[: x.shape[0] // 2 + 1]

model = torch.compile(Block(), dynamic=True, fullgraph=True, backend=backend)
on = contextlib.nullcontext() if recorder == "none" else kcap.record(output, recorder=recorder)
with on, torch.no_grad():
    results = [model(torch.randn(n, 16, generator=torch.Generator().manual_seed(n))).tolist() for n in (7, 9, 33, 8)]
after = model(torch.randn(12, 16, generator=torch.Generator().manual_seed(1))).tolist()
groups = ("stats", "frames", "recompiles", "graph_break", "unimplemented")
counted = {group: dict(counters[group]) for group in groups}
print(orjson.dumps({"results": results, "after": after, "counters": counted}).decode())
"""


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    return {}


@both
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_program_first_compiled_while_recorded_behaves_the_same(
    recorder: str, backend: str, python: Python, plain: dict[str, str], tmp_path: Path
) -> None:
    if backend not in plain:
        plain[backend] = python(COMPILED, "none", backend, "").stdout
    ran = python(COMPILED, recorder, backend, tmp_path / "out")
    assert ran.returncode == 0, ran.stderr
    assert orjson.loads(ran.stdout) == orjson.loads(plain[backend])
    assert orjson.loads(plain[backend])["counters"]["stats"]["unique_graphs"] <= 2
    recording = kcap.load(tmp_path / "out")
    assert all(tap.status in ("ok", "absent") for tap in recording.metadata.taps)
    linears = [call for call in recording.kernels() if "mm" in call.operator or "linear" in call.operator]
    assert sum(call.total for call in linears) == 2 * 4
    assert {call.tensors().__next__()[1].shape[0] for call in linears} <= {7, 9, 33, 8, 16, 32}


FORKED = """
import os, sys
import torch, kcap
recorder, how, output = sys.argv[1:]
a = torch.randn(4, 4)
with torch.no_grad(), kcap.record(output, recorder=recorder) as session:
    with session.step("decode"):
        torch.add(a, a)
    child = os.fork()
    if child == 0:
        for _ in range(50):
            torch.mm(a, a), torch.mul(a, a)
        if how == "step":
            with session.step("decode"):
                torch.mm(a, a)
        if how == "anew":
            with kcap.record(output + ".child", recorder=recorder):
                torch.mul(a, a)
                files = [os.path.realpath(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd")]
                assert sum(file.endswith(".jsonl") for file in files) == (recorder == "native"), files
            os._exit(0)
        os._exit(0) if how == "abrupt" else sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with session.step("decode"):
        torch.add(a, a)
"""


@both
@pytest.mark.parametrize("how", ["abrupt", "orderly", "step", "anew"])
def test_a_fork_leaves_the_recording_to_its_parent(recorder: str, how: str, python: Python, tmp_path: Path) -> None:
    ran = python(FORKED, recorder, how, tmp_path / "out")
    assert ran.returncode == 0, ran.stderr
    recording = kcap.load(tmp_path / "out")
    assert {call.operator: call.total for call in recording.calls} == {"aten::add.Tensor": 2}
    assert recording.metadata.complete
    assert {tap.name for tap in recording.metadata.taps if tap.status == "ok"} >= set(recording.metadata.recorder)
    assert recording.metadata.steps == {"decode": 2}
    if how == "anew":
        child = kcap.load(tmp_path / "out.child")
        assert child.metadata.recorder == recording.metadata.recorder
        assert {call.operator: call.total for call in child.calls} == {"aten::mul.Tensor": 1}


MEMORY = """
import resource, sys, time
import torch, kcap
output, calls = sys.argv[1], int(sys.argv[2])
a = torch.randn(4, 4)

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

with torch.no_grad(), kcap.record(output) as session:
    def work(n):
        for i in range(n):
            torch.add(a, a)
            torch.add(a, i)
            a[i % 4]
            if i % 100 == 0:
                with session.step("decode", [1], [i]):
                    torch.mm(a, a)
                    torch.mul(a, i)
    work(calls // 10)
    before = rss()
    work(calls)
    print(rss() - before)
"""


def test_a_million_calls_take_no_memory(python: Python, tmp_path: Path) -> None:
    ran = python(MEMORY, tmp_path / "out", 333_334)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 4
    recording = kcap.load(tmp_path / "out")
    totals = recording.metadata.totals
    assert totals["kernels"] + totals["views"] > 1_000_000
    assert totals["calls"] < 80
    assert sum(path.stat().st_size for path in recording.path.rglob("*")) < 4 << 20


OVERFLOWING = """
import sys
import torch
from kcap.capture.session import Session
from kcap.capture.window.window import Window
window = Window(Session(sys.argv[1]))
window.session.write()
window.start(loose=True)
base = torch.empty(1)
with torch.no_grad():
    for i in range(int(sys.argv[2])):
        torch.exp(base.expand(1 + i, 0))  # a shape that was not seen before
window.close()
"""


def test_of_more_shapes_than_the_table_holds_every_call_is_counted(python: Python, tmp_path: Path) -> None:
    made = MAX_CALLS + 1000
    ran = python(OVERFLOWING, tmp_path, made)
    assert ran.returncode == 0, ran.stderr
    (stem,) = stems(tmp_path)
    shard = read_shard(stem)
    numbers = [line.id for line in shard.lines(CallLine) if line.operator == "aten::exp"]
    shapes = {line.call: line.shapes for line in shard.lines(ShapesLine)}
    assert len(shapes) == made.bit_length() - MAX_EXACT.bit_length() + 1
    assert len(numbers) == MAX_EXACT + len(shapes) and set(numbers) >= shapes.keys()
    assert sum(sum(shard.loose_counts(number)) for number in numbers) == made
    assert sum(shapes.values()) == made - MAX_EXACT
    assert (shard.header(OVERFLOW), shard.header(FAILED), shard.header(CLOSED)) == (0, 0, 1)
