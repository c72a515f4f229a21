"""What this machine can do at most: bandwidth by working set, and arithmetic by dtype, as `kcap replay` measures them.

    python scripts/ceilings.py [--device cuda:0|cpu] [--threads N] [--keep]

Measures anew, a few seconds. `--keep`: for later runs of kcap, too, where higher than what is kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from kcap.replay.roofline import ceilings
from kcap.replay.roofline.ceilings import Ceilings
from kcap.replay.roofline.floor import MARGINS
from kcap.replay.roofline.measure import measure
from kcap.replay.timing import device


def lines(found: Ceilings) -> Iterator[str]:
    yield " · ".join(str(part) for part in (found.device_name, f"torch {found.torch}", found.driver) if part)
    yield f"{found.cache_bytes / 2**20:,.0f} MiB last-level cache" + (
        f", {found.threads} threads" if found.threads else ""
    )
    yield "\nworking set of at least      GB/s (read and written)"
    for level in found.levels:
        yield f"{level.size / 2**20:>14,.2f} MiB    {level.gb_s:>10,.0f}"
    yield "\nproducts of matrices      TFLOP/s"
    for name, rate in found.tflop_s.items():
        yield f"{name:<20}    {rate:>10,.3g}"
    of_bytes, of_flops = MARGINS["cuda" if found.device.startswith("cuda") else "cpu"]
    yield f"\na kernel that does next to nothing: {found.empty_us:.2f} µs back to back"
    yield f"a floor is what these allow over {of_bytes} (bandwidth), over {of_flops} (arithmetic)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of a CPU  [default: torch's]")
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    found = measure(device.choose_device(given.device, None), given.threads)
    if given.keep:
        found = ceilings.raised_ceilings(found.model_dump(), lambda _: found)
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
