"""Kernels with a source of their own: run as they were launched, and only where that is allowed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from handmade import Values, call, tensor

from kcap.errors import FAILED
from kcap.replay.calls.runner import Runner
from kcap.replay.rebuild.launches import NO_SOURCE, UNTRUSTED, InductorRule, Launches
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.recording.recording import Argument, Call, Launch, Metadata, Sample, load, write_recording
from kcap.schemas.recording.seal import seal
from kcap.schemas.recording.values import Opaque, TensorSpec, TorchConstant

HEAD = "import triton\nimport triton.language as tl\n\n\n"
ADD = (
    HEAD
    + """
@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr, KIND: tl.constexpr, SIZES: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(KIND)
    assert scale == 3
    tl.static_assert(SIZES[1] == 5)
    tl.store(out_ptr + at, x + tl.load(y_ptr + at, mask=at < n) * scale, mask=at < n)
"""
)
COPIES = (
    HEAD
    + """
@triton.jit
def _small_copy_kernel(sources, destinations, sizes, strides, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    for i in tl.static_range(FIELDS):
        assert sizes[i] == 3 + i
        values = tl.load(sources[i] + offsets * strides[i][1], offsets < sizes[i], other=7)
        tl.store(destinations[i] + offsets, values, offsets < sizes[i])
"""
)
GATHER = (
    HEAD
    + """
@triton.jit
def embedding(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    index = tl.load(in_ptr0 + at, at < xnumel)
    assert tl.max(index) < 5, 'index out of bounds: 0 <= index < 5'
    tl.store(out_ptr0 + at, tl.load(in_ptr1 + index), at < xnumel)
"""
)
CPP = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       const int64_t* in_ptr1,
                       float* out_ptr0,
                       const int64_t ks0)
{
    for (int64_t i = 0; i < ks0; i++) {
        auto at = in_ptr1[i];
        if (at < 0 || at >= 3) throw std::runtime_error("index out of bounds: 0 <= at < 3L");
        out_ptr0[i] = in_ptr0[at];
    }
}
"""
FULL = {"KIND": TorchConstant("triton", "fp32"), "SIZES": [4, 5], "BLOCK": 64}
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def recorded(tmp_path: Path, values: Values) -> Write:
    """Writes a Recording of these Calls and kernel sources, sealed or not."""
    return partial(write, tmp_path / "r.kcap", values)


def write(
    path: Path,
    values: Values,
    calls: Iterable[Call],
    *sources: str,
    sealed: bool = True,
    samples: Sequence[Sample] = (),
) -> Path:
    files = {file_of(text): text.encode() for text in sources}
    metadata = Metadata(seal=seal(files) if sealed else None)
    write_recording(path, metadata, calls, samples=samples, values=values.files, kernels=files)
    return path


def file_of(text: str) -> str:
    return f"{hashlib.sha256(text.encode()).hexdigest()}.{'cpp' if '#include' in text else 'py'}"


def launched(text: str, function: str, *args: tuple[str, Any], **more: Any) -> Call:
    """The Call of a launch; `more` are fields of its Launch."""
    language = "cpp" if "#include" in text else "triton"
    launch = Launch(**{"language": language, "kernel": file_of(text), "function": function, **more})
    made = call(f"{language}::{function}.s{file_of(text)[:8]}", launch=launch)
    return made.model_copy(update={"args": [Argument(name=name, value=value) for name, value in args]})


def add(**more: Any) -> Call:
    tensors = [(name, tensor(200, storage=i)) for i, name in enumerate(("x_ptr", "y_ptr", "out_ptr"))]
    settings = {
        "grid": [4, 1, 1],
        "constexprs": FULL,
        "num_warps": 4,
        "num_stages": 2,
        "options": {"debug": True, "sanitize_overflow": False},
    }
    return launched(ADD, "add", *tensors, ("n", 200), ("scale", 3), **{**settings, **more})


def gather(table: str = "in_ptr", n: str = "xnumel") -> tuple[Call, str]:
    text = GATHER.replace("in_ptr", table).replace("xnumel", n)
    args = [(f"{table}0", tensor(64, dtype="int64")), (f"{table}1", tensor(5, storage=1))]
    args += [("out_ptr0", tensor(64, storage=2)), (n, 64)]
    return launched(text, "embedding", *args, grid=[2], constexprs={"XBLOCK": 32}), text


def cpp(text: str = CPP, **more: Any) -> Call:
    args = [("in_ptr0", tensor(3)), ("in_ptr1", tensor(70, dtype="int64", storage=1))]
    return launched(text, "kernel", *args, ("out_ptr0", tensor(70, storage=2)), ("ks0", 70), **more)


def replay(path: Path, *options: str, interpret: str = "1") -> tuple[int, list[dict[str, Any]], str]:
    """The exit code, the measurements and the output of `kcap replay` with Triton's interpreter."""
    out = path.with_suffix(".jsonl")
    command = [sys.executable, "-m", "kcap", "replay", str(path), "--seconds", "0.001", "-o", str(out), "--force"]
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=300)
    assert out.exists(), done.stderr
    return done.returncode, [orjson.loads(line) for line in out.read_bytes().splitlines()], done.stdout


@dataclass(frozen=True)
class Case:
    """A launch, the source of its kernel, and the integers of a Sample, by the place of their argument."""

    made: Call
    text: str
    sample: tuple[str, list[int], torch.dtype] | None = None


def copies() -> Call:
    """Of lists of tensors, of which SGLang copies several by one launch."""
    lists = [[tensor(3 + i, dtype="int64", storage=first + i) for i in range(2)] for first in (0, 2)]
    args = [("sources", lists[0]), ("destinations", lists[1]), ("sizes", [3, 4]), ("strides", [[0, 1], [0, 1]])]
    return launched(COPIES, "_small_copy_kernel", *args, grid=[1], constexprs={"FIELDS": 2, "BLOCK": 4})


def changed(made: Call, **scalars: Any) -> Call:
    """With other arguments of these names."""
    args = [a.model_copy(update={"value": scalars.get(a.name or "", a.value)}) for a in made.args]
    return made.model_copy(update={"args": args})


UNDECLARED = CPP.replace("ks0; i++", "nothing; i++")


def cases() -> dict[str, Case]:
    embedding, text = gather()
    return {
        "right": Case(add(), ADD),
        "SIZES": Case(add(constexprs=FULL | {"SIZES": [4, 6]}), ADD),
        "KIND": Case(add(constexprs=FULL | {"KIND": "no dtype"}), ADD),
        "scale": Case(changed(add(), scale=4), ADD),
        "addresses": Case(zero(), ZERO, ("1", [40_000, 3], torch.int32)),
        "unknown addresses": Case(changed(zero(), n_blocks=3), ZERO),
        "copies": Case(copies(), COPIES),
        "index 4": Case(embedding, text, ("0", [4] * 64, torch.int64)),
        "index 7": Case(changed(embedding, xnumel=63), text, ("0", [7] * 64, torch.int64)),
        "cpp": Case(cpp(), CPP),
        "cpp, too far": Case(changed(cpp(), ks0=69), CPP, ("1", [3] * 70, torch.int64)),
        "cpp, undeclared": Case(cpp(UNDECLARED), UNDECLARED),
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one `kcap replay` of all `cases` says of each."""
    pytest.importorskip("triton")
    every, values = cases(), Values()
    calls = [case.made.model_copy(update={"id": number}) for number, case in enumerate(every.values())]
    samples = [
        Sample(call=number, phase="decode", tensors={case.sample[0]: values(*case.sample[1:])})
        for number, case in enumerate(every.values())
        if case.sample
    ]
    path = tmp_path_factory.mktemp("launches") / "r.kcap"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(path.parent / "data"))
        write(path, values, calls, *{case.text for case in every.values()}, samples=samples)
        code, measurements, _ = replay(path)
    assert code == FAILED
    by_call = {measurement["call"]: measurement for measurement in measurements}
    assert len(by_call) == len(measurements)
    return {name: by_call[number] for number, name in enumerate(every)}


def test_a_triton_launch_is_replayed_with_its_constants(measured: dict[str, dict[str, Any]]) -> None:
    """The kernel itself checks its constexprs and its scalars."""
    measurement = measured["right"]
    assert (measurement.get("status", "ok"), measurement["method"]) == ("ok", "host"), measurement
    assert measurement["operator"].startswith("triton::add")
    assert "interpreted, not compiled (TRITON_INTERPRET)" in measurement["notes"]


def test_a_launch_takes_lists_of_tensors_and_of_numbers(measured: dict[str, dict[str, Any]]) -> None:
    measurement = measured["copies"]
    assert (measurement.get("status", "ok"), measurement["method"]) == ("ok", "host"), measurement


def test_a_kernel_is_compiled_for_what_the_engine_compiled_it_for() -> None:
    """Not for what Triton sees in the values: 2,816 fits into 32 bits, and 16 divides it."""
    pytest.importorskip("triton")
    code = f"""
from kcap.replay.rebuild.launches import load_triton, specialized
from kcap.schemas.recording.records import Launch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
import torch
kernel = load_triton({GATHER!r}, "embedding")
backend, table = make_backend(GPUTarget("cuda", 90, 32)), torch.zeros(16)
for fields in ({{}}, {{"types": {{"xnumel": "i64"}}, "unspecialized": ["in_ptr1", "xnumel"]}}):
    compiled = specialized(kernel, Launch(function="embedding", **fields))
    bind = create_function_from_signature(compiled.signature, compiled.params, backend)
    print(*bind(table, table, table, 2816, XBLOCK=32)[1][:4])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
    by_value, as_told = done.stdout.splitlines() if done.returncode == 0 else (done.stderr, "")
    assert by_value == "('*fp32', 'D') ('*fp32', 'D') ('*fp32', 'D') ('i32', 'D')"
    assert as_told == "('*fp32', 'D') ('*fp32', None) ('*fp32', 'D') ('i64', None)"


ZERO = (
    HEAD
    + """
@triton.jit
def _zero_kv_blocks_kernel(seg_addrs_ptr, block_ids_ptr, n_blocks, N_SEGS: tl.constexpr, PAGE_SIZE_EL: tl.constexpr,
                           BLOCK_SIZE: tl.constexpr):
    block = tl.load(block_ids_ptr + tl.program_id(0) // N_SEGS)
    segment = tl.load(seg_addrs_ptr + tl.program_id(0) % N_SEGS).to(tl.pointer_type(tl.int32))
    tl.store(segment + block * PAGE_SIZE_EL + tl.arange(0, BLOCK_SIZE), tl.zeros([BLOCK_SIZE], dtype=tl.int32))
"""
)


def zero() -> Call:
    args = [("seg_addrs_ptr", tensor(3, dtype="uint64")), ("block_ids_ptr", tensor(2, dtype="int64", storage=1))]
    sizes = {"N_SEGS": 3, "PAGE_SIZE_EL": 64, "BLOCK_SIZE": 64}
    return launched(ZERO, "_zero_kv_blocks_kernel", *args, ("n_blocks", 2), grid=[6], constexprs=sizes)


@pytest.mark.parametrize(("name", "status"), [("addresses", "ok"), ("unknown addresses", "skipped")])
def test_caches_behind_addresses_are_zeroed_in_memory_of_the_replays_own(
    name: str, status: str, measured: dict[str, dict[str, Any]]
) -> None:
    """Recorded addresses are another process's: written to, they would end this one."""
    assert measured[name].get("status", "ok") == status, measured[name]


@pytest.mark.parametrize("name", ["SIZES", "KIND", "scale"])
def test_a_wrong_constant_reaches_the_kernel(name: str, measured: dict[str, dict[str, Any]]) -> None:
    """Else the launch with the right ones could pass with constants that are dropped."""
    assert measured[name]["status"] == "failed"
    assert measured[name]["reason"]


def test_sources_from_elsewhere_run_only_when_trusted(recorded: Write, tmp_path: Path) -> None:
    touched = tmp_path / "ran"
    text = ADD + f"\nopen({str(touched)!r}, 'w').close()\n"
    one = add(kernel=file_of(text))
    path = recorded([one], text, sealed=False)
    code, (measurement,), out = replay(path)
    assert (code, measurement["status"], measurement["reason"]) == (3, "skipped", UNTRUSTED)
    assert not touched.exists(), "not even imported"
    assert "--trust" in " ".join(out.split())
    pytest.importorskip("triton")
    code, (measurement,), _ = replay(path, "--trust")
    assert code == 0 and touched.exists(), measurement


def test_a_source_added_to_a_sealed_recording_is_from_elsewhere(recorded: Write) -> None:
    path = recorded([add()], ADD)
    (path / "kernels" / file_of(GATHER)).write_text(GATHER)
    assert answer(path, add())["reason"] == UNTRUSTED


def test_a_source_that_is_not_what_its_name_says_never_runs(recorded: Write, tmp_path: Path) -> None:
    path = recorded([add()], ADD)
    touched = tmp_path / "ran"
    (path / "kernels" / file_of(ADD)).write_text(ADD + f"open({str(touched)!r}, 'w')\n")
    for trust in (False, True):
        measurement = answer(path, add(), trust=trust)
        assert (measurement["status"], "the Recording was changed" in measurement["reason"]) == ("skipped", True)
    assert not touched.exists()


def test_a_launch_whose_source_was_not_read_says_why(recorded: Write) -> None:
    made = add(kernel=None, unread="its global 'X' is a list, which no source can say")
    measurement = answer(recorded([made]), made)
    assert measurement["status"] == "skipped"
    assert measurement["reason"] == "its global 'X' is a list, which no source can say"


def test_a_launch_in_a_trace_file_is_skipped_for_want_of_its_source(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("Operator: triton.add.s0a1b2c3d\ncnt: 1, ((T([8], f32, device='cpu'),), {})\n")
    code, (measurement,), _ = replay(path)
    assert (code, measurement["status"], measurement["reason"]) == (3, "skipped", NO_SOURCE)


def test_without_a_gpu_and_the_interpreter_the_reason_is_given(recorded: Write) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    _, (measurement,), _ = replay(recorded([add()], ADD), interpret="0")
    assert "TRITON_INTERPRET=1" in measurement["reason"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"constexprs": FULL | {"KIND": Opaque("function")}}, "its constant 'KIND' is opaque (function)"),
        ({"constexprs": FULL | {"KIND": TorchConstant("triton", "fp17")}}, "this Triton has no dtype fp17"),
        ({"options": {"extern_libs": [["x", "/tmp/evil.bc"]]}}, "its option 'extern_libs'"),
        ({"grid": []}, "its grid was not recorded"),
        ({"function": "missing"}, "no Triton kernel called 'missing'"),
        ({"language": "cpp"}, "its name is not that of a kernel in cpp"),
    ],
)
def test_what_cannot_be_launched_is_skipped(recorded: Write, change: dict[str, Any], reason: str) -> None:
    pytest.importorskip("triton")
    made = add()
    assert made.launch is not None
    made = made.model_copy(update={"launch": made.launch.model_copy(update=change)})
    measurement = answer(recorded([made], ADD), made)
    assert (measurement["status"], reason in measurement["reason"]) == ("skipped", True), measurement


