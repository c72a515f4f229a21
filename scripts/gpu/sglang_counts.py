"""What a dense Llama-like model must have run in each decode step of SGLang, held against a Recording of it.

    python scripts/gpu/sglang_counts.py llama.kcap --layers 32

Takes the most frequent kind of decode step: 4 × layers linears and the logits', per layer one attention, cache store,
rotary embedding and activation, and 2 × layers + 1 RMSNorms. Which library runs each is the engine's choice; what runs
inside a call of the same purpose is not counted again. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import counts
from counts import Check, Counts, base
from marks import mark

from kcap.schemas.recording.recording import Call

PURPOSES = {
    "linears": re.compile(r"aten::(linear|mm|addmm|matmul)$"),
    "attentions": re.compile(r"triton::_fwd_(grouped_)?kernel_stage1$|flashinfer::Batch\w+Wrapper$|sgl_kernel::fwd$"),
    "cache stores": re.compile(r"store_cache|set_kv_buffer|append_paged_kv_cache"),
    "ropes": re.compile(r"rope|rotary"),
    "activations": re.compile(r"run_activation|silu_and_mul"),
    "RMSNorms": re.compile(r"rms_?norm", re.IGNORECASE),
}


def wanted(layers: int) -> dict[str, int]:
    """In a step, the linear of the logits among the linears."""
    each = dict.fromkeys(PURPOSES, layers)
    return each | {"linears": 4 * layers + 1, "RMSNorms": 2 * layers + 1}


def ran(calls: list[Call]) -> Counter[str]:
    """How many calls served each purpose; a plan is no work."""
    found: Counter[str] = Counter()
    for call in (call for call in calls if call.work):
        for purpose, names in PURPOSES.items():
            found[purpose] += bool(names.search(base(call))) and not (call.parent and names.search(call.parent))
    return found


def check_decode(recorded: Counts, layers: int) -> list[Check]:
    """Of every step of the most frequent kind."""
    steps = recorded.decode_steps()
    one, number = steps[0], len(steps)
    size = f"{number} of {one.tokens} tokens, {one.mode}" + (f", padded to {one.padded}" if one.padded else "")
    rows = [Check("decode steps", size, number > 1 and one.mode == "full")]
    programs = Counter(step.program or 0 for step in steps)
    held = {program: ran(recorded.recording.ran(recorded.recording.programs[program])) for program in programs}
    for purpose, each in wanted(layers).items():
        found = sum(held[program][purpose] * times for program, times in programs.items())
        every = all(by_purpose[purpose] == each for by_purpose in held.values())
        rows.append(Check(purpose, f"{found} = {each} x {number}", every))
    return rows


def check(path: Path, layers: int) -> list[Check]:
    recorded = Counts(path)
    metadata = recorded.recording.metadata
    rows = [*check_decode(recorded, layers), *counts.check_launches(recorded), counts.check_share(recorded)]
    failed = [f"{tap.name}: {tap.detail}" for tap in metadata.taps if tap.status in ("failed", "off")]
    return [*rows, Check("the Recording is complete", "; ".join(failed) or str(metadata.complete), metadata.complete)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args()
    rows = check(args.path, args.layers)
    for row in rows:
        print(f"{mark(row.passed)}  {row.what}: {row.found}")
    sys.exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    main()
