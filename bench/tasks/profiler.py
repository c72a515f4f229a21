"""`kcap judge --profile`: counters of Nsight Compute (`ncu`) for a Solution's kernels, on the most counted Workload.

ncu does not work in the judge's sandbox, so that the Solution runs outside of it here, in a process of its own
(`profiled_run`). No time of it counts: the counters are beside the Verdict, and change nothing in it.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from kcap.bench.solutions import FoundSolution
from kcap.bench.tasks.folder import OpenTask
from kcap.errors import KcapError
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.results.verdict import Verdict

LIMIT_S = 300.0
METRICS = {
    "gpu__time_duration.sum": "duration_ns",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_percent",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "dram__bytes.sum": "dram_bytes",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers_per_thread",
    "launch__shared_mem_per_block": "shared_bytes_per_block",
    "launch__grid_size": "blocks",
    "launch__block_size": "threads_per_block",
}
NO_NCU = "--profile: ncu (Nsight Compute) is not here: install it with the CUDA toolkit, or put it on PATH"
NO_GPU = "--profile: counters are a GPU's, and this was judged on {}"
NO_RIGHT = (
    "--profile: the driver keeps its counters for root (ERR_NVGPUCTRPERM): run as root, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)


def with_profile(verdict: Verdict, opened: OpenTask, solution_file: FoundSolution) -> Verdict:
    """`verdict` with the counters, or with a note of why there are none."""
    try:
        return verdict.model_copy(update={"profile": profile(verdict, opened, solution_file)})
    except KcapError as error:
        return verdict.model_copy(update={"notes": [*verdict.notes, str(error)]})


def profile(verdict: Verdict, opened: OpenTask, solution_file: FoundSolution) -> Mapping[str, Any]:
    """The counters by kernel; KcapError says why there are none."""
    if not verdict.device.startswith("cuda"):
        raise KcapError(NO_GPU.format(verdict.device or "no GPU"))
    if (ncu := shutil.which("ncu")) is None:
        raise KcapError(NO_NCU)
    workload = opened.workloads[0]
    with tempfile.TemporaryDirectory(prefix="kcap-profile-") as folder:
        request = {
            "solution": solution_file.solution.model_dump(mode="json"),
            "definition": definitions_file.to_bytes(opened.definition).decode(),
            "workload": workload.model_dump(mode="json"),
            "dataset": str(opened.dataset.root.resolve()),
            "folder": folder,
            "device": verdict.device,
        }
        file = Path(folder) / "request.json"
        file.write_bytes(orjson.dumps(request))
        command = [ncu, "--csv", "--page", "raw", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
        command += [sys.executable, "-P", "-m", "kcap.bench.tasks.profiled_run", str(file)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=dict(os.environ)
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KcapError(f"--profile: ncu did not end: {error}") from None
    kernels = list(kernels_of(done.stdout))
    if not kernels:
        raise KcapError(_why_none(done.stdout + done.stderr))
    return {"workload": workload.uuid, "kernels": kernels}


def kernels_of(text: str) -> Iterator[dict[str, Any]]:
    """What ncu's table (`--csv --page raw`) says of each kernel. Its own lines, and those of the program, go before."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return
    rows = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    units = next(rows, {})  # of the counters, in the row below their names
    for row in rows:
        counters = {
            name: value * SCALES.get(units.get(metric) or "", 1.0)
            for metric, name in METRICS.items()
            if (value := _number(row.get(metric))) is not None
        }
        yield {"kernel": row.get("Kernel Name") or "", **counters}


SCALES = {"us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
SCALES |= {"Kbyte/block": 1e3, "byte/block": 1.0, "s": 1e9, "second": 1e9}


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _why_none(output: str) -> str:
    if "ERR_NVGPUCTRPERM" in output:
        return NO_RIGHT
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return f"--profile: ncu saw no kernel: {lines[-1][:200] if lines else 'it printed nothing'}"