def answer(path: Path, made: Call, sample: Sample | None = None, trust: bool = False) -> dict[str, Any]:
    """What the Runner says, in this process: for Calls whose kernel does not run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kcap.replay.rebuild.launches.check_triton_device", lambda *_: None)
        return Runner(Rebuilder("cpu", "cpu", path, trust)).run(made, sample, 0.001)


def test_without_triton_the_reason_names_the_package(recorded: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    made = add()
    assert answer(recorded([made], ADD), made)["reason"] == "Triton is not installed: pip install triton"


def test_a_source_that_needs_another_library_names_it(recorded: Write) -> None:
    text = ADD.replace(HEAD, HEAD + "import no_such_library.kernels as lib\n")
    made = add(kernel=file_of(text))
    assert "pip install no_such_library" in answer(recorded([made], text), made)["reason"]


@pytest.mark.parametrize(("name", "status"), [("index 4", "ok"), ("index 7", "failed")])
def test_recorded_integers_reach_the_kernel(name: str, status: str, measured: dict[str, dict[str, Any]]) -> None:
    """Index 7 is the Sample's: the kernel's own check says that it got it."""
    assert measured[name].get("status", "ok") == status, measured[name]
    assert measured[name]["sample"] is not None


def prepared(text: str, spec: TensorSpec, name: str = "in_ptr0", **more: Any) -> torch.Tensor:
    """What inductor's kernel `text` is given for an integer tensor without recorded values."""
    args = [Argument(name=name, value=spec), Argument(name="ks0", value=7)]
    bound = BoundCall("triton::f.s0", args, **more)
    InductorRule(text).prepare(bound)
    return bound.contents["0"]


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (GATHER, 5),
        ('TORCH_CHECK((0 <= tmp14) & (tmp14 < 50L), "index out of bounds: 0 <= tmp14 < 50L");', 50),
        ("AOTI_TORCH_CHECK(x, 'index out of bounds: 0 <= tmp3 < 9L'); f(\"index out of bounds: tmp4 < 6L\")", 6),
        ("tl.device_assert(x, 'index out of bounds: 0 <= tmp3 < ks0')", 7),
        ("tl.device_assert(x, 'index out of bounds: 0 <= tmp3 < 2*ks1'), 'index out of bounds: 0 <= tmp3 < 9'", 1),
        ("tl.device_assert(x, 'index out of bounds: 0 <= tmp3 < 0')", 1),
        ("tl.load(in_ptr0)", 1),
    ],
)
def test_inductors_indices_are_drawn_below_its_own_bound(text: str, limit: int) -> None:
    drawn = prepared(text, tensor(4096, dtype="int64"))
    assert (int(drawn.min()), int(drawn.max())) == (0, limit - 1)


