"""`kernelbench`: `level{N}/{id}_{Name}.py` with Model, get_inputs and get_init_inputs, the most often invoked first.

Source: KernelBench's `src/kernelbench/eval.py`. It casts every tensor that get_inputs or get_init_inputs returns,
integers too, to one float dtype, and compares one output tensor. So integers and booleans are buffers, which
`Module.to(dtype)` leaves alone; scalars are arguments of `__init__`. Level 2 is what a Definition's tags call fused.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from kcap.bench.exports import Exporter, Request, exporter
from kcap.bench.exports.common.cases import NO_BLOB, SAMPLES, Account, Case
from kcap.bench.exports.common.model_source import FLOATS, MAX_STORED, model_source, stored_bytes
from kcap.replay.definitions import valid
from kcap.schemas.loss import ExportLoss
from kcap.schemas.workload import RandomInput

CAST = "dtypes of floats: KernelBench casts all to one"


@exporter("kernelbench")
class KernelBench(Exporter):
    """One file for each Call's sizes; of its Samples the first."""

    takes = "definitions"

    def write(self, request: Request) -> ExportLoss:
        account, numbers = Account(request.contents), Counter[int]()
        taken = sorted(account.taken_cases(_refuse, samples=False), key=lambda case: -case.count)
        for case in taken:
            level = 2 if any(tag.startswith("fused") for tag in case.definition.tags) else 1
            numbers[level] += 1
            folder = request.output / f"level{level}"
            folder.mkdir(exist_ok=True)
            path = folder / f"{numbers[level]}_{case.definition.name}.py"
            path.write_text(model_source(case, request.contents.metadata.model))
            _reduce(account, case)
        return account.loss("kernelbench")

    def following(self, output: Path) -> str:
        files = sorted(output.glob("level*/1_*.py"))
        one = files[0] if files else output / "level1" / "1_NAME.py"
        origin = f"ref_origin=local ref_arch_src_path={one}"
        return f"python scripts/run_and_check.py {origin} kernel_src_path=MODEL_NEW.py (in KernelBench)"


def _refuse(case: Case) -> str | None:
    outputs = list(case.definition.outputs.values())
    if len(outputs) != 1 or outputs[0].shape is None:
        return f"KernelBench compares one output tensor: this has {len(outputs)} outputs"
    if case.lacks_blob():
        return NO_BLOB
    for name, tensor, given in case.tensors():
        if tensor.dtype.startswith(("float8", "float4")):
            return f"KernelBench has no {tensor.dtype}"
        if isinstance(given, RandomInput) and _is_special(case, name):
            return f"KernelBench draws its inputs, and not any number is a valid {name}"
        if name in case.blob and stored_bytes(case.blob[name]) > MAX_STORED:
            return f"more than {MAX_STORED >> 20} MiB of recorded values: too many for a source file"
    return None


def _is_special(case: Case, name: str) -> bool:
    return next(valid.rules_for(case.definition.op_type, name), None) is not None


def _reduce(account: Account, case: Case) -> None:
    floats = {tensor.dtype for _, tensor, _ in case.tensors() if tensor.shape is not None and tensor.dtype in FLOATS}
    for (number, operator), count in case.calls.items():
        if number not in account.regions:
            if len(floats) > 1:
                account.ledger.reduce(operator, CAST, count)
            if len(case.blob):
                account.ledger.reduce(operator, SAMPLES, count)
