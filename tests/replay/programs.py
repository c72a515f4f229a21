"""A small model's Programs, written by hand."""

from __future__ import annotations

from handmade import call, tensor

from kcap.schemas.recording.recording import Argument, Call, Count, Program
from kcap.schemas.recording.values import TensorSpec

M, N = 4, 16


def linear(id: int, **more: object) -> Call:
    """[M, N] @ [N, N], the second a weight."""
    made = call("aten::mm", id=id, **more)  # type: ignore[arg-type]
    args = [Argument(name="self", value=tensor(M, N)), Argument(name="mat2", value=tensor(N, N, storage=1))]
    return made.model_copy(update={"args": args})


def relu(id: int, shape: tuple[int, ...] = (M, N)) -> Call:
    return call("aten::relu_", TensorSpec(shape, "float32"), id=id)


LINEAR, RELU = linear(0), relu(1)
VIEW = call("aten::view", tensor(M, N), [M * N], id=2, work=False)
NOBODY = call("nobody::kernel", tensor(2), id=3)
REGION = call("vllm::unified_attention", tensor(M, N), id=4, kind="region")
CALLS = [LINEAR, RELU, VIEW, NOBODY, REGION]


def program(id: int, calls: list[int], counts: dict[str, int] | None = None, **more: object) -> Program:
    times = [Count(phase=phase, count=count) for phase, count in (counts or {}).items()]
    return Program.model_validate({"id": id, "calls": calls, "counts": times, **more})