def test_drawn_indices_keep_to_the_recorded_range_the_dtype_and_the_strides() -> None:
    text = "'index out of bounds: 0 <= tmp3 < 50000'"
    seen = prepared(text, tensor(4096, dtype="int64"), ranges={"0": (10, 12)})
    assert (int(seen.min()), int(seen.max())) == (10, 12)
    assert int(prepared(text, tensor(4096, dtype="int64"), ranges={"0": (-3, 90000)}).max()) < 50000
    assert int(prepared(text, tensor(4096, dtype="int8")).max()) == 127
    assert prepared(text, TensorSpec((8, 4), "int32", strides=(0, 1))).shape == (1, 4)


@pytest.mark.parametrize("name", ["ws_ptr", "sem_ptr"])
def test_inductors_workspaces_start_as_zeros(name: str) -> None:
    """A semaphore that is not zero makes a cooperative reduction wait for ever."""
    kept = {"0": torch.full((64,), 9)}
    assert not prepared(GATHER, tensor(64, dtype="uint8"), name, contents=kept).any()


def test_what_inductor_writes_is_restored(recorded: Write) -> None:
    """A kernel that adds to its output in place would run on other numbers each time."""
    made = cpp()
    operator, _ = Launches(load(recorded([made], CPP)), trusted=False).resolve_launch(made, "cpu")
    names = {a.name: a.alias_info is not None and a.alias_info.is_write for a in operator.schema.arguments}
    assert names == {"in_ptr0": False, "in_ptr1": False, "out_ptr0": True, "ks0": False}


