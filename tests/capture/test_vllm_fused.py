"""Which of vLLM's classes are named as fused operators, and when: on stand-ins of its modules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fake_graphs import Engine, health

from kcap.capture.engines.vllm import WORKERS, hook
from kcap.capture.engines.vllm_fused import CUSTOM_OPS, IR
from kcap.schemas.recording import Recording

pytestmark = pytest.mark.usefixtures("no_gradients")
X = torch.ones(2, 4)
WORKER, CLASS = next(iter(WORKERS.items()))


def worker(mode: str | None, **more: Any) -> SimpleNamespace:
    named = mode and SimpleNamespace(name=mode)
    return SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(mode=named)), **more)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As vLLM has them: a norm of its IR, the CustomOp that calls it, and another CustomOp."""

    class IrOp:
        registry: ClassVar[dict[str, Any]] = {}

        def __init__(self, name: str, function: Any) -> None:
            self.name, self.impls = name, {"native": SimpleNamespace(impl_fn=function)}
            self.registry[name] = self

        def __call__(self, *args: Any) -> Any:
            return self._inner_call(*args)

        def _inner_call(self, *args: Any) -> Any:
            return self.impls["native"].impl_fn(*args)

    class IrOpInplaceOverload:
        def __init__(self, op: IrOp) -> None:
            self.op, self.name = op, f"{op.name}.maybe_inplace"

        def __call__(self, *args: Any) -> Any:
            return self._inner_call(*args)

        def _inner_call(self, *args: Any) -> Any:
            return self.op.impls["native"].impl_fn(*args)

    class CustomOp(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return self._forward_method(*args)

    class Norm(CustomOp):
        name = "rms_norm"

        def _forward_method(self, x: torch.Tensor) -> torch.Tensor:
            return norm(x, 1e-5)  # type: ignore[no-any-return]

    class Silu(CustomOp):
        name = "silu_and_mul"

        def _forward_method(self, x: torch.Tensor) -> torch.Tensor:
            return x.sigmoid()

    class Unregistered(CustomOp):
        def _forward_method(self, x: torch.Tensor) -> torch.Tensor:
            return x.neg()

    norm = IrOp("rms_norm", lambda x, epsilon, variance_size=None: x.rsqrt())
    for name, held in ((IR, (IrOp, IrOpInplaceOverload)), (CUSTOM_OPS[0], (CustomOp,))):
        module = ModuleType(name)
        for each in held:
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, CUSTOM_OPS[1], raising=False)
    return SimpleNamespace(
        Norm=Norm, Silu=Silu, Unregistered=Unregistered, norm=norm, inplace=IrOpInplaceOverload(norm)
    )


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """`engine.worker` is a class of worker whose warm-up kcap hooks."""

    def warm_up(self: Any) -> str:
        return "warm"

    module = ModuleType(WORKER)
    kind = type(CLASS, (SimpleNamespace,), {"compile_or_warm_up_model": warm_up, "execute_dummy_batch": warm_up})
    setattr(module, CLASS, kind)
    monkeypatch.setitem(sys.modules, WORKER, module)
    monkeypatch.setattr("kcap.capture.engines.vllm._facts", lambda worker: {})
    made = Engine(tmp_path)
    hook(made.window)
    made.worker = kind  # type: ignore[attr-defined]
    return made


def recorded(engine: Any, vllm: SimpleNamespace, **given: Any) -> Recording:
    """Warm a worker up that has these attributes, then one step of each of vLLM's operators."""
    assert engine.worker(**given).compile_or_warm_up_model() == "warm"
    operators = (vllm.Norm(), vllm.Silu(), vllm.Unregistered(), lambda x: vllm.inplace(x, 1e-6))
    engine.step("decode", *(lambda operator=operator: operator(X) for operator in operators))
    done: Recording = engine.close()
    return done


@pytest.mark.parametrize("mode", ["NONE", None])
def test_an_operator_of_the_ir_is_preferred_to_the_custom_op_of_its_name(
    mode: str | None, engine: Engine, vllm: SimpleNamespace
) -> None:
    recording = recorded(engine, vllm, **vars(worker(mode)))
    regions = {call.operator: [a.name for a in call.args] for call in recording.calls if call.kind == "region"}
    assert regions == {
        "vllm_ir::rms_norm": ["x", "epsilon", "variance_size"],
        "vllm_custom_op::silu_and_mul": ["x"],
        "vllm_custom_op::Unregistered": ["x"],
        "vllm_ir::rms_norm.maybe_inplace": ["x", "epsilon", "variance_size"],
    }
    assert health(recording, "fused_operators") == ("ok", "3 methods")


def test_a_compiled_model_is_left_alone_and_its_recording_is_whole(engine: Engine, vllm: SimpleNamespace) -> None:
    before = vllm.Silu.forward, vllm.norm._inner_call.__func__
    recording = recorded(engine, vllm, **vars(worker("VLLM_COMPILE")))
    assert health(recording, "fused_operators") == ("absent", "vLLM compiles the model")
    assert (vllm.Silu.forward, vllm.norm._inner_call.__func__) == before
    assert not [call for call in recording.calls if call.kind == "region"]


def test_a_vllm_without_such_classes_says_so(engine: Engine, vllm: SimpleNamespace) -> None:
    del sys.modules[IR], sys.modules[CUSTOM_OPS[0]]
    recording = recorded(engine, vllm, **vars(worker("NONE")))
    assert health(recording, "fused_operators") == ("absent", "this vLLM has none")


def test_a_vllm_that_names_no_mode_is_noted_and_warms_up(engine: Engine, vllm: SimpleNamespace) -> None:
    recording = recorded(engine, vllm, vllm_config=None)
    status, detail = health(recording, "fused_operators")
    assert status == "failed" and "compilation_config" in detail
    assert [call.operator for call in recording.kernels()].count("aten::sigmoid") == 1
