"""Whether a family's reference computes what an operator does, on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kcap.bench.check.checker import as_list, compare_outputs, copy_of
from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.families import recognize
from kcap.schemas.derive.invocation import Invocation, invocation_of
from kcap.schemas.derive.kernel import KernelInstance, dtype_name
from kcap.schemas.flashinfer.definition import Definition, from_bytes, to_bytes
from kcap.schemas.recording.records import Argument, Call, Launch
from kcap.schemas.recording.values import TensorSpec

needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM has this operator for CPUs with AVX-512 only"
)


def load_vllm_kernels() -> None:
    """Register vLLM's operators of this machine, which has one library for each kind of CPU; skips without vLLM."""
    pytest.importorskip("vllm.platforms").current_platform.import_kernels()


def kernel_of(operator: str, **arguments: Any) -> KernelInstance:
    """The kernel instance of a Call that its family takes."""
    kernel = recognize(Invocation(operator, arguments))
    assert kernel is not None, f"no family takes {operator}"
    return kernel


def launched(operator: str, arguments: dict[str, Any], *constants: str) -> KernelInstance:
    """The kernel instance of a Triton launch as it is recorded: without tensors' values, its `constants` apart."""
    values = {name: without_values(value, i) for i, (name, value) in enumerate(arguments.items())}
    fixed = {name: values.pop(name) for name in constants}
    args = [Argument(name=name, value=value) for name, value in values.items()]
    call = Call(id=0, operator=f"{operator}.s01234567", args=args, launch=Launch(function="kernel", constexprs=fixed))
    kernel = recognize(invocation_of(call))
    assert kernel is not None, f"no family takes the launch of {operator}"
    return kernel


def without_values(value: Any, storage: int) -> Any:
    """`value` as it is recorded: each tensor as a spec, a tuple as a list."""
    if isinstance(value, tuple):
        return [without_values(item, storage) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    return TensorSpec(tuple(value.shape), dtype_name(value.dtype), tuple(value.stride()), storage=storage)


def declined(operator: str, **arguments: Any) -> bool:
    return recognize(Invocation(operator, arguments)) is None


def on_meta(arguments: dict[str, Any]) -> dict[str, Any]:
    """Tensors without data, that lie as these do: as a family first sees a Call."""
    return {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }


def checked(kernel: KernelInstance) -> Definition:
    """Its Definition, through the format's own validators and back."""
    definition = kernel.definition()
    assert from_bytes(to_bytes(definition)) == definition
    return definition


def agrees(
    operator: str, run: Callable[..., Any], hidden: dict[str, torch.Tensor] | None = None, **arguments: Any
) -> KernelInstance:
    """The kernel instance, once its reference returned what `run(**arguments)` returns or writes to its arguments; so
    did that of its other form, if it has one."""
    invocation = Invocation(operator, arguments, hidden or {})
    kernel = recognize(invocation)
    assert kernel is not None, f"no family takes {operator}"
    forms = [form for form in (kernel, kernel.engine_form) if isinstance(form, KernelInstance)]
    references = [referred(form) for form in forms]
    invocation.result = run(**arguments)
    for form, expected in zip(forms, references, strict=True):
        result = compare_outputs(form, [slot.get() for slot in form.outputs.values()], expected)
        assert result["status"] == "agrees", (form.name, result)
    return kernel


def referred(kernel: KernelInstance) -> list[Any]:
    """What the reference makes of the invocation."""
    definition = checked(kernel)
    inputs = [copy_of(slot.get()) for slot in kernel.inputs.values()]
    kernel.sizes(dict(zip(kernel.inputs, inputs, strict=True)))
    return as_list(compile_reference(definition.reference, definition.name)(*inputs))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
