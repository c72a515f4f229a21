"""Tensors that are not dense and real: quantized, sparse, nested, complex."""

import sys
from collections.abc import Callable

import torch
from torch import nn


def quantized() -> None:
    """Linear layers quantized as they run."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    smaller = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        for _ in range(2):
            smaller(torch.randn(3, 16))


def calibrated() -> None:
    """Quantized ahead, after a calibration."""
    model = nn.Sequential(
        torch.ao.quantization.QuantStub(), nn.Conv2d(3, 8, 3), nn.ReLU(), torch.ao.quantization.DeQuantStub()
    ).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig()
    torch.ao.quantization.fuse_modules(model, [["1", "2"]], inplace=True)
    torch.ao.quantization.prepare(model, inplace=True)
    with torch.no_grad():
        model(torch.rand(1, 3, 8, 8))
        torch.ao.quantization.convert(model, inplace=True)
        model(torch.rand(1, 3, 8, 8))


def sparse() -> None:
    """A graph convolution, and an embedding with sparse gradients."""
    adjacency = (torch.rand(6, 6) > 0.5).float().to_sparse_csr()
    layer, embedding = nn.Linear(8, 8), nn.EmbeddingBag(20, 8, sparse=True, mode="sum")
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    features = embedding(torch.randint(20, (12,)), torch.arange(0, 12, 2))
    (adjacency @ layer(features)).relu().sum().backward()
    optimizer.step()
    torch.sparse.mm(adjacency.to_sparse_coo(), features.detach()).sum()


def nested() -> None:
    """Sequences of their own lengths."""
    layer = nn.Linear(8, 8)
    batch = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    layer(batch).relu().to_padded_tensor(0.0).sum().backward()
    strided = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    with torch.no_grad():
        layer(strided).to_padded_tensor(0.0)


def transformer() -> None:
    """PyTorch's own encoder, which nests padded batches in its fast path."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    with torch.no_grad():
        encoder(torch.randn(2, 6, 32), src_key_padding_mask=padding)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :5], self.weight)
        return torch.fft.irfft(modes, n=x.shape[-1])


def spectral() -> None:
    layer = Spectral()
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(2, 4, 16)).abs().mean().backward()
    optimizer.step()
    torch.istft(torch.stft(torch.randn(400), 64, return_complex=True, window=torch.ones(64)), 64, window=torch.ones(64))


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (quantized, calibrated, sparse, nested, transformer, spectral)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
