"""Make a Recording of a hundred thousand distinct Calls and export it to each target: seconds, and memory at its peak.

    python scripts/export_throughput.py [CALLS] [TARGET…]

Each export is a process of its own. The Calls are those of a served model in many sizes: matrix products, norms,
attention, cache updates, views, and Triton kernels, in two phases and on two ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kcap.bench.exports import targets
from kcap.schemas.recording.recording import Argument, Call, Count, Launch, Metadata, write_recording
from kcap.schemas.recording.records import totals
from kcap.schemas.recording.values import TensorSpec, Value

CALLS = 100_000
METADATA = Metadata(model="kcap/many", framework="vLLM", device="NVIDIA H200", layers_recorded=2, layers_model=2)
COUNTS = [Count(phase="prefill", count=2), Count(phase="decode", count=64), Count(phase="decode", rank=1, count=64)]


def tensor(*shape: int, dtype: str = "bfloat16", strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(shape, dtype, strides, device="cuda:0")


def named(**arguments: Value) -> list[Argument]:
    return [Argument(name=name, value=value) for name, value in arguments.items()]


KINDS: list[tuple[str, Callable[[int, int], list[Argument]]]] = [
    ("aten::mm", lambda m, n: named(self=tensor(m, 4096), mat2=tensor(4096, n, strides=(1, 4096)))),
    ("aten::addmm", lambda m, n: named(self=tensor(n), mat1=tensor(m, 4096), mat2=tensor(4096, n))),
    ("aten::add.Tensor", lambda m, n: named(self=tensor(m, n), other=tensor(m, n), alpha=1)),
    ("aten::_softmax", lambda m, n: named(self=tensor(m, n), dim=-1, half_to_float=False)),
    ("aten::silu", lambda m, n: named(self=tensor(m, n))),
    ("_C::rms_norm", lambda m, n: named(result=tensor(m, n), input=tensor(m, n), weight=tensor(n), epsilon=1e-5)),
    ("_C::silu_and_mul", lambda m, n: named(result=tensor(m, n), input=tensor(m, 2 * n))),
    ("aten::view", lambda m, n: named(self=tensor(m, n), size=[m * n])),
    ("triton::fused.s12345678", lambda m, n: named(in_ptr0=tensor(m, n), out_ptr0=tensor(m, n), xnumel=m * n)),
]


def calls(number: int) -> Iterator[Call]:
    for index in range(number):
        operator, arguments = KINDS[index % len(KINDS)]
        m, n = index // len(KINDS) % 4093 + 1, 64 * (index // len(KINDS) // 4093 + 1)
        launch = Launch(function="fused", grid=[m]) if operator.startswith("triton::") else None
        work = operator != "aten::view"
        yield Call(id=index, operator=operator, args=arguments(m, n), counts=COUNTS, launch=launch, work=work)


def export(recording: Path, target: str, output: Path) -> tuple[float, float, float, int]:
    """Seconds, of them on a CPU, peak MiB and exit code of `kcap export` in a process of its own."""
    command = [sys.executable, "-m", "kcap", "export", recording, "--to", target, "-o", output, "--no-check"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    on_cpu = usage.ru_utime + usage.ru_stime
    return time.perf_counter() - started, on_cpu, usage.ru_maxrss / 1024, process.returncode


def main(number: int, targets: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "many.kcap"
        made = list(calls(number))
        write_recording(recording, METADATA.model_copy(update={"totals": totals(made)}), made)
        print(f"{number:,} Calls\n\n| target | seconds | on a CPU | peak MiB | MiB written |\n|---|---|---|---|---|")
        for target in targets:
            output = Path(folder) / target
            seconds, on_cpu, peak, code = export(recording, target, output)
            size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) / 2**20
            failed = f" (exit code {code})" if code else ""
            print(f"| {target}{failed} | {seconds:.1f} | {on_cpu:.1f} | {peak:,.0f} | {size:,.1f} |", flush=True)


if __name__ == "__main__":
    count, *chosen = sys.argv[1:] or [str(CALLS)]
    main(int(count), chosen or targets())
