#!/usr/bin/env python3
"""Programs that compose known tricks against the judge, drawn from a seed: none may pass with a time it did not take.

    python scripts/fuzz_judge.py [--programs 10000] [--seed 0] [--judges 2] [--seconds 3600] [--keep FOLDER]

Each program is a right kernel inside of one to three tricks (judge_tricks.py): late work, memory of earlier inputs,
less work, reports and addresses forged in the memory that is shared, a process that stops early or is woken, neighbours
that are starved. A trick begins with the first call or after some hundred. A program may pass in the time that the
kernel takes without tricks, or longer; it is found out if it passes in less than LEAST of that, again and again, or
passes though it is wrong from the first call on. So is a judge that condemns the kernel without tricks; where it cannot
judge that, or not in time, the machine is busy, and it is asked again. Each judge has a core of its own, which its
Solutions share. Prints what was found, and how many programs came to which end; exits with 1 where something was found.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import judge_tricks

from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, DefinitionTensor, RandomInput, Workload
from kcap.schemas.flashinfer.solution import BuildSpec, Solution, SourceFile
from kcap.schemas.results.outcome import Outcome
from kcap.system.worker_process import Worker

LEAST = 0.6  # of the kernel's own time, below which a program that passes is found out
SECONDS, TIMEOUT, ANSWER_S = 0.02, 5.0, 120.0
HONEST_EVERY = 100  # programs, after which the kernels alone are judged again
BUSY = ("TIMEOUT", "NOT_JUDGED")  # what comes of an honest kernel on a busy machine
AGAIN = 3  # times that a program must have gained, before it is found out
KERNELS = {  # inputs, output, body, whether the output has the input's shape
    "rmsnorm": ({"x": "float32"}, "float32", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)", True),
    "product": ({"x": "float32"}, "float32", "x @ x.T @ x", True),
    "softmax": ({"x": "float32"}, "float32", "torch.softmax(x, -1)", True),
    "greatest": ({"x": "float32"}, "int64", "x.argmax(-1)", False),
}
CORES = sorted(os.sched_getaffinity(0))
HEAD = Path(judge_tricks.__file__).read_text()
TAIL = """
AFTER, PERIOD, PAUSE_S, TIMER_NS = {after}, {period}, {pause}, {timer}


def BODY(x):
    return {body}


tricked = right
for trick in ({tricks}):
    tricked = trick(tricked)


def run(x):
    CALLS[0] += 1
    return tricked(x)
