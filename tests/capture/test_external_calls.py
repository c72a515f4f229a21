"""Calls that Python tells the recorder of: whatever they were given reads back, and nothing reaches the caller."""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcap.capture.recorder.native_recorder import LONGEST_LIST, Packer
from kcap.capture.shards.counts import KERNELS
from kcap.capture.taps import external
from kcap.capture.taps.external import Externals
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.values import Folded, Opaque, TensorSpec, TorchConstant, Value, encode

Record = Callable[..., Recording]
pytestmark = pytest.mark.usefixtures("no_gradients")
both = pytest.mark.parametrize("recorder", ["native", "python"])
X = torch.ones(4, 4)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("kce", "DEF") as lib:
        lib.define("leaf(Tensor x) -> Tensor")
        lib.impl("leaf", lambda x: x * 2, "CPU")
        yield lib


def told(recorder: Any) -> Externals:
    """The way of the taps to the recorder of `kcap.record()`."""
    found: Externals = recorder._window.taps.externals
    return found


def call(recorder: Any, values: Sequence[Any], name: str = "lib::call", **more: Any) -> bool:
    """One call of `name` with arguments called a0, a1, …"""
    began = told(recorder).enter(name, ([f"a{i}" for i in range(len(values))], values), **more)
    if began:
        told(recorder).leave()
    return began


def values_of(recording: Recording, name: str = "lib::call") -> list[list[Value]]:
    return [[argument.value for argument in one.args] for one in recording.calls if one.operator == name]


BASE = torch.zeros(64)
PLAIN: list[tuple[Any, Value]] = [
    (None, None),
    (True, True),
    (-7, -7),
    (2**63 - 1, 2**63 - 1),
    (-(2**63), -(2**63)),
    (2**63, Opaque("int")),
    (0.1, 0.1),
    (1e300, 1e300),
    (math.inf, math.inf),
    (-math.inf, -math.inf),
    ('fp8 "e4m3"\n\\ é', 'fp8 "e4m3"\n\\ é'),
    ("model.layers.31.mlp", Folded("model.layers.*.mlp")),
    ("", ""),
    (3j, 3j),
    (torch.bfloat16, TorchConstant("dtype", "bfloat16")),
    (torch.device("cuda:3"), TorchConstant("device", "cuda")),
    (torch.channels_last, TorchConstant("memory_format", "channels_last")),
    (object(), Opaque("object")),
    (slice(1, 2), Opaque("slice")),
    ((1, 2), [1, 2]),
    (torch.Size([3, 4]), [3, 4]),
    ([], []),
    ([1, [2.5, "a", None], [[True]]], [1, [2.5, "a", None], [[True]]]),
    ([1, 2.5, False], [1, 2.5, False]),
    (BASE, TensorSpec((64,), "float32")),
    (BASE.view(8, 8).t(), TensorSpec((8, 8), "float32", (1, 8))),
    (BASE.view(8, 8)[2:, 1:3], TensorSpec((6, 2), "float32", (8, 1), 17)),
    (torch.nn.Parameter(BASE), TensorSpec((64,), "float32")),
    (torch.zeros(2, dtype=torch.float8_e4m3fn), TensorSpec((2,), "float8_e4m3fn")),
    (torch.zeros(0, 3), TensorSpec((0, 3), "float32")),
    (torch.zeros(3).to_sparse(), Opaque("tensor")),
]


@both
@pytest.mark.parametrize("given_value, value", PLAIN, ids=lambda value: type(value).__name__)
def test_every_kind_of_value_reads_back(recorder: str, given_value: Any, value: Value, record: Record) -> None:
    (args,) = values_of(record(lambda session: call(session, [given_value]), recorder))
    if isinstance(value, Opaque) and value.type == "tensor":
        assert isinstance(args[0], Opaque) and args[0].type.startswith("tensor")
    else:
        assert args == [value] and type(args[0]) is type(value)


@both
def test_tensors_that_share_memory_say_so(recorder: str, record: Record) -> None:
    other = torch.zeros(64)
    (args,) = values_of(record(lambda session: call(session, [BASE, other, [BASE[8:], other]]), recorder))
    assert args == [
        TensorSpec((64,), "float32", storage=0),
        TensorSpec((64,), "float32", storage=1),
        [TensorSpec((56,), "float32", offset=8, storage=0), TensorSpec((64,), "float32", storage=1)],
    ]


