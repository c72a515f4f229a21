"""A function of a module that an operator alone runs is the operator's own: `sglang::store_cache` around its kernel.

So the operator stays a kernel, which replay can call. Where it runs more, each counts on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_graphs import X, captured, graph_class

from kcap.schemas.recording.recording import Recording

Record = Callable[..., Recording]
Body = Callable[[], object]
pytestmark = pytest.mark.usefixtures("no_gradients")
both = pytest.mark.parametrize("recorder", ["native", "python"])


class Operators:
    """`outer` and `inner` run what they are given here."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Body]] = {}

    def run(self, name: str, *bodies: Body) -> None:
        self.runs[name] = list(bodies)
        getattr(torch.ops.kcd, name)(X)


@pytest.fixture(scope="module")
def operators() -> Iterator[Operators]:
    found = Operators()

    def implementation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            for body in found.runs[name]:
                body()
            return x * 2

        return run

    with torch.library._scoped_library("kcd", "DEF") as library:
        for name in ("outer", "inner"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, implementation(name), "CPU")
        yield found


def module(session: Any, name: str = "tvm::run") -> Body:
    """The call of a module's function, with operators of PyTorch's inside."""
    externals = session._window.taps.externals

    def call() -> None:
        assert externals.enter(name, (("arg0",), (X,)), detail=True)
        torch.mm(X, X)
        externals.leave()

    return call


def shape(recording: Recording) -> set[tuple[str, str, str | None, int]]:
    calls = (call for call in recording.calls if call.total and not call.operator.startswith("aten::"))
    return {(call.operator, call.kind, call.parent, call.total) for call in calls}


@both
def test_an_operator_around_one_function_of_a_module_is_the_kernel(
    recorder: str, record: Record, operators: Operators
) -> None:
    def body(session: Any) -> None:
        for _ in range(3):
            operators.run("outer", lambda: torch.relu(X), module(session))
        module(session)()

    assert shape(record(body, recorder)) == {
        ("kcd::outer", "kernel", None, 3),
        ("tvm::run", "kernel", None, 1),
    }


@both
@pytest.mark.parametrize("second", ["tvm::run", "tvm::other"])
def test_an_operator_around_two_functions_is_a_region(
    second: str, recorder: str, record: Record, operators: Operators
) -> None:
    recording = record(lambda session: operators.run("outer", module(session), module(session, second)), recorder)
    kernels = {operator: total for operator, kind, _, total in shape(recording) if kind == "kernel"}
    assert kernels == ({"tvm::run": 2} if second == "tvm::run" else {"tvm::run": 1, "tvm::other": 1})
    assert ("kcd::outer", "region", None, 1) in shape(recording)


@both
@pytest.mark.parametrize("order", [1, -1])
def test_an_operator_around_a_function_and_another_operator_is_a_region(
    order: int, recorder: str, record: Record, operators: Operators
) -> None:
    def body(session: Any) -> None:
        bodies = (module(session, "tvm::own"), lambda: operators.run("inner", module(session)))
        operators.run("outer", *bodies[::order])

    assert shape(record(body, recorder)) == {
        ("kcd::outer", "region", None, 1),
        ("tvm::own", "kernel", "kcd::outer", 1),
        ("kcd::inner", "kernel", "kcd::outer", 1),
    }


@both
def test_a_function_in_an_engines_region_counts(recorder: str, record: Record, operators: Operators) -> None:
    def body(session: Any) -> None:
        externals = session._window.taps.externals
        number = externals.operator("sglang_op::RMSNorm", ["x"], region=True)
        assert externals.enter_region(number, [X])
        module(session)()
        externals.leave_region()

    assert shape(record(body, recorder)) == {
        ("sglang_op::RMSNorm", "region", None, 1),
        ("tvm::run", "kernel", "sglang_op::RMSNorm", 1),
    }


def test_in_a_graph_it_is_the_same(record: Record, operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind := graph_class())

    def body(session: Any) -> None:
        graph = captured(
            kind,
            lambda: operators.run("outer", module(session)),
            lambda: operators.run("inner", module(session), module(session)),
        )
        for _ in range(5):
            with session.step("decode"):
                graph.replay()

    assert shape(record(body)) == {
        ("kcd::outer", "kernel", None, 5),
        ("kcd::inner", "region", None, 5),
        ("tvm::run", "kernel", "kcd::inner", 10),
    }
