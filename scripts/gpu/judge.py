"""Does the judge hold on a GPU? Honest Solutions must pass there, cheats must be caught, and times must be believable.

    python scripts/gpu/judge.py [--only NAME]… [--all] [--limit SECONDS] [-o FILE.jsonl]

Judges the Solutions of tests/bench/honest and tests/bench/cheats that need a GPU, and the honest ones that do not
(--all: the other cheats, too), one after another in one judge worker; before that RMSNorm and a product on shapes of a
Llama-3.1-8B, by `kcap bench`, with the reference's times beside those of `kcap replay`: of more than 10 µs they agree
within 2 % (a product of few rows 7, several kernels 15: see MOST_OFF_OF). An Outcome is a line of FILE as soon as it is
there. Prints a short table last: what was not as it must be, and the times. When the limit is over, what is left is
told and not tried. Needs an NVIDIA GPU and a C++ compiler (CUDA Solutions: nvcc); exits with 1 where something is not
as it must be, or nothing was there to judge.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import pytest
from counts import Check
from marks import mark

from kcap.errors import CallError, KcapError
from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, DefinitionTensor, RandomInput, Workload
from kcap.schemas.results import outcome as outcomes_file
from kcap.schemas.results.measurement import read_measurements
from kcap.schemas.results.outcome import Clocked, Outcome

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "bench"))

from cheat_catalogue import Entry, entries  # noqa: E402
from judging import Bench, bench  # noqa: E402

TIMEOUTS = {True: 240.0, False: 15.0}  # seconds on a Workload, of honest ones and of cheats: these may only wait
BUILDS = {True: 300.0, False: 60.0}
WIDTH, ROWS = 4096, (16, 4096)
MOST_OFF, LEAST_US = 0.02, 10.0  # of what the judge says from what replay does, of what takes so long
# By where its weights lie, a product of few rows takes up to 6 % more; between kernels the cache holds other things.
MOST_OFF_OF = {"gemm_n4096_k4096-16": 0.07, "rmsnorm_by_steps_h4096-16": 0.15}


def definition(name: str, second: tuple[str, list[str]], output: str, reference: str) -> Definition:
    """Of rows of WIDTH numbers and a `second` input."""
    shapes = {"hidden_states": ["rows", "width"], second[0]: second[1]}
    return Definition(
        name=name,
        op_type=name.partition("_")[0],
        axes={"rows": AxisVar(), "width": AxisConst(value=WIDTH)},
        inputs={name: DefinitionTensor(shape=shape, dtype="bfloat16") for name, shape in shapes.items()},
        outputs={output: DefinitionTensor(shape=["rows", "width"], dtype="bfloat16")},
        reference=f"import torch\n\n\ndef run(hidden_states, {second[0]}):\n    return {reference}\n",
    )


NORM = definition(
    "rmsnorm_h4096",
    ("weight", ["width"]),
    "output",
    "torch.nn.functional.rms_norm(hidden_states, (4096,), weight, 1e-5)",
)
PRODUCT = definition("gemm_n4096_k4096", ("B", ["width", "width"]), "C", "torch.nn.functional.linear(hidden_states, B)")
STEPS = definition(
    "rmsnorm_by_steps_h4096",
    ("weight", ["width"]),
    "output",
    "(hidden_states.float() * torch.rsqrt(hidden_states.float().pow(2).mean(-1, keepdim=True) + 1e-5)"
    " * weight.float()).bfloat16()",
)
SOLUTIONS = {
    "torch_steps": (STEPS, STEPS.reference),
    "torch_linear": (PRODUCT, PRODUCT.reference),
    "triton_rms_norm": (
        NORM,
        """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, weight, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * BLOCK
    values = tl.load(x + row + at).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / BLOCK + 1e-5)
    tl.store(out + row + at, values * scale * tl.load(weight + at).to(tl.float32))


def run(hidden_states, weight):
    out = torch.empty_like(hidden_states)
    kernel[(hidden_states.shape[0],)](hidden_states, weight, out, BLOCK=4096, num_warps=8)
    return out
