"""An engine's own fused operators, on stand-ins of its classes: regions whose kernels count as they did without."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import Engine, captured, graph_class, health

from kcap.capture.hooks.patching import MARK
from kcap.capture.taps.fused import Fused
from kcap.schemas.recording.recording import Call, Recording
from kcap.schemas.recording.values import TensorSpec, TorchConstant

pytestmark = pytest.mark.usefixtures("no_gradients")
both = pytest.mark.parametrize("recorder", ["native", "python"])
X = torch.ones(4, 8)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("kcfused", "DEF") as lib:
        for name, function in (("leaf", lambda x: x * 2), ("outer", lambda x: inside[0](x).neg())):
            lib.define(f"{name}(Tensor x) -> Tensor")
            lib.impl(name, function, "CPU")
        yield lib


inside: list[Callable[[torch.Tensor], torch.Tensor]] = []  # what kcfused::outer runs


class CustomOp(torch.nn.Module):
    name = "custom"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_method(*args, **kwargs)

    def _forward_method(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Norm(CustomOp):
    name = "norm"

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.register_parameter("bias", None)
        self.register_buffer("scale", torch.ones(()))
        self.epsilon, self.sizes, self.dtype, self.table = 1e-5, (4, 8), torch.float32, torch.zeros(3)
        self._hidden, self.config = 7, object()

    def _forward_method(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = x if residual is None else x + residual
        return x.pow(2).mul(self.weight)


class Activation(CustomOp):
    name = "activation"

    def _forward_method(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid()


class Overriding(CustomOp):
    name = "overriding"

    def forward(self, y: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return y * factor


class Nothing(CustomOp):
    name = "nothing"


class Failing(CustomOp):
    name = "failing"

    def _forward_method(self, x: torch.Tensor) -> torch.Tensor:
        x.neg()
        raise ValueError("of the engine")


class Rotary(CustomOp):
    name = "rotary"

    def _forward_method(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.kcfused.leaf(x)  # type: ignore[no-any-return]


class Ir:
    """As an operator of vLLM's IR: no module."""

    name = "rms_norm.overload"

    def run(self, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
        return x.rsqrt()


def record(engine: Engine, *operators: Any) -> None:
    """Each by the function that runs it."""
    engine.window.taps.fused.record([fused(operator) for operator in operators], "it has none")


def fused(operator: Any) -> Fused:
    module = isinstance(operator, torch.nn.Module)
    attribute = "forward" if "forward" in vars(type(operator)) else "_forward_method" if module else "run"
    return Fused(operator, attribute, f"engine_op::{operator.name}", stateful=module)


@pytest.fixture(params=["native", "python"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, recorder=request.param)
    made.open()
    yield made
    made.window.close()


def regions(recording: Recording) -> dict[str, int]:
    found = Counter[str]()
    for call in recording.calls:
        if call.kind == "region":
            found[call.operator] += call.total
    return dict(found)


def kernels(recording: Recording) -> dict[tuple[str, str | None], int]:
    """(operator, parent) -> count."""
    found = Counter[tuple[str, str | None]]()
    for call in recording.kernels(hidden=True):
        found[call.operator, call.parent] += call.total
    return dict(found)


def arguments(recording: Recording, operator: str) -> list[dict[str | None, Any]]:
    return [{a.name: a.value for a in call.args} for call in recording.calls if call.operator == operator]


def test_aten_calls_in_a_fused_operator_count_as_before_and_have_it_for_parent(engine: Engine) -> None:
    norm, activation = Norm(), Activation()
    record(engine, norm, activation)
    for _ in range(3):
        engine.step("decode", lambda: activation(norm(X)), lambda: X.sigmoid())
    recording = engine.close()
    assert regions(recording) == {"engine_op::norm": 3, "engine_op::activation": 3}
    assert kernels(recording) == {
        ("aten::pow.Tensor_Scalar", "engine_op::norm"): 3,
        ("aten::mul.Tensor", "engine_op::norm"): 3,
        ("aten::sigmoid", "engine_op::activation"): 3,
        ("aten::sigmoid", None): 3,
    }
    assert (recording.metadata.totals["kernels"], recording.metadata.totals["regions"]) == (
        12,
        6,
    ) and recording.metadata.complete
    (program,) = recording.programs
    ran = [(call.operator, call.kind) for call in recording.ran(program)]
    assert ran == [
        ("engine_op::norm", "region"),
        ("aten::pow.Tensor_Scalar", "kernel"),
        ("aten::mul.Tensor", "kernel"),
        ("engine_op::activation", "region"),
        ("aten::sigmoid", "kernel"),
        ("aten::sigmoid", "kernel"),
    ]


def test_a_modules_own_tensors_and_plain_attributes_are_arguments_by_name(engine: Engine) -> None:
    norm = Norm()
    record(engine, norm)
    engine.step("decode", lambda: norm(X), lambda: norm(X, residual=X))
    alone, added = arguments(engine.close(), "engine_op::norm")
    matrix, vector = TensorSpec((4, 8), "float32"), TensorSpec((8,), "float32", storage=1)
    assert alone == {
        "x": matrix,
        "residual": None,
        "weight": vector,
        "bias": None,
        "scale": TensorSpec((), "float32", storage=2),
        "epsilon": 1e-5,
        "sizes": [4, 8],
        "dtype": TorchConstant("dtype", "float32"),
        "table": TensorSpec((3,), "float32", storage=3),
    }
    assert added == alone | {"residual": matrix}


def test_a_weight_that_is_loaded_anew_is_seen_as_it_is(engine: Engine) -> None:
    norm = Norm()
    record(engine, norm)
    engine.step("decode", lambda: norm(X))
    norm.weight = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))
    engine.step("decode", lambda: norm(X))
    dtypes = [found["weight"].dtype for found in arguments(engine.close(), "engine_op::norm")]
    assert dtypes == ["float32", "float64"]


