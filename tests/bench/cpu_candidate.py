"""A candidate's process that is not confined: `python cpu_candidate.py CHANNEL` runs a copy of its input."""

from __future__ import annotations

import sys

import torch

from kcap.bench.integrity import driver


def copied(x):
    return x.clone()


loaded = driver.Driver(driver.build())
with torch.no_grad():
    loaded.serve(int(sys.argv[1]), copied, ())
