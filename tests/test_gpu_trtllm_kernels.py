"""`scripts/gpu/trtllm_kernels.py` on a CPU, with a stand-in of TensorRT-LLM's kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu" / "trtllm_kernels.py"
KERNELS = '''
"""trtllm's operators for a CPU, as they are on Hopper: rows are padded, and scales lie group by group."""

import torch

GROUP, ROWS = 128, 4
library = torch.library.Library("trtllm", "DEF")


def cublas_mm(a, b, bias, out_dtype):
    return torch.mm(a, b)


def quantize(x, use_ue8m0=False):
    rows, columns = x.shape
    groups = x.float().view(rows, -1, GROUP)
    scale = groups.abs().amax(-1) / 448
    padded = -(-rows // ROWS) * ROWS
    values = torch.empty(padded, columns, dtype=torch.float8_e4m3fn)
    values[:rows] = (groups / scale[..., None]).view(rows, columns).to(values.dtype)
    scales = torch.zeros(columns // GROUP, padded)
    scales[:, :rows] = scale.T
    return values[:rows], scales.flatten()


def gemm(a, b, a_scale, b_scale):
    rows, columns = a.shape
    scale = a_scale.view(columns // GROUP, -1)[:, :rows].T
    left = (a.float().view(rows, -1, GROUP) * scale[..., None]).view(rows, columns)
    right = b.float() * b_scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return (left @ right.T).to(torch.bfloat16)


for schema, function in {
    "cublas_mm(Tensor mat_a, Tensor mat_b, Tensor? bias, ScalarType? out_dtype) -> (Tensor out)": cublas_mm,
    "fp8_quantize_1x128(Tensor input, bool use_ue8m0=False) -> (Tensor, Tensor)": quantize,
    "fp8_block_scaling_gemm_impl(Tensor mat1, Tensor mat2, Tensor mat1Scale, Tensor mat2Scale) -> Tensor": gemm,
}.items():
    library.define(schema)
    library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
'''


def table(folder: Path, kernels: str) -> tuple[int, list[str]]:
    """The script's status and its lines, with these kernels."""
    (folder / "trtllm_kernel.py").write_text(kernels)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--output", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith(("ok ", "BAD"))]


def test_each_operator_is_counted_replayed_and_agrees_with_its_definition(tmp_path: Path) -> None:
    status, lines = table(tmp_path, KERNELS)
    assert [line for line in lines if line.startswith("BAD")] == []
    assert (status, len(lines)) == (0, 2 + 3 + 3 + 2 * 3)


def test_an_operator_that_fails_is_a_line_and_the_others_go_on(tmp_path: Path) -> None:
    status, lines = table(tmp_path, KERNELS.replace("return torch.mm(a, b)", "raise ValueError('not here')"))
    bad = [line for line in lines if line.startswith("BAD")]
    assert (status, len(bad)) == (1, 4), "it runs, counts, replays, agrees"
    assert "ValueError: not here" in bad[0]
    assert all("cublas_mm" in line for line in bad)
