"""From the real vLLM to a dataset that FlashInfer-Bench itself loads and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import kcap
from kcap.schemas.derive.derive import derive
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import kernel_invocations

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("flashinfer_bench", reason="FlashInfer-Bench is not installed")
pytestmark = pytest.mark.engine

LAYERS = 2
LLAMA = ("--model", "meta-llama/Llama-3.1-8B", "--framework", "vLLM", "--load-format", "dummy", "--eager")
SHORT = ("--num-layers", LAYERS, "--num-prompts", 3, "--input-len", 40, "--output-len", 4)
Kcap = Callable[..., "subprocess.CompletedProcess[str]"]
# What one step of a Llama runs, by family: 4 linears a layer and the logits', two norms a layer and the last one
EVERY_STEP = {
    "gemm": 4 * LAYERS + 1,
    "gqa_paged": LAYERS,
    "cache_update": LAYERS,
    "rope": LAYERS,
    "embedding": 1,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, kcap_record: Kcap) -> Recording:
    """Two layers of Llama-3.1-8B at their true shapes."""
    output = tmp_path_factory.mktemp("llama") / "llama.kcap"
    ran = kcap_record(output, *LLAMA, *SHORT)
    assert ran.returncode == 0, ran.stderr
    return kcap.load(output)


@pytest.fixture(scope="module")
def dataset(llama: Recording, environment: dict[str, str]) -> Path:
    """Its Definitions and Workloads, each reference checked against vLLM's own operator."""
    output = llama.path.with_name("dataset")
    ran = kcap_command(environment, "export", llama.path, "--to", "flashinfer-bench", "-o", output, "--allow-truncated")
    assert ran.returncode == 0, ran.stderr
    return output


def kcap_command(environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kcap", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)


def by_family(recording: Recording) -> Counter[str]:
    """Invocations in each named family; regions count, what runs in them does not."""
    found: Counter[str] = Counter()
    for kernel in derive(recording).kernels:
        found[kernel.family] += kernel.total
    return found


def test_what_the_architecture_runs_falls_into_named_families(llama: Recording) -> None:
    found, steps = by_family(llama), sum(llama.metadata.steps.values())
    assert {name: found[name] for name in EVERY_STEP} == {name: n * steps for name, n in EVERY_STEP.items()}
    assert found["rmsnorm"] + found["fused_add_rmsnorm"] == (2 * LAYERS + 1) * steps
    assert found["activation"] == LAYERS * steps
    share = derive(llama).invocations_in_families(llama.calls) / kernel_invocations(llama.calls)
    print(f"{share:.1%} of all calls, views and allocations aside, are in named families")
    assert share > 0.5


def test_the_references_of_the_families_are_verified_against_vllms_operators(dataset: Path) -> None:
    checks = [json.loads(line) for line in (dataset / "checks.jsonl").read_text().splitlines()]
    assert [check for check in checks if check["status"] in ("differs", "failed")] == []
    verified = {one.op_type for one in Dataset.load(dataset).definitions.values() if "status:verified" in one.tags}
    assert {"gemm", "gqa_paged", "rope", "rmsnorm", "embedding", "cache_update"} <= verified


def test_the_loss_names_what_is_not_exported(llama: Recording, dataset: Path) -> None:
    loss = json.loads((dataset / "loss.json").read_text())
    assert loss["total"] == kernel_invocations(llama.calls)
    assert loss["exported"] + sum(lost["count"] for lost in loss["lost"]) == loss["total"]


def test_counts_stand_beside_the_workloads(llama: Recording, dataset: Path) -> None:
    record = json.loads((dataset / "calling_record.json").read_text())
    counts = {kernel["id"]: kernel["count"] for kernel in record["kernels"]}
    assert set(counts) == set(Dataset.load(dataset).definitions)
    steps = sum(llama.metadata.steps.values())
    assert counts["gemm_bf16_n28672_k4096"] == LAYERS * steps


def test_every_workload_is_a_valid_one(dataset: Path, environment: dict[str, str]) -> None:
    ran = kcap_command(environment, "validate", dataset)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_flashinfer_bench_loads_the_dataset_and_runs_its_references(dataset: Path) -> None:
    script = Path(__file__).parents[2] / "scripts/try_flashinfer_bench.py"
    ran = subprocess.run([sys.executable, script, dataset, "--device", "cpu"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    exported = len(Dataset.load(dataset).definitions)
    assert f"{exported} Definitions loaded, 0 failed" in ran.stdout
