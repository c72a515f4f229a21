"""What inductor compiled ahead of time, or with its C++ wrapper, run for real in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_graphs import health

import kcap
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.values import TensorSpec

PROGRAM = """
import sys
from pathlib import Path
import torch, kcap
from torch.fx.experimental.proxy_tensor import make_fx

out = Path(sys.argv[1])
x, model = torch.ones(2, 16), torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU()).eval()
with torch.no_grad():
    exported = torch.export.export(model, (x,))
    weight = torch.ones(16, 4)
    graph = make_fx(lambda x: torch.relu(x @ (weight + weight)))(x)
    with kcap.record(out / "compiling.kcap"):
        with torch._inductor.config.patch(freezing=True):  # computes what is constant
            torch._inductor.compile(graph, [x])
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(out / "gated.pt2"))
        torch.relu(x)
    before = torch._inductor.aoti_load_package(path)
    torch._inductor.config.cpp_wrapper = True
    with kcap.record(out / "package.kcap"):
        after = torch._inductor.aoti_load_package(path)
        results = [after(x), after(x), before(x)]
        torch.relu(x)
    compiled = torch.compile(model)
    with kcap.record(out / "wrapped.kcap"):
        results += [compiled(x), compiled(x)]
    assert all(torch.allclose(result, model(x), atol=1e-6) for result in results)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("aot")
    (directory / "program.py").write_text(PROGRAM)
    words = [sys.executable, directory / "program.py", directory]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def package(directory: Path) -> Recording:
    return kcap.load(directory / "package.kcap")


def test_each_run_of_a_package_is_a_call_of_its_inputs(package: Recording) -> None:
    runs = {call.args[0].value: call for call in package.kernels() if call.operator == "aoti::run"}
    assert {name: call.total for name, call in runs.items()} == {"gated": 2, "": 1}
    assert runs["gated"].args[1].value == [TensorSpec((2, 16), "float32")]
    assert package.metadata.complete
    assert health(package, "aot_inductor").detail == "3 runs of AOTInductor packages"


def test_what_compiling_runs_is_no_call(directory: Path) -> None:
    assert [call.operator for call in kcap.load(directory / "compiling.kcap").kernels()] == ["aten::relu"]


def test_what_a_package_dispatches_is_its_detail(package: Recording) -> None:
    assert {call.operator for call in package.kernels() if call.work} == {"aoti::run", "aten::relu"}


def test_a_recording_without_the_kernels_of_a_cpp_wrapper_is_partial(directory: Path) -> None:
    recording = kcap.load(directory / "wrapped.kcap")
    assert not recording.metadata.complete
    tap = health(recording, "aot_inductor")
    assert (tap.status, tap.detail) == (
        "off",
        "the kernels of 2 runs of graphs with inductor's C++ wrapper are not recorded",
    )
