"""The Solutions that are shown as examples, in Triton's interpreter: it computes float32 as a GPU does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kcap

EXAMPLES = Path(kcap.__file__).parent / "bench" / "solutions" / "examples"
PROGRAM = """
import runpy, sys, torch
example = lambda name: runpy.run_path(f"{sys.argv[1]}/{name}.py")["run"]
torch.manual_seed(0)

a, b, c = torch.randn(5, 512), torch.randn(64, 512), torch.empty(5, 64)
example("gemm")(a, b, c)
torch.testing.assert_close(c, a @ b.T, rtol=1e-4, atol=1e-4)
a, c = torch.randn(40, 512), torch.empty(40, 64)
example("gemm")(a, b, c)
torch.testing.assert_close(c, a @ b.T)

x, y, weight, out = torch.randn(3, 96), torch.randn(3, 96), torch.randn(96), torch.empty(3, 96)
example("add_rms_norm")(x, y, weight, out)
torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + y, (96,), weight, 1e-5))

logits, samples = torch.randn(3, 10_000), torch.empty(3, dtype=torch.int64)
logits[1, 7] = logits[1, 9_000] = 9.0
logits[2] = float("-inf")
example("argmax")(logits, samples)
assert samples.tolist() == logits.argmax(-1).tolist() and samples[1] == 7

k, v = torch.randn(3, 2, 8), torch.randn(3, 4, 8)[:, :2]
caches = torch.zeros(2, 4, 16, 2, 8)
slots = torch.tensor([5, -1, 33])
example("cache_update")(k, v, *caches, slots)
expected = torch.zeros(2, 64, 2, 8)
for cache, new in zip(expected, (k, v)):
    cache[[5, 33]] = new[[0, 2]]
assert torch.equal(caches.flatten(1, 2), expected)

heads, dim, page = 4, 32, 16
lengths, table = torch.tensor([0, 1, 16, 17, 600]), torch.full((5, 40), -1)
cells = torch.randperm(5 * 40)
for row, (length, own) in enumerate(zip(lengths.tolist(), cells.chunk(5))):
    table[row, : -(-length // page)] = own[: -(-length // page)]
for order in [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 1, 3, 4, 2)]:  # tokens first, heads first, tokens last
    whole = torch.randn([(2, 200, page, 2, dim)[axis] for axis in order])
    caches = whole.permute([order.index(axis) for axis in range(5)])
    q = torch.randn(5, heads, 2 * dim)[..., :dim]
    output, lse = torch.full((7, heads, dim), 7.0)[1:6], torch.empty(heads, 5)
    example("decode_attention")(q, *caches, table, lengths, 0.2, output, lse)
    assert (output._base[[0, -1]] == 7.0).all()
    for row, length in enumerate(lengths.tolist()):
        k, v = (cache[table[row, : -(-length // page)]].flatten(0, 1)[:length] for cache in caches)
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        logits = torch.einsum("hd,khd->hk", q[row], k) * 0.2
        torch.testing.assert_close(output[row], torch.einsum("hk,khd->hd", logits.softmax(-1), v))
        torch.testing.assert_close(lse[:, row], logits.logsumexp(-1))
"""


def test_they_compute_what_they_say() -> None:
    environment = {"TRITON_INTERPRET": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(EXAMPLES)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
