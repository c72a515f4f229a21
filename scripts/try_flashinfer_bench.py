"""Load a dataset with FlashInfer-Bench itself, and run each reference on inputs that it generates.

    python scripts/try_flashinfer_bench.py DATASET [--device cuda] [--all]

One Workload of each Definition, or with `--all` every one. Needs `pip install flashinfer-bench`. Ends with 1 if
something failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import TraceSet


def workloads(found: TraceSet, name: str, every: bool) -> list[Any]:
    traces = found.workloads.get(name, [])
    return [trace.workload for trace in (traces if every else traces[:1])]


def shapes_of(outputs: Any) -> list[Any]:
    listed = outputs if isinstance(outputs, tuple | list) else [outputs]
    return [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in listed]


def run(found: TraceSet, name: str, workload: Any, root: Path, device: str) -> None:
    """Build and run the reference; ValueError if its outputs have other shapes than the Definition says."""
    definition = found.definitions[name]
    stored = load_safetensors(definition, workload, root)
    inputs = gen_inputs(definition, workload, device, stored)
    with torch.inference_mode():
        outputs = BuilderRegistry.get_instance().build_reference(definition)(*inputs)
    wanted = [None if shape is None else tuple(shape) for shape in definition.get_output_shapes(workload.axes)]
    actual = shapes_of(outputs)
    if len(actual) != len(wanted) or any(b is not None and a != b for a, b in zip(actual, wanted, strict=False)):
        raise ValueError(f"outputs of shapes {actual}, the Definition says {wanted}")


def failures(found: TraceSet, root: Path, device: str, every: bool) -> Iterator[str]:
    for name in sorted(found.definitions):
        given = workloads(found, name, every)
        if not given:
            yield f"{name}: no Workload"
        for workload in given:
            try:
                run(found, name, workload, root, device)
            except Exception as error:  # whatever a reference or FlashInfer-Bench raises is this row's result
                yield f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--all", action="store_true", help="every Workload")
    args = parser.parse_args()
    found = TraceSet.from_path(str(args.dataset))
    failed = list(failures(found, args.dataset, args.device, args.all))
    for line in failed:
        print(line)
    print(f"{len(found.definitions)} Definitions loaded, {len(failed)} failed")
    sys.exit(1 if failed or not found.definitions else 0)


if __name__ == "__main__":
    main()
