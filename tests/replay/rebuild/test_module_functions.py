"""Functions of tvm-ffi modules: recorded with their library, and replayed out of the Recording."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

import kcap
from kcap.replay.calls.runner import error_fields
from kcap.replay.rebuild import tvm_library
from kcap.replay.rebuild.launches import UNTRUSTED
from kcap.replay.rebuild.memory import Target
from kcap.replay.rebuild.rebuild import Rebuilder, ResolvedCall, apply_rule, name_arguments, resolve_integers
from kcap.schemas.derive.bound_call import Inputs, Skip, bind_call, invocation_of_bound, replay_rule_for
from kcap.schemas.derive.families import recognize
from kcap.schemas.derive.invocation import invocation_of
from kcap.schemas.recording.recording import Argument, Call, Launch, Recording
from kcap.schemas.recording.values import TensorSpec

pytest.importorskip("tvm_ffi")
pytest.importorskip("ninja")

PROGRAM = '''
import sys
import torch, tvm_ffi.cpp

SOURCE = """
#include <cmath>
using tvm::ffi::Optional, tvm::ffi::String, tvm::ffi::TensorView;
float* data(TensorView x) { return static_cast<float*>(x.data_ptr()); }

void scale(TensorView x, TensorView out, double factor, bool twice, Optional<TensorView> bias, String mode) {
  for (int64_t i = 0; i < x.numel(); ++i)
    data(out)[i] = data(x)[i] * factor * (twice ? 2 : 1) + (mode == "shift" && !bias.has_value() ? 1 : 0);
}
void rmsnorm(TensorView x, TensorView weight, TensorView out, double epsilon) {
  for (int64_t row = 0, n = x.size(1); row < x.size(0); ++row) {
    double sum = 0;
    for (int64_t i = row * n; i < (row + 1) * n; ++i) sum += data(x)[i] * data(x)[i];
    for (int64_t i = row * n; i < (row + 1) * n; ++i)
      data(out)[i] = data(x)[i] / std::sqrt(sum / n + epsilon) * data(weight)[i - row * n];
  }
}
void gather(TensorView table, TensorView rows) {}
void early(TensorView x) {}
"""

def built(name, *functions):
    return tvm_ffi.cpp.build_inline(name, cpp_sources=SOURCE, functions=functions)

path = built("kcap_replayed", "scale", "rmsnorm", "gather", "early")
before = tvm_ffi.load_module(path)
import kcap
with torch.no_grad(), kcap.record(sys.argv[1]) as recorder:
    module = tvm_ffi.load_module(path)
    x, out = torch.randn(4, 8), torch.empty(4, 8)
    for _ in range(2):
        with recorder.step("decode"):
            module.scale(x, out, 3.0, True, None, "shift")
            module.rmsnorm(x, torch.ones(8), out, 1e-5)
            module.gather(x, torch.zeros(2, dtype=torch.int32))
            before.early(x)
'''


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        program, path = folder / "program.py", folder / "r.kcap"
        program.write_text(PROGRAM)
        done = subprocess.run([sys.executable, program, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        yield path


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy.kcap"
    shutil.copytree(recorded, path)
    return path


def call(recording: Recording, operator: str) -> Call:
    (found,) = (call for call in recording.kernels() if call.operator == operator)
    return found


def rebuilt(path: Path, operator: str, trust: bool = False) -> tuple[ResolvedCall, Inputs]:
    rebuilder = Rebuilder("cpu", "cpu", path, trust)
    assert rebuilder.recording is not None
    resolved = rebuilder.resolve(call(rebuilder.recording, operator), None)
    return resolved, rebuilder.build(resolved)


def written(resolved: ResolvedCall) -> list[str]:
    return [parameter.name for parameter in resolved.operator.schema.arguments if parameter.alias_info]


def replay(path: Path, *options: str) -> tuple[int, Mapping[str, Mapping[str, Any]]]:
    """The exit code, and the measurement of each operator."""
    output = path.with_suffix(".jsonl")
    command = [sys.executable, "-m", "kcap", "replay", path, "--device", "cpu", "--seconds", "0.001", "-o", output]
    done = subprocess.run([*map(str, command), "--force", *options], capture_output=True, text=True)
    lines = map(orjson.loads, output.read_bytes().splitlines())
    names = {call.id: call.operator for call in kcap.load(path).calls}
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, {names[line["call"]]: line for line in lines}


def test_a_number_that_may_be_an_address_is_passed_to_no_function(recorded: Path) -> None:
    rebuilder = Rebuilder("cpu", "cpu", recorded, False)
    assert rebuilder.recording is not None
    scale = call(rebuilder.recording, "tvm::scale")
    args = [arg.model_copy(update={"value": 1 << 40}) if arg.value == 3.0 else arg for arg in scale.args]
    with pytest.raises(Skip, match="may be an address"):
        rebuilder.resolve(scale.model_copy(update={"args": args}), None)


def test_functions_of_one_module_share_the_library_that_the_recording_keeps(recorded: Path) -> None:
    recording = kcap.load(recorded)
    launches = {name: call(recording, f"tvm::{name}").launch for name in ("scale", "rmsnorm", "early")}
    (library,) = (recorded / "kernels").iterdir()
    for name in ("scale", "rmsnorm"):
        assert launches[name] == Launch(language="tvm", kernel=library.name, function=name)
    assert launches["early"] is not None and launches["early"].kernel is None
    assert recording.metadata.complete
    validated = subprocess.run([sys.executable, "-m", "kcap", "validate", recorded], capture_output=True, text=True)
    assert validated.returncode == 0, validated.stdout


def test_it_runs_with_the_arguments_that_were_recorded(recorded: Path) -> None:
    resolved, inputs = rebuilt(recorded, "tvm::scale")
    x, out, *rest = inputs.args
    assert rest == [3.0, True, None, "shift"]
    resolved.operator.call(*inputs.args)
    torch.testing.assert_close(out, x * 6 + 1)
    assert written(resolved) == [], "no family knows it"


def test_what_its_family_calls_an_output_is_written(recorded: Path) -> None:
    resolved, inputs = rebuilt(recorded, "tvm::rmsnorm")
    resolved.operator.call(*inputs.args)
    x, weight, out, epsilon = inputs.args
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,), weight, epsilon))
    assert written(resolved) == ["arg2"]


def test_the_command_times_each_and_says_why_not(recorded: Path) -> None:
    code, lines = replay(recorded)
    assert code == 3
    timed = {name for name, line in lines.items() if "status" not in line}
    assert {name for name in timed if name.startswith("tvm::")} == {"tvm::scale", "tvm::rmsnorm"}
    assert "integer argument 'arg1' were not recorded" in lines["tvm::gather"]["reason"]
    assert "not loaded from one, or before kcap" in lines["tvm::early"]["reason"]


def test_its_definition_is_verified_against_it(recorded: Path, tmp_path: Path) -> None:
    output = tmp_path / "dataset"
    command = [sys.executable, "-m", "kcap", "export", recorded, "--to", "flashinfer-bench", "--device", "cpu"]
    done = subprocess.run([*map(str, command), "-o", str(output)], capture_output=True, text=True)
    assert done.returncode in (0, 3), done.stderr
    (definition,) = output.rglob("rmsnorm_*.json")
    assert "status:verified" in orjson.loads(definition.read_bytes())["tags"]


def test_a_library_from_elsewhere_runs_only_if_it_is_trusted(copied: Path) -> None:
    metadata = orjson.loads((copied / "recording.json").read_bytes())
    (copied / "recording.json").write_bytes(orjson.dumps({**metadata, "seal": None}))
    assert replay(copied)[1]["tvm::scale"]["reason"] == UNTRUSTED
    assert "status" not in replay(copied, "--trust")[1]["tvm::scale"]


@pytest.mark.parametrize(("damage", "reason"), [("changed", "not what its name says"), ("missing", "not readable")])
def test_a_library_that_is_damaged_is_never_loaded(copied: Path, damage: str, reason: str) -> None:
    (library,) = (copied / "kernels").iterdir()
    library.write_bytes(library.read_bytes() + b"\0") if damage == "changed" else library.unlink()
    with pytest.raises(Skip, match=reason):
        rebuilt(copied, "tvm::scale", trust=True)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"no library", "does not load"), (None, "no function called 'other'")]
)
def test_a_library_without_the_function_is_skipped(
    recorded: Path, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    (library,) = (recorded / "kernels").iterdir()
    if content is not None:
        library = tmp_path / "library.so"
        library.write_bytes(content)
    with pytest.raises(Skip, match=reason):
        tvm_library.load_function(library, "other", of_vm=False)


@pytest.mark.parametrize(("of_vm", "package"), [(False, "apache-tvm-ffi"), (True, "apache-tvm")])
def test_the_package_that_loads_it_may_be_missing(
    of_vm: bool, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tvm" if of_vm else "tvm_ffi", None)
    with pytest.raises(Skip, match=f"^needs {package}: pip install {package}$"):
        tvm_library.load_function(tmp_path / "library.so", "scale", of_vm)


def test_apache_tvm_is_not_needed(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm", None)
    tvm_library._module.cache_clear()
    resolved, inputs = rebuilt(recorded, "tvm::scale")
    resolved.operator.call(*inputs.args)


def test_code_for_another_gpu_is_skipped() -> None:
    error = RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")
    fields = error_fields(error, Target("cuda:0", "cuda"))
    assert fields["status"] == "skipped"
    assert "compiled for another GPU" in fields["reason"]


def test_a_rule_names_the_arguments_of_sglangs_product() -> None:
    """What is written, what is made up and what rotates go by names; its family knows it by both."""
    words = {1: (16, 256), 4: (0,), 5: (0,), 6: (0,), 10: (132,)}
    halves = {0: (3, 256), 2: (4, 128), 3: (0,), 7: (3, 128), 8: (0,), 9: (0,)}
    shapes = {**dict.fromkeys(words, "int32"), **dict.fromkeys(halves, "float16")}
    specs = {n: TensorSpec((words | halves)[n], dtype, storage=n) for n, dtype in shapes.items()}
    values = [*(specs[n] for n in range(11)), 0x4000000100400, True, False, True, False]
    args = [Argument(name=f"arg{n}", value=value) for n, value in enumerate(values)]
    recorded = Call(id=0, operator="tvm::gptq_marlin_gemm", args=args)
    rule = replay_rule_for(recorded.operator)
    parameters = tvm_library.parameters_of(recorded, rule)
    assert tuple(parameter.name for parameter in parameters.arguments) == rule.unnamed_args
    assert [parameter.name for parameter in parameters.arguments if parameter.alias_info] == ["c"]
    bound = bind_call(recorded, None, parameters, lambda _: None)
    name_arguments(bound, rule)
    apply_rule(bound, rule)
    resolve_integers(bound)
    locks, weight = bound.content("workspace"), bound.content("b_q_weight")
    assert locks is not None and not locks.any()
    assert weight is not None and len(weight.unique()) > 1000
    named, unnamed = recognize(invocation_of_bound(bound)), recognize(invocation_of(recorded))
    assert named is not None and unnamed is not None and named.key == unnamed.key
