"""A small engine on a GPU, recorded under the profiler, and its replay held against it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

pytestmark = pytest.mark.gpu

# Layers whose weights together are far larger than any L2, so that each is read from memory, as in serving.
ENGINE = """
import sys
import kcap, torch
LAYERS, WIDTH, BATCH = 24, 4096, 64
weights = [torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(LAYERS)]
first = torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)

def forward():
    x = first
    for weight in weights:
        x = torch.relu(x @ weight)
    return x

with torch.inference_mode():
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if sys.argv[1] == "graph":
        with torch.cuda.graph(graph):
            forward()
    for step in range(24):
        with kcap.step("decode", queries=[1] * BATCH, lengths=[step + 1] * BATCH):
            graph.replay() if sys.argv[1] == "graph" else forward()
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_a_small_engine_ran_is_replayed_as_long(mode: str, kcap: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    recording = tmp_path / "small.kcap"
    ran = kcap("record", "--check-coverage", "-o", recording, "--", sys.executable, script, mode)
    assert ran.code == 0, ran.err
    done = kcap("replay", recording, "--fidelity", "--json")
    assert done.code in (0, 3), done.err
    (kind,) = orjson.loads(done.out)["kinds"]
    assert (kind["phase"], kind["steps"], kind["mode"]) == ("decode", 16, "eager" if mode == "eager" else "full")
    assert kind["program"]["us"] is not None, kind["outside"]
    assert kind["span"]["own_us"] <= kind["span"]["us"]
    for state in kind["states"].values():
        products = [row for row in state["kernels"] if "mm" in row["operator"] or "matmul" in row["operator"]]
        assert sum(row["count"] for row in products) == 24
        assert all(abs(row["ratio"] - 1) < 0.10 for row in products), (state, kind["outside"])
        assert state["missing_us"] == 0, state["missing"]
    assert kind["program"]["over_span"] == pytest.approx(1, abs=0.15)
