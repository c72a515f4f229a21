"""Attention of the real vLLM on a CPU, replaced: recorded, judged, chosen, tried, put in and compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mixed_batches import BLOCKS

from kcap.schemas.results.plan import plan_bytes, read_plan

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="attention of a CPU"),
]

NAME = "gqa_table_decode_nolse_fp32_h4_kv2_d32_ps128"
ATTENTION = f"""# definition: {NAME}
import torch


def run(q, k_cache, v_cache, block_table, seq_lens, sm_scale, output):
    size = k_cache.shape[1]
    reached = torch.arange(block_table.shape[1] * size, device=q.device) < seq_lens[:, None]
    pages = torch.where(reached[:, ::size], block_table, 0).long()
    k, v = (cache[pages].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
    attended = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], k, v, reached[:, None, None], scale=sm_scale, enable_gqa=True
    )
    output.copy_(attended[:, :, 0].masked_fill(seq_lens[:, None, None] == 0, 0.0))
"""
LAYERS, OUTPUT = 2, 40
# float32: what has bfloat16 lies in tiles for AMX
ENGINE = [
    *("--model", "kcap/tiny-llama", "--load-format", "dummy", "--num-layers", str(LAYERS), "--eager"),
    *("--num-prompts", "4", "--input-len", "24", "--output-len", str(OUTPUT)),
    *("--engine-arg", "dtype=float32", "--engine-arg", "max_model_len=512"),
    *("--engine-arg", f"num_gpu_blocks_override={BLOCKS}"),
]


@pytest.fixture(scope="module")
def kcap(one_process: dict[str, str]) -> Callable[..., str]:
    """`kcap(words…)`: what it prints."""

    def run(*words: object) -> str:
        command = [sys.executable, "-m", "kcap", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=one_process)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_judged_solution_runs_in_the_place_of_attention(kcap: Callable[..., str], tmp_path: Path) -> None:
    recorded, measured, plan = tmp_path / "tiny.kcap", tmp_path / "measured.jsonl", tmp_path / "plan.json"
    kcap("record", *ENGINE, "-o", recorded)
    kcap("replay", recorded, "--op", "*attention*", "--threads", 1, "--trust", "-o", measured)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "attention.py").write_text(ATTENTION)
    judged = tmp_path / "judged"
    kcap("bench", recorded, "--solutions", tmp_path / "mine", "--threads", 1, "-o", judged)
    kcap("apply", recorded, "--solutions", judged, "--measurements", measured, "--slower", "-o", plan)
    whole = read_plan(plan)  # a request that began before the others ends before them: not all have four sequences
    one = max(whole.replacements, key=lambda one: one.call.total)
    assert (one.definition, one.call.operator) == (NAME, "_C::cpu_attention_with_kv_cache")
    plan.write_bytes(plan_bytes(whole.only([one])))

    found = json.loads(kcap("ab", "--plan", plan, *ENGINE, "--pairs", 1, "--json"))
    assert found["problems"] == []
    assert found["fresh"]["tokens"] == {"requests": 4, "same": 1.0, "agreed": 1.0}
    compared = {(steps["phase"], steps["sequences"]): steps for steps in found["plans"][0]["compared"]}
    assert compared["decode", 4]["held"] > 0.8, "of all batches of that size, which may not be of one call"
    (engaged,) = found["engagement"][0]["replacements"]
    assert (engaged["off"], engaged["checked"]) == ("", 2)
    assert engaged["eager"] == LAYERS * engaged["steps"] > 0
