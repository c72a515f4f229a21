"""What is counted, and what is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from kcap.capture.fold.calls import rounded_notes
from kcap.capture.shards.counts import MAX_EXACT
from kcap.schemas.recording.recording import Call, Recording
from kcap.schemas.recording.records import Count

Record = Callable[..., Recording]
Counted = Callable[[Recording], dict[str, int]]
both = pytest.mark.parametrize("recorder", ["native", "python"])


@torch.library.custom_op("kcaptest::kernel", mutates_args=())
def kernel(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).exp()


@torch.library.custom_op("kcaptest::region", mutates_args=())
def region(x: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.ops.kcaptest.kernel(x * 2) + torch.ops.kcaptest.kernel(x)


@torch.library.custom_op("kcaptest::gather", mutates_args=())
def gather(block_table: torch.Tensor) -> torch.Tensor:
    return block_table * 2


@torch.library.custom_op("kcaptest::raising", mutates_args=())
def raising(x: torch.Tensor) -> torch.Tensor:
    torch.ops.kcaptest.kernel(x)
    raise ValueError("of the operator itself")


@torch.library.custom_op("kcaptest::wrapper", mutates_args=())
def wrapper(x: torch.Tensor, runs: int, layer_name: str) -> torch.Tensor:
    """What it runs depends on more than its arguments: aten operators alone, a kernel too, or what nobody sees."""
    if runs == SEEN_BY_NOBODY:
        return torch.from_numpy(x.numpy().copy())
    return torch.ops.kcaptest.kernel(x * 2) if runs == A_KERNEL else x * 2


ATEN_ALONE, A_KERNEL, SEEN_BY_NOBODY = range(3)
A = torch.randn(4, 4)


@both
def test_every_call_of_a_loop_is_counted(recorder: str, record: Record, counted: Counted) -> None:
    def body(_: Any) -> None:
        for _ in range(1000):
            torch.add(A, A)
            torch.mm(A, A)
            torch.nn.functional.linear(A, A)

    expected = {"aten::add.Tensor": 1000, "aten::mm": 1000, "aten::linear": 1000}
    if recorder == "python":  # it sees what a linear is made of
        expected = {"aten::add.Tensor": 1000, "aten::mm": 2000}
    assert counted(record(body, recorder)) == expected


def test_every_call_of_every_thread_is_counted(record: Record, counted: Counted) -> None:
    def work() -> None:
        with torch.no_grad():
            for _ in range(500):
                torch.add(A, A)
                torch.ops.kcaptest.region(A, "layers.0")

    def body(_: Any) -> None:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    recording = record(body)
    assert counted(recording) == {
        "aten::add.Tensor": 6000,
        "aten::mul.Tensor": 3000,
        "kcaptest::kernel": 6000,
    }
    assert recording.metadata.totals["regions"] == 3000


def test_the_backward_pass_is_counted(record: Record, counted: Counted) -> None:
    weight = A.clone().requires_grad_()

    def body(_: Any) -> None:
        with torch.enable_grad():
            torch.mm(A, weight).sum().backward()

    found = counted(record(body))
    assert found["aten::mm"] == 2
    assert found["aten::sum"] == 1


@both
def test_operators_inside_a_kernel_are_its_detail(recorder: str, record: Record, counted: Counted) -> None:
    recording = record(lambda _: torch.ops.kcaptest.kernel(A), recorder)
    assert counted(recording) == {"kcaptest::kernel": 1}
    assert [(call.kind, call.parent) for call in recording.calls] == [("kernel", None)]


@both
def test_a_custom_operator_around_another_is_a_region(recorder: str, record: Record, counted: Counted) -> None:
    recording = record(lambda _: torch.ops.kcaptest.region(A, "model.layers.3.attn"), recorder)
    assert counted(recording) == {"aten::mul.Tensor": 1, "kcaptest::kernel": 2, "aten::add.Tensor": 1}
    assert {call.operator: call.kind for call in recording.calls}["kcaptest::region"] == "region"
    assert {call.parent for call in recording.kernels()} == {"kcaptest::region"}
    assert recording.metadata.totals["regions"] == 1


@both
@pytest.mark.parametrize("order", list(permutations([ATEN_ALONE, A_KERNEL, SEEN_BY_NOBODY])))
def test_an_operator_that_takes_its_layers_name_is_no_kernel_whatever_runs_in_it(
    order: tuple[int, ...], recorder: str, record: Record, counted: Counted
) -> None:
    recording = record(lambda _: [torch.ops.kcaptest.wrapper(A, runs, "layers.0") for runs in order], recorder)
    assert counted(recording) == {"aten::mul.Tensor": 2, "kcaptest::kernel": 1}
    wrappers = [call for call in recording.calls if call.operator == "kcaptest::wrapper"]
    assert ({call.kind for call in wrappers}, sum(call.total for call in wrappers)) == ({"region"}, 3)


@both
def test_a_wrapper_in_which_nothing_is_seen_is_what_ran(recorder: str, record: Record, counted: Counted) -> None:
    recording = record(lambda _: torch.ops.kcaptest.wrapper(A, SEEN_BY_NOBODY, "layers.0"), recorder)
    assert counted(recording) == {"kcaptest::wrapper": 1}


@both
def test_a_program_lists_its_calls_in_order(recorder: str, record: Record) -> None:
    def body(session: Any) -> None:
        with session.step("decode"):
            torch.add(A, A)
            torch.ops.kcaptest.region(A, "layers.0")
            torch.mm(A, A)

    recording = record(body, recorder)
    (program,) = recording.programs
    names = [recording.calls[number].operator.split(".")[0] for number in program.calls]
    assert names == [
        "aten::add",
        "kcaptest::region",
        "aten::mul",
        "kcaptest::kernel",
        "kcaptest::kernel",
        "aten::add",
        "aten::mm",
    ]


@both
def test_views_and_allocations_do_no_work(recorder: str, record: Record, counted: Counted) -> None:
    def body(_: Any) -> None:
        A.view(16), A.t(), A[1:], A.transpose(0, 1), A.expand(4, 4), A.unsqueeze(0)
        A.detach().unsqueeze_(0).squeeze_(0).t_().transpose_(0, 1).swapaxes_(0, 1)  # they change shape and strides
        torch.empty(3), torch.empty_like(A), A.new_empty(2), torch.empty_strided((2, 2), (1, 2))

    recording = record(body, recorder)
    assert counted(recording) == {}
    assert recording.metadata.totals["views"] >= 16
    assert recording.metadata.totals["kernels"] == 0


@both
def test_the_same_memory_changed_in_place_is_work(recorder: str, record: Record, counted: Counted) -> None:
    scratch = torch.zeros(4, 4)
    found = counted(record(lambda _: scratch.add_(1).copy_(A), recorder))
    assert found == {"aten::add_.Tensor": 1, "aten::copy_": 1}


@both
@pytest.mark.parametrize("broken", [lambda: torch.mm(A, torch.zeros(3, 3)), lambda: torch.ops.kcaptest.raising(A)])
def test_an_operator_that_raises_leaves_the_recorder_well(
    recorder: str, broken: Callable[[], Any], record: Record, counted: Counted
) -> None:
    def body(_: Any) -> None:
        for _ in range(10):
            with pytest.raises((RuntimeError, ValueError)):
                broken()
            torch.add(A, A)
            torch.ops.kcaptest.kernel(A)

    recording = record(body, recorder)
    found = counted(recording)
    assert found["aten::add.Tensor"] == 10
    assert found["kcaptest::kernel"] == (20 if "raising" in str(recording.calls) else 10)
    assert "aten::exp" not in found
    assert all(tap.status in ("ok", "absent") for tap in recording.metadata.taps)
    assert all(call.parent is None for call in recording.calls if call.operator == "aten::add.Tensor")


@both
def test_fake_and_meta_tensors_never_count(recorder: str, record: Record, counted: Counted) -> None:
    def body(_: Any) -> None:
        meta = torch.empty(4, 4, device="meta")
        torch.mm(meta, meta)
        torch.zeros(3, device="meta")
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(A)
            torch.mm(fake, fake) + torch.ones(4, 4)
        torch.add(A, A)

    recording = record(body, recorder)
    assert counted(recording) == {"aten::add.Tensor": 1}
    assert recording.metadata.dropped["traced"] > 0


class Wrapped(torch.Tensor):
    """A subclass that holds a real tensor, as quantized and distributed tensors do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        out = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
        return cls(func(*plain, **(kwargs or {})))


