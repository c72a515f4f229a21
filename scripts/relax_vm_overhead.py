"""What recording costs a step of a small Llama in TVM's Relax VM, on the CPU.

    python scripts/relax_vm_overhead.py [STEPS]

Runs the same program plain and under `kcap record`, in turns, three times each; prints the median milliseconds of a
decode step of two layers, over the last half of the STEPS (200). Needs apache-tvm.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROUNDS = 3
MODEL = Path(__file__).parent.parent / "tests" / "capture"
PROGRAM = """
import sys, time
from statistics import median
sys.path.insert(0, sys.argv[1])
from tvm_llama import Engine
engine = Engine(sys.argv[2])
engine.add(0)
engine.forward({0: [1, 2, 3]})
times = []
for step in range(int(sys.argv[3])):
    started = time.perf_counter()
    engine.forward({0: [step % 256]})
    times.append(time.perf_counter() - started)
print("step_ms", 1e3 * median(times[len(times) // 2:]))
"""


def step_ms(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("step_ms")))


def main() -> None:
    steps = sys.argv[1] if len(sys.argv) > 1 else "200"
    with tempfile.TemporaryDirectory() as folder:
        library, program = Path(folder, "llama.so"), Path(folder, "program.py")
        program.write_text(PROGRAM)
        subprocess.run([sys.executable, MODEL / "tvm_llama.py", "build", library], check=True, capture_output=True)
        plain = [sys.executable, str(program), str(MODEL), str(library), steps]
        record = [sys.executable, "-m", "kcap", "record", "--force", "-o", str(Path(folder, "run.kcap")), "--"]
        times = [(step_ms(plain), step_ms([*record, *plain])) for _ in range(ROUNDS)]
    without, recorded = (median(column) for column in zip(*times, strict=True))
    print(f"not recorded {without:.3f} ms, recorded {recorded:.3f} ms: {1e3 * (recorded - without):+.0f} us a step")


if __name__ == "__main__":
    main()