def test_an_operator_that_is_not_named_costs_nothing_and_is_no_region(engine: Engine) -> None:
    """Of one class with one that is: neither it nor the class is touched."""
    named, other = Norm(), Norm()
    record(engine, named)
    engine.step("decode", lambda: named(X), lambda: other(X))
    assert "_forward_method" not in vars(other) and not hasattr(Norm._forward_method, MARK)
    recording = engine.close()
    assert regions(recording) == {"engine_op::norm": 1}
    assert kernels(recording)["aten::pow.Tensor_Scalar", None] == 1


def test_a_function_that_an_object_keeps_is_called_without_the_object(engine: Engine) -> None:
    class Implementation:
        name = "kept"

        def __init__(self) -> None:
            self.run = lambda x, factor=2.0: x * factor

    implementation = Implementation()
    kept = implementation.run
    engine.window.taps.fused.record([Fused(implementation, "run", "engine_op::kept")], "")
    engine.step("decode", lambda: implementation.run(X))
    recording = engine.close()
    assert arguments(recording, "engine_op::kept") == [{"x": TensorSpec((4, 8), "float32"), "factor": 2.0}]
    assert implementation.run is kept


def test_each_function_is_put_back_as_it_was(engine: Engine) -> None:
    norm, kept, changed = Norm(), Norm(), Norm()
    kept._forward_method = bound = kept._forward_method
    record(engine, norm, kept, changed)
    assert all(hasattr(operator._forward_method, MARK) for operator in (norm, kept, changed))
    changed._forward_method = own = X.mul
    engine.close()
    assert vars(norm).get("_forward_method") is None and norm._forward_method.__func__ is Norm._forward_method
    assert vars(kept)["_forward_method"] == bound and not hasattr(kept._forward_method, MARK)
    assert changed._forward_method is own


def test_a_copy_of_an_operator_runs_on_what_it_holds_itself(engine: Engine) -> None:
    norm = Norm()
    norm._forward_method = norm._forward_method  # as vLLM's keep it
    record(engine, norm)
    copied = copy.deepcopy(norm)
    copied.weight = torch.nn.Parameter(torch.zeros(8))
    assert not copied(X).any() and norm(X).any()


def test_an_operator_is_not_kept_alive(engine: Engine) -> None:
    norm = Norm()
    record(engine, norm)
    alive = weakref.ref(norm)
    del norm
    gc.collect()
    assert alive() is None
    engine.close()


def test_what_is_recorded_already_is_recorded_once(engine: Engine) -> None:
    norm = Norm()
    record(engine, norm)
    record(engine, norm)
    engine.step("decode", lambda: norm(X))
    assert regions(engine.close()) == {"engine_op::norm": 1}


