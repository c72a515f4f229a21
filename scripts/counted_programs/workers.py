"""Work beside the main thread: a loader's processes, threads, futures, and scripts' own threads."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(16), torch.tensor(index % 4)


def train(workers: int) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, labels in DataLoader(Noise(), batch_size=4, num_workers=workers):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()


def loader() -> None:
    """Two processes load."""
    train(2)


def threads() -> None:
    """A server's threads share a model, which has been warmed up."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    model(torch.randn(1, 16))

    @torch.inference_mode()
    def answer(size: int) -> int:
        return int(model(torch.randn(size, 16)).sum(0).argmax())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(answer, range(1, 33)))


def hogwild() -> None:
    """Threads train at once."""
    train(0)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, [0] * 3))


def scripted() -> None:
    """TorchScript, with a task forked."""

    class Forking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            future = torch.jit.fork(self.left, x)
            return self.right(x) + torch.jit.wait(future)

    model = torch.jit.script(Forking().eval())
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(3, 16))


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (loader, threads, hogwild, scripted)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
