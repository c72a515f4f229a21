"""A small Llama in TVM's Relax VM with MLC-LLM's paged cache, recorded."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import orjson
import pytest

import kcap
from kcap.capture.engines.mlc import phase
from kcap.capture.taps.relax_vm import tap
from kcap.schemas.derive.engine_comparison import ComparedRecording, compare_engines, purposes
from kcap.schemas.recording.recording import Recording

PROGRAM = Path(__file__).with_name("tvm_llama.py")
LAYERS = 2

needs_tvm = pytest.mark.skipif(importlib.util.find_spec("tvm") is None, reason="apache-tvm has no wheel here")


def python(*words: object, status: int = 0) -> str:
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def outputs(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("outputs"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tvm") / "llama.so"
    python(PROGRAM, "build", path)
    return path


@pytest.fixture(scope="module")
def recorded(library: Path) -> tuple[Recording, str]:
    """The Recording, and what the program and kcap said."""
    path = library.with_suffix(".kcap")
    said = python("-m", "kcap", "record", "-o", path, "--", sys.executable, PROGRAM, "run", library)
    return kcap.load(path), said


def counts(recording: Recording, phase: str) -> Counter[str]:
    """Invocations by kernel, without the library's digits and the compiler's numbers."""
    total: Counter[str] = Counter()
    for call in recording.kernels():
        name = call.operator.removeprefix("tvm::").partition(".")[0]
        total[re.sub(r"\d+", "", name)] += call.counted(phase)
    return total


def invocations(recording: Recording) -> Counter[tuple[object, ...]]:
    """By kernel, what it is launched from, and the shapes and numbers that it was given."""
    total: Counter[tuple[object, ...]] = Counter()
    for call in recording.kernels():
        tensors = tuple((spec.shape, spec.dtype, spec.effective_strides) for _, spec in call.tensors())
        numbers = tuple(argument.value for argument in call.args if isinstance(argument.value, int | float))
        total[call.operator, str(call.launch), tensors, numbers] += call.total
    return total


@needs_tvm
class TestSmallLlama:
    def test_steps_are_told_apart_by_their_sequences(self, recorded: tuple[Recording, str]) -> None:
        recording, _ = recorded
        assert recording.metadata.steps == {"prefill": 1, "decode": 2, "mixed": 1}
        assert recording.metadata.complete

    def test_each_layer_of_a_step_has_the_kernels_of_its_architecture(self, recorded: tuple[Recording, str]) -> None:
        recording, _ = recorded
        for name, steps in (("prefill", 1), ("decode", 2), ("mixed", 1)):
            seen, layers = counts(recording, name), steps * LAYERS
            assert seen["matmul"] == 2 * layers + steps, "qkv and gate_up, and the head"
            assert seen["fused_matmul_add"] == 2 * layers, "output and down"
            assert seen["rms_norm"] == 2 * layers + steps
            assert seen["fused_split_silu_multiply"] == layers
            assert seen["split_rotary"] == seen["transpose_append_mha"] == layers
            assert seen["attention_decode"] == (layers if name == "decode" else 0)
            assert seen["attention_prefill_ragged"] == (0 if name == "decode" else layers)
            assert seen["merge_inplace"] == (layers if name == "mixed" else 0)
            assert seen["take"] == (steps if name == "decode" else 2 * steps), "the embedding, and the rows of logits"

    def test_the_outputs_are_the_same_bits_without_kcap(self, recorded: tuple[Recording, str], library: Path) -> None:
        assert outputs(recorded[1]) == outputs(python(PROGRAM, "run", library))

    def test_samples_hold_the_block_tables(self, recorded: tuple[Recording, str]) -> None:
        recording, _ = recorded
        (call,) = [call for call in recording.calls if "attention_decode" in call.operator]
        names = {argument.name: place for place, argument in enumerate(call.args)}
        sampled = {place for sample in recording.samples if sample.call == call.id for place in sample.tensors}
        assert {str(names[name]) for name in ("page_table_indptr", "page_table_values", "length_info")} <= sampled

    def test_each_kernel_replays_alone_from_the_library_in_the_recording(
        self, recorded: tuple[Recording, str], tmp_path: Path
    ) -> None:
        recording, _ = recorded
        output = tmp_path / "times.jsonl"
        python("-m", "kcap", "replay", recording.path, "--device", "cpu", "--seconds", "0.001", "-o", output)
        timed = {measurement["call"] for measurement in map(orjson.loads, output.read_bytes().splitlines())}
        total = sum(call.total for call in recording.kernels())
        assert sum(call.total for call in recording.kernels() if call.id in timed) >= 0.95 * total

    def test_its_definitions_agree_with_its_kernels(self, recorded: tuple[Recording, str], tmp_path: Path) -> None:
        flashinfer_bench = pytest.importorskip("flashinfer_bench")
        path = tmp_path / "dataset"
        python("-m", "kcap", "export", recorded[0].path, "--to", "flashinfer-bench", "--device", "cpu", "-o", path)
        definitions = flashinfer_bench.TraceSet.from_path(str(path)).definitions
        verified = [name for name, definition in definitions.items() if "status:verified" in definition.tags]
        assert len(verified) == len(definitions)
        assert {definition.op_type for definition in definitions.values()} == {
            *("activation", "attention_merge", "cache_update", "embedding", "gemm", "gqa_paged", "gqa_ragged"),
            *("index_select", "rmsnorm", "rope", "transpose"),
        }

    def test_a_decode_step_compares_with_other_engines_by_purpose(self, recorded: tuple[Recording, str]) -> None:
        recording, _ = recorded
        side = ComparedRecording(list(recording.calls), recording.metadata)
        decode = next(phase for phase in compare_engines(side, side).phases if phase.phase == "decode")
        per_step = {
            purpose: sum(line.a.count for line in lines if line.a) for purpose, lines in purposes(decode.lines).items()
        }
        assert per_step == {
            "gemm": 4 * LAYERS + 1,
            "rmsnorm": 2 * LAYERS + 1,
            **dict.fromkeys(("activation", "attention", "cache_update", "rope"), LAYERS),
            "embedding": 1,
            "transpose": 4 * LAYERS + 1,  # this library's own: its weights are transposed as it runs
        }

    def test_a_library_of_somebody_else_or_changed_is_not_loaded(
        self, recorded: tuple[Recording, str], tmp_path: Path
    ) -> None:
        path = tmp_path / "changed.kcap"
        shutil.copytree(recorded[0].path, path)
        metadata = orjson.loads((path / "recording.json").read_bytes())
        (path / "recording.json").write_bytes(orjson.dumps({**metadata, "seal": None}))
        assert "pass --trust" in python("-m", "kcap", "replay", path, "--device", "cpu", status=3)
        shutil.copy(recorded[0].path / "recording.json", path)
        (library,) = (path / "kernels").iterdir()
        library.write_bytes(library.read_bytes() + b"\0")
        assert "not what its name says" in python("-m", "kcap", "replay", path, "--device", "cpu", status=3)
        assert "not what its name says" in python("-m", "kcap", "validate", path, status=1)

    def test_a_fault_in_the_tap_leaves_the_program_running(self, library: Path) -> None:
        path = library.with_name("fault.kcap")
        program = library.with_name("fault.py")
        program.write_text(
            f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r})\n"
            "import tvm_llama\nfrom kcap.capture.taps.relax_vm.tap import RelaxVM\n"
            "kernel = RelaxVM._kernel\n"
            "def fails(self, library, name, *rest):\n"
            "    if name == 'attention_decode': raise RuntimeError('injected')\n"
            "    return kernel(self, library, name, *rest)\n"
            "RelaxVM._kernel = fails\n"
            f"tvm_llama.run({str(library)!r})\n"
        )
        said = python("-m", "kcap", "record", "-o", path, "--", sys.executable, program, status=3)
        assert outputs(said) == outputs(python(PROGRAM, "run", library))
        assert "relax_vm failed" in said
        assert "injected" in said
        assert kcap.load(path).metadata.steps == {"prefill": 1}, "the decode that it failed in does not count"


def test_a_program_that_only_imports_tvm_is_pytorchs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import tvm, torch\nmodel = torch.nn.Linear(4, 4)\nfor _ in range(3):\n    model(torch.ones(2, 4))\n"
    )
    python("-m", "kcap", "record", "-o", tmp_path / "out", "--", sys.executable, program)
    recording = kcap.load(tmp_path / "out")
    assert recording.metadata.steps == {"other": 3}
    assert recording.metadata.framework != "TVM"


@pytest.mark.parametrize(
    ("queries", "before", "expected"),
    [
        *(([5, 3], [0, 0], "prefill"), ([1], [0], "prefill"), ([4], [8], "prefill")),
        *(([1, 1], [5, 3], "decode"), ([3, 1], [0, 4], "mixed")),
    ],
)
def test_a_phase_is_of_the_sequences(queries: list[int], before: list[int], expected: str) -> None:
    assert phase(queries, before) == expected


class OfAnotherType:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # DLPack's kDLCPU

    def __dlpack__(self, **_: object) -> None:
        raise BufferError("torch has no such type")


def test_a_tensor_that_torch_cannot_hold_is_told_by_its_class() -> None:
    assert tap._value(OfAnotherType()) == "OfAnotherType"


@needs_tvm
def test_without_a_compiler_python_is_told_of_the_same_calls(library: Path, recorded: tuple[Recording, str]) -> None:
    path, program = library.with_name("plain.kcap"), library.with_name("plain.py")
    program.write_text(
        f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r})\n"
        "import tvm_llama\nfrom kcap.capture.taps.relax_vm import tap\n"
        "from kcap.system.native_build import Unavailable\n"
        "def unavailable(_): raise Unavailable('no compiler')\n"
        "tap.native = unavailable\n"
        f"tvm_llama.run({str(library)!r})\n"
    )
    python("-m", "kcap", "record", "-o", path, "--", sys.executable, program)
    plain, native = kcap.load(path), recorded[0]
    assert any("no compiler" in note for note in plain.metadata.notes)
    assert not native.metadata.notes
    assert plain.metadata.steps == native.metadata.steps
    assert invocations(plain) == invocations(native)