@both
def test_a_tensor_subclass_counts_by_the_operators_inside_it(recorder: str, record: Record, counted: Counted) -> None:
    wrapped = Wrapped(A)
    recording = record(lambda _: [torch.mm(wrapped, wrapped) for _ in range(5)], recorder)
    assert counted(recording) == {"aten::mm": 5}
    assert recording.metadata.dropped == {}


@both
@pytest.mark.parametrize("all_threads", [False, True])
def test_a_profiler_at_the_same_time_sees_what_it_sees_alone(
    recorder: str, all_threads: bool, record: Record, counted: Counted
) -> None:
    of_all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)

    def work() -> None:
        for _ in range(20):
            torch.nn.functional.linear(A, A)
            torch.softmax(A, -1)

    def profiled(_: Any = None) -> None:
        with profile(activities=[ProfilerActivity.CPU], experimental_config=of_all_threads) as prof:
            work()
        seen.append({event.key: event.count for event in prof.key_averages()})

    seen: list[dict[str, int]] = []
    with torch.no_grad():
        profiled()
    record(lambda _: work(), recorder)  # what costs most may be left unobserved from now on
    recording = record(profiled, recorder)
    alone, recorded = seen
    for name in ("aten::linear", "aten::mm", "aten::softmax", "aten::_softmax", "aten::t"):
        # A dispatch mode calls each operator again, and the profiler sees both.
        assert recorded[name] == alone[name] if recorder == "native" else recorded[name] >= alone[name], name
    assert counted(recording)["aten::linear" if recorder == "native" else "aten::mm"] == 20


