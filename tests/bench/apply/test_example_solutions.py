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
"""


def test_they_compute_what_they_say() -> None:
    environment = {"TRITON_INTERPRET": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(EXAMPLES)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
