"""Whether memory stays flat, and the Recording small, over a million replays of a CUDA graph.

    python scripts/gpu/replays.py [--replays 1000000]

Captures a small graph with an integer input while recording, replays it in steps, and prints the host's and the GPU's
memory and the size of the Recording's files on the way.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

import kcap

STEP = 10  # replays in a step
LEAST = 20 * STEP  # replays: memory is looked at after a twentieth, a half and all of them
FLAT = 16 << 20  # bytes that the host's memory may differ by


def host_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def used(directory: Path) -> tuple[int, int, int]:
    """Bytes of the host's memory, of the GPU's, and of the files written so far."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    lines = sum(file.stat().st_size for file in directory.rglob("*.jsonl"))
    return host_bytes(), total - free, lines


@torch.library.custom_op("kcap_demo::gather", mutates_args=())
def gather(x: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    return x[block_table] * 2


def asked_for() -> int:
    """What was asked for, in whole steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=1_000_000)
    asked: int = parser.parse_args().replays
    if asked < LEAST:
        parser.error(f"--replays {asked}: fewer than {LEAST} show no growth of memory")
    return asked // STEP * STEP


def main() -> None:
    asked = asked_for()
    looked = {part // STEP for part in (asked // 20, asked // 2, asked)}  # after so many steps
    x, table = torch.zeros(256, 64, device="cuda"), torch.arange(64, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "graph.kcap"
        with torch.cuda.stream(stream):
            gather(x, table)
        marks = []
        with kcap.record(output) as recorder:
            with torch.cuda.graph(graph, stream=stream):
                gather(x, table) + 1
            start = time.perf_counter()
            for number in range(asked // STEP):
                with recorder.step("decode", queries=[1], lengths=[number % 4096]):
                    for _ in range(STEP):
                        graph.replay()
                if number + 1 in looked:
                    marks.append(((number + 1) * STEP, *used(Path(directory))))
            seconds = time.perf_counter() - start
        calls = kcap.load(output).calls
        size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    for replays, host, gpu, lines in marks:
        print(f"{replays:9,} replays: host {host >> 20} MiB, GPU {gpu >> 20} MiB, shard {lines / 2**20:.2f} MiB")
    counted = next(call.total for call in calls if call.operator == "kcap_demo::gather")
    print(f"{seconds:.1f} s; gather counted {counted:,}; the Recording is {size / 2**20:.2f} MiB")
    grown = abs(marks[-1][1] - marks[0][1])
    flat = grown <= FLAT and marks[-1][2] == marks[0][2]
    print(f"memory flat: {flat} (host differs by {grown / 2**20:.1f} MiB)")
    sys.exit(0 if flat and counted == asked else 1)


if __name__ == "__main__":
    main()
