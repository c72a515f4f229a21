"""On a GPU: what the recorder does there breaks no capture of a CUDA graph, and tells what each node of it is."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kcap
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.values import tensors
from kcap.schemas.results import coverage

Record = Callable[..., Recording]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]


@torch.library.custom_op("kcaptest::looked_up", mutates_args=())
def looked_up(x: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    return x + block_table.sum()


def test_a_capture_inside_the_recording_is_left_whole(record: Record) -> None:
    x = torch.ones(300, device="cuda")
    table = torch.arange(6, device="cuda", dtype=torch.int32)
    looked_up(x, table)
    torch.cuda.synchronize()
    out: list[torch.Tensor] = []

    def body(_: Any) -> None:
        for size in (4, 200):  # the first sampled tensor of all comes in a capture; then some wait while one is on
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out.extend(looked_up(x[: i + 1], table) for i in range(size))
            graph.replay()
            for i in range(100):
                looked_up(torch.ones(i + 1, device="cuda"), table)
        torch.cuda.synchronize()

    recording = record(body)
    assert recording.metadata.complete
    assert all(y.eq(16).all() for y in out)
    held = [tensor for sample in recording.samples for tensor in sample.tensors.values()]
    assert held
    assert {(tensor.low, tensor.high) for tensor in held} == {(0, 5)}


def test_what_a_graph_computes_is_sampled_after_its_launch(record: Record) -> None:
    """Each layer's table is the graph's own; what comes after the last would be given its memory."""
    x, base, n = (torch.zeros(6, device="cuda", dtype=torch.int32) for _ in range(3))
    out: list[torch.Tensor] = []

    def layers() -> None:
        for layer in range(3):
            out.append(looked_up(x, base + n + layer))
        out.extend(torch.full_like(x, 99) + n for _ in range(20))

    layers()
    torch.cuda.synchronize()

    def body(recorder: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        for k in (1, 2, 3):
            n.fill_(k)
            with recorder.step("decode"):
                graph.replay()
        torch.cuda.synchronize()

    recording = record(body)
    sampled = [sample for sample in recording.samples if "looked_up" in recording.calls[sample.call].operator]
    values = [(sample.step, recording.value(table).tolist()) for sample in sampled for table in sample.tensors.values()]
    assert values == [(k - 1, [k] * 6) for k in (1, 2, 3)]


class Mapped:
    """Pinned memory of the host, which torch takes for a tensor of the GPU's, as engines have some."""

    def __init__(self, held: torch.Tensor) -> None:
        whole = {"shape": tuple(held.shape), "typestr": "<i4", "data": (held.data_ptr(), False), "version": 3}
        self.__cuda_array_interface__ = whole


def test_memory_that_the_host_shares_is_sampled_without_a_wait(record: Record) -> None:
    held = torch.arange(6, dtype=torch.int32).pin_memory()
    table = torch.as_tensor(Mapped(held), device="cuda")
    assert table.is_cuda and table.data_ptr() == held.data_ptr()
    waited = []

    def body(_: Any) -> None:
        for size in range(1, 8):
            torch.cuda._sleep(200_000_000)
            slept = torch.cuda.Event()
            slept.record()
            looked_up(torch.ones(size, device="cuda"), table)
            waited.append(slept.query())
            torch.cuda.synchronize()

    recording = record(body)
    assert not any(waited[1:])  # with the first comes what is allocated once
    sampled = [sample for sample in recording.samples if "looked_up" in recording.calls[sample.call].operator]
    assert len(sampled) == 7
    assert {(t.low, t.high) for sample in sampled for t in sample.tensors.values()} == {(0, 5)}
    call = recording.calls[sampled[-1].call]
    assert [spec.mapped for _, spec in tensors([argument.value for argument in call.args])] == [False, True]
    rebuilder = Rebuilder("cuda:0", "cuda", recording.path)
    inputs = rebuilder.build(rebuilder.resolve(call, sampled[-1]))
    assert all(value.is_cuda for value in inputs.args)
    on_host = ctypes.cast(inputs.args[1].data_ptr(), ctypes.POINTER(ctypes.c_int32))
    torch.cuda.synchronize()
    assert on_host[:6] == [0, 1, 2, 3, 4, 5]


BRANCHES = """
import torch

import kcap

side = torch.cuda.Stream()
a, b = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))


def forward():
    here = torch.cuda.current_stream()
    side.wait_stream(here)
    x = a @ b
    with torch.cuda.stream(side):
        y = torch.softmax(b.float(), -1)
        y = y.sum(-1)
    z = torch.sigmoid(x) @ b
    here.wait_stream(side)
    return z.float().sum(-1) + y.zero_()


with kcap.step("prefill"):
    forward()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = forward()
for _ in range(24):
    with kcap.step("decode"):
        graph.replay()
torch.cuda.synchronize()
"""


def test_branches_of_a_graph_are_told_apart(tmp_path: Path) -> None:
    """What runs beside something else starts in another order than it was captured in."""
    program, output = tmp_path / "branches.py", tmp_path / "branches.kcap"
    program.write_text(BRANCHES)
    command = [sys.executable, "-m", "kcap", "record", "--check-coverage", "-o", str(output), "--", sys.executable]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, timeout=300)
    recording = kcap.load(output)
    steps = list(coverage.read(output / coverage.FILE))
    seen = {kernel.reason or recording.calls[kernel.call].operator for step in steps for kernel in step.kernels}
    kernels = {call.operator for call in recording.kernels() if call.total}
    assert steps and all(step.explained_us == step.gpu_us for step in steps), (seen, done.stderr)
    assert {"aten::matmul", "aten::softmax.int", "aten::sigmoid", "aten::zero_"} <= seen <= kernels
