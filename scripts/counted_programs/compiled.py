"""What torch.compile makes of a model: inference, training, changing shapes, a graph that breaks."""

import sys
from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized = self.norm(x)
        x = x + self.attention(normalized, normalized, normalized, need_weights=False)[0]
        return x + self.layers(x)


def inference() -> None:
    model = torch.compile(Block().eval())
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(2, 8, 32))


def training() -> None:
    block = Block()
    model = torch.compile(block)
    optimizer = torch.optim.AdamW(block.parameters())
    for _ in range(3):
        model(torch.randn(2, 8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def dynamic() -> None:
    """Compiled anew for the second length, then no more."""
    model = torch.compile(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)))
    with torch.no_grad():
        for length in (5, 7, 9, 11):
            model(torch.randn(length, 32)).sum().item()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.mean() > 0)](x).relu()


def broken() -> None:
    """The graph breaks at a choice by value."""
    model = torch.compile(Routed())
    with torch.no_grad():
        for sign in (1, -1, 1):
            model(sign * torch.rand(4, 32))


def eager() -> None:
    """Traced by dynamo and run as it was."""
    model = torch.compile(Block(), backend="aot_eager")
    for _ in range(2):
        model(torch.randn(2, 8, 32)).mean().backward()


def function() -> None:
    """A function that calls no compiled module."""
    layer = nn.Linear(32, 32)

    @torch.compile
    def score(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.T, -1).amax(-1)

    with torch.no_grad():
        for _ in range(3):
            score(layer(torch.randn(6, 32)))


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (inference, training, dynamic, broken, eager, function)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
