"""What a dense Llama-like model must have run in each step, held against a Recording of it.

    python scripts/gpu/counts.py llama.kcap --layers 32 [--eager llama.eager.kcap]

Takes the most frequent kind of decode step of the Recording and checks, over all of its steps, the linears, attentions
and cache updates; and in the profiled steps, which it must have (`--check-coverage`), each kernel that was launched
from a source of its own against the profiler's count of it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

from marks import mark

import kcap
from kcap.errors import KcapError
from kcap.schemas.recording.recording import Call, Recording, Step
from kcap.schemas.results import coverage

LINEARS = ("aten::linear", "aten::mm", "aten::addmm")
ATTENTIONS = ("_vllm_fa3_C::fwd", "_vllm_fa2_C::varlen_fwd")
CACHE_UPDATE = "_C_cache_ops::reshape_and_cache_flash"
LEAST_SHARE = 0.97


@dataclass(frozen=True)
class Check:
    what: str
    found: str
    passed: bool


def end_with(rows: Sequence[Check], separator: str = "  ") -> NoReturn:
    """Print the table, and exit with 1 unless each row passed. `separator`: before what was found."""
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(f"{mark(row.passed)}  {row.what:<{width}}{separator}{row.found}")
    sys.exit(0 if all(row.passed for row in rows) else 1)


def base(call: Call) -> str:
    return call.operator.split(".")[0]


class Counts:
    """The kernels of a Recording's steps by base name."""

    def __init__(self, path: Path) -> None:
        self.recording: Recording = kcap.load(path)
        self.of_program = cache(self._of_program)

    def _of_program(self, number: int) -> Counter[str]:
        program = self.recording.programs[number]
        return Counter(base(call) for call in self.recording.ran(program) if call.kind == "kernel")

    def decode_steps(self) -> list[Step]:
        """Those of the most frequent kind."""
        steps = [step for step in self.recording.steps if step.phase == "decode" and step.program is not None]
        kinds = Counter((step.mode, step.padded, step.tokens) for step in steps)
        chosen = max(kinds, key=lambda kind: kinds[kind])
        return [step for step in steps if (step.mode, step.padded, step.tokens) == chosen]

    def total(self, steps: list[Step], names: tuple[str, ...]) -> int:
        return sum(self.of_program(step.program or 0)[name] for step in steps for name in names)


def check_decode(counts: Counts, layers: int) -> list[Check]:
    """Over the S steps of one kind: 4 × layers linears and one of the logits, and `layers` of what attention needs."""
    steps = counts.decode_steps()
    one, number = steps[0], len(steps)
    size = f"{number} decode steps of {one.tokens} tokens, {one.mode}"
    size += f", padded to {one.padded}" if one.padded else ""
    wanted = {
        "linears, those of the logits among them": (LINEARS, 4 * layers + 1),
        "attentions": (ATTENTIONS, layers),
        "cache updates": ((CACHE_UPDATE,), layers),
    }
    rows = [Check("steps", size, number > 1)]
    for what, (names, each) in wanted.items():
        found = counts.total(steps, names)
        rows.append(Check(what, f"{found} = {each} x {number}", found == each * number))
    return rows


def check_launches(counts: Counts) -> list[Check]:
    """In each profiled step, every kernel with a source of its own as often as the profiler saw that name."""
    recording, wrong, seen = counts.recording, Counter[str](), Counter[str]()
    what = "kernels of own source that the profiler counts otherwise"
    if not (steps := known_steps(recording)):
        return [Check(what, "no step was profiled: record with --check-coverage", False)]
    for step in steps:
        calls = recording.ran(recording.program(step.program or 0))
        ran = Counter(call.launch.function for call in calls if call.launch)
        profiled = Counter(kernel.name for kernel in step.kernels)
        for function, times in ran.items():
            seen[function] += profiled[function]
            wrong[function] += profiled[function] != times
    rows = [Check(f"{name}, by the profiler", f"{times}", not wrong[name]) for name, times in seen.most_common(8)]
    differ = sum(bool(times) for times in wrong.values())
    return [*rows, Check(what, f"{differ} of {len(wrong)}, in {len(steps)} steps", not differ)]


def known_steps(recording: Recording) -> list[coverage.StepCoverage]:
    """The profiled steps of which it is known what they ran."""
    path = recording.path / coverage.FILE
    return [step for step in coverage.read(path) if step.program is not None] if path.is_file() else []


def check_share(counts: Counts) -> Check:
    found = counts.recording.metadata.coverage or {}
    modes = {mode: f"{share['share']:.2%}" for mode, share in found.get("by_mode", {}).items() if "share" in share}
    share = found.get("share") or 0.0
    return Check("GPU time of recorded calls", f"{share:.2%} {modes}", share >= LEAST_SHARE)


def check_depth(path: Path, layers: int) -> Check:
    """Whether there is a Recording at `path`, and it is of `layers`, not left there by a call that asked for others."""
    try:
        found = kcap.load(path).metadata.layers_recorded
    except KcapError as error:
        return Check(f"{path.stem}: layers", str(error), False)
    return Check(f"{path.stem}: layers", f"{found}, to be {layers}", found == layers)


def check(path: Path, layers: int, eager: Path | None = None) -> list[Check]:
    counts = Counts(path)
    rows = [*check_decode(counts, layers), *check_launches(counts), check_share(counts)]
    if eager is not None:
        other = Counts(eager)
        mine, theirs = counts.decode_steps()[:1], other.decode_steps()[:1]
        names = (*LINEARS, *ATTENTIONS)
        same = counts.total(mine, names) == other.total(theirs, names) and mine[0].tokens == theirs[0].tokens
        rows.append(Check("an eager step of this batch runs as many linears and attentions", str(same), same))
    complete = counts.recording.metadata.complete
    return [*rows, Check("the Recording is complete", str(complete), complete)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--eager", type=Path)
    args = parser.parse_args()
    rows = check(args.path, args.layers, args.eager)
    for row in rows:
        print(f"{mark(row.passed)}  {row.what}: {row.found}")
    sys.exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    main()
