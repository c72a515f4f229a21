"""Which calls of vLLM's operators are regions, and when: on stand-ins of its modules."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fake_graphs import Engine, health

from kcap.capture.engines.vllm.adapter import WORKERS, hook
from kcap.capture.engines.vllm.fused import CUSTOM_OPS, IR
from kcap.capture.hooks.patching import MARK
from kcap.schemas.recording.recording import Recording

pytestmark = pytest.mark.usefixtures("no_gradients")
X = torch.ones(2, 4)
WORKER, CLASS = next(iter(WORKERS.items()))


def worker(mode: str | None, **more: Any) -> SimpleNamespace:
    named = mode and SimpleNamespace(name=mode)
    return SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(mode=named)), **more)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As vLLM has them: a norm of its IR and its overload, which choose at each call; CustomOps, whose class does."""

    class IrOp:
        registry: ClassVar[dict[str, Any]] = {}

        def __init__(self, name: str, native: Any, kernel: Any) -> None:
            self.impls = {"native": SimpleImplementation(native), "vllm_c": SimpleImplementation(kernel)}
            self.registry[name] = self

        def __call__(self, x: torch.Tensor, *args: Any) -> Any:
            return self.impls["vllm_c" if x.dtype == torch.float16 else "native"].impl_fn(x, *args)

    class CustomOp(torch.nn.Module):
        platform: ClassVar[str] = "cuda"

        def __init__(self) -> None:
            super().__init__()
            self._forward_method = getattr(self, f"forward_{self.platform}")

        def forward(self, *args: Any) -> Any:
            return self._forward_method(*args)

        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return x.sigmoid()

        def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    class Norm(CustomOp):
        name, platform = "rms_norm", "native"

        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return norm(x, 1e-5)  # type: ignore[no-any-return]

    class Kernel(CustomOp):
        name = "kernel"

    class Native(CustomOp):
        name, platform = "native", "native"

    class Static(CustomOp):
        name, platform = "static", "native"

        @staticmethod
        def forward_native(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.cos()

    class FallingBack(CustomOp):
        name, platform = "falling_back", "cpu"

        def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward_cuda(x) if x.dtype == torch.float16 else self.forward_native(x)

    class OfItsOwn(CustomOp):
        name = "of_its_own"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward_cuda(x)

    class Unregistered(CustomOp):
        platform = "native"

    class Foreign(CustomOp):
        name = "foreign"

        def __init__(self) -> None:
            super().__init__()
            self._forward_method = lambda x: x.neg()

    norm = IrOp("rms_norm", lambda x, epsilon, variance_size=None: x.rsqrt(), lambda x, epsilon: x.exp())
    for name, held in ((IR, IrOp), (CUSTOM_OPS[0], CustomOp)):
        module = ModuleType(name)
        setattr(module, held.__name__, held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, CUSTOM_OPS[1], raising=False)
    kinds = (Norm, Kernel, Native, Static, FallingBack, OfItsOwn, Unregistered, Foreign)
    return SimpleNamespace(norm=norm, **{kind.__name__: kind() for kind in kinds})


class SimpleImplementation:
    """One of an IR operator's."""

    def __init__(self, function: Any) -> None:
        self.impl_fn = function

    @functools.cache  # noqa: B019
    def uuid(self) -> str:
        return inspect.getfile(self.impl_fn)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """`engine.worker` is a class of worker whose warm-up kcap hooks."""

    def warm_up(self: Any) -> str:
        return "warm"

    module = ModuleType(WORKER)
    methods = ("compile_or_warm_up_model", "execute_dummy_batch", "execute_model")
    kind = type(CLASS, (SimpleNamespace,), dict.fromkeys(methods, warm_up))
    setattr(module, CLASS, kind)
    monkeypatch.setitem(sys.modules, WORKER, module)
    monkeypatch.setattr("kcap.capture.engines.vllm.adapter._facts", lambda worker: {})
    made = Engine(tmp_path)
    hook(made.window)
    made.worker = kind  # type: ignore[attr-defined]
    return made


def recorded(engine: Any, bodies: list[Any], **given: Any) -> Recording:
    """Warm a worker up that has these attributes, then one step of these."""
    assert engine.worker(**given).compile_or_warm_up_model() == "warm"
    engine.step("decode", *bodies)
    done: Recording = engine.close()
    return done


def parents(recording: Recording) -> dict[str, str | None]:
    """The region around each kernel of work."""
    return {call.operator: call.parent for call in recording.kernels()}


@pytest.mark.parametrize("mode", ["NONE", None])
def test_an_operator_of_the_ir_is_preferred_to_the_custom_op_of_its_name(
    mode: str | None, engine: Engine, vllm: SimpleNamespace
) -> None:
    recording = recorded(engine, [lambda: vllm.Norm(X)], **vars(worker(mode)))
    (region,) = [call for call in recording.calls if call.kind == "region"]
    assert region.operator == "vllm_ir::rms_norm"
    assert [a.name for a in region.args] == ["x", "epsilon", "variance_size"]
    assert health(recording, "fused_operators")[0] == "ok"


def test_only_a_call_for_which_the_ir_chooses_pytorch_is_a_region(engine: Engine, vllm: SimpleNamespace) -> None:
    bodies = [lambda: vllm.norm(X, 1e-5), lambda: vllm.norm(X.half(), 1e-5)]
    recording = recorded(engine, bodies, **vars(worker("NONE")))
    found = parents(recording)
    assert (found["aten::rsqrt"], found["aten::exp"]) == ("vllm_ir::rms_norm", None)


def test_the_key_that_vllm_caches_compiled_models_by_stays_as_it_was(engine: Engine, vllm: SimpleNamespace) -> None:
    native = vllm.norm.impls["native"]
    engine.worker(**vars(worker("NONE"))).compile_or_warm_up_model()  # type: ignore[attr-defined]
    assert hasattr(native.impl_fn, MARK) and native.uuid() == __file__
    engine.close()


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        ("Native", "aten::sigmoid"),
        ("Static", "aten::cos"),
        ("FallingBack", "aten::sigmoid"),
        ("OfItsOwn", "aten::tanh"),
        ("Unregistered", "aten::sigmoid"),
        ("Foreign", "aten::neg"),
    ],
)
def test_a_custom_op_that_runs_or_may_run_as_pytorchs_operators_is_a_region(
    kind: str, kernel: str, engine: Engine, vllm: SimpleNamespace
) -> None:
    operator = getattr(vllm, kind)
    recording = recorded(engine, [lambda: operator(X)], **vars(worker("NONE")))
    name = f"vllm_custom_op::{getattr(operator, 'name', kind)}"
    assert parents(recording) == {kernel: name}
    assert [a.name for call in recording.calls if call.operator == name for a in call.args] == ["x"]


