"""A plan in a process of the engine: put in once the model is loaded, watched step by step, and told of.

The engine's adapter is that of a recording: it says when the model is loaded and when a step begins and ends. Each
process leaves what became of the plan in a file of its own (`Engagement`), which is written anew about every second.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from kcap.bench.apply import quality
from kcap.bench.apply.graphs import ENGINE, Arm, GraphSets, GraphUses, Table
from kcap.bench.apply.launches import Launches
from kcap.bench.apply.matching import PlanRefused, check_engine
from kcap.bench.apply.quality import (
    OWN_TIMEOUT,
    Agree,
    QualityCheck,
    compare_logits,
    on_any_rank,
    rows_of,
    why_different,
)
from kcap.bench.apply.seams import Functions, Operators, Placed, Replacements, Seam
from kcap.bench.build import BuildFailed, build
from kcap.capture.session import Session
from kcap.capture.window.process import at_exit_of_child
from kcap.capture.window.window import Forward, StepShape, Window
from kcap.errors import KcapError
from kcap.schemas.files.jsonfile import dump_json, read_json
from kcap.schemas.flashinfer.solution import Solution
from kcap.schemas.results.applied import ENGAGEMENT_ADAPTER, Engaged, Engagement
from kcap.schemas.results.plan import Plan, file_sha256, plan_bytes, read_plan
from kcap.system.output import write_atomically

WINDOW = f"{__name__}:PlanWindow"
WRITTEN_EVERY = 1.0  # seconds
ENDING = ".engagement.json"
CHECKS = 2  # invocations of each Solution outside a graph that are compared with the engine's own first
BUILT = "built"
OTHERS_WAIT = timedelta(seconds=60)  # for this rank, in a collective of the forward that failed here alone


def session_options(plans: Sequence[Plan], left: Path, window: str = WINDOW, **extension: Any) -> dict[str, Any]:
    """What the Session of an engine with these plans has beside the others: they lie in the folder `left`, where the
    processes leave their Engagements. `window`: the class of their windows, which finds `extension` there, too.

    PlanWindow uses the first plan alone.
    """
    files = [left / f"plan-{number}.json" for number in range(len(plans))]
    for plan, file in zip(plans, files, strict=True):
        file.write_bytes(plan_bytes(plan))
    return {
        "extension": {"window": window, "plans": list(map(str, files)), "left": str(left), **extension},
        "plan": {
            "sha256": file_sha256(files[0]),
            "solutions": plans[0].hashes,
        },
    }


def read_engagements(left: Path) -> list[Engagement]:
    """Of every process that left one in the folder `left`, by rank."""
    found = [read_json(path, ENGAGEMENT_ADAPTER) for path in sorted(left.glob(f"*{ENDING}"))]
    return sorted(found, key=lambda one: (one.rank, one.pid))


class PlanWindow(Window):
    """The window of a process with a plan: it steers a recording, if there is one, and the Solutions."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.left = Path(session.extension["left"])
        self.replacements = Replacements([])
        self._seams: list[Seam] = []  # what they register lasts as long as they do
        self._graphs = GraphUses(self.replacements)
        self._counted: Counter[str] = Counter()
        self._held: Counter[int] = Counter()
        self._before: list[int] = []  # how often each Solution had run when the step began
        self._under_way: StepShape | None = None
        self._sets = GraphSets()
        self._to_compare = session.extension.get("compared", 0)
        self._comparing = bool(self._to_compare)
        self.arm: Arm = 0
        self.index = 0  # of the step
        self.rank, self._world_size = 0, 1
        self._written = 0.0
        self._telling = threading.Lock()

    def loaded(self, **facts: Any) -> None:
        """Put the plan in, once: an engine may load a model of drafts, too.

        PlanRefused ends the engine's start: nothing runs that only seems to have a plan.
        """
        if self._seams:
            return
        self.stays_as_it_is(facts)
        try:
            placed: list[Placed] = []
            for number, file in enumerate(self.session.extension["plans"]):
                plan = read_plan(Path(file))
                check_engine(plan, facts)
                placed += place(plan, self.left / BUILT, number)
            self.replacements = Replacements(placed, self._recorded, CHECKS)
            self.replacements.unseen = self.taps.externals.ignoring
            self.replacements.checking = lambda: self._under_way is not None  # a warm-up's numbers say nothing
            self.replacements.failed = self._solution_failed
            self._graphs = GraphUses(self.replacements)
            libraries = Functions(self.replacements, self.taps.library_calls())
            self._seams = [Operators(self.replacements), Launches(self.replacements), libraries]
            for seam in self._seams:
                seam.install()
            self._graphs.install()
        except (KcapError, BuildFailed, PlanRefused) as error:
            self.tell(str(error))
            raise PlanRefused(f"kcap: the plan cannot be put into this engine: {error}") from None
        self.show(self.arms[0])
        self.tell()

    @property
    def watches_operators(self) -> bool:
        """Also where a Solution stands in the place of one, and is used: graphs are captured before a recording."""
        overrides = self.replacements.on is not None and self.replacements.operators("operator")
        return bool(overrides) or super().watches_operators

    def stays_as_it_is(self, facts: Mapping[str, Any]) -> None:
        """Put nothing in: the engine is watched alone."""
        self.rank, self._world_size = facts.get("rank", 0), facts.get("world_size", 1)
        ends = functools.partial(self._ends_in, os.getpid())
        atexit.register(ends)
        at_exit_of_child(ends)

    def _ends_in(self, process: int) -> None:
        if os.getpid() == process:  # and not a child that it forked
            self.ends()

    # ---- arms ----

    @property
    def arms(self) -> Sequence[Arm]:
        """What this engine runs with, that first that it begins with."""
        return (0, ENGINE) if self._comparing else (0,)

    def show(self, arm: Arm) -> None:
        """Let the engine find the graphs of this arm alone, and launch its kernels."""
        self.arm = arm
        self.replacements.on = arm if arm >= 0 else None
        self._sets.show(arm)

    def capture(self, tables: Callable[[], Sequence[Table]], original: Callable[[], Any], compares: bool) -> Any:
        """Capture the graphs of every arm. `compares`: `forward` is called, for which the engine's own are kept."""
        if not compares:
            self._comparing, self._to_compare = False, 0
        if len(self.arms) == 1:
            return original()
        result = self._sets.capture(self.arms, tables, original, self.show)
        self.show(self.arms[0])
        return result

    def forward(self, forward: Forward) -> Any:
        """In a step that is compared every Solution is, first, without graphs; then, where there are logits, the
        forward runs with every arm's kernels, with the step's own last."""
        if not self._to_compare or forward.logits is None:
            return forward.run()
        logits, ranks = forward.logits, forward.ranks()

        def agree(flags: Sequence[bool], wait: timedelta = OWN_TIMEOUT) -> list[bool]:
            with self.taps.externals.ignoring():
                return on_any_rank(flags, ranks, wait)

        if not self.compares(agree):
            return forward.run()
        self._to_compare -= 1
        own, tokens = self.arm, self._under_way.tokens if self._under_way else 0
        kept = self._copies(forward)
        if agree([kept is None])[0] or kept is None:
            self.stop_comparing()
            return forward.run()

        def run_as(arm: Arm) -> Any:
            for state, before in zip(forward.states(), kept, strict=True):
                state.copy_(before)
            self.show(arm)
            return forward.run()

        def logits_of(made: Any) -> Any:
            hidden = forward.hidden(made)
            return logits(rows_of(hidden, tokens)) if isinstance(hidden, torch.Tensor) else None  # of an early stage

        found, made, failed = {}, None, False
        try:
            with forward.without_graphs(), self._uncounted():
                for each in self.arms:
                    if each >= 0:
                        run_as(each)
            for each in (*(other for other in self.arms if other != own), own):
                made = run_as(each)
                found[each] = logits_of(made)
            check = self._check_of(found)
        except Exception as error:  # of torch, say that its memory is full: the engine goes on, if all ranks had one
            self._say_not_compared(error)
            check, failed = None, True
            self.show(own)
        (failed,) = agree([failed], OTHERS_WAIT if failed else OWN_TIMEOUT)
        arm = self.compared(check, agree)
        return run_as(arm) if failed or arm != own else made

    def _copies(self, forward: Forward) -> list[Any] | None:
        """Of the states that the forward overwrites; None where there is no memory for them."""
        try:
            return [state.clone() for state in forward.states()]
        except Exception as error:
            self._say_not_compared(error)
            return None

    def _say_not_compared(self, error: Exception) -> None:
        self.say(f"a step could not be compared: {type(error).__name__}: {error}")

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """How often Solutions run in it is not told."""
        before = [one.eager for one in self.replacements.placed]
        try:
            yield
        finally:
            for one, times in zip(self.replacements.placed, before, strict=True):
                one.eager = times

    def compares(self, agree: Agree) -> bool:
        """Whether the step that is under way is compared: on all ranks or on none, for all run as many forwards. A
        rank may have begun to follow the engine's steps a moment after another."""
        (not_here,) = agree([self._under_way is None or self._under_way.phase != "decode"])
        return not not_here

    def compared(self, check: QualityCheck | None, agree: Agree) -> Arm:
        """What the step goes on with, on all ranks alike. `check`: None where this rank has no logits."""
        if check is not None:
            self.keep_check(check)
        reason = why_different(check.arms[0]) if check is not None else ""
        differs, *taken_out = agree([bool(reason), *(bool(one.off) for one in self.replacements.placed)])
        for one, out in zip(self.replacements.placed, taken_out, strict=True):
            if out and not one.off:
                one.off = "another rank took it out"
                self._solution_failed(one, ValueError(one.off))
        if differs and not reason:
            reason = "another rank's logits differ"
        if agree([any(one.off and one.captured for one in self.replacements.placed)])[0] and not reason:
            reason = "the graphs that hold it hold one that was taken out, too"
        if reason:
            self._to_compare, self._comparing = 0, False
            for one in self.replacements.placed:
                if not one.off:
                    one.off = reason
                    self._solution_failed(one, ValueError(reason))
            return ENGINE
        self.stop_comparing()
        return self.arm

    def stop_comparing(self) -> None:
        """Give the memory of the engine's own graphs back, once nothing is compared any more."""
        if not self._to_compare:
            self._comparing = False
            self._sets.drop(ENGINE)

    def keep_check(self, check: QualityCheck) -> None:
        with contextlib.suppress(OSError), self.left_file(quality.ENDING).open("ab") as file:
            file.write(check.line())

    def _check_of(self, logits: Mapping[Arm, Any]) -> QualityCheck | None:
        if not all(isinstance(of_arm, torch.Tensor) for of_arm in logits.values()):  # another rank has them
            return None
        arms = {arm: compare_logits(of_arm, logits[ENGINE]) for arm, of_arm in logits.items() if arm != ENGINE}
        return QualityCheck(index=self.index, rank=self.rank, arms=arms)

    def close(self) -> None:
        """An engine may end its processes without a word once their shards are closed: what is known is told before."""
        self.ends()
        super().close()

    def ends(self) -> None:
        """The process ends, or is about to; may be called again."""
        self.tell()

    # ---- steps ----

    def begin(self, shape: StepShape) -> bool:
        if self._under_way is not None:
            self.end()
        super().begin(shape)
        self._before = self._uses()
        self._under_way = shape
        self.step_begins(shape)
        return True

    def resume(self) -> bool:
        super().resume()
        return self._under_way is not None

    def end(self) -> None:
        shape, self._under_way = self._under_way, None
        if shape is not None:
            self.step_ended(shape)
            self.index += 1
            self._counted[shape.phase] += 1
            self._held.update(index for index, times in enumerate(self.uses()) if times)
        super().end()
        if time.monotonic() > self._written + WRITTEN_EVERY:
            self.tell()

    def discard(self) -> None:
        self._under_way = None
        super().discard()

    def step_begins(self, shape: StepShape) -> None:
        """For whoever decides step by step what runs."""

    def step_ended(self, shape: StepShape) -> None:
        """The same, before anything else is done."""

    def uses(self) -> list[int]:
        """How often each Solution was run in this step so far, by the order of the plan's replacements."""
        return [now - before for now, before in zip(self._uses(), self._before, strict=True)]

    def _uses(self) -> list[int]:
        return [one.eager + self._graphs.replayed[index] for index, one in enumerate(self.replacements.placed)]

    # ---- what is told of it ----

    def _solution_failed(self, placed: Placed, error: BaseException) -> None:
        self.say(f"{placed.replacement.recorded_as} was taken out: {placed.off}; the engine's own runs")

    def say(self, text: str) -> None:
        """To whoever looks at the engine, and to its Recording, if there is one."""
        print(f"kcap: {text}", file=sys.stderr, flush=True)
        self.note(text)

    def _recorded(self, placed: Placed, values: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """A Solution is a call of its own in the Recording, and the operator around it a region."""
        tensors = {f"argument_{path}": value for path, value in values.items() if isinstance(value, torch.Tensor)}
        with self.taps.externals.replacing(placed.replacement.recorded_as, tensors):
            return run()

    def tell(self, refused: str = "") -> None:
        """Write what became of the plan so far. `refused`: why this engine cannot hold it."""
        self._written = time.monotonic()
        replayed = self._graphs.replayed
        engaged = [
            Engaged(
                solution=one.replacement.recorded_as, call=one.replacement.call.id, eager=one.eager,
                captured=one.captured, replayed=replayed[index], steps=self._held[index], misses=dict(one.misses),
                checked=one.checked, off=one.off,
            )
            for index, one in enumerate(self.replacements.placed)
        ]  # fmt: skip
        told = Engagement(
            pid=os.getpid(), rank=self.rank, world_size=self._world_size, steps=dict(self._counted),
            replacements=engaged, refused=refused,
        )  # fmt: skip
        with self._telling, contextlib.suppress(OSError):  # a full disk ends no engine
            write_atomically(self.left_file(ENDING), dump_json(told.model_dump(mode="json")))

    def left_file(self, ending: str) -> Path:
        """A file of this process in `left`."""
        return self.left / f"{self.session.shard().name}{ending}"


def place(plan: Plan, folder: Path, number: int = 0) -> list[Placed]:
    """The plan's replacements, each Solution built once, below `folder`; BuildFailed where one cannot be. `number`: the
    plan's."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # what another rank compiles is used again
        functions = {sha256: _built(solution, folder) for sha256, solution in plan.solutions.items()}
    return [
        Placed(one, functions[one.solution], plan.solutions[one.solution].spec.destination_passing_style, plan=number)
        for one in plan.replacements
    ]


def _built(solution: Solution, folder: Path) -> Callable[..., Any]:
    try:
        return build(solution, folder)
    except BuildFailed as error:
        raise BuildFailed(f"{solution.author}/{solution.name}: {error.reason}", error.log) from None
