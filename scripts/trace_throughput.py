"""Write a trace file of a million lines and read it as a stream: lines per second, and the memory it took.

    python scripts/trace_throughput.py [LINES]

Every line is distinct: shapes, scalars and strides change, so that little is answered from a cache.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kcap.schemas.backendbench import read

LINES = 1_000_000
BLOCKS = (
    ("aten.addmm.default", "((T([{m}], bf16), T([{n}, 4096], bf16), T([4096, {m}], bf16, stride=(1, 4096))), {{}})"),
    ("aten.add.Tensor", "((T([{n}, {m}], f16), T([{n}, {m}], f16)), {{'alpha': {n}}})"),
    ("aten._softmax.default", "((T([{n}, 12, {m}, {m}], f32), -1, False), {{}})"),
    (
        "aten.convolution.default",
        "((T([{n}, {m}, 14, 14], f16), T([{m}, 1, 3, 3], f16), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {{}})",
    ),
    ("aten._to_copy.default", "((T([{n}, {m}], f32),), {{'dtype': f16, 'layout': torch.strided, 'device': 'cuda'}})"),
    ("aten.native_layer_norm.default", "((T([{n}, {m}], f16), [{m}], T([{m}], f16), T([{m}], f16), 1e-05), {{}})"),
)


def text(lines: int) -> Iterator[str]:
    block = lines // len(BLOCKS) + 1
    for index in range(lines):
        operator, arguments = BLOCKS[index // block]
        if index % block == 0:
            yield f"Operator: {operator}\n"
        yield f"cnt: {index}, {arguments.format(n=index % 4093 + 1, m=index // 251 + 1)}\n"


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "linux" else 1024) / 1024


def main(lines: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.txt"
        with path.open("w") as file:
            file.writelines(text(lines))
        before, started = peak_mib(), time.perf_counter()
        found = sum(1 for _ in read(path))
        seconds = time.perf_counter() - started
        print(
            f"{found:,} lines, {path.stat().st_size / 2**20:.0f} MiB: {found / seconds:,.0f} lines/s in {seconds:.1f} s"
        )
        print(f"peak memory {peak_mib():.0f} MiB, {peak_mib() - before:.0f} MiB more than before reading")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else LINES)