def test_a_custom_op_that_is_a_kernel_is_called_as_it_was_and_is_no_region(
    engine: Engine, vllm: SimpleNamespace
) -> None:
    kernel = vllm.Kernel
    engine.worker(**vars(worker("NONE"))).compile_or_warm_up_model()  # type: ignore[attr-defined]
    assert not hasattr(kernel.forward, MARK) and not hasattr(kernel._forward_method, MARK)
    half = X.half()
    engine.step("decode", lambda: kernel(X), lambda: vllm.FallingBack(half))
    recording = engine.close()
    assert not [call for call in recording.calls if call.kind == "region"]
    assert sum(call.total for call in recording.calls if call.operator == "aten::tanh") == 2


def test_a_compiled_model_is_left_alone_and_its_recording_is_whole(engine: Engine, vllm: SimpleNamespace) -> None:
    bodies = [lambda: vllm.Native(X), lambda: vllm.norm(X, 1e-5)]
    recording = recorded(engine, bodies, **vars(worker("VLLM_COMPILE")))
    assert health(recording, "fused_operators") == ("absent", "vLLM compiles the model")
    assert parents(recording) == {"aten::sigmoid": None, "aten::rsqrt": None}


def test_a_vllm_without_such_classes_says_so(engine: Engine, vllm: SimpleNamespace) -> None:
    del sys.modules[IR], sys.modules[CUSTOM_OPS[0]]
    recording = recorded(engine, [lambda: vllm.Native(X)], **vars(worker("NONE")))
    assert health(recording, "fused_operators") == ("absent", "this vLLM has none")


def test_a_vllm_that_names_no_mode_is_noted_and_warms_up(engine: Engine, vllm: SimpleNamespace) -> None:
    recording = recorded(engine, [lambda: vllm.Native(X)], vllm_config=None)
    status, detail = health(recording, "fused_operators")
    assert status == "failed" and "compilation_config" in detail
    assert parents(recording) == {"aten::sigmoid": None}
