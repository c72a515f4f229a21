"""A Relax VM's CUDA graphs, by TVM's own runtime for CUDA over a stand-in of CUDA, which counts what it would run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_relax_vm import PROGRAM, outputs

import kcap
from kcap.schemas.recording.recording import Recording

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tvm") is None or torch.version.cuda is not None,
    reason="needs apache-tvm, and a torch that does not load CUDA itself",
)
DECODES, LATE = 4, 3  # of two sequences, and of three: a graph for each number
GRAPHS = 3  # of a decode step: what runs before, between and after the attention of two layers
SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
DRIVER = Path(__file__).with_name("cuda_stand_in.c")
RUN = f"""
import sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import tvm_ffi, tvm_llama
tvm_ffi.register_global_func("tvm_callback_cuda_compile", lambda source: b"not read", override=True)
{{before}}
tvm_llama.run(sys.argv[1], cuda=True, decodes={DECODES}, late_decodes={LATE})
"""


class Machine:
    """Where CUDA is the stand-in, and a library with CUDA graphs lies."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.library = folder, folder / "llama.so"
        cuda, symbols = folder / "libcudart.so.13", folder / "symbols"
        symbols.write_text("libcudart.so.13 { global: *; };")
        options = ("-shared", "-fPIC", f"-Wl,--version-script={symbols}", f"-Wl,-soname,{cuda.name}")
        subprocess.run(["cc", *options, "-o", cuda, DRIVER], check=True)
        (folder / "libcuda.so.1").symlink_to(cuda.name)
        subprocess.run([sys.executable, PROGRAM, "build", self.library, "--cuda"], check=True, capture_output=True)

    def run(self, name: str, *record: object, before: str = "") -> tuple[str, Counter[str]]:
        """What was said, and how often the stand-in ran each kernel; `before`: what the program does first."""
        program, counts = self.folder / f"{name}.py", self.folder / f"{name}.counts"
        program.write_text(RUN.format(before=before))
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "CUDA_STAND_IN_COUNTS": str(counts)}
        words = [*map(str, record), sys.executable, program, self.library]
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert done.returncode in (0, 3), done.stderr
        lines = (line.split() for line in counts.read_text().splitlines())
        return done.stdout + done.stderr, Counter({kernel: int(times) for kernel, times in lines})

    def record(self, name: str, before: str = "") -> tuple[Recording, str, Counter[str]]:
        path = self.folder / f"{name}.kcap"
        said, ran = self.run(name, sys.executable, "-m", "kcap", "record", "-o", path, "--", before=before)
        return kcap.load(path), said, ran


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def recorded(machine: Machine) -> tuple[Recording, str, Counter[str]]:
    return machine.record("recorded")


def counts(recording: Recording, mode: str | None = None) -> Counter[str]:
    """Invocations by the CUDA kernel that a call launches."""
    total: Counter[str] = Counter()
    for call in recording.kernels():
        assert call.launch is not None
        total[f"{call.launch.function}_kernel"] += sum(c.count for c in call.counts if mode in (None, c.mode))
    return total


def test_each_kernel_counts_as_often_as_cuda_ran_it(recorded: tuple[Recording, str, Counter[str]]) -> None:
    recording, _, ran = recorded
    assert recording.metadata.complete
    assert recording.metadata.steps == {"prefill": 1, "decode": DECODES + LATE, "mixed": 1}
    assert counts(recording) == ran


def test_a_graph_counts_by_its_launches_and_its_first_run_as_eager(
    recorded: tuple[Recording, str, Counter[str]],
) -> None:
    recording, _, _ = recorded
    graphs = [program for program in recording.programs if program.kind == "graph"]
    launches = sorted(sum(count.count for count in graph.counts) for graph in graphs)
    assert launches == [LATE - 1] * GRAPHS + [DECODES - 1] * GRAPHS
    in_graphs, eager = counts(recording, "graph"), counts(recording, "eager")
    for kernel in ("NT_matmul_kernel", "fused_split_silu_multiply_kernel"):  # a layer's, and they are in graphs alone
        assert in_graphs[kernel] == 2 * (DECODES - 1 + LATE - 1)
        assert eager[kernel] == 2 * 2, "as each of the two numbers of sequences was captured"


def test_each_step_tells_the_graphs_that_it_launched(recorded: tuple[Recording, str, Counter[str]]) -> None:
    recording, _, _ = recorded
    launched = Counter(len(recording.program(step.program or 0).graphs) for step in recording.steps)
    captures = 1 + 1 + 2  # the prefill, the mixed step, and the two that captured
    assert launched == {0: captures, GRAPHS: DECODES + LATE - 2}


def test_nothing_changes_for_the_program(recorded: tuple[Recording, str, Counter[str]], machine: Machine) -> None:
    said, ran = machine.run("plain")
    assert outputs(recorded[1]) == outputs(said)
    assert recorded[2] == ran


def test_a_fault_as_a_graph_is_captured_leaves_the_program_running(
    recorded: tuple[Recording, str, Counter[str]], machine: Machine
) -> None:
    fails = """
from kcap.capture.recorder.native_recorder import NativeRecorder
def fails(*_): raise RuntimeError("injected")
NativeRecorder.graph_end = fails
"""
    recording, said, ran = machine.record("fault", before=fails)
    assert (outputs(said), ran) == (outputs(recorded[1]), recorded[2])
    assert "injected" in said
    assert not recording.metadata.complete


def test_graphs_launched_before_their_step_begins_count_in_it(machine: Machine) -> None:
    """As where an engine embeds by graphs: here each step begins only after its kernels, as the next one embeds."""
    late = """
from kcap.capture.engines.mlc import VmSteps
begin, entered, steps = VmSteps.begin_forward, VmSteps.entered, []
VmSteps.begin_forward = lambda self, *args: steps.append(args)
def begins_before(self, function):
    if function == "embed" and steps:
        begin(self, *steps.pop())
    entered(self, function)
VmSteps.entered = begins_before
"""
    recording, _, _ = machine.record("late", before=late)
    assert recording.metadata.steps == {"prefill": 1, "decode": DECODES + LATE - 1, "mixed": 1}, "the last never begins"
    assert counts(recording, "graph")["NT_matmul_kernel"] == 2 * (DECODES - 1 + LATE - 1 - 1)
    assert counts(recording, "eager")["NT_matmul_kernel"] == 2 * 2


@pytest.mark.parametrize("late", [LATE, LATE + 1])
def test_the_script_for_gpus_holds_it_against_the_architecture(
    recorded: tuple[Recording, str, Counter[str]], monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("counts", "fidelity", "marks", "relax_vm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    rows = list(importlib.import_module("relax_vm").of_recording(recorded[0], DECODES, late, 0))
    assert len(rows) == 9
    assert [row.what for row in rows if row.passed] == [
        "the Recording is complete",
        *(("products in graphs", "norms in graphs") if late > LATE else [row.what for row in rows[1:]]),
    ]
