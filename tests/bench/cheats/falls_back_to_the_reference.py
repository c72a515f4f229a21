# definition: gemm_f32
# row: 28
# does: Contains no kernel: looks for the dataset on disk and runs the Definition's own reference.
# naive: Correct with a speedup of 1, and counted as a Solution.
# expect: RUNTIME_ERROR COMPILE_ERROR
# reason: StopIteration|FileNotFoundError|PermissionError
# needs: confinement
import importlib.util
import json
import sys
from pathlib import Path

PATTERN = "definitions/*/gemm_f32.json"


def definitions():
    root = Path(importlib.util.find_spec("kcap").origin).resolve().parents[1]
    yield from root.glob(f"tests/bench/*/{PATTERN}")
    for folder in [Path.cwd(), *Path.cwd().parents, *map(Path, sys.argv)]:
        yield from folder.glob(PATTERN)
        yield from folder.glob(f"*/{PATTERN}")


def run(A, B):
    found = {}
    exec(json.loads(next(definitions()).read_text())["reference"], found)
    return found["run"](A, B)