def test_integers_of_other_triton_kernels_are_not_guessed(recorded: Write) -> None:
    made, text = gather("table", "n")
    reason = answer(recorded([made], text), made)["reason"]
    assert reason == "the values of its integer argument 'table0' were not recorded"


def test_a_cpp_kernel_is_compiled_and_its_indices_are_valid(measured: dict[str, dict[str, Any]]) -> None:
    measurement = measured["cpp"]
    assert (measurement.get("status", "ok"), measurement["method"]) == ("ok", "host"), measurement


def test_a_cpp_kernel_that_indexes_too_far_fails(measured: dict[str, dict[str, Any]]) -> None:
    """Else the test above would pass with any index."""
    measurement = measured["cpp, too far"]
    assert measurement["status"] == "failed"
    assert "index out of bounds" in measurement["reason"]


def test_a_compiler_error_is_a_failure_in_its_own_words(measured: dict[str, dict[str, Any]]) -> None:
    measurement = measured["cpp, undeclared"]
    assert measurement["status"] == "failed"
    assert "'nothing' was not declared" in measurement["reason"].replace("‘", "'").replace("’", "'")


def test_a_cpp_call_with_other_arguments_than_its_source_is_skipped(recorded: Write) -> None:
    made = cpp()
    made = made.model_copy(update={"args": made.args[:-1]})
    assert "takes 4 arguments, 3 were recorded" in answer(recorded([made], CPP), made)["reason"]


