"""References of inductor's fused kernels: compiled for real, and compared with the kernels themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fused import errors

import kcap
from kcap.schemas.derive.fragment.reference import FragmentReference, Unknown, reference_of
from kcap.schemas.recording.recording import Call, Recording

PROGRAM = Path(__file__).with_name("fused_program.py")
SEEDS = range(5)


def record(directory: Path, name: str, device: str) -> Recording:
    """The program's Recording."""
    command = [sys.executable, PROGRAM, directory / name, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return kcap.load(directory / name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the Recordings lie, and inductor's cache for recording and replaying."""
    folder = tmp_path_factory.mktemp("fused")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def recording(directory: Path) -> Recording:
    return record(directory, "cpu", "cpu")


def fused(recording: Recording) -> list[Call]:
    return [call for call in recording.calls if call.launch is not None]


def named(recording: Recording, name: str) -> Call:
    return next(call for call in fused(recording) if name in call.operator)


def reference(call: Call, recording: Recording) -> FragmentReference:
    result = reference_of(call, recording)
    assert isinstance(result, FragmentReference), result
    return result


def test_every_fused_kernel_has_a_reference_that_computes_what_it_does(recording: Recording) -> None:
    calls = fused(recording)
    assert len(calls) == 14 and all(call.launch and call.launch.fragment for call in calls)
    for call in calls:
        for seed in SEEDS:
            ratios = errors(call, recording, seed=seed)
            assert ratios and max(ratios) <= 1.0, (call.operator, ratios)


def test_a_reference_is_plain_pytorch_that_names_sizes_by_its_inputs(recording: Recording) -> None:
    result = reference(named(recording, "::mul_view"), recording)
    assert result.source == (
        "import torch\n\n\ndef run(in_ptr0):\n    n0 = in_ptr0.shape[0]\n"
        "    reshape = torch.ops.aten.reshape.default(in_ptr0, [(2 * n0), -1])\n"
        "    mul = torch.ops.aten.mul.Tensor(reshape, n0)\n    return mul\n"
    )


def test_inputs_and_outputs_name_the_kernels_own_arguments(recording: Recording) -> None:
    call = named(recording, "mean_mul_pow_rsqrt_sub")
    result = reference(call, recording)
    ports = [*result.inputs, *result.outputs]
    assert [port.name for port in ports] == ["in_ptr0", "in_ptr1", "in_ptr2", "out_ptr0", "out_ptr2"]
    assert [call.args[int(port.path)].name for port in ports] == [port.name for port in ports]
    assert [port.shape for port in ports] == [(8, 64), (8, 64), (64,), (8, 64), (8, 64)]
    assert [call.args[int(path)].name for path in result.scratch] == ["out_ptr1"]  # sums of squares


def test_what_is_read_and_written_is_an_input_and_an_output(recording: Recording) -> None:
    result = reference(named(recording, "copy__mul_sub"), recording)
    assert {port.name for port in result.inputs} & {"in_ptr0", "in_out_ptr0"}
    assert all(port.name not in {port.name for port in result.inputs} for port in result.outputs)


def test_wrappers_from_inductors_cache_tell_the_same(directory: Path, recording: Recording) -> None:
    again = record(directory, "again", "cpu")
    fragments = {call.operator: recording.fragment(call.launch) for call in fused(recording) if call.launch}
    assert fragments == {call.operator: again.fragment(call.launch) for call in fused(again) if call.launch}


def test_operands_that_are_exchanged_do_not_agree(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees which buffer is which."""
    call = named(recording, "::abs_add_div")
    result = reference(call, recording)
    swapped = FragmentReference(result.source, result.inputs[::-1], result.outputs)
    monkeypatch.setattr("fused.reference_of", lambda call, recording: swapped)
    assert max(errors(call, recording)) > 1.0


def test_a_fragment_that_is_missing_or_changed_costs_the_reference_only(recording: Recording) -> None:
    call = fused(recording)[0]
    assert call.launch is not None
    bare = call.model_copy(update={"launch": call.launch.model_copy(update={"fragment": None})})
    gone = call.model_copy(update={"launch": call.launch.model_copy(update={"fragment": "../recording.json"})})
    assert reference_of(bare, recording) == Unknown("torch's wrapper told no operators of it, or was not there")
    assert isinstance(reference_of(gone, recording), Unknown)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_every_fused_triton_kernel_has_a_reference_that_computes_what_it_does(directory: Path) -> None:
    recording = record(directory, "cuda", "cuda")
    calls = fused(recording)
    assert len(calls) >= 13 and all(call.launch and call.launch.fragment for call in calls)
    unknown = {call.operator: found for call in calls if isinstance(found := reference_of(call, recording), Unknown)}
    wrong = {
        call.operator: found
        for call in calls
        if call.operator not in unknown and max(found := errors(call, recording, "cuda")) > 1.0
    }
    assert not wrong and not unknown
