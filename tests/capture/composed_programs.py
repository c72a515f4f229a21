"""Programs composed of modules, threads, exceptions, autocast, checkpoints and graphs of autograd, as plain data.

A program is a list of blocks, a block its kind and what the kind takes: `["no_grad", [["modules", ["linear"]]]]`.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


class Cubed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x.transpose(-1, -2)).transpose(-1, -2)


LAYERS = {
    "attention": SelfAttention(),
    "convolution": Convolution(),
    "cubed": Cubed(),
    "dropout": nn.Dropout(0.5),
    "gelu": nn.GELU(),
    "linear": nn.Linear(8, 8),
    "norm": nn.LayerNorm(8),
    "softmax": nn.Softmax(-1),
}
INPUT = torch.ones(1, 4, 8)
FIRST = ("linear", "norm")  # of those that learn
TWICE = ("convolution", "cubed", "dropout", "gelu", "linear", "norm", "softmax")  # that can be differentiated twice
CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}
Program = Sequence[Sequence[Any]]


class Stop(Exception):
    """What a hook raises to end a forward early."""


def run(program: Program) -> None:
    """Run each block in turn."""
    for kind, *rest in program:
        if kind in CONTEXTS:
            with CONTEXTS[kind]():
                run(*rest)
        else:
            BLOCKS[kind](*rest)


def _stack(names: Sequence[str]) -> nn.Sequential:
    return nn.Sequential(*(LAYERS[name] for name in names))


def _modules(names: Sequence[str]) -> torch.Tensor:
    return _stack(names)(INPUT)


def _stopped(names: Sequence[str], at: int) -> None:
    """A hook ends the forward at a layer."""
    stack = _stack(names)

    def stop(*_: Any) -> None:
        raise Stop

    handle = stack[at % len(stack)].register_forward_hook(stop)
    try:
        stack(INPUT)
    except Stop:
        pass
    finally:
        handle.remove()


def _fails(names: Sequence[str]) -> None:
    """An operator refuses what it is given."""
    with contextlib.suppress(RuntimeError):
        nn.Sequential(_stack(names), nn.Linear(3, 3))(INPUT)


@torch.inference_mode(False)
@torch.enable_grad()
def _backward(names: Sequence[str], foreach: bool) -> None:
    stack = copy.deepcopy(_stack([*FIRST, *names]))  # other threads learn, too
    optimizer = torch.optim.AdamW(stack.parameters(), foreach=foreach)
    stack(INPUT).float().sum().backward()
    optimizer.step()


@torch.inference_mode(False)
@torch.enable_grad()
def _second_order(names: Sequence[str]) -> None:
    x = INPUT.clone().requires_grad_()
    (first,) = torch.autograd.grad(_stack([*FIRST, *names])(x).float().sum(), x, create_graph=True)
    first.sum().backward()


@torch.inference_mode(False)
@torch.enable_grad()
def _checkpointed(names: Sequence[str], reentrant: bool) -> None:
    x = INPUT.clone().requires_grad_()
    checkpoint(_stack([*FIRST, *names]), x, use_reentrant=reentrant).float().sum().backward()


def _threads(*programs: Program) -> None:
    """At once."""
    threads = [threading.Thread(target=run, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


BLOCKS: dict[str, Callable[..., object]] = {
    "modules": _modules,
    "stopped": _stopped,
    "fails": _fails,
    "backward": _backward,
    "second_order": _second_order,
    "checkpointed": _checkpointed,
    "threads": _threads,
}


def programs() -> st.SearchStrategy[list[list[Any]]]:
    """Any program of a few blocks, nested a few deep."""
    names = st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3)
    leaves = st.one_of(
        st.tuples(st.just("modules"), names),
        st.tuples(st.just("stopped"), names, st.integers(0, 2)),
        st.tuples(st.just("fails"), names),
        st.tuples(st.just("backward"), names, st.booleans()),
        st.tuples(st.just("second_order"), st.lists(st.sampled_from(TWICE), max_size=2)),
        st.tuples(st.just("checkpointed"), names, st.booleans()),
    ).map(list)

    def around(blocks: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        inner = st.lists(blocks, min_size=1, max_size=3)
        return st.one_of(
            st.tuples(st.sampled_from(sorted(CONTEXTS)), inner),
            st.tuples(st.just("threads"), inner),
            st.tuples(st.just("threads"), inner, inner),
        ).map(list)

    return st.lists(st.recursive(leaves, around, max_leaves=6), min_size=1, max_size=4)


def every_block(seed: int) -> list[list[Any]]:
    """Each kind of block, plain and in each context, in a random order."""
    chance = random.Random(seed)

    def names() -> list[str]:
        return chance.choices(sorted(LAYERS), k=2)

    leaves: list[list[Any]] = [
        ["modules", names()],
        ["stopped", names(), chance.randrange(2)],
        ["fails", names()],
        *(["backward", names(), foreach] for foreach in (False, True)),
        *(["checkpointed", names(), reentrant] for reentrant in (False, True)),
        ["second_order", chance.choices(TWICE, k=2)],
    ]
    blocks = [*leaves, *([context, leaves] for context in CONTEXTS if context != "inference_mode"), ["threads", leaves]]
    chance.shuffle(blocks)
    return blocks


if __name__ == "__main__":
    with torch.no_grad():
        _threads(*([["modules", ["linear", "gelu"]]] * 200 for _ in range(4)))  # while the window opens
    run(every_block(0))
