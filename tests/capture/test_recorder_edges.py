"""What a recorder must not trip over: look-alike signatures, many threads, many recordings, memory given back."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kcap
from kcap.capture.recorder import fallback_tables
from kcap.capture.shards.counts import LOOSE_STEPS, MAX_BATCHES, MAX_CALLS, MAX_EXACT, MAX_KEYS, STEPS
from kcap.capture.shards.lines import ProgramLine
from kcap.capture.shards.reader import read_shard
from kcap.errors import CallError
from kcap.replay.jobs import Choice
from kcap.replay.source import open_source
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.values import Opaque

Record = Callable[..., Recording]
Counted = Callable[[Recording], dict[str, int]]
Python = Callable[..., Any]


def test_a_small_tensor_is_not_taken_for_none(record: Record) -> None:
    x, bound = torch.zeros(4, dtype=torch.uint8), torch.tensor(3, dtype=torch.uint8)

    def body(_: Any) -> None:
        for _ in range(3):
            torch.clamp(x, min=bound)
        for _ in range(5):
            torch.clamp(x, max=bound)

    clamps = [call.total for call in record(body).calls if call.operator == "aten::clamp.Tensor"]
    assert sorted(clamps) == [3, 5]


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_dtype_that_is_not_known_is_opaque_and_all_else_is_recorded(recorder: str, record: Record) -> None:
    def body(_: Any) -> None:
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, dtype=torch.qint8)
        torch.dequantize(quantized)

    recording = record(body, recorder)
    assert recording.metadata.complete, recording.metadata.notes
    found = {call.operator: [argument.value for argument in call.args] for call in recording.kernels()}
    assert found["aten::quantize_per_tensor"][-1] == Opaque("dtype")
    (tensor,) = found["aten::dequantize.self"]
    assert isinstance(tensor, Opaque) and tensor.type.startswith("tensor ")


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_file_opened_under_a_closed_number_is_not_written_to(recorder: str, record: Record, tmp_path: Path) -> None:
    """As a daemon's are that closes every descriptor which it inherited."""
    theirs = tmp_path / "theirs"

    def body(_: Any) -> None:
        torch.ones(1)
        with theirs.open("wb") as file:
            for number in shard_files():
                os.dup2(file.fileno(), number)
        torch.ones(2)
        assert theirs.read_bytes() == b""

    assert record(body, recorder).metadata.complete
    assert theirs.read_bytes() == b""
    recording = record(
        lambda _: [torch.ones(1), [os.close(number) for number in shard_files()], torch.ones(3)], recorder
    )
    assert sum(call.total for call in recording.calls if call.operator == "aten::ones") == 2


def shard_files() -> list[int]:
    """The descriptors that this process has of a shard's lines."""
    numbers = [int(number) for number in os.listdir("/proc/self/fd")]
    return [number for number in numbers if os.path.realpath(f"/proc/self/fd/{number}").endswith(".jsonl")]


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_offsets_in_a_list_make_one_call_whose_samples_carry_them(recorder: str, record: Record) -> None:
    cache = torch.zeros(64, 4)

    def body(_: Any) -> None:
        for row in range(40):
            torch.cat([cache[row : row + 1], cache[row + 8 : row + 9]])

    recording = record(body, recorder)
    (call,) = (call for call in recording.calls if call.operator == "aten::cat")
    assert call.total == 40
    assert [spec.offset for _, spec in call.tensors()] == [None, None]
    samples = [sample.offsets for sample in recording.samples if sample.call == call.id]
    assert 1 < len(samples) <= 4
    assert all(offsets["0.1"] - offsets["0.0"] == 32 for offsets in samples)
    (job,) = open_source(recording.path, Choice(globs=("aten::cat",)), keep_going=False).jobs
    assert [group.sample.offsets for group in job.groups if group.sample] == samples


def test_a_tensor_whose_memory_was_given_back_is_not_read(record: Record) -> None:
    def body(_: Any) -> None:
        x = torch.ones(1 << 18, dtype=torch.int64)
        x.untyped_storage().resize_(0)
        x.detach()
        x.resize_(5)

    metadata = record(body, keep_tokens=True).metadata
    assert metadata.complete
    assert metadata.dropped["samples"] >= 1


def test_elements_that_share_memory_are_not_copied_by_the_million(record: Record) -> None:
    index = torch.zeros(4, 1, dtype=torch.int64).expand(4, 1 << 19)
    recording = record(lambda _: torch.ones(4, 1).gather(1, index), keep_tokens=True)
    assert recording.metadata.complete and recording.metadata.dropped["samples"] == 1
    assert not any(sample.tensors for sample in recording.samples)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_threads_that_ended_leave_no_memory_behind(record: Record) -> None:
    grown: list[int] = []

    def many() -> None:
        for _ in range(500):
            thread = threading.Thread(target=torch.ones, args=(1,))
            thread.start()
            thread.join()

    def body(_: Any) -> None:
        many()
        before = resident()
        many()
        grown.append(resident() - before)

    recording = record(body)
    assert sum(call.total for call in recording.calls if call.operator == "aten::ones") == 1000
    assert grown[0] < 10 << 20


