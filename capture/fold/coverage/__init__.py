"""How much GPU time of a few profiled steps is of recorded Calls: the analysis behind `--check-coverage`.

read_trace    the chrome trace that torch.profiler exported in the engine's process
attribute     gives each of its kernels to one of the Calls that the step recorded, or says why it cannot
covered       a step of it as a line of coverage.jsonl; summarize and coverage_lines make the words of it
"""

from kcap.capture.fold.coverage.attribute import Attributed, attribute
from kcap.capture.fold.coverage.report import coverage_lines, covered, summarize
from kcap.capture.fold.coverage.steps import ProfiledStep, Ran, Replayed
from kcap.capture.fold.coverage.trace import CALL, STEP, Trace, read_trace

__all__ = [
    "CALL",
    "STEP",
    "Attributed",
    "ProfiledStep",
    "Ran",
    "Replayed",
    "Trace",
    "attribute",
    "coverage_lines",
    "covered",
    "read_trace",
    "summarize",
]
