"""The tap of the engines' own NCCL communicators, on a stand-in for the modules, with NCCL's groups played."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from library_calls import Heard, imported, write_package
from torch.distributed import ReduceOp

from kcap.capture.taps.libraries import pynccl
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.values import Group

COMMUNICATOR = """
from torch.distributed import ReduceOp


class PyNcclCommunicator:
    def __init__(self, group, disabled=False):
        self.group, self.disabled, self.launched, self.grouped = group, disabled, [], None

    def all_reduce(self, in_tensor, out_tensor=None, op=ReduceOp.SUM, stream=None):
        return in_tensor

    def all_gather(self, output_tensor, input_tensor, stream=None):
        if not self.disabled:
            (self.launched if self.grouped is None else self.grouped).append("all_gather")

    def reduce_scatter(self, output_tensor, input_tensor, op=ReduceOp.SUM, stream=None): pass

    def send(self, tensor, dst, stream=None): pass
    def recv(self, tensor, src, stream=None): pass
    def group_start(self): self.grouped = []
    def group_end(self): self.launched, self.grouped = [*self.launched, tuple(self.grouped)], None
    def destroy(self): pass
    def register_comm_window(self, tensor): return tensor
    def _warm_up(self, tensor): return tensor
"""
X, Y = torch.ones(4, 2), torch.ones(2, 2)
NAMED = type("ProcessGroup", (), {"group_name": "7"})()


@pytest.fixture(params=pynccl.MODULES)
def communicator(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the communicator of an engine; its module is imported by this."""
    parts = request.param.split(".")
    for depth in range(1, len(parts)):
        write_package(tmp_path, ".".join(parts[:depth]), {})
    (tmp_path / f"{request.param.replace('.', '/')}.py").write_text(COMMUNICATOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in imported(sys.modules, parts[0]):
        yield lambda **more: importlib.import_module(request.param).PyNcclCommunicator(NAMED, **more)


@pytest.fixture
def heard() -> Iterator[Heard]:
    """What the tap is told of; the tap waits for the module."""
    heard = Heard()
    tap = pynccl.install(heard)
    yield heard
    tap.undo()


def test_a_collective_is_recorded_with_its_group_and_its_reduction_by_name(communicator: Any, heard: Heard) -> None:
    made = communicator()
    assert made.all_reduce(X) is X
    made.reduce_scatter(Y, X, ReduceOp.MAX, stream=3)
    made.send(X, dst=1)
    group = {"group": "c10d/7"}
    assert heard.calls == [
        ("pynccl::all_reduce", {"in_tensor": X, "out_tensor": None, "op": "sum"} | group),
        ("pynccl::reduce_scatter", {"output_tensor": Y, "input_tensor": X, "op": "max"} | group),
        ("pynccl::send", {"tensor": X, "dst": 1} | group),
    ]
    assert heard.flags == [(True, True)] * 3 and heard.left == 3


def test_what_launches_nothing_is_left_out(communicator: Any, heard: Heard) -> None:
    made, off = communicator(), communicator(disabled=True)
    off.all_gather(X, Y)
    made.register_comm_window(X)
    made._warm_up(X)
    made.group_start()
    made.group_end()
    heard.on = False
    made.all_gather(X, Y)
    made.group_start()
    made.all_gather(X, Y)
    heard.on = True  # in the midst of a group
    made.all_gather(X, Y)
    made.group_end()
    assert heard.calls == [] and off.launched == []
    assert made.launched == [(), "all_gather", ("all_gather", "all_gather")]


def test_a_group_is_one_call_at_its_end(communicator: Any, heard: Heard) -> None:
    made = communicator()
    made.group_start()
    made.all_gather(X, Y)
    made.all_gather(Y, input_tensor=X)
    assert heard.calls == []
    made.group_end()
    lists = {"output_tensor": [X, Y], "input_tensor": [Y, X], "group": "c10d/7"}
    assert heard.calls == [("pynccl::all_gather", lists)] and heard.left == 1
    assert made.launched == [("all_gather", "all_gather")]
    made.all_gather(X, Y)
    assert heard.operators == ["pynccl::all_gather"] * 2 and heard.calls[1][1]["input_tensor"] is Y


def test_a_group_of_one_is_as_one_alone_and_groups_in_a_group_end_with_it(communicator: Any, heard: Heard) -> None:
    made, inner = communicator(), communicator()
    made.group_start()
    made.all_gather(X, Y)
    made.group_end()
    made.group_start()
    made.send(X, 1)
    inner.group_start()
    inner.send(Y, 0)
    inner.group_end()
    assert len(heard.calls) == 1
    made.group_end()
    assert heard.calls == [
        ("pynccl::all_gather", {"output_tensor": X, "input_tensor": Y, "group": "c10d/7"}),
        ("pynccl::send", {"tensor": [X, Y], "dst": [1, 0], "group": "c10d/7"}),
    ]


class Nameless:
    """A group without a backend."""

    @property
    def group_name(self) -> str:
        raise RuntimeError("ProcessGroup name not set")


@pytest.mark.parametrize("group", [None, Nameless()])
def test_a_communicator_of_no_named_group_is_recorded_without(communicator: Any, heard: Heard, group: Any) -> None:
    made = communicator()
    made.group = group
    made.all_gather(X, Y)
    assert heard.calls == [("pynccl::all_gather", {"output_tensor": X, "input_tensor": Y, "group": None})]


def test_a_group_of_sends_and_receives_tells_which_is_which(communicator: Any, heard: Heard) -> None:
    made = communicator()
    made.group_start()
    made.send(X, 1)
    made.recv(Y, 0)
    made.group_end()
    lists = {"send.tensor": [X], "send.dst": [1], "recv.tensor": [Y], "recv.src": [0], "group": "c10d/7"}
    assert heard.calls == [("pynccl::group", lists)]


def test_what_raises_raises_and_a_failure_of_the_taps_own_does_not(communicator: Any, heard: Heard) -> None:
    made = communicator()
    with pytest.raises(TypeError):
        made.all_gather(X)
    heard.breaks = RuntimeError("of the tap")
    made.group_start()
    made.all_gather(X, Y)
    made.group_end()
    made.all_gather(X, Y)
    assert made.launched == [("all_gather",), "all_gather"]
    assert heard.failures == [("pynccl", "RuntimeError: of the tap")]


def test_without_the_tap_the_methods_are_the_communicators_own(communicator: Any) -> None:
    tap = pynccl.install(Heard())
    kind = type(communicator())
    assert len(tap) == 7
    tap.undo()
    assert all("wrapper" not in method.__qualname__ for method in (kind.all_gather, kind.group_end, kind.send))
    assert not any(hasattr(method, "__wrapped__") for method in vars(kind).values())


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_collective_is_its_operators_detail_where_it_is_the_only_kernel(
    recorder: str,
    communicator: Any,
    record: Callable[..., Recording],
    counted: Callable[[Recording], dict[str, int]],
    request: pytest.FixtureRequest,
) -> None:
    """As in `vllm::all_reduce`; among other kernels, as in a layer of experts, it counts, and so it does alone."""
    made: list[Any] = []

    def reduce(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        made[0].all_reduce(x, out)
        return out

    def experts(x: torch.Tensor) -> torch.Tensor:
        made[0].group_start()
        made[0].all_gather(torch.empty(8, 2), x)
        made[0].all_gather(torch.empty(8, 2), x)
        made[0].group_end()
        torch.ops.kcapnccl.reduce(x)
        made[0].reduce_scatter(torch.empty(1, 2), x)
        return x

    library = torch.library.Library("kcapnccl", "FRAGMENT")
    for function in (reduce, experts):
        library.define(f"{function.__name__}(Tensor x) -> Tensor")
        library.impl(function.__name__, function, "CPU")
    request.addfinalizer(library._destroy)

    def body(session: Any) -> None:
        made.append(communicator())
        session._window.recorder.group("c10d/7", 0, 2, 1, "dp")
        with session.step("decode"):
            torch.ops.kcapnccl.reduce(Y)
            torch.ops.kcapnccl.experts(Y)
            made[0].all_gather(X, Y)

    recording = record(body, recorder)
    assert counted(recording) == {
        "kcapnccl::reduce": 2,
        "pynccl::all_gather": 2,  # two at once, and one alone
        "pynccl::reduce_scatter": 1,
    }
    groups = [arg.value for call in recording.kernels() for arg in call.args if arg.name == "group"]
    assert groups == [Group(2, 1, "dp") if recorder == "native" else "c10d/7"] * 3
    tap = next(tap for tap in recording.metadata.taps if tap.name == "pynccl")
    assert (tap.status, tap.detail) == ("ok", "7 functions")