""",
    ),
}


def tried(only: list[str], every: bool, honest: bool) -> Iterator[Entry]:
    """The Solutions to judge that are honest, or those that are not."""
    folders = ["honest/gpu", "honest"] if honest else ["cheats/gpu", *(["cheats"] if every else [])]
    for entry in (entry for folder in folders for entry in entries(folder)):
        if entry.header.get("devices") != "cpu" and (not only or entry.name in only):
            yield entry


def missing(only: list[str], chosen: list[Entry]) -> list[Check]:
    """What there was to judge, and is not there."""
    if not only and not chosen:
        return [Check("the catalogue", "it has no Solution", False)]
    names = {entry.name for entry in chosen}
    return [Check(name, "no such Solution (of cheats that need no GPU: --all)", False) for name in {*only} - names]


def verdict(entry: Entry, honest: bool, outcomes: list[Outcome]) -> Check:
    """Of the Outcome on the last of its Workloads; of an honest one, of that on which it did not pass."""
    found = next((one for one in outcomes if honest and one.status != "PASSED"), outcomes[-1])
    took = f" {found.time.median_us:.2f} µs of {found.time.method}, {found.time.cache}" if found.time else ""
    told = f"{found.status}{took}" + (f": {found.reason}" if found.reason else "")
    if honest:
        fine = found.status == "PASSED"
    elif found.time and entry.at_least_us is not None:  # its trick came to nothing: the time is the true one
        fine = found.time.median_us >= entry.at_least_us
    else:
        said = re.search(entry.header["reason"], f"{found.reason}\n{found.log}")
        fine = found.status in entry.expect and said is not None
    told = "; ".join([told, *launched(found)])
    return Check(f"{'honest' if honest else 'cheat'} {entry.name}", f"{told} ({found.seconds:.1f} s)", fine)


def launched(found: Outcome) -> list[str]:
    """What was launched while the clock ran."""
    return [note for note in found.notes if "while the clock runs" in note]


def catalogue(one: Bench, chosen: list[Entry], honest: bool, until: float, file: BinaryIO) -> Iterator[Check]:
    for entry in chosen:
        if time.monotonic() > until:
            yield Check(entry.name, "not tried: the limit was over", False)
            continue
        try:
            outcomes = one.judge(entry)
        except (AssertionError, KcapError, pytest.skip.Exception) as error:  # skipped: others disturb it
            yield Check(entry.name, f"the judge itself: {error}", False)
            continue
        for outcome in outcomes:
            file.write(outcome.line())
            file.flush()
        row = verdict(entry, honest, outcomes)
        print(f"{mark(row.passed)}  {row.what}: {row.found}", outcomes[-1].log[-500:] * (not row.passed), flush=True)
        yield row


def sized(folder: Path, device: str, seconds: float, file: BinaryIO) -> Iterator[Check]:
    """`kcap bench` on a dataset of real sizes: a line for each Solution and Workload; and `kcap replay` beside it."""
    made = {one.name: [workload(one, rows) for rows in ROWS] for one in (NORM, PRODUCT)}
    made[STEPS.name] = [workload(STEPS, min(ROWS))]
    write_dataset(folder / "dataset", [NORM, PRODUCT, STEPS], made, {})
    (folder / "solutions").mkdir()
    for name, (one, source) in SOLUTIONS.items():
        (folder / "solutions" / f"{name}.py").write_text(f"# definition: {one.name}\n{source}")
    words = ("bench", folder / "dataset", "--solutions", folder / "solutions", "-o", folder / "out", "--trust")
    if failed := ran([*words, "--device", device, "--seconds", "0.2"], seconds):
        yield failed
        return
    lacking = {(name, each.uuid) for name, (one, _) in SOLUTIONS.items() for each in made[one.name]}
    outcomes = list(outcomes_file.read_outcomes(folder / "out" / "outcomes.jsonl"))
    for found in outcomes:
        file.write(found.line())
        lacking.discard((found.solution, found.workload))
        yield Check(f"{found.solution}, {found.workload}", compared(found), found.status == "PASSED")
    for solution, uuid in sorted(lacking):
        yield Check(f"{solution}, {uuid}", "kcap bench says nothing of it", False)
    times = folder / "times.jsonl"
    if failed := ran(["replay", folder / "dataset", "--trust", "--cache", "cold", "-o", times], seconds):
        yield failed
        return
    replayed = {one.workload: one.median_us for one in read_measurements(times)}
    for uuid in (each.uuid for workloads in made.values() for each in workloads):
        judged = [one.reference for one in outcomes if one.workload == uuid and one.reference]
        yield agreement(uuid, judged, replayed.get(uuid), MOST_OFF_OF.get(uuid, MOST_OFF))


def workload(one: Definition, rows: int) -> Workload:
    return Workload(uuid=f"{one.name}-{rows}", axes={"rows": rows}, inputs=dict.fromkeys(one.inputs, RandomInput()))


def ran(words: Sequence[object], seconds: float) -> Check | None:
    """What to say of a command of kcap's that failed, or took longer."""
    command = [sys.executable, "-m", "kcap", *map(str, words)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        return Check(f"kcap {words[0]}", f"took over {seconds:.0f} s", False)
    if done.returncode:
        print(done.stdout, done.stderr, flush=True)
        return Check(f"kcap {words[0]}", f"status {done.returncode}", False)
    return None


def agreement(uuid: str, judged: list[Clocked], replayed: float | None, most_off: float = MOST_OFF) -> Check:
    """`reference, gemm_n4096_k4096-16: judged at 17.00 µs, replayed at 16.80 µs: +1.2 % (the way +0.9 %)`."""
    name = f"reference, {uuid}"
    if not judged or not replayed:
        return Check(name, "not timed by both", False)
    ours, way = median(one.median_us for one in judged), median(one.way_us or 0.0 for one in judged)
    off = ours / replayed - 1
    found = f"judged at {ours:.2f} µs, replayed at {replayed:.2f} µs: {off:+.1%} (the way {way / replayed:+.1%})"
    return Check(name, found, abs(off) <= most_off or replayed < LEAST_US)


def compared(found: Outcome) -> str:
    """`2.31 µs of graph, cold; reference 14.20 µs; floor 1.10 µs; the way 0.05 µs`."""
    if found.time is None or found.reference is None:
        return f"{found.status}: {found.reason}"
    parts = [f"{found.time.median_us:.2f} µs of {found.time.method}, {found.time.cache}"]
    parts.append(f"reference {found.reference.median_us:.2f} µs")
    parts.append("no floor" if found.floor_us is None else f"floor {found.floor_us:.2f} µs")
    return "; ".join([*parts, f"the way {found.time.way_us or 0.0:.2f} µs", *launched(found)])


def machine(one: Bench) -> dict[str, Any]:
    return {name: one.worker.environment.get(name) for name in ("device_name", "driver", "torch")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this Solution, and others so named"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--all", action="store_true", help="the cheats that need no GPU, too")
    parser.add_argument("--limit", type=float, default=540, help="seconds  [default: 540]")
    parser.add_argument("-o", "--output", type=Path, default=Path("judged.jsonl"))
    args = parser.parse_args()
    until = time.monotonic() + args.limit
    rows: list[Check] = []
    with tempfile.TemporaryDirectory() as place, args.output.open("wb") as file:
        (folder := Path(place)).chmod(0o711)  # a Solution's process is another user's
        if not args.only:
            for row in sized(folder, args.device, until - time.monotonic(), file):
                print(f"{mark(row.passed)}  {row.what}: {row.found}", flush=True)
                rows.append(row)
        chosen = {honest: list(tried(args.only, args.all, honest)) for honest in TIMEOUTS}
        rows += missing(args.only, [*chosen[True], *chosen[False]])
        for honest in filter(chosen.get, TIMEOUTS):
            (scratch := folder / f"scratch-{honest}").mkdir()
            try:
                with bench(scratch, args.device, timeout=TIMEOUTS[honest], build_timeout=BUILDS[honest]) as one:
                    print(json.dumps(machine(one)), flush=True)
                    rows += catalogue(one, chosen[honest], honest, until, file)
            except (CallError, KcapError) as error:
                rows.append(Check("the judge", str(error), False))
    for row in rows:
        if not row.passed or row.what.startswith("reference"):
            print(f"{mark(row.passed)}  {row.what}: {row.found}")
    fine = sum(row.passed for row in rows)
    print(f"{mark(fine == len(rows))}  judging: {fine} of {len(rows)} as they must be")
    sys.exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    main()
