"""A reference is code from elsewhere: whatever it does costs its own result alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from definitions import COPY, DATASET, copying, definition, tensor, workload

from kcap.replay.datasets.inputs import make_inputs
from kcap.replay.datasets.reference import ReferenceResult, References
from kcap.replay.datasets.workloads import default_workload
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.flashinfer.dataset import Dataset

MIB = 1 << 20


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    with References(None, memory=256 * MIB, threads=1) as started:
        yield started


def run(references: References, reference: str, timeout: float = 60) -> ReferenceResult:
    of = copying(reference)
    return references.run(of, workload(of), timeout)


def test_a_reference_runs_and_its_outputs_are_described(references: References) -> None:
    result = run(references, COPY)
    assert result.status == "ok"
    assert [(o.name, o.shape, o.dtype, o.nan, o.inf) for o in result.outputs] == [("out", [4], "float32", 0, 0)]
    assert result.seconds is not None


BAD = {
    "import os\ndef run(x):\n    os._exit(0)\n": "the reference ended its process with exit code 0",
    "import os\ndef run(x):\n    os._exit(7)\n": "the reference ended its process with exit code 7",
    "import os, signal\ndef run(x):\n    os.kill(os.getpid(), signal.SIGSEGV)\n": "the reference crashed: SIGSEGV",
    "import sys\ndef run(x):\n    sys.exit(3)\n": "SystemExit: 3 (line 3 of the reference)",
    "def run(x):\n    raise ValueError('mine')\n": "ValueError: mine (line 2 of the reference)",
    "def run(x):\n    return run(x)\n": "RecursionError: maximum recursion depth exceeded (line 2 of the reference)",
    "def run(x):\n    return x, x\n": "ValueError: returns 2 outputs, the Definition has 1",
    "def run(x):\n    return {'other': x}\n": "ValueError: returns no out",
    "def run(x):\n    return 'x'\n": "ValueError: out: is a str, no tensor",
    "def run(x):\n    return x[:3]\n": "ValueError: out: has shape [3], the Definition's is [4]",
    "def run(x):\n    return x.half()\n": "ValueError: out: is float16, the Definition's is float32",
}


@pytest.mark.parametrize("reference", BAD, ids=range(len(BAD)))
def test_a_bad_reference_fails_with_its_reason_and_the_next_runs(references: References, reference: str) -> None:
    before = references.worker.restarts
    result = run(references, reference)
    assert (result.status, result.reason) == ("failed", BAD[reference])
    assert run(references, COPY).status == "ok"
    assert references.worker.restarts == before


def test_a_reference_that_hangs_is_skipped_at_its_limit(references: References) -> None:
    began = time.monotonic()
    result = run(references, "def run(x):\n    while True:\n        pass\n", timeout=1)
    assert result.status == "skipped"
    assert "longer than 1 s" in str(result.reason)
    assert time.monotonic() - began < 10
    assert run(references, COPY).status == "ok"


@pytest.mark.parametrize("first", ["pass", "os.setsid()"])
def test_a_hanging_reference_does_not_outlive_its_limit(references: References, tmp_path: Path, first: str) -> None:
    beat = tmp_path / "beat"
    write = f"open({str(beat)!r}, 'a').write('.'); time.sleep(0.05)"
    text = f"import os, time\ndef run(x):\n    {first}\n    while True:\n        {write}\n"
    assert run(references, COPY).status == "ok"  # it has started
    run(references, text, timeout=3)
    size = beat.stat().st_size
    assert size > 0
    time.sleep(0.5)
    assert beat.stat().st_size == size


@pytest.mark.parametrize("grow", ["torch.ones(1 << 22)", "bytearray(1 << 24)"])
def test_a_reference_that_allocates_without_end_is_stopped(references: References, grow: str) -> None:
    text = f"import torch\ndef run(x):\n    kept = []\n    while True:\n        kept.append({grow})\n"
    result = run(references, text)
    assert (result.status, result.reason) == ("skipped", "its reference takes more memory than there is")
    assert run(references, COPY).status == "ok"


def test_a_reference_has_the_memory_it_is_given_and_no_more(references: References) -> None:
    text = "import torch\ndef run(x):\n    torch.empty(N, dtype=torch.uint8)\n    return x\n"
    assert run(references, text.replace("N", str(64 * MIB))).status == "ok"
    assert run(references, text.replace("N", str(512 * MIB))).status == "skipped"


RAISE = "import resource as r\nr.setrlimit(r.RLIMIT_DATA, (r.RLIM_INFINITY,) * 2)\n"
LOWER = "import resource as r\nr.setrlimit(r.RLIMIT_DATA, (1 << 32,) * 2)\n"


def test_a_reference_cannot_raise_its_own_memory_limit(references: References) -> None:
    if subprocess.run([sys.executable, "-c", LOWER + RAISE], capture_output=True).returncode == 0:
        pytest.skip("this user may raise any limit")
    result = run(references, f"{RAISE}\ndef run(x):\n    return x\n")
    assert result.status == "failed"
    assert "not allowed to raise" in str(result.reason)


def test_what_one_reference_changes_the_next_does_not_see(references: References) -> None:
    spoil = "import torch\ndef run(x):\n    torch.Tensor.clone = None\n    return x\n"
    assert run(references, spoil).status == "ok"
    assert run(references, COPY).status == "ok"


def test_a_reference_that_prints_does_not_disturb_the_answer(references: References) -> None:
    text = "import os\ndef run(x):\n    print('{}' * 9)\n    os.write(1, b'{}\\n')\n    return x\n"
    assert run(references, text).status == "ok"


def test_a_reference_that_writes_to_every_file_it_has_costs_its_own_result(references: References) -> None:
    text = (
        "import os\ndef run(x):\n    for fd in range(3, 40):\n        try:\n            os.write(fd, b'junk\\n')\n"
        "        except OSError:\n            pass\n    return x\n"
    )
    assert run(references, text).status == "failed"
    assert run(references, COPY).status == "ok"


def test_an_absent_package_is_named(references: References) -> None:
    result = run(references, "import not_there_at_all\ndef run(x):\n    return x\n")
    assert (result.status, result.reason) == (
        "skipped",
        "its reference imports not_there_at_all, which is not installed",
    )


def test_outputs_that_are_not_finite_are_counted(references: References) -> None:
    result = run(references, "def run(x):\n    x[0] = float('nan')\n    x[1] = -float('inf')\n    return x\n")
    assert [(o.nan, o.inf) for o in result.outputs] == [(1, 1)]


def test_a_reference_in_another_order_is_called_by_name_and_that_is_said(references: References) -> None:
    row, column = tensor("float32", "N"), tensor("float32", "M")
    of = definition({"x": row, "y": column}, {"N": 4, "M": 5}, reference="def run(y, x):\n    return x\n")
    result = references.run(of, workload(of), 60)
    assert result.status == "ok"
    assert result.notes == ["called by name, by position it would fail: its reference takes y, x"]


def test_inputs_that_cannot_be_made_are_the_result(references: References) -> None:
    of = definition({"x": tensor("float32", "M"), "where": tensor("int64", "M")}, {"M": None})
    result = references.run(of, workload(of, {"where": "gone"}, M=2), 60)
    assert result.status == "failed"
    assert "inputs.where" in str(result.reason)
    large = definition({"x": tensor("float32", "M")}, {"M": None})
    assert references.run(large, workload(large, M=1 << 40), 60).status == "skipped"


LARGE = {
    "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e48_h7168_i2048",
    "moe_fp8_block_scale_renorm_topk10_e128_h2048_i512",
    "moe_fp8_block_scale_renorm_topk8_e128_h4096_i1536",
    "trtllm_fp4_block_scale_moe_topk1_e128_h5120_i8192",
    "trtllm_fp4_block_scale_moe_topk8_e128_h2048_i768",
    "trtllm_fp4_block_scale_routed_moe_topk10_e128_h2048_i512",
    "trtllm_fp4_block_scale_routed_moe_topk1_e16_h5120_i8192",
    "trtllm_fp4_block_scale_routed_moe_topk8_e64_h4096_i1536",
    "trtllm_fp8_per_tensor_scale_moe_topk1_e16_h5120_i8192",
}  # whose weights take gigabytes whatever the batch: scripts/run_references.py has the rest


def test_every_reference_of_flashinfers_dataset_runs_and_is_finite() -> None:
    definitions = Dataset.load(DATASET).definitions
    with References(None) as references:
        results = {
            name: references.run(of, default_workload(of), 120) for name, of in definitions.items() if name not in LARGE
        }
    assert {name: r.reason for name, r in results.items() if r.status != "ok"} == {}
    assert len(results) == 69
    assert [name for name, r in results.items() if any(o.nan or o.inf for o in r.outputs)] == []


def test_inputs_are_made_for_every_definition_whatever_its_size() -> None:
    for of in Dataset.load(DATASET).definitions.values():
        with pytest.raises(Skip, match="its tensors take"):
            make_inputs(of, default_workload(of), None, limit=0)