def test_after_the_recording_nothing_is_observed(record: Record, counted: Counted) -> None:
    first = record(lambda _: torch.add(A, A))
    torch.mm(A, A)
    second = record(lambda _: torch.mul(A, A))
    assert counted(first) == {"aten::add.Tensor": 1}
    assert counted(second) == {"aten::mul.Tensor": 1}


@both
def test_a_custom_operator_with_gradients_on_is_counted(recorder: str, record: Record, counted: Counted) -> None:
    def body(_: Any) -> None:
        with torch.enable_grad():
            torch.ops.kcaptest.kernel(A)

    assert counted(record(body, recorder))["kcaptest::kernel"] == 1


def test_the_fallback_counts_its_own_thread_only(record: Record, counted: Counted) -> None:
    def body(_: Any) -> None:
        thread = threading.Thread(target=lambda: torch.mm(A, A))
        thread.start()
        thread.join()
        torch.add(A, A)

    assert counted(record(body, "python")) == {"aten::add.Tensor": 1}


@both
def test_many_shapes_of_one_operator_are_counted_by_size(recorder: str, record: Record) -> None:
    rows = [*range(1, 1 + MAX_EXACT), *range(300, 700, 2), 300, 600, 5]

    def body(_: Any) -> None:
        weight, indices = torch.ones(8, 3), torch.arange(700, dtype=torch.int32)
        for count in rows:
            torch.mm(torch.ones(count, 8), weight)
            torch.ops.kcaptest.gather(indices[:count])

    recording = record(body, recorder=recorder)
    for operator in ("aten::mm", "kcaptest::gather"):
        calls = [call for call in recording.calls if call.operator == operator]
        rounded = {call.total: call.shapes for call in calls if call.shapes > 1}
        assert len(calls) == MAX_EXACT + 2 and sum(call.total for call in calls) == len(rows)
        # 300 to 512, and to 698; both 300 and 600 came twice
        assert rounded == {107 + 1: 107, 93 + 1: 93}
        assert next(call.total for call in calls if (5,) in shapes_of(call) or (5, 8) in shapes_of(call)) == 2
    sampled = {call.id: shapes_of(call) for call in recording.calls if call.operator == "kcaptest::gather"}
    samples = [sample for sample in recording.samples if sample.call in sampled]
    assert {sample.call for sample in samples} == sampled.keys()
    for sample in samples:  # of the first of a size alone
        assert [tuple(recording.value(tensor).shape) for tensor in sample.tensors.values()] == sampled[sample.call]
    assert any("beside the calls kept apart, 200 more are counted in 2" in note for note in recording.metadata.notes)


def test_notes_of_many_shapes_are_of_the_first_operators() -> None:
    calls = [
        Call(id=number, operator=f"own::o{number // 2}", counts=[Count(phase="decode", count=9)], shapes=3)
        for number in range(40)
    ]
    assert "apart, at least 6 more" in rounded_notes(calls, closed=False)[0]
    *named, last = rounded_notes(calls)
    assert [note.split(": ")[0] for note in named] == [f"own::o{number}" for number in range(8)]
    assert (
        "6 more are counted in 2" in named[0] and last == "12 further operators have calls beyond those kept apart, too"
    )


def shapes_of(call: Call) -> list[tuple[int, ...]]:
    return [tensor.shape for _, tensor in call.tensors()]
