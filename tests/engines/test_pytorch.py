"""PyTorch programs as their users write them, recorded by `kcap record -- python program.py`: a transformers model
among them, with the counts that its architecture demands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.exceptions import Exit

import kcap
from kcap.capture.window.profiled import MOST_STEPS
from kcap.commands.record import command
from kcap.errors import PARTIAL
from kcap.schemas.recording.recording import Recording
from kcap.schemas.results.coverage import CoverageSummary
from kcap.system import machine

pytestmark = pytest.mark.engine
Kcap = Callable[..., "subprocess.CompletedProcess[str]"]
Record = Callable[..., Recording]
LAYERS, PROMPT, OUTPUT = 2, 5, 4
LINEARS = 7 * LAYERS + 1

GENERATES = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=97, max_position_embeddings=64,
)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(3, 13).reshape(2, 5)

def generate(**more):
    given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None, **more}
    return model.generate(ids, max_new_tokens=4, do_sample=False, **given).tolist()

outputs = [generate(), generate(cache_implementation="static")]
"""
AT_EXIT = """
import atexit
atexit.register(lambda: plain(torch.ones(9, 4)))

"""
STEPS_OF_A_GENERATE = [("prefill", [PROMPT] * 2, [PROMPT] * 2)] + [
    ("decode", [1] * 2, [PROMPT + token] * 2) for token in range(1, OUTPUT)
]
OTHER_STEPS = """
open(sys.argv[1], "w").write(json.dumps(outputs))

import threading
import kcap

plain = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
with torch.inference_mode():
    first = model(ids[:1], use_cache=True)
    torch.erf(first.logits)
    model(ids[:1, :1], past_key_values=first.past_key_values)
    plain(torch.ones(2, 4))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(input_ids=ids, use_cache=False)
    torch.compile(model.__call__, backend="eager", fullgraph=True)(ids[:1], use_cache=False)
    thread = threading.Thread(target=torch.no_grad()(lambda: plain(torch.zeros(7, 4))))
    thread.start()
    thread.join()
    with kcap.step("decode", [1], [9]):
        torch.erf(plain(torch.ones(5, 4)))
    for fails in (lambda: plain(torch.ones(5, 5)), lambda: generate(stopping_criteria=[lambda *_: 1 / 0])):
        try:
            fails()
        except (RuntimeError, ZeroDivisionError):
            pass
    plain(torch.ones(2, 4))

class Waits(torch.nn.Module):
    def forward(self):
        begun.set()
        done.wait(60)

def begin_another(*given, **more):
    if not begun.is_set():
        thread.start()
        begun.wait(60)
    return torch.zeros(len(ids), dtype=torch.bool)

begun, done, thread = threading.Event(), threading.Event(), threading.Thread(target=Waits())
generate(stopping_criteria=[begin_another])
done.set()
thread.join()
"""
STEPS_AFTER = [
    ("prefill", [PROMPT], [PROMPT], LINEARS),
    ("decode", [1], [PROMPT + 1], LINEARS),
    ("other", [], [], 1),
    ("prefill", [PROMPT] * 2, [PROMPT] * 2, LINEARS),
    ("prefill", [PROMPT] * 2, [PROMPT] * 2, LINEARS),
    ("prefill", [PROMPT], [PROMPT], LINEARS),
    ("other", [], [], 1),
    ("decode", [1], [9], 1),
    ("other", [], [], 1),  # its operator raised
    ("prefill", [PROMPT] * 2, [PROMPT] * 2, LINEARS),  # the generate that raised after it
    ("other", [], [], 1),
    *((*step, LINEARS) for step in STEPS_OF_A_GENERATE),
    ("other", [], [], 1),  # the program's own, at its exit
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, kcap_record: Kcap) -> tuple[Recording, list[list[list[int]]]]:
    """A transformers model's Recording, and the tokens that it generated."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    directory = tmp_path_factory.mktemp("transformers")
    (directory / "program.py").write_text(GENERATES.replace("\n\n", AT_EXIT, 1) + OTHER_STEPS)
    done = kcap_record(
        directory / "out", "--", sys.executable, directory / "program.py", directory / "outputs", PYTHONPATH=""
    )
    assert done.returncode == 0, done.stderr
    return kcap.load(directory / "out"), json.loads((directory / "outputs").read_text())


@pytest.fixture(scope="module")
def recording(ran: tuple[Recording, list[list[list[int]]]]) -> Recording:
    return ran[0]


def linears(recording: Recording, program: int) -> int:
    return sum(call.operator == "aten::linear" for call in recording.ran(recording.programs[program]))


def test_prefill_and_decode_are_told_apart_whatever_the_cache(recording: Recording) -> None:
    found = [(step.phase, step.queries, step.lengths) for step in recording.steps]
    assert found[: 2 * OUTPUT] == STEPS_OF_A_GENERATE * 2


def test_every_forward_has_the_linears_of_its_layers_and_its_sampling(recording: Recording) -> None:
    for step in recording.steps[: 2 * OUTPUT] + recording.steps[-OUTPUT - 1 : -1]:
        ran = Counter(call.operator for call in recording.ran(recording.programs[step.program]))
        assert (ran["aten::linear"], ran["aten::scaled_dot_product_attention"]) == (LINEARS, LAYERS)
        assert ran["aten::argmax"] == 1
    total = sum(call.total for call in recording.calls if call.operator == "aten::argmax")
    assert total == 3 * OUTPUT + 1, "and in the generate that raised, nowhere else"


def test_a_model_called_by_hand_or_compiled_and_a_plain_module_are_steps(recording: Recording) -> None:
    found = [(step.phase, step.queries, step.lengths, linears(recording, step.program)) for step in recording.steps]
    assert found[2 * OUTPUT :] == STEPS_AFTER


def test_what_runs_outside_steps_is_of_phase_other(recording: Recording) -> None:
    erf = [
        (count.phase, count.count) for call in recording.calls if call.operator == "aten::erf" for count in call.counts
    ]
    assert sorted(erf) == [("decode", 1), ("other", 1)]
    in_steps = sum(linears(recording, step.program) for step in recording.steps)
    assert sum(call.total for call in recording.calls if call.operator == "aten::linear") == in_steps


def test_the_recording_names_the_model_and_is_whole(recording: Recording) -> None:
    metadata = recording.metadata
    assert (metadata.framework, metadata.model, metadata.layers_recorded) == (
        "transformers",
        "LlamaForCausalLM",
        LAYERS,
    )
    assert metadata.framework_version
    assert metadata.complete, metadata.notes


def test_the_tokens_are_the_same_with_and_without(ran: tuple[Recording, list[list[list[int]]]]) -> None:
    here: dict[str, list[list[list[int]]]] = {}
    exec(GENERATES, here)
    assert ran[1] == here["outputs"]
    assert len(ran[1][0][0]) == PROMPT + OUTPUT


@pytest.mark.gpu
@pytest.mark.slow
def test_a_compiled_generate_replays_graphs_in_its_steps(tmp_path: Path, kcap_record: Kcap) -> None:
    """On a GPU transformers compiles a model with a static cache, and inductor captures it."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    program = GENERATES.replace(".eval()", ".eval().cuda()").replace("reshape(2, 5)", "reshape(2, 5).cuda()")
    (tmp_path / "program.py").write_text(program)
    done = kcap_record(tmp_path / "out", "--", sys.executable, tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    recording = kcap.load(tmp_path / "out")
    found = [(step.phase, step.queries, step.lengths) for step in recording.steps]
    assert found == STEPS_OF_A_GENERATE * 2
    assert linears(recording, recording.steps[OUTPUT - 1].program) == LINEARS


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """`record(code, program)` runs `kcap record` here, where torch is imported already, to end with `code`."""
    monkeypatch.setenv("PYTHONPATH", "")

    def run(code: int, program: Path, *options: str) -> Recording:
        words = [*options, "-o", str(tmp_path / "out"), "--", sys.executable, str(program)]
        context = command.make_context("record", words)
        try:
            command.invoke(context)
        except Exit as ended:
            assert ended.exit_code == code
        else:
            assert code == 0
        return kcap.load(tmp_path / "out")

    return run


PROCESSES = """
import os, subprocess, sys
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(4, 3)
model(torch.ones(2, 4))
child = os.fork()
if child == 0:
    model(torch.ones(3, 4))
    model(torch.ones(3, 4))
    sys.exit()  # as a program ends, with what it does at its exit
assert os.waitpid(child, 0)[1] == 0
script = "import torch; torch.nn.Linear(4, 3)(torch.ones(5, 4))"
subprocess.run([sys.executable, "-c", script], check=True)
import user_choice
assert user_choice.made, "the user's own sitecustomize ran"
assert not [place for place in sys.path if place.endswith("capture/startup")]
model(torch.ones(2, 4))
"""


def test_forked_and_started_processes_each_have_their_shard(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import user_choice; user_choice.made = True")
    (tmp_path / "site/user_choice.py").write_text("made = False")
    (tmp_path / "program.py").write_text(PROCESSES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    recording = record(0, tmp_path / "program.py")
    assert recording.metadata.framework == "PyTorch"
    rows = Counter[int]()
    for call in recording.calls:
        if call.operator == "aten::linear":
            rows[call.args[0].value.shape[0]] += call.total  # type: ignore[union-attr]
    assert rows == {2: 2, 3: 2, 5: 1}
    assert recording.metadata.complete, recording.metadata.notes


CHILDREN = """
import multiprocessing
import torch
import kcap
from kcap.capture import activate

torch.set_num_threads(1)
model, fork = torch.nn.Linear(4, 3), multiprocessing.get_context("fork")

def child(rows):
    process = fork.Process(target=lambda: model(torch.ones(rows, 4)))
    process.start()
    process.join(60)
    assert process.exitcode == 0

activate.window_of("pytorch").for_capture()  # as before a graph that is captured in no step
child(2)
with kcap.step("decode"):
    child(3)
child(4)
"""


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_children_of_multiprocessing_are_recorded_to_their_end(recorder: str, tmp_path: Path, record: Record) -> None:
    (tmp_path / "program.py").write_text(CHILDREN)
    recording = record(0, tmp_path / "program.py", "--recorder", recorder)
    linears = ("aten::linear", "aten::addmm")
    first = [call.args[0 if call.operator == linears[0] else 1] for call in recording.calls if call.operator in linears]
    assert sorted(arg.value.shape[0] for arg in first) == [2, 3, 4]  # type: ignore[union-attr]
    assert recording.metadata.steps == {"decode": 1, "other": 3}
    assert recording.metadata.complete, recording.metadata.notes


BECOMES_ANOTHER = """
import os, sys
import torch
import kcap

torch.set_num_threads(1)
with kcap.step("decode"):
    torch.ones(len(sys.argv)).sin()
if len(sys.argv) < 4:
    os.execv(sys.executable, [sys.executable, *sys.argv, "more"])
"""


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_each_program_that_a_process_becomes_is_recorded(recorder: str, tmp_path: Path, record: Record) -> None:
    (tmp_path / "program.py").write_text(BECOMES_ANOTHER)
    recording = record(PARTIAL, tmp_path / "program.py", "--recorder", recorder)
    shapes = [call.args[0].value.shape for call in recording.calls if call.operator == "aten::sin"]  # type: ignore[union-attr]
    assert sorted(shapes) == [(1,), (2,), (3,), (4,)]
    assert recording.metadata.steps == {"decode": 4}
    assert any("every step that had ended is here" in note for note in recording.metadata.notes)


FORKS_WHILE_PROFILED = """
import os, signal, sys
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(4, 3)
for step in range(30):
    model(torch.ones(2, 4))
    if step in (2, 20):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            model(torch.ones(3, 4))
            sys.exit(step)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == step
"""


def test_a_child_of_a_profiled_program_counts_and_ends_as_without(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: True)  # the profiler works without one
    (tmp_path / "program.py").write_text(FORKS_WHILE_PROFILED)
    recording = record(0, tmp_path / "program.py", "--check-coverage")
    assert recording.metadata.steps == {"other": 30 - MOST_STEPS + 2}
    assert CoverageSummary.model_validate(recording.metadata.coverage).steps == MOST_STEPS
    assert recording.metadata.complete, recording.metadata.notes


CRASHES = """
import os
import torch

class Crashes(torch.nn.Module):
    def forward(self, x):
        x = torch.sin(x)
        if len(x) == 3:
            os.abort()
        return x

for rows in range(1, 4):
    Crashes()(torch.ones(rows))
"""


def test_a_program_that_crashes_leaves_the_steps_that_had_ended(tmp_path: Path, record: Record) -> None:
    (tmp_path / "program.py").write_text(CRASHES)
    recording = record(128 + signal.SIGABRT, tmp_path / "program.py")
    assert recording.metadata.steps == {"other": 2}
    assert not recording.metadata.complete
    shapes = {call.args[0].value.shape for call in recording.calls if call.operator == "aten::sin"}  # type: ignore[union-attr]
    assert {(1,), (2,)} <= shapes


def test_a_program_without_a_module_is_told_of_marks(
    tmp_path: Path, record: Record, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("import torch; torch.ones(2) + 1")
    why = "nothing was recorded: no torch.nn.Module was called: bracket the program's work in `with kcap.step():`"
    assert record(1, tmp_path / "program.py").metadata.notes == [why]
    assert f"kcap: {why}\n" in capfd.readouterr().err


AUTOCAST = """
import torch

x, model = torch.ones(64, 512, device="cuda"), torch.nn.Sequential(
    torch.nn.Linear(512, 512), torch.nn.LayerNorm(512), torch.nn.ReLU(), torch.nn.Linear(512, 512)
).cuda()
for _ in range(12):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(x).sum().backward()
"""


@pytest.mark.gpu
def test_under_autocast_every_kernel_has_the_call_that_ran_it(tmp_path: Path, kcap_record: Kcap) -> None:
    (tmp_path / "program.py").write_text(AUTOCAST)
    done = kcap_record(tmp_path / "out", "--check-coverage", "--", sys.executable, tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    recording = kcap.load(tmp_path / "out")
    linears = [call for call in recording.calls if call.operator == "aten::linear"]
    assert {argument.value.dtype for call in linears for argument in call.args} == {"bfloat16"}
    summary = CoverageSummary.model_validate(recording.metadata.coverage)
    assert summary.share == pytest.approx(1, abs=0.001)
    assert not summary.disagreements


PACKAGE = """
import sys
import torch

x, model = torch.ones(64, 512, device="cuda"), torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()).cuda()
class Packaged(torch.nn.Module):
    def forward(self, x):
        return loaded(x)

with torch.no_grad():
    path = torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=sys.argv[1])
    loaded, packaged = torch._inductor.aoti_load_package(path), Packaged()
    for _ in range(12):
        packaged(x)
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_a_packages_kernels_are_of_its_run(tmp_path: Path, kcap_record: Kcap) -> None:
    (tmp_path / "program.py").write_text(PACKAGE)
    program = (sys.executable, tmp_path / "program.py", tmp_path / "model.pt2")
    if status := subprocess.run(program, capture_output=True).returncode:
        pytest.skip(f"without kcap the program ends with {status}: this torch does not run its own packages here")
    done = kcap_record(tmp_path / "out", "--check-coverage", "--", *program)
    assert done.returncode == 0, done.stderr
    recording = kcap.load(tmp_path / "out")
    assert {call.operator for call in recording.kernels() if call.work} == {"aoti::run"}
    summary = CoverageSummary.model_validate(recording.metadata.coverage)
    assert summary.share == pytest.approx(1, abs=0.001)