INDUCTOR = """
import sys, torch
from torch._inductor.async_compile import AsyncCompile
original, found = AsyncCompile.cpp_pybinding, []
def keep(self, types, text):
    found.append((types, text))
    return original(self, types, text)
AsyncCompile.cpp_pybinding = keep
f = torch.compile(lambda x, table, at: torch.nn.functional.silu(x) * table[at])
f(torch.randn(64, 128), torch.randn(50, 128), torch.randint(0, 50, (64,)))
((types, text),) = found
from kcap.replay.rebuild.launches import cpp_signature
assert cpp_signature(text)[0] == types, (cpp_signature(text), types)
sys.stdout.write(text)
"""


def test_a_kernel_that_inductor_made_is_replayed(recorded: Write) -> None:
    """Its indices are checked by inductor's own assertion, and the types read from it are those that inductor gave."""
    done = subprocess.run([sys.executable, "-c", INDUCTOR], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    args = [("in_ptr0", tensor(64, 128)), ("in_ptr1", tensor(64, dtype="int64", storage=1))]
    args += [("in_ptr2", tensor(50, 128, storage=2)), ("out_ptr0", tensor(64, 128, storage=3))]
    made = launched(text, "kernel", *args)
    code, (measurement,), _ = replay(recorded([made], text))
    assert (code, measurement["method"]) == (0, "host"), measurement
    assert measurement["bytes"] == (64 * 128 * 2 + 50 * 128) * 4 + 64 * 8


def on_gpu(value: Any) -> Any:
    if not isinstance(value, TensorSpec):
        return value
    return TensorSpec(value.shape, value.dtype, storage=value.storage, device="cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_triton_launch_is_timed_on_the_gpu(recorded: Write) -> None:
    made = add(options={})
    args = [argument.model_copy(update={"value": on_gpu(argument.value)}) for argument in made.args]
    code, (measurement,), _ = replay(recorded([made.model_copy(update={"args": args})], ADD), interpret="0")
    assert (code, measurement["method"]) == (0, "graph"), measurement


GPU_INDUCTOR = """
import sys, torch, kcap
f = torch.compile(lambda x, table, at: torch.nn.functional.silu(x) * table[at])
x, table, at = torch.randn(64, 128), torch.randn(50, 128), torch.randint(0, 50, (64,))
given = [tensor.cuda() for tensor in (x, table, at)]
wanted = f(*given)
with kcap.record(sys.argv[1]) as recorder:
    for _ in range(3):
        with recorder.step("decode"):
            assert torch.equal(f(*given), wanted)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_kernel_that_inductor_made_is_recorded_and_timed_on_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "compiled.kcap"
    done = subprocess.run([sys.executable, "-c", GPU_INDUCTOR, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (made,) = [call for call in load(path).kernels() if call.launch]
    assert (made.total, made.operator.split(".")[0]) == (3, "triton::index_mul_silu")
    code, measurements, _ = replay(path, interpret="0")
    (measurement,) = [each for each in measurements if each["operator"] == made.operator]
    assert (code, measurement["method"]) == (0, "graph"), measurement
