"""Export Recordings to FlashInfer-Bench with every reference checked on the GPU, and say how much GPU time that is.

    python scripts/gpu/verified_exports.py RECORDING… [--output DIR]

For each Recording (made with --check-coverage): the share of the profiled steps' GPU time in named families, the
Definitions whose references agreed with the engine's own operators, and of the kernels that inductor fused those with a
reference from their ATen graph that agreed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from counts import Check
from marks import mark

from kcap.errors import DONE, PARTIAL
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import VERIFIED
from kcap.schemas.recording.recording import Recording, load
from kcap.show.summary import NO_FAMILY, of_recording

FUSED = "reference:inductor-fragment"


def family_time(recording: Recording) -> Check:
    """Of the GPU time of the profiled steps, what is of named families."""
    summary = of_recording(recording, "family")
    times = {row.name: row.gpu_us for row in summary.rows}
    if not summary.gpu_us:
        return Check("GPU time in named families", "none was profiled: record with --check-coverage", False)
    share = 1 - times.get(NO_FAMILY, 0.0) / summary.gpu_us
    top = ", ".join(f"{name} {us / summary.gpu_us:.1%}" for name, us in sorted(times.items(), key=lambda i: -i[1])[:6])
    eager = recording.metadata.engine_arguments.get("enforce_eager") is True
    return Check("GPU time in named families", f"{share:.1%} ({top})", share >= 0.95 or not eager)


def checked(dataset: Path) -> Check:
    """How the checks of all references ended; every one that could run must agree, and one at least."""
    lines = [json.loads(line) for line in (dataset / "checks.jsonl").read_text().splitlines()]
    found = Counter(line["status"] for line in lines)
    for line in lines:
        if line["status"] != "agrees":
            print("  ", line["status"], line["definition"], line["operator"], line.get("reason"))
    text = ", ".join(f"{count} {status}" for status, count in found.most_common())
    passed = found["agrees"] > 0 and not found["differs"] and not found["failed"]
    return Check("references on the GPU", text or "none", passed)


def fused(recording: Recording, dataset: Path) -> Check:
    """Of inductor's kernels, by invocations: those whose reference from their ATen graph agreed."""
    loaded = Dataset.load(dataset)
    kernels = [call for call in recording.kernels() if call.launch is not None and call.launch.fragment is not None]
    verified = {name for name, one in loaded.definitions.items() if {FUSED, VERIFIED} <= set(one.tags)}
    calls = {count.call for count in loaded.counts if count.definition in verified}
    launches = [call for call in recording.kernels() if call.launch is not None]
    total, had = sum(c.total for c in launches), sum(c.total for c in kernels)
    agreed = sum(call.total for call in launches if call.id in calls)
    text = f"of {total:,} launches {had / max(total, 1):.1%} had their ATen graph, "
    text += f"{agreed / max(total, 1):.1%} a reference that agreed"
    return Check("kernels with a source of their own", text, True)


def check(path: Path, output: Path) -> list[Check]:
    command = ["export", str(path), "--to", "flashinfer-bench", "-o", str(output), "--allow-truncated", "--force"]
    done = subprocess.run([sys.executable, "-m", "kcap", *command], capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    if done.returncode not in (DONE, PARTIAL):  # PARTIAL: a reference differs, which `checked` says
        return [Check(f"export {path.name}", f"status {done.returncode}", False)]
    recording = load(path)
    exported = Check(f"export {path.name}", done.stdout.splitlines()[0], True)
    return [exported, family_time(recording), checked(output), fused(recording, output)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"))
    args = parser.parse_args()
    rows = [(path, row) for path in args.recordings for row in check(path, args.output / f"{path.stem}.dataset")]
    for path, row in rows:
        print(f"{mark(row.passed)}  {path.stem}: {row.what}: {row.found}")
    sys.exit(0 if all(row.passed for _, row in rows) else 1)


if __name__ == "__main__":
    main()
