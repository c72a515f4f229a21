"""Whether kcap counts what ran in programs as people write them: each of `counted_programs/` by `count_operators.py`.

    python scripts/count_programs.py [PATTERN…]

PATTERN leaves out the programs whose `FILE NAME` it does not match (`'compiled *'`). A program whose libraries are not
installed is left out, and so named. torchvision and torchaudio must be CPU builds where torch is one.

Prints the operators that differ as it goes, and a table last; ends with 1 where any differs or a program fails.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
SUMMARY = re.compile(r"(\d+) operators equal \(([\d,]+) invocations\), (\d+) differ; kcap record: (-?\d+)")


class Programs(NamedTuple):
    """The programs of a file, and what they need beside torch."""

    file: str
    names: str
    needs: tuple[str, ...] = ()
    processes: int = 0


class Outcome(NamedTuple):
    """What became of a program; without numbers where it did not run."""

    status: str
    equal: str = ""
    invocations: str = ""
    differing: tuple[str, ...] = ()


ALL = (
    Programs(
        "transformers_models", "generate static_cache beams assisted seq2seq encode image train", ("transformers",)
    ),
    Programs("diffusion", "unet dit vae", ("diffusers",)),
    Programs("vision", "resnet vit mobilenet segment", ("torchvision",)),
    Programs("audio", "conformer wav2vec2", ("torchaudio",)),
    Programs("trainers", "lora", ("peft", "transformers")),
    Programs("trainers", "accelerate", ("accelerate",)),
    Programs("trainers", "lightning", ("lightning", "torchmetrics")),
    Programs("trainers", "huggingface", ("accelerate", "transformers")),
    Programs("distributed", "ddp fsdp tensor_parallel", processes=2),
    Programs("compiled", "inference training dynamic broken eager function"),
    Programs("functional", "ensemble gradients jacobians hessians products higher_order attention"),
    Programs("training", "amp checkpoints function operator hooks recurrent averaged"),
    Programs("tensors", "quantized calibrated sparse nested transformer spectral"),
    Programs("workers", "loader threads hogwild scripted"),
)


def count(programs: Programs, name: str) -> Outcome:
    """Run one of `programs` by `count_operators.py`."""
    if missing := [library for library in programs.needs if importlib.util.find_spec(library) is None]:
        return Outcome(f"not run: {', '.join(missing)} not installed")
    processes = ["--processes", str(programs.processes)] if programs.processes else []
    program = HERE / "counted_programs" / f"{programs.file}.py"
    words = [sys.executable, str(HERE / "count_operators.py"), *processes, str(program), name]
    done = subprocess.run(words, capture_output=True, text=True)
    *differing, last = done.stdout.splitlines() or [""]
    summary = SUMMARY.fullmatch(last)
    if summary is None or summary[4] != "0":
        print(done.stderr, file=sys.stderr)
        return Outcome("failed")
    return Outcome("differs" if differing else "equal", summary[1], summary[2], tuple(differing))


def main(patterns: Sequence[str]) -> int:
    table = Table(
        "program", "needs", "", "operators equal", "invocations", "differing", title=f"torch {torch.__version__}"
    )
    statuses = set()
    for programs in ALL:
        for name in programs.names.split():
            program = f"{programs.file} {name}"
            if patterns and not any(fnmatch.fnmatch(program, pattern) for pattern in patterns):
                continue
            outcome = count(programs, name)
            print(f"{program}: {outcome.status}", *outcome.differing, sep="\n  ", flush=True)
            operators = ", ".join(line.partition(": ")[0] for line in outcome.differing)
            needs = ", ".join(programs.needs) or (f"{programs.processes} processes" if programs.processes else "")
            table.add_row(program, needs, outcome.status, outcome.equal, outcome.invocations, operators)
            statuses.add(outcome.status)
    console = Console()
    console.print(table, width=max(console.width, 120))
    return int(bool(statuses & {"differs", "failed"}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
