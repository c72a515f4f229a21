"""What every test can ask for: the command line as a function, and a small Recording written by hand."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from kcap.cli import main
from kcap.schemas.json_schema import schema_file
from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, Tap, write_recording
from kcap.schemas.recording.values import Drift, Folded, Opaque, TensorSpec
from kcap.schemas.results.command_output import format_of_output

settings.register_profile(
    "kcap",
    deadline=None,  # of a busy machine; what hangs is ended by pytest-timeout
    derandomize=os.environ.get("KCAP_EXAMPLES") == "fixed",  # a change is not refused for what it did not change
)
settings.load_profile("kcap")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked gpu is skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:  # some tests run without it
        return False
    return torch.cuda.is_available()


@pytest.fixture
def kcap(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`kcap("show", path)` runs the command line in this process and gives its exit code and its output."""

    def run(*args: object) -> Ran:
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        if "--json" in args and stop.value.code in (0, None, 1, 3) and captured.out:
            check_output(str(args[0]), captured.out)
        return Ran(int(stop.value.code or 0), captured.out, captured.err)

    return run


def check_output(command: str, text: str) -> None:
    """What a command prints with --json keeps to its published schema."""
    if find_spec("jsonschema") is None:  # an engine's environment may lack it
        return
    jsonschema = import_module("jsonschema")
    schema = json.loads(schema_file(format_of_output(command)).read_bytes())
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def tensor(*shape: int, argument: str | None = None, **more: object) -> Argument:
    return Argument(name=argument, value=TensorSpec(shape, "bfloat16", **more))


def count(phase: str, n: int, mode: str = "eager", rank: int = 0) -> Count:
    return Count(phase=phase, count=n, mode=mode, rank=rank)


ATTENTION = "vllm::unified_attention_with_output"
LINEAR = Call(
    id=0,
    operator="aten::mm",
    args=[tensor(64, 4096), tensor(4096, 6144, strides=(1, 4096))],
    counts=[count("prefill", 2), count("decode", 14, "graph"), count("decode", 1, rank=1)],
)
NORM = Call(
    id=1,
    operator="_C::rms_norm",
    args=[
        tensor(64, 4096, argument="result"),
        tensor(64, 4096, argument="input"),
        tensor(4096, argument="weight"),
        Argument(name="epsilon", value=1e-5),
    ],
    counts=[count("prefill", 4), count("decode", 2800)],
)
REGION = Call(
    id=2,
    operator=ATTENTION,
    kind="region",
    args=[tensor(64, 32, 128), Argument(value=Folded("model.layers.*.attn"))],
    counts=[count("prefill", 2)],
)
VIEW = Call(
    id=3,
    operator="aten::view",
    work=False,
    args=[tensor(64, 4096), Argument(value=[64, 32, 128])],
    counts=[count("prefill", 6)],
)
FORWARD = Call(
    id=4,
    operator="_vllm_fa3_C::fwd",
    parent=ATTENTION,
    args=[tensor(64, 32, 128), Argument(value=Drift("int")), Argument(value=Opaque("[bold]")), Argument(default=True)],
    counts=[count("prefill", 2), count("mixed", 1, "graph", 1)],
)
CALLS = [LINEAR, NORM, REGION, VIEW, FORWARD]
METADATA = Metadata(
    kcap="0.1.0",
    model="meta-llama/Llama-3.1-8B",
    framework="vLLM",
    framework_version="0.32.0",
    device="NVIDIA H200",
    layers_recorded=2,
    layers_model=32,
    world_size=2,
    recorder=["dispatcher"],
    steps={"decode": 7, "prefill": 1},
)
TROUBLE = {
    "complete": False,
    "taps": [Tap(name="cuda_graphs", rank=1, pid=77, status="failed", detail="no symbol [bold]")],
    "dropped": {"overflow": 3},
    "notes": ["graphs were replayed by another way"],
}


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Kernels of two ranks, a region and a view, eager and in graphs."""
    path = tmp_path / "llama.kcap"
    write_recording(path, METADATA, CALLS)
    return path


@pytest.fixture
def troubled(tmp_path: Path) -> Path:
    """The same, partial, with a tap that failed and Calls that were dropped."""
    path = tmp_path / "troubled.kcap"
    write_recording(path, METADATA.model_copy(update=TROUBLE), CALLS)
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A Recording of a PyTorch program: no framework, no model."""
    path = tmp_path / "plain.kcap"
    write_recording(path, Metadata(), [LINEAR])
    return path


@pytest.fixture(scope="session")
def llama_on_h100(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was made of Llama-3.1-8B in vLLM on an H100: the Recording, its kernels' times, judged Solutions and what
    plans of them changed."""
    return unpacked("llama-3.1-8b-h100", tmp_path_factory)


@pytest.fixture(scope="session")
def llama_in_two_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-3.1-8B in vLLM and in SGLang on an H200: both Recordings, the times of vLLM's kernels, and how near to the
    engine they are."""
    return unpacked("llama-3.1-8b-h200", tmp_path_factory)


def unpacked(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(Path(__file__).parent / "data" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name
