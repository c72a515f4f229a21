"""Each Solution of a plan tried alone before an engine is started with it, in a process of its own.

On the arguments of a recorded invocation, as rebuilt by `kcap replay`, the Solution must give what the engine's own
kernel gives there, by the judge's rule; on a GPU inside a captured CUDA graph, without waiting for the GPU; and must
not be slower than that kernel, unless the plan says that it is. This module is the worker, too: `python -m`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kcap.bench.apply.matching import with_items
from kcap.bench.apply.process import place
from kcap.bench.apply.seams import Placed, why_different, why_not_overridden
from kcap.bench.build import BuildFailed
from kcap.errors import CallError
from kcap.replay.jobs import ReplaySession
from kcap.replay.rebuild.rebuild import Rebuilder, ResolvedCall
from kcap.replay.source import replay_session
from kcap.replay.timing.clock import loop_ns
from kcap.replay.timing.graphs import CaptureFailed, capture_graph, detect_sync, do_nothing, timed_us
from kcap.replay.worker import open_session, sample_of_request
from kcap.schemas.derive.bound_call import Inputs, Skip
from kcap.schemas.recording.recording import Recording, load
from kcap.schemas.recording.records import Call
from kcap.schemas.results.plan import METADATA_FILE, LeftOut, Plan, file_sha256, plan_bytes, read_plan
from kcap.system.worker_process import Worker, serve

PATIENCE = 300.0  # seconds for one Solution, its build among them
SLOWER = 1.05  # times the engine's kernel, from which on a Solution is slower for certain
ROUNDS, IN_ROUND = 7, 20  # of invocations, for either time


def try_alone(plan: Plan, trust: bool = False, slower: bool = False) -> Plan:
    """The plan without the Solutions that fail here, for which its `left_out` has the reasons. `slower`: those that are
    slower stay.

    CallError where the plan's Recording is not there, or is another by now.
    """
    recording = open_recording(plan)
    calls = [one.call for one in plan.replacements]
    session: ReplaySession = {
        **replay_session(recording, recording.calls, calls, trust),
        "device": None,
        "threads": None,
    }
    kept, left_out = [], []
    with tempfile.TemporaryDirectory(prefix="kcap-trial-") as folder, Worker(session, __name__, None) as worker:
        file = Path(folder) / "plan.json"
        file.write_bytes(plan_bytes(plan))
        samples = {sample.call: sample for sample in reversed(recording.drawn_samples)}
        for index, one in enumerate(plan.replacements):
            sample = samples.get(one.call.id)
            request = {
                "plan": str(file),
                "replacement": index,
                "slower": slower,
                "sample": None if sample is None else sample.model_dump(mode="json"),
            }
            reason = worker.run(request, PATIENCE).get("reason")
            kept += [] if reason else [one]
            solution = plan.solutions[one.solution]
            left_out += [LeftOut.of(solution, one.call, f"tried alone: {reason}")] if reason else []
    return plan.only(kept, left_out)


def open_recording(plan: Plan) -> Recording:
    """The plan's Recording; CallError where it is not there, or is another by now."""
    path = Path(plan.recording)
    if not (path / METADATA_FILE).is_file():
        raise CallError(f"{path}, which the plan is of, is not there: Solutions cannot be tried alone (--no-trial)")
    if file_sha256(path / METADATA_FILE) != plan.recording_sha256:
        raise CallError(
            f"{path}: is another Recording than the one that the plan was made of: kcap apply makes one anew"
        )
    return load(path)


def main() -> None:
    """Answer requests to try until there are no more."""
    session = open_session()
    if session is None:
        return
    rebuilder = Rebuilder(session.device, session.home, session.root, session.trust)

    read = cache(read_plan)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        file = Path(request["plan"])
        plan = read(file)
        one = plan.replacements[request["replacement"]]
        try:
            (placed,) = place(plan.only([one]), file.parent)
            resolved = rebuilder.resolve(one.call, sample_of_request(request))
            return {"reason": _try(placed, rebuilder, resolved, request["slower"])}
        except CaptureFailed as error:
            return {"reason": f"cannot be captured in a CUDA graph: {error}", "poisoned": True}
        except (BuildFailed, Skip) as error:
            return {"reason": str(error)}
        except Exception as error:
            return {"reason": f"{type(error).__name__}: {error}", "poisoned": session.device != "cpu"}

    serve(session.answers, answer)


def _try(placed: Placed, rebuilder: Rebuilder, resolved: ResolvedCall, slower: bool) -> str | None:
    """Why the Solution is not to be put in; None if nothing speaks against it."""
    operator = resolved.operator
    if placed.replacement.seam == "operator" and (reason := why_not_overridden(operator.schema, placed.replacement)):
        return reason
    inputs = rebuilder.build(resolved)
    mine = rebuilder.clone(resolved, inputs)
    values = values_by_path(placed.replacement.call, resolved, mine)
    if mismatch := placed.matching.mismatch(values):
        return f"what is rebuilt of the call is not as it was recorded ({mismatch})"
    theirs = placed.outputs(
        values_by_path(placed.replacement.call, resolved, inputs), operator.call(*inputs.args, **inputs.kwargs)
    )
    ours = placed.outputs(values, placed.run(values))
    if reason := why_different(ours, theirs):
        return reason
    on_gpu = any(tensor.is_cuda for tensor in ours)
    if on_gpu and (waits := detect_sync(lambda: placed.run(values))):
        return f"waits for the GPU: {waits}"
    if slower or all(saved < 0 for saved in placed.replacement.saved_by_phase.values()):
        return None  # as is known
    us, engine_us = time_us(placed.run, Inputs([values], {}, {}), on_gpu), time_us(operator.call, inputs, on_gpu)
    if us > SLOWER * engine_us:
        return f"takes {us:.2f} us, and the engine's kernel {engine_us:.2f} us"
    return None


def values_by_path(call: Call, resolved: ResolvedCall, inputs: Inputs) -> Mapping[str, Any]:
    """The rebuilt arguments by their paths in the Call."""
    positional = iter(inputs.args)
    values: dict[str, Any] = {}
    for index, argument in enumerate(resolved.bound.args):
        keyword = argument.keyword and argument.name
        value = inputs.kwargs[argument.name] if keyword and argument.name in inputs.kwargs else next(positional)
        values |= with_items(str(index), value)
    return values


def time_us(call: Callable[..., Any], inputs: Inputs, on_gpu: bool) -> float:
    """Microseconds of one invocation, on a GPU in a graph: the median of some rounds, caches warm."""
    if not on_gpu:
        loop_ns(call, inputs, 1)
        return median(loop_ns(call, inputs, IN_ROUND) for _ in range(ROUNDS)) / IN_ROUND / 1e3
    replay = capture_graph(lambda: call(*inputs.args, **inputs.kwargs), IN_ROUND)
    stream = torch.cuda.current_stream()
    return median(timed_us(replay, IN_ROUND, do_nothing, stream, None) for _ in range(ROUNDS))


if __name__ == "__main__":
    main()