def test_an_operator_that_is_no_module_has_the_arguments_of_its_call(engine: Engine) -> None:
    operator = Ir()
    record(engine, operator)
    engine.step("decode", lambda: operator.run(X, None, epsilon=1e-6), lambda: operator.run(X, X[0], 1e-6))
    recording = engine.close()
    without, given = arguments(recording, "engine_op::rms_norm.overload")
    assert without == {"x": TensorSpec((4, 8), "float32"), "weight": None, "epsilon": 1e-6}
    assert given["weight"] == TensorSpec((8,), "float32")
    assert kernels(recording)["aten::rsqrt", "engine_op::rms_norm.overload"] == 2


def test_a_class_with_a_method_of_its_own_is_recorded_by_that(engine: Engine) -> None:
    operator = Overriding()
    record(engine, operator)
    engine.step("decode", lambda: operator(X))
    recording = engine.close()
    assert arguments(recording, "engine_op::overriding") == [{"y": TensorSpec((4, 8), "float32"), "factor": 2.0}]
    assert kernels(recording) == {("aten::mul.Tensor", "engine_op::overriding"): 1}


def test_a_fused_operator_in_which_nothing_ran_does_not_appear(engine: Engine) -> None:
    nothing = Nothing()
    record(engine, nothing)
    engine.step("decode", lambda: nothing(X), lambda: X.neg())
    recording = engine.close()
    assert [(call.operator, call.total) for call in recording.calls] == [("aten::neg", 1)]


def test_fused_operators_in_each_other_are_each_a_region(engine: Engine) -> None:
    class Outer(CustomOp):
        name = "outer"

        def _forward_method(self, x: torch.Tensor) -> torch.Tensor:
            return activation(x).neg()

    activation, outer = Activation(), Outer()
    record(engine, activation, outer)
    engine.step("decode", lambda: outer(X))
    recording = engine.close()
    parents = {call.operator: call.parent for call in recording.calls}
    assert parents == {
        "engine_op::outer": None,
        "engine_op::activation": "engine_op::outer",
        "aten::sigmoid": "engine_op::activation",
        "aten::neg": "engine_op::outer",
    }


@both
def test_a_kernel_around_a_fused_operator_stays_a_kernel(recorder: str, tmp_path: Path) -> None:
    """What it calls has always been its detail: neither the region nor what is in it is recorded."""
    found: list[list[tuple[str, str, str | None, int]]] = []
    activation = Activation()
    for number, named in enumerate([[activation], []]):
        engine = Engine(tmp_path / str(number), recorder=recorder)
        engine.open()
        record(engine, *named)
        inside[:] = [activation]
        engine.step("decode", lambda: torch.ops.kcfused.outer(X))
        found.append([(c.operator, c.kind, c.parent, c.total) for c in engine.close().calls])
    assert found[0] == found[1] == [("kcfused::outer", "kernel", None, 1)]


def test_a_kernel_of_a_library_in_a_fused_operator_is_a_kernel_still(engine: Engine) -> None:
    rotary = Rotary()
    record(engine, rotary)
    engine.step("decode", lambda: rotary(X))
    kinds = {call.operator: (call.kind, call.parent) for call in engine.close().calls}
    assert kinds == {"engine_op::rotary": ("region", None), "kcfused::leaf": ("kernel", "engine_op::rotary")}


def test_a_kernel_of_a_library_makes_a_region_of_the_operator_around_the_fused_one(engine: Engine) -> None:
    inside[:] = [rotary := Rotary()]
    record(engine, rotary)
    engine.step("decode", lambda: torch.ops.kcfused.outer(X))
    assert [(call.operator, call.kind, call.parent) for call in engine.close().calls] == [
        ("kcfused::outer", "region", None),
        ("engine_op::rotary", "region", "kcfused::outer"),
        ("kcfused::leaf", "kernel", "engine_op::rotary"),
        ("aten::neg", "kernel", "kcfused::outer"),
    ]


