"""A judge in this process, Definitions made for a test, and what it says of a source."""

from __future__ import annotations

from bench_datasets import SCALE, definition, of, workload
from solution_files import solution

from kcap.schemas.flashinfer.definition import ScalarInput

ROWS = 4096


def made(name, body, **more):
    return definition(name, {"x": of("m n"), "eps": of(None)}, more.pop("outputs", {"y": of("m n")}), body, **more)


def scale(uuid="w", m=ROWS, eps=2.0, of_definition=SCALE):
    return workload(of_definition, uuid, m, eps=ScalarInput(value=eps))


def outcome(judge, source, name="mine", of_definition=SCALE, m=ROWS, **spec):
    spec = {"destination_passing_style": False, **spec}
    mine = solution({"main.py": source}, name=name, definition=of_definition.name, **spec)
    return judged(judge, mine, of_definition, scale(m=m, of_definition=of_definition))


def judged(judge, mine, of_definition, of_workload):
    return judge.judge(mine, of_definition, of_workload)
