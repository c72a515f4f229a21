"""What recording costs a step of a small Llama in TVM's Relax VM, on the CPU.

    python scripts/relax_vm_overhead.py [STEPS]

Runs the same program plain and under `kcap record`, in turns, five times each; prints the median microseconds of a
decode step of two layers, over the last half of the STEPS (2000), and the difference for each callback of the VM's
instrument. Needs apache-tvm.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROUNDS = 5
MODEL = Path(__file__).parent.parent / "tests" / "capture"
PROGRAM = """
import os, sys, time
from statistics import median
sys.path.insert(0, sys.argv[1])
import tvm
from tvm_llama import Engine
engine = Engine(sys.argv[2])
remove = tvm.get_global_func("vm.builtin.kv_state_remove_sequence")
times = []
for step in range(int(sys.argv[3])):
    if step % 200 == 0:  # a sequence has to fit into the cache
        if step:
            remove(engine.cache, 0)
        engine.add(0)
        engine.forward({0: [1, 2, 3]})
    started = time.perf_counter()
    engine.forward({0: [step % 256]})
    times.append(time.perf_counter() - started)
print("step_us", 1e6 * median(times[len(times) // 2:]))
if "KCAP_SESSION" not in os.environ:
    callbacks = []
    engine.vm["set_instrument"](lambda *_: callbacks.append(None))
    engine.forward({0: [0]})
    print("callbacks", len(callbacks))
"""


def run(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = (line.split() for line in done.stdout.splitlines())
    return {words[0]: float(words[1]) for words in lines if words and words[0] in ("step_us", "callbacks")}


def main() -> None:
    steps = sys.argv[1] if len(sys.argv) > 1 else "2000"
    with tempfile.TemporaryDirectory() as folder:
        library, program = Path(folder, "llama.so"), Path(folder, "program.py")
        program.write_text(PROGRAM)
        subprocess.run([sys.executable, MODEL / "tvm_llama.py", "build", library], check=True, capture_output=True)
        plain = [sys.executable, str(program), str(MODEL), str(library), steps]
        record = [sys.executable, "-m", "kcap", "record", "--force", "-o", str(Path(folder, "run.kcap")), "--"]
        runs = [(run(plain), run([*record, *plain])) for _ in range(ROUNDS)]
    without, recorded = (median(each["step_us"] for each in column) for column in zip(*runs, strict=True))
    added, callbacks = recorded - without, runs[0][0]["callbacks"]
    print(f"a step: not recorded {without:.0f} us, recorded {recorded:.0f} us, {added:+.0f} us")
    print(f"{callbacks:.0f} callbacks: {added / callbacks:+.2f} us each")


if __name__ == "__main__":
    main()
