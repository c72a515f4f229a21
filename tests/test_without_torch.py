"""The commands where torch is not installed: files are read and written, and what needs torch says so in one line.

The whole command line runs in processes to which torch is not importable, their children included.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import orjson
import pytest
from safetensors.numpy import save

from kcap.cli import COMMANDS, UNIX_MODULES
from kcap.errors import INSTALL_TORCH
from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, DefinitionTensor, RandomInput, Workload
from kcap.schemas.recording.recording import (
    Argument,
    Call,
    Count,
    Metadata,
    Sample,
    SampledTensor,
    load,
    write_recording,
)
from kcap.schemas.recording.values import TensorSpec

REFUSE_TORCH = "import sys\nsys.modules['torch'] = None\n"
IDS = save({"value": numpy.arange(8, dtype=numpy.int64)})
IDS_FILE = f"{hashlib.sha256(IDS).hexdigest()}.safetensors"
METADATA = Metadata(model="meta-llama/Llama-3.1-8B", framework="vLLM", layers_recorded=2, layers_model=32)


def tensor(name: str, *shape: int, dtype: str = "bfloat16", storage: int = 0) -> Argument:
    return Argument(name=name, value=TensorSpec(shape, dtype, storage=storage))


COUNTS = [Count(phase="prefill", count=2), Count(phase="decode", count=14, mode="graph", rank=1)]
PRODUCT = Call(
    id=0,
    operator="aten::mm",
    args=[tensor("self", 64, 32), tensor("mat2", 32, 16, storage=1)],
    counts=COUNTS,
)
EMBEDDING = Call(
    id=1,
    operator="aten::embedding",
    args=[tensor("weight", 100, 32), tensor("indices", 8, dtype="int64", storage=1)],
    counts=COUNTS,
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def torchless(tmp_path: Path) -> Run:
    """Runs `kcap` with these arguments, in an environment without torch."""
    (tmp_path / "refuse").mkdir()
    (tmp_path / "refuse" / "sitecustomize.py").write_text(REFUSE_TORCH)
    path = os.pathsep.join([str(tmp_path / "refuse"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}

    def run(*args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kcap", *map(str, args)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture
def broken_torch(tmp_path: Path, torchless: Run) -> Path:
    """The source of a torch that is found there, and does not import."""
    (tmp_path / "refuse" / "sitecustomize.py").unlink()
    source = tmp_path / "refuse" / "torch" / "__init__.py"
    source.parent.mkdir()
    source.write_text("raise OSError('libtorch.so: gone')")
    return source


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Two Recordings of the same calls, one of which has a value that was sampled."""
    sample = Sample(call=EMBEDDING.id, phase="decode", tensors={"1": SampledTensor(file=IDS_FILE, low=0, high=7)})
    for name in ("a", "b"):
        write_recording(
            tmp_path / f"{name}.kcap", METADATA, [PRODUCT, EMBEDDING], samples=[sample], values={IDS_FILE: IDS}
        )
    return [tmp_path / "a.kcap", tmp_path / "b.kcap"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    axes = {"n": AxisVar(), "h": AxisConst(value=8)}
    vector = DefinitionTensor(shape=["n", "h"], dtype="float32")
    definition = Definition(
        name="relu",
        op_type="activation",
        axes=axes,
        inputs={"x": vector},
        outputs={"y": vector},
        reference="import torch\ndef run(x):\n    return torch.relu(x)\n",
    )
    workload = Workload(axes={"n": 4}, inputs={"x": RandomInput()}, uuid="w4")
    write_dataset(tmp_path / "dataset", [definition], {"relu": [workload]}, {})
    return tmp_path / "dataset"


def test_a_process_of_these_tests_has_no_torch(tmp_path: Path, torchless: Run) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "refuse")}
    done = subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True)
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_help(name: str, torchless: Run) -> None:
    assert torchless(name, "--help").stdout.startswith(f"Usage: kcap {name}")


@pytest.mark.parametrize("by", ["kernel", "operator", "phase", "rank"])
def test_a_recording_is_shown(by: str, torchless: Run, paths: list[Path]) -> None:
    assert orjson.loads(torchless("show", paths[0], "--by", by, "--json").stdout)
    assert torchless("show", paths[0], "--by", by).stdout


def test_a_dataset_is_shown_and_valid_and_merged_and_compared(torchless: Run, dataset: Path, tmp_path: Path) -> None:
    assert "relu" in torchless("show", dataset).stdout
    assert "valid" in torchless("validate", dataset).stdout
    torchless("merge", dataset, "-o", tmp_path / "merged")
    torchless("diff", dataset, tmp_path / "merged")


def test_a_recording_is_valid_with_the_values_in_it(torchless: Run, paths: list[Path]) -> None:
    assert torchless("validate", paths[0]).stdout == f"{paths[0]}: valid, a Recording\n"
    (paths[0] / "values" / IDS_FILE).write_bytes(b"damaged")
    assert "not a readable safetensors file" in torchless("validate", paths[0], code=1).stdout


def test_merged_recordings_have_a_trace_file_and_no_calling_record(
    torchless: Run, paths: list[Path], tmp_path: Path
) -> None:
    done = torchless("merge", *paths, "-o", tmp_path / "both.kcap")
    assert "calling_record.json is left out" in done.stderr and INSTALL_TORCH in done.stderr
    both = load(tmp_path / "both.kcap")
    assert [call.total for call in both.calls] == [2 * call.total for call in load(paths[0]).calls]
    assert (both.path / "trace.txt").is_file() and not (both.path / "calling_record.json").exists()
    assert "valid" in torchless("validate", both.path).stdout


