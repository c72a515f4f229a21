"""Loops of training that hook into autograd and modules: autocast, checkpoints, one's own functions and operators."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def amp() -> None:
    """Mixed precision with scaled gradients."""
    module, scaler = model(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(module(torch.randn(8, 16)), torch.randint(4, (8,)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def checkpoints() -> None:
    module = model()
    checkpoint_sequential(module, 2, torch.randn(8, 16), use_reentrant=False).sum().backward()


class Step(torch.autograd.Function):
    """A step function that learns as if it were the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 1)


def function() -> None:
    module = model()
    Step.apply(module(torch.randn(8, 16))).sum().backward()


def operator() -> None:
    """One's own operator, with its gradient."""

    @torch.library.custom_op("counted::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.tanh(x) * factor

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scaled(gradient, ctx.factor), None

    def setup(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
        ctx.factor = inputs[1]

    scaled.register_autograd(backward, setup_context=setup)
    module = model()
    for _ in range(2):
        scaled(module(torch.randn(8, 16)), 0.5).sum().backward()


class Features(Exception):
    """What a hook raises once it has a layer's output."""


def hooks() -> None:
    """A hook stops the forward; others look at outputs and gradients."""
    module = model()
    seen: list[torch.Tensor] = []

    def stop(_: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen.append(output.detach().mean())
        raise Features

    handle = module[1].register_forward_hook(stop)
    for _ in range(3):
        with contextlib.suppress(Features):
            module(torch.randn(8, 16))
    handle.remove()
    module[0].register_full_backward_hook(lambda layer, inputs, outputs: seen.append(outputs[0].abs().max()))
    module[3].weight.register_hook(lambda gradient: gradient * 2)
    module(torch.randn(8, 16)).sum().backward()


def recurrent() -> None:
    """Packed sequences through an LSTM."""
    network, head = nn.LSTM(16, 32, num_layers=2, batch_first=True), nn.Linear(32, 4)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 7, 16), torch.tensor([7, 5, 2]), batch_first=True)
    outputs, _ = nn.utils.rnn.pad_packed_sequence(network(packed)[0], batch_first=True)
    head(outputs).mean().backward()


def averaged() -> None:
    """Weights averaged over steps, by a second optimizer's closure."""
    module = model()
    average = torch.optim.swa_utils.AveragedModel(module)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)
    inputs = torch.randn(8, 16)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    average.update_parameters(module)
    average(inputs)


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (amp, checkpoints, function, operator, hooks, recurrent, averaged)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
