"""Candidates on the CPU: `python cpu_candidate.py CONTROL` forks those that run one of the functions here."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from forked_candidates import serve_all

from kcap.bench.judge.driver import driver

KEPT = []


def copied(x):
    return x.clone()


def turned(x):
    return x.T


def turned_in_a_row(x):
    return x.T.contiguous()


def negated(x):
    return -x


def negated_view(x):
    return torch._neg_view(x)


def padded(x):
    out = torch.empty(x.shape[0], x.shape[1] + 4)[:, : x.shape[1]]
    return out.copy_(x)


def called(x):
    raise RuntimeError("it was called")


def mutated(x):
    x.view(-1)[-1] += 1
    return x.clone()


def earlier(x):
    """What a kept input reads as, later."""
    KEPT.append(x)
    return KEPT[0].clone()


def maps(x):
    """How much memory the process has that the judge fills for it, by the files' names."""
    names = [line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    return torch.full_like(x, names.count("/memfd:batch")) + 100 * names.count("/memfd:inputs")


loaded = driver.Driver(driver.build_driver())
torch.set_num_threads(1)
with torch.no_grad():
    serve_all(int(sys.argv[1]), lambda channel, what: loaded.serve(channel, globals()[what], ()))