def test_recordings_and_trace_files_are_compared_by_call(torchless: Run, paths: list[Path], tmp_path: Path) -> None:
    assert "equal" in torchless("diff", *paths).stdout
    other = tmp_path / "other.kcap"
    write_recording(other, METADATA, [PRODUCT])
    assert "only in A" in torchless("diff", paths[0], other, code=1).stdout
    torchless("merge", *paths, "-o", tmp_path / "both.kcap")
    assert orjson.loads(torchless("diff", tmp_path / "both.kcap", paths[0], "--by", "call", "--json", code=1).stdout)
    trace = tmp_path / "both.kcap" / "trace.txt"
    assert "equal" in torchless("diff", trace, trace).stdout


def test_a_recording_and_a_trace_file_are_reported(torchless: Run, paths: list[Path], tmp_path: Path) -> None:
    torchless("report", paths[0], "-o", tmp_path / "r.html", "--against", paths[1])
    torchless("export", paths[0], "--to", "backendbench", "-o", tmp_path / "bb", "--allow-truncated")
    torchless("report", tmp_path / "bb" / "trace.txt", "-o", tmp_path / "t.html")
    assert all(page.stat().st_size > 50_000 for page in (tmp_path / "r.html", tmp_path / "t.html"))


@pytest.mark.parametrize("target", ["parquet", "backendbench", "tritonbench"])
def test_calls_are_exported(target: str, torchless: Run, paths: list[Path], tmp_path: Path) -> None:
    torchless("export", paths[0], "--to", target, "-o", tmp_path / "out", "--allow-truncated")
    assert (tmp_path / "out" / "loss.json").is_file()


def test_a_parquet_of_calls_and_a_trace_file_are_read_again(torchless: Run, paths: list[Path], tmp_path: Path) -> None:
    torchless("export", paths[0], "--to", "backendbench", "-o", tmp_path / "bb", "--allow-truncated")
    trace = tmp_path / "bb" / "trace.parquet"
    assert torchless("show", trace).stdout
    torchless("export", trace, "--to", "parquet", "-o", tmp_path / "pq")
    assert (tmp_path / "pq" / "calls.parquet").is_file()


NEED_TORCH = pytest.mark.parametrize(
    "command",
    [
        "replay {a}",
        "record --model kcap/tiny-llama --load-format dummy -o {out}",
        "record -o {out} -- true",
        "bench {a} --solutions {a} -o {out} --device cpu",
        "task {a} --definition mm -o {out}",
        "judge {a}",
        "export {a} --to flashinfer-bench -o {out} --allow-truncated",
        "export {a} --to kernelbench -o {out} --allow-truncated",
        "export {a} --to sol-execbench -o {out} --allow-truncated",
        "export {a} --to kernel-description -o {out} --allow-truncated",
        "show {a} --by family",
        "diff {a} {b} --by family",
    ],
)


@NEED_TORCH
def test_what_needs_torch_says_so_in_one_line(command: str, torchless: Run, paths: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = torchless(*command.format(a=paths[0], b=paths[1], out=output).split(), code=2)
    assert done.stderr == f"kcap: this needs PyTorch, which is not installed: {INSTALL_TORCH}\n"
    assert not done.stdout and not output.exists()


@NEED_TORCH
def test_a_torch_that_does_not_import_is_told_in_one_line(
    command: str, torchless: Run, broken_torch: Path, paths: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    done = torchless(*command.format(a=paths[0], b=paths[1], out=output).split(), code=2)
    assert done.stderr == "kcap: this needs PyTorch, which does not import here (libtorch.so: gone): kcap doctor\n"
    assert not done.stdout and not output.exists()


@pytest.mark.parametrize("error", ["ImportError", "ModuleNotFoundError"])
def test_so_is_one_that_lacks_a_part(error: str, torchless: Run, broken_torch: Path, paths: list[Path]) -> None:
    broken_torch.write_text(broken_torch.read_text().replace("OSError", error))
    assert "does not import here (libtorch.so: gone)" in torchless("replay", paths[0], code=2).stderr


def test_doctor_tells_how_to_mend_torch(torchless: Run, broken_torch: Path) -> None:
    assert "--force-reinstall torch" in torchless("doctor").stdout


@pytest.fixture
def elsewhere(torchless: Run, tmp_path: Path) -> Run:
    """As `torchless`, without the modules that Windows lacks either."""
    refused = "".join(f"sys.modules[{name!r}] = None\n" for name in UNIX_MODULES)
    (tmp_path / "refuse" / "sitecustomize.py").write_text(REFUSE_TORCH + refused)
    return torchless


@pytest.mark.parametrize(
    "command",
    [
        "show {a}",
        "validate {a}",
        "diff {a} {b}",
        "report {a} -o {out}",
        "export {a} --to parquet --allow-truncated -o {out}",
    ],
)
def test_what_only_reads_files_needs_no_linux(command: str, elsewhere: Run, paths: list[Path], tmp_path: Path) -> None:
    elsewhere(*command.format(a=paths[0], b=paths[1], out=tmp_path / "out").split())


@pytest.mark.parametrize("command", ["record -o out -- true", "doctor"])
def test_what_needs_linux_says_so(command: str, elsewhere: Run) -> None:
    assert elsewhere(*command.split(), code=2).stderr.startswith("kcap: this needs Linux; elsewhere, kcap shows, ")


def test_doctor_tells_how_to_get_torch(torchless: Run) -> None:
    assert "install torch" in torchless("doctor").stdout
