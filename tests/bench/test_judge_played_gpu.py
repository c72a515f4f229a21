"""The whole judge with a GPU that is played, from the first draw to the verdict: how it goes on where CUDA refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from played_memory import PlayedMemory, build_library, build_tensors
from solution_files import solution

from kcap.bench.judge import worker
from kcap.bench.judge.driver.device import Gpu
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, DefinitionTensor, RandomInput, Workload

pytestmark = pytest.mark.alone

HERE = Path(__file__).parent
MATRIX = DefinitionTensor(shape=["m", "n"], dtype="float32")
RETURNS = "import played\n\ndef run(x):\n    y = played.empty_like(x)\n    played.double(x, y{})\n    return y\n"
DOUBLE = Definition(
    name="double",
    op_type="test",
    axes={"m": AxisVar(), "n": AxisConst(value=4)},
    inputs={"x": MATRIX},
    outputs={"y": MATRIX},
    reference=RETURNS.format(", 0.0002"),
)
WRITES = "import ctypes\nimport played\n{}\ndef run(x, y):\n    {}\n    played.double(x, y)\n"
KEEPS = """import played
KEPT = []

def run(x):
    if not KEPT:
        KEPT.append(played.empty_like(x))
    played.double(x, KEPT[0])
    return KEPT[0]
"""
REFUSED = "if played.captured: raise RuntimeError('operation not permitted when stream is capturing')"
FIRST = "if played.captured and not played.calls: raise RuntimeError('compiled while the stream was capturing')"
ABSENT = "if played.captured: return"
RESERVES = "ctypes.CDLL(played.RUNTIME).cudaDeviceSetLimit(6, 1 << 20)"


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("played")
    folder.chmod(0o755)
    runtime = build_library(folder)
    tensors = folder / "made.so"
    tensors.write_bytes(build_tensors().read_bytes())
    (folder / "scratch").mkdir()
    session = {"device": "cuda:0", "threads": 1, "seconds": 0.02, "timeout": 20, "scratch": str(folder / "scratch")}
    told = {"device": "cuda:0", "device_name": "played", "torch": "x", "threads": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAYED_RUNTIME", str(runtime))
        patch.setenv("LD_LIBRARY_PATH", str(folder), prepend=os.pathsep)
        patch.setenv("PLAYED_TENSORS", str(tensors))
        patch.setenv("PYTHONPATH", str(HERE / "played_gpu"), prepend=os.pathsep)
        patch.setattr(worker, "describe_device", lambda device, threads: (told, Gpu(1 << 14, 1 << 30)))
        patch.setattr(worker, "GpuMemory", lambda device: PlayedMemory(runtime))
        patch.setattr(worker, "prepare_draws", lambda device: None)
        opened = worker.open_judge(session)
    yield opened
    opened.close()
    opened.server.close()


def outcome(judge, source, definition=DOUBLE):
    destination = "run(x, y)" in source
    name = f"s{abs(hash(source))}"
    mine = solution({"main.py": source}, name=name, destination_passing_style=destination, definition=definition.name)
    workload = Workload(uuid="w", axes={"m": 64}, inputs={"x": RandomInput()})
    return judge.judge(mine, definition, workload)


@pytest.mark.parametrize(
    ("source", "method"),
    [
        (RETURNS.format(""), "graph"),
        (WRITES.format("", ""), "graph"),
        (WRITES.format("", FIRST), "graph"),
        (WRITES.format("", REFUSED), "host"),
        (KEEPS, "host"),
    ],
    ids=["returns", "writes", "makes_much_at_its_first_call", "cannot_be_captured", "returns_the_same_memory"],
)
def test_honest_solution_passes_whatever_of_it_cuda_refuses(judge, source, method):
    found = outcome(judge, source)
    assert found.status == "PASSED", f"{found.reason} {found.log}"
    assert (found.time.method, found.time.cache, found.reference.method) == (method, "cold", "graph")
    assert found.time.median_us > 80 and found.reference.median_us > 160


@pytest.mark.parametrize(
    ("gates", "why", "told"),
    [(True, "or needs its process", ["its", "its reference's"]), (False, "one could not wait for it", [""])],
)
def test_what_is_launched_while_the_clock_runs_is_told(judge, monkeypatch, gates, why, told):
    monkeypatch.setattr("kcap.bench.judge.candidate.PATIENCE_S", 30)  # a machine that others work on passes a gate late
    assert not outcome(judge, RETURNS.format("")).notes
    monkeypatch.setattr("kcap.bench.judge.candidate.PATIENCE_S", 1e-6)
    monkeypatch.setattr(judge.limits.gpu_memory, "gates", gates)
    found = outcome(judge, RETURNS.format(", 0.0001"))
    assert (found.status, found.time.method) == ("PASSED", "graph"), f"{found.reason} {found.log}"
    assert [note.partition("graph")[0].strip() for note in found.notes if why in note] == told


def test_what_may_be_written_in_place_is(judge):
    """As a cache is; of a Definition that does not say so it is refused."""
    source = "import played\n\ndef run(x):\n    played.double(x, x)\n    return x\n"
    said = {"name": "double_in_place", "tags": ["in_place:x=y"]}
    found = outcome(judge, source, Definition.model_validate(DOUBLE.model_dump() | said))
    assert found.status == "PASSED", f"{found.reason} {found.log}"
    assert found.time.method == "graph"
    refused = outcome(judge, source)
    assert (refused.status, refused.reason) == ("REWARD_HACK", "it changed its input x")


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        (WRITES.format("", ABSENT), "REWARD_HACK", "do not depend on its inputs"),
        (WRITES.format(RESERVES, ""), "REWARD_HACK", "keeps part of the GPU's L2"),
        (WRITES.format("", "raise RuntimeError('CUDA error: lost')"), "RUNTIME_ERROR", "CUDA error: lost"),
    ],
    ids=["absent_from_the_graph", "reserves_the_l2", "raises"],
)
def test_what_does_not_pass_says_why(judge, source, status, reason):
    found = outcome(judge, source)
    assert (found.status, reason in found.reason) == (status, True), found.reason