@both
def test_not_a_number_reads_back(recorder: str, record: Record) -> None:
    ((value,),) = values_of(record(lambda session: call(session, [math.nan]), recorder))
    assert isinstance(value, float) and math.isnan(value)


texts = st.text(max_size=8).filter(lambda text: not re.search(r"\.\d", text))  # which would fold
numbers = st.integers(-(2**70), 2**70) | st.floats() | st.booleans()
leaves = (
    st.none() | numbers | texts | st.sampled_from([torch.float16, torch.strided, BASE, BASE[4:], BASE.view(8, 8).t()])
)
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner), max_leaves=12)


def expected(value: Any, storages: dict[int, int]) -> Value:
    """What a value is in a Recording, by the words of kcap.schemas.recording.values."""
    if isinstance(value, list | tuple):
        return [expected(item, storages) for item in value]
    if isinstance(value, torch.Tensor):
        strides = None if value.is_contiguous() else tuple(value.stride())
        return TensorSpec(tuple(value.shape), "float32", strides, int(value.storage_offset()))
    if isinstance(value, torch.dtype):
        return TorchConstant("dtype", "float16")
    if isinstance(value, torch.layout):
        return TorchConstant("layout", "strided")
    if type(value) is int and not -(2**63) <= value < 2**63:
        return Opaque("int")
    return value  # type: ignore[no-any-return]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tree_of_values_reads_back(data: st.DataObject, record: Record) -> None:
    """All trees of an example in one recording, each an operator of its own."""
    many = data.draw(st.lists(st.lists(trees, max_size=3), min_size=1, max_size=8))

    def body(session: Any) -> None:
        for number, values in enumerate(many):
            assert call(session, values, f"lib::call{number}")

    recording = record(body)
    assert all(tap.status in ("ok", "absent") for tap in recording.metadata.taps) and recording.metadata.complete
    for number, values in enumerate(many):
        (found,) = values_of(recording, f"lib::call{number}")
        assert encode(found) == encode([expected(value, {}) for value in values])


ODD: list[tuple[Any, Value]] = [
    ("fp8\0e4m3", "fp8\0e4m3"),
    ('\x01{"tensor": 1}', '\x01{"tensor": 1}'),
    ("\ud800", "?"),
    ("x" * 100_000, Opaque("str")),
    ([0] * (LONGEST_LIST + 1), Opaque("list")),
]


@pytest.mark.parametrize("given_value, value", ODD, ids=["zero", "mark", "surrogate", "text", "list"])
def test_an_odd_value_costs_neither_its_call_nor_the_tap(given_value: Any, value: Value, record: Record) -> None:
    def body(session: Any) -> None:
        with session.step("decode"):
            assert call(session, [given_value, 5])
            torch.relu(X)

    recording = record(body)
    assert values_of(recording) == [[value, 5]]
    assert [call.total for call in recording.calls] == [1, 1]


def test_lists_nested_without_end_end_in_something_opaque(record: Record) -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep, 1]

    def body(session: Any) -> None:
        assert call(session, [endless, deep, [[0] * LONGEST_LIST] * LONGEST_LIST])

    ((first, second, third),) = values_of(record(body))
    for value in (first, second):
        while isinstance(value, list):
            value = value[0]
        assert value == Opaque("list")
    assert isinstance(third, list) and Opaque("list") in third


@both
@pytest.mark.parametrize("sequence", [list, tuple, deque])
def test_values_in_any_sequence_read_alike(recorder: str, sequence: Callable[..., Any], record: Record) -> None:
    def body(session: Any) -> None:
        told(session).launched(
            told(session).operator("lib::call", ["a0", "a1", "a2"]), -1, sequence([BASE, 2**63, 0.5])
        )

    assert values_of(record(body, recorder)) == [[TensorSpec((64,), "float32"), Opaque("int"), 0.5]]