"""


@dataclass(frozen=True)
class Program:
    """`wrong`: it cannot be right from its first call on."""

    number: int
    kernel: str
    tricks: tuple[str, ...]
    source: str
    wrong: bool


def drawn(number: int, seed: int) -> Program:
    """Program `number` of a `seed`: always the same."""
    draw = random.Random(f"{seed} {number}")
    kernel = draw.choice([*KERNELS])
    names = tuple(trick.__name__ for trick in draw.sample(judge_tricks.TRICKS, draw.choice((1, 1, 2, 2, 3))))
    after = draw.choice((0, 0, 3, 10, 40, 400))
    period, pause = draw.choice((2, 3, 5, 20)), draw.choice((0, 1e-5, 1e-4, 1e-3))
    timer = draw.choice((50_000, 500_000, 5_000_000))
    wrong = after == 0 and any(name in judge_tricks.WRONG for name in names)
    return Program(number, kernel, names, source_of(kernel, names, after, period, pause, timer), wrong)


def source_of(
    kernel: str, tricks: Sequence[str] = (), after: int = 0, period: int = 2, pause: float = 0.0, timer: int = 50_000
) -> str:
    named = "".join(f"{name}, " for name in tricks)
    words = {"after": after, "period": period, "pause": pause, "timer": timer, "tricks": named}
    return HEAD + TAIL.format(**words, body=KERNELS[kernel][2])


def definition_of(kernel: str) -> Definition:
    inputs, output, body, same_shape = KERNELS[kernel]
    return Definition(
        name=kernel,
        op_type="test",
        axes={"m": AxisVar(), "n": AxisConst(value=512)},
        inputs={name: DefinitionTensor(shape=["m", "n"], dtype=dtype) for name, dtype in inputs.items()},
        outputs={"y": DefinitionTensor(shape=["m", "n"] if same_shape else ["m"], dtype=output)},
        reference=f"import torch\n\n\ndef run(x):\n    return {body}\n",
    )


@dataclass
class Fuzzer:
    """`own_us`: the least time of each kernel without tricks so far; `ends`: how many programs came to which. `judges`:
    one for each thread that asks.
    """

    seed: int
    keep: Path | None
    judges: threading.local = field(default_factory=threading.local)
    own_us: dict[str, float] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    def judge(self, program: Program) -> Outcome | None:
        """None where the judge's own process does not answer."""
        spec = BuildSpec(language="python", target_hardware=["cpu"], entry_point="main.py::run",
                         destination_passing_style=False)  # fmt: skip
        solution = Solution(
            name=f"p{program.number}",
            definition=program.kernel,
            author="fuzz",
            spec=spec,
            sources=[SourceFile(path="main.py", content=program.source)],
        )
        request = {
            "solution": solution.model_dump(mode="json"),
            "file": "",
            "definition": definitions_file.to_bytes(definition_of(program.kernel)).decode(),
            "workload": Workload(uuid="w", axes={"m": 64}, inputs={"x": RandomInput()}).model_dump(mode="json"),
        }
        answer: dict[str, Any] = self.judges.worker.run(request, ANSWER_S)
        return Outcome.model_validate(answer) if "solution" in answer else None

    def measure(self, kernel: str) -> float:
        """Microseconds that `kernel` takes without tricks, this time."""
        honest = Program(-1, kernel, (), source_of(kernel), False)
        while (outcome := self.judge(honest)) is None or outcome.time is None:
            if outcome is not None and outcome.status not in BUSY:
                self.note(honest, f"is condemned: {outcome.status} ({outcome.reason})")
                return math.inf
            print(f"{kernel}, without tricks: {outcome.reason if outcome else 'no answer'}; again", flush=True)
        self.own_us[kernel] = min(outcome.time.median_us, self.own_us.get(kernel, math.inf))
        return outcome.time.median_us

    def try_one(self, program: Program) -> None:
        outcome = self.judge(program)
        words = (
            f"NOT_JUDGED, {program.tricks}: {outcome.reason}" if outcome and outcome.status == "NOT_JUDGED" else None
        )
        self.ends[words or (outcome.status if outcome else "the judge gave no answer")] += 1
        if outcome is None:
            self.note(program, "the judge gave no answer")
        elif outcome.status == "PASSED" and program.wrong:
            self.note(program, "passed, and is wrong")
        elif self.gained(program, outcome) and all(self.gained_again(program) for _ in range(AGAIN)):
            self.note(program, f"passed in less than {LEAST} of the kernel's own time")

    def gained(self, program: Program, outcome: Outcome | None) -> bool:
        timed = outcome is not None and outcome.status == "PASSED" and outcome.time is not None
        return timed and outcome.time.median_us < LEAST * self.own_us[program.kernel]

    def gained_again(self, program: Program) -> bool:
        """Beside the kernel's time of now: a machine is not always as quick."""
        self.own_us[program.kernel] = self.measure(program.kernel)
        return self.gained(program, self.judge(program))

    def note(self, program: Program, what: str) -> None:
        self.found.append(f"program {program.number}, {program.kernel} in {', '.join(program.tricks)}: {what}")
        print(self.found[-1], flush=True)
        if self.keep:
            self.keep.mkdir(parents=True, exist_ok=True)
            (self.keep / f"{program.number}.py").write_text(f"# definition: {program.kernel}\n{program.source}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program  [default: 0]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judges", type=int, default=len(CORES), help="at once  [default: one on each processor]")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no more programs are begun")
    parser.add_argument("--keep", type=Path, help="a folder for the programs that were found")
    given = parser.parse_args()
    began, last = time.monotonic(), given.first + given.programs
    fuzzer, cores = Fuzzer(given.seed, given.keep), SimpleQueue[int]()
    for number in range(given.judges):
        cores.put(CORES[number % len(CORES)])
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as opened:
        session = {"threads": 1, "seconds": SECONDS, "timeout": TIMEOUT, "build_timeout": TIMEOUT, "scratch": scratch,
                   "device": "cpu", "memory": 2 << 30}  # fmt: skip

        def open_judge() -> None:
            os.sched_setaffinity(0, {cores.get()})  # of this thread, and of the processes that it starts
            fuzzer.judges.worker = opened.enter_context(Worker(session, "kcap.bench.judge.worker"))

        with ThreadPoolExecutor(given.judges, initializer=open_judge) as pool:
            for start in range(given.first, last, HONEST_EVERY):
                list(pool.map(fuzzer.measure, KERNELS))
                programs = [drawn(number, given.seed) for number in range(start, min(start + HONEST_EVERY, last))]
                # a judge starts the reference again where the Definition is another
                list(pool.map(fuzzer.try_one, sorted(programs, key=lambda program: program.kernel)))
                print(f"{sum(fuzzer.ends.values())} programs, {time.monotonic() - began:.0f} s", flush=True)
                if time.monotonic() - began > given.seconds:
                    break
    seconds = time.monotonic() - began
    print(f"{sum(fuzzer.ends.values())} programs in {seconds:.0f} s: {dict(fuzzer.ends.most_common())}")
    print(f"{len(fuzzer.found)} found")
    sys.exit(bool(fuzzer.found))


if __name__ == "__main__":
    main()
