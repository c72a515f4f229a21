"""BackendBench's trace file: `Operator: aten.mm.default`, then `cnt: 3, ((args…), {kwargs})` for each signature.

The format is BackendBench's, which took it from tritonbench (its documentation: "Understanding Trace Files in
BackendBench", "Understanding Serialized Arguments in BackendBench"; its code: `data_loaders.py`, `utils.py`).
BackendBench evaluates the arguments as Python; here a grammar reads them, and nothing in a file is ever run.

- Read: every dtype word and torch's own names, strides in both spellings, Python's numbers, strings, lists and
  tuples (both become lists), torch's layouts, memory formats and devices. A tensor without a device is on `cuda`,
  as in BackendBench. The text of `ST(…)` and `torch.randint(…)` is kept as Opaque: nothing rebuilds them.
- BackendBench skips lines that it does not know; here they are errors with line and column, or with
  `keep_going` counted in `Problems`.
- Written: what a line cannot carry is counted in a `.loss.json` beside the trace file.
"""

from __future__ import annotations

from kcap.schemas.backendbench.convert import Converted, convert_calls, from_recording, trace_lines
from kcap.schemas.backendbench.grammar import parse_arguments
from kcap.schemas.backendbench.line import TraceLine
from kcap.schemas.backendbench.loss import Loss, read_loss
from kcap.schemas.backendbench.text import Unwritable, serialize
from kcap.schemas.backendbench.trace_file import Problems, read, write

__all__ = [
    "Converted",
    "Loss",
    "Problems",
    "TraceLine",
    "Unwritable",
    "convert_calls",
    "from_recording",
    "parse_arguments",
    "read",
    "read_loss",
    "serialize",
    "trace_lines",
    "write",
]