def test_a_librarys_detail_is_kept_in_a_fused_operator(engine: Engine) -> None:
    class Calling(CustomOp):
        name = "calling"

        def _forward_method(self, x: torch.Tensor) -> torch.Tensor:
            if engine.window.taps.externals.enter("tvm::kernel", (("x",), (x,)), detail=True):
                engine.window.taps.externals.leave()
            return x

    calling = Calling()
    record(engine, calling)
    engine.step("decode", lambda: calling(X))
    kinds = {call.operator: (call.kind, call.parent) for call in engine.close().calls}
    assert kinds == {"engine_op::calling": ("region", None), "tvm::kernel": ("kernel", "engine_op::calling")}


def test_an_operator_that_raises_is_left_and_raises_as_before(engine: Engine) -> None:
    failing = Failing()
    record(engine, failing)

    def body() -> None:
        for _ in range(100):  # deeper than is followed, were one not left
            with pytest.raises(ValueError, match="of the engine"):
                failing(X)
        X.neg()

    engine.step("decode", body)
    recording = engine.close()
    assert kernels(recording) == {("aten::neg", "engine_op::failing"): 100, ("aten::neg", None): 1}
    assert recording.metadata.complete


def test_outside_a_step_nothing_counts(engine: Engine) -> None:
    norm = Norm()
    record(engine, norm)
    norm(X)
    engine.step("decode", lambda: norm(X))
    norm(X)
    assert regions(engine.close()) == {"engine_op::norm": 1}


def test_a_tap_that_fails_is_noted_and_the_engine_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = Norm()

    def broken(*args: object, **kwargs: object) -> int:
        raise RuntimeError("of the tap")

    monkeypatch.setattr(engine.window.taps.externals, "operator", broken)
    record(engine, norm)
    for _ in range(3):
        engine.step("decode", lambda: norm(X))
    recording = engine.close()
    assert health(recording, "fused_operators") == ("failed", "RuntimeError: of the tap")
    assert regions(recording) == {} and not recording.metadata.complete
    assert kernels(recording) == {("aten::pow.Tensor_Scalar", None): 3, ("aten::mul.Tensor", None): 3}


@both
def test_an_engine_without_such_classes_has_a_whole_recording_that_says_why(recorder: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path, recorder=recorder)
    engine.open()
    engine.window.taps.fused.record([], "it compiles the model")
    engine.step("decode", lambda: Norm()(X))
    recording = engine.close()
    assert health(recording, "fused_operators") == ("absent", "it compiles the model")
    assert recording.metadata.complete and regions(recording) == {}


def test_a_compiler_sees_the_method_as_it_was(engine: Engine) -> None:
    """One graph, no break, the same result; and nothing of kcap's is guarded on."""
    norm = Norm()
    record(engine, norm)
    plain = Norm()(X)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    engine.step("decode", lambda: compiled(X))
    assert torch.equal(compiled(X), plain)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(norm)(X)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    assert "kcap" not in str([guard.name for guard in explained.out_guards])
    assert regions(engine.close()) == {}


def test_a_captured_fused_operator_is_a_region_of_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind := graph_class())
    engine = Engine(tmp_path)
    norm, nothing = Norm(), Nothing()
    record(engine, norm, nothing)
    graph = captured(kind, lambda: norm(nothing(X)))  # before the window opens, as engines do
    engine.open()
    for _ in range(5):
        engine.step("decode", graph.replay)
    recording = engine.close()
    assert regions(recording) == {"engine_op::norm": 5}
    assert kernels(recording) == {
        ("aten::pow.Tensor_Scalar", "engine_op::norm"): 5,
        ("aten::mul.Tensor", "engine_op::norm"): 5,
    }
    assert all(count.mode == "graph" for call in recording.calls for count in call.counts)


def identity(call: Call) -> tuple[str, str, str | None, str, int]:
    return call.operator, call.kind, call.parent, str(call.args), call.total


def test_both_recorders_record_the_same_regions(tmp_path: Path) -> None:
    norm, activation, operator = Norm(), Activation(), Ir()
    found = []
    for recorder in ("native", "python"):
        engine = Engine(tmp_path / recorder, recorder=recorder)
        engine.open()
        record(engine, norm, activation, operator)
        engine.step("prefill", lambda: activation(norm(X, X)), lambda: operator.run(X, X[0], 1e-5))
        recording = engine.close()
        found.append([identity(call) for call in recording.calls if call.kind == "region"])
    assert len(found[0]) == 3
    assert found[0] == found[1]