@pytest.mark.parametrize("change", [[], [BASE] * 64], ids=["shrinks", "grows"])
@pytest.mark.parametrize("last", [7, "text"])
def test_a_list_that_changes_while_it_is_read_is_read_as_it_was(change: list[Any], last: Any, record: Record) -> None:
    class Changing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            values[:] = change
            return super().__torch_function__(function, types, args, kwargs or {})

    values = [torch.ones(2).as_subclass(Changing), BASE, last]

    def body(session: Any) -> None:
        assert told(session).launched(told(session).operator("lib::call", ["a0", "a1", "a2"]), -1, values)
        assert values == change

    assert [read[2] for read in values_of(record(body))] == [last]


@both
def test_a_call_keeps_no_reference_to_its_values(recorder: str, record: Record) -> None:
    plain, rare = (BASE[1:], 2**40, 0.25), (BASE[2:], "text of this call alone", [2**41])
    counts = []

    def body(session: Any) -> None:
        for values in (plain, rare):
            operator = told(session).operator("lib::call", [f"a{i}" for i in range(len(values))])
            for calls in (10, 1000):
                for _ in range(calls):
                    assert told(session).launched(operator, -1, values)
                counts.append([sys.getrefcount(value) for value in (values, *values)] + [values[0]._use_count()])

    record(body, recorder)
    assert counts[0] == counts[1] and counts[2] == counts[3]


def test_what_python_raises_for_a_value_is_raised_and_the_call_not_recorded(record: Record) -> None:
    class Unwilling(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise LookupError("no")

    class Elsewhere(torch.Tensor):
        _cdata = None  # type: ignore[assignment]

    def body(session: Any) -> None:
        recorder, operator = told(session)._host.recorder, told(session).operator("lib::call", ["a0"])
        assert recorder is not None
        for kind, error in ((Unwilling, LookupError), (Elsewhere, TypeError)):
            with pytest.raises(error):
                recorder.call(operator, -1, [torch.ones(2).as_subclass(kind)], False, False)
        for arguments in ((operator,), (operator, None, [1], True, False), (2**80, -1, [1], True, False)):
            with pytest.raises((TypeError, OverflowError)):
                recorder.call(*arguments)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            recorder.call(operator, -1, 5, False, False)  # type: ignore[arg-type]
        assert recorder.call(operator, -1, [7], False, False)

    assert values_of(record(body)) == [[7]]


def test_texts_past_the_limit_take_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcap.capture.recorder.native_recorder.MOST_TEXTS", 4)
    numbered: list[bytes] = []
    packer = Packer(lambda text: numbered.append(text) or len(numbered) - 1)
    words = [int.from_bytes(packer([f"text {n}"])[1], sys.byteorder) for n in (0, 1, 2, 3, 4, 5, 6, 2)]
    assert words == [0, 1, 2, 3, 4, 4, 4, 2]
    assert numbered[4:] == [b'\x01{"opaque":"text"}']


def test_beyond_the_most_launches_those_that_differ_in_the_grid_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(external, "MOST_LAUNCHES", 2)
    bodies: list[bytes] = []
    host: Any = SimpleNamespace(recorder=SimpleNamespace(launch=lambda body: bodies.append(body) or len(bodies) - 1))
    listener = external.Externals(host, Path())
    numbers = [listener.launch({"function": "f", "grid": [size], "num_warps": 4}) for size in (1, 2, 3, 4, 1)]
    assert numbers == [0, 1, 2, 2, 0] and b"grid" not in bodies[2]
    assert [listener.launch({"function": name, "grid": [9]}) for name in "gh"] == [3, None], "nor without end"


def test_a_source_is_whole_though_a_process_was_killed_as_it_wrote_it(tmp_path: Path) -> None:
    text = b"def kernel(): pass\n" * 100
    if (process := os.fork()) == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        Externals(cast("Any", None), tmp_path).source("kernel.py", text)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGXFSZ
    assert not (tmp_path / KERNELS / "kernel.py").exists()
    Externals(cast("Any", None), tmp_path).source("kernel.py", text)
    assert (tmp_path / KERNELS / "kernel.py").read_bytes() == text


def test_a_source_that_could_not_be_written_is_written_the_next_time(tmp_path: Path) -> None:
    externals = Externals(cast("Any", None), tmp_path / "later")
    with pytest.raises(FileNotFoundError):
        externals.source("kernel.py", b"text")
    (tmp_path / "later").mkdir()
    externals.source("kernel.py", b"text")
    assert (tmp_path / "later" / KERNELS / "kernel.py").read_bytes() == b"text"