def exponentials(sizes: Sequence[int]) -> Callable[[Any], None]:
    """A body that runs one operator on tensors of these sizes."""
    tensors = [torch.empty(1).expand(size, 0) for size in sizes]

    def body(_: Any) -> None:
        for tensor in tensors:
            torch.exp(tensor)

    return body


def test_signatures_that_are_not_remembered_are_counted(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 are exact, the next 28 are remembered, and the others are not."""
    monkeypatch.setattr(fallback_tables, "MAX_EXACT", 100)
    monkeypatch.setattr(fallback_tables, "MAX_KEYS", 128)
    recording = record(exponentials([*range(1, 501), *range(1, 501)]), "python")
    assert sum(call.total for call in recording.calls) == 1000
    assert [call.shapes for call in recording.calls if call.total > 2] == [28, 1, 1]


def test_a_full_table_still_counts_what_is_like_a_known_call(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback_tables, "MAX_CALLS", 20)
    powers = [1 << power for power in range(5, 30)]
    recording = record(exponentials([*range(2, 32), *range(1 << 15, 32818), *powers, *range(32838, 32868)]), "python")
    assert len(recording.calls) == 20
    assert max(call.total for call in recording.calls) == 49 + 1 + 30


def test_past_the_most_batches_steps_add_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback_tables, "MAX_BATCHES", 2)
    writer = fallback_tables.ShardWriter(tmp_path / "shard")
    for calls in ([0], [0, 1], [1, 0], [1, 1], [0]):
        writer.count_step(calls, 1, 1, 1, b"")
    shard = read_shard(tmp_path / "shard")
    assert [line.calls for line in shard.lines(ProgramLine)] == [[0], [0, 1]]
    assert [shard.batch_count(batch) for batch in range(2)] == [1, 1]
    assert [sum(shard.loose_counts(number)) for number in range(2)] == [2, 3]
    assert (shard.header(STEPS), shard.header(LOOSE_STEPS + 1)) == (5, 3)
    writer.close()


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_recording_gives_its_files_back(recorder: str, record: Record) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(".counts (deleted)")

    record(lambda _: torch.ones(1), recorder)
    before = held()
    for _ in range(3):
        record(lambda _: torch.ones(1), recorder)
    assert held() == before


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_recording_that_is_over_has_no_part_in_forks_and_the_exit(
    recorder: str, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(lambda _: torch.ones(1), recorder)
    hooks: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hook: hooks.append(hook))
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", hooks.remove)
    record(lambda _: torch.ones(1), recorder)
    assert hooks == []


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_force_replaces_nothing_but_a_recording(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    if kind == "directory":
        place.mkdir()
    precious = place / "precious" if kind == "directory" else place
    precious.write_text("mine")
    with pytest.raises(CallError, match="is no Recording"), kcap.record(place, force=True):
        torch.ones(1)
    assert precious.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_what_is_received_is_work_even_where_its_operator_calls_it_an_alias(
    recorder: str, record: Record, counted: Counted
) -> None:
    """As vLLM declares that by which a pipeline's stage on a CPU receives."""
    with torch.library._scoped_library("kcapreceive", "DEF") as lib:
        lib.define("receive(int source) -> Tensor[](a)")
        lib.impl("receive", lambda source: [torch.ones(2)], "CompositeExplicitAutograd")
        found = counted(record(lambda _: torch.ops.kcapreceive.receive(0), recorder))
    assert found["kcapreceive::receive"] == 1


def test_a_boxed_call_is_recorded_with_its_own_arguments(record: Record) -> None:
    """Inside two levels of functorch, its stack holds others' arguments, too."""
    x = torch.ones(2)

    def body(_: Any) -> None:
        torch.func.jvp(lambda x: torch.func.jvp(lambda y: y.unsqueeze(0), (x,), (x,))[1], (x,), (x,))

    calls = record(body).calls
    (unsqueeze,) = (call for call in calls if call.operator == "aten::unsqueeze")
    assert [argument.name for argument in unsqueeze.args] == ["self", "dim"]
    assert not any(call.operator == "aten::as_strided" for call in calls)


def test_a_product_with_a_zero_without_memory_is_not_counted(record: Record, counted: Counted) -> None:
    zero = torch._efficientzerotensor((2, 2))
    assert "aten::mm" not in counted(record(lambda _: torch.mm(torch.ones(2, 2), zero)))


def test_what_makes_jagged_of_padded_is_counted(record: Record, counted: Counted) -> None:
    """PyTorch calls it with a jagged dummy of meta tensors."""
    jagged = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged).requires_grad_()
    padded = jagged.to_padded_tensor(0.0).sum()
    assert counted(record(lambda _: padded.backward()))["aten::_padded_dense_to_jagged_forward"] == 1


def test_the_bounds_are_those_of_the_compiled_recorder() -> None:
    native = Path(fallback_tables.__file__).with_name("native")
    text = "".join((native / name).read_text() for name in ("shard.h", "state.h"))
    bounds = {"kMaxBatches": MAX_BATCHES, "kMaxCalls": MAX_CALLS, "kMaxExact": MAX_EXACT, "kMaxKeys": MAX_KEYS}
    for name, bound in bounds.items():
        found = re.search(rf"{name} = (\d+)(?: << (\d+))?", text)
        assert found is not None, name
        assert int(found[1]) << int(found[2] or 0) == bound, name
