"""`kernel-description`: one JSON for each Definition, in the FlashInfer schema set's older form.

It has no integers but int8 and names no inputs' values: attention's index inputs cannot be written in it, and Workloads
are left out.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.bench.exports.common.cases import Account, Case
from kcap.errors import FormatError
from kcap.schemas.flashinfer import kernel_description
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.flashinfer.kernel_description import from_definition
from kcap.schemas.results.export_loss import ExportLoss

WORKLOADS = "its Workloads: a Kernel Description holds no inputs"


@exporter("kernel-description")
class KernelDescriptions(Exporter):
    """What the older set can carry; each Definition is told with what it loses, or why it cannot be written."""

    takes = "definitions"

    def write(self, request: ExportRequest) -> ExportLoss:
        account, written = Account(request, None), dict[str, list[str]]()
        for case in account.taken_cases(_refuse, samples=False):
            name = case.definition.name
            if name not in written:
                written[name] = _write(request.output, case.definition)
            for (number, operator), count in case.calls.items():
                for reason in (WORKLOADS, *written[name]) if number not in account.regions else ():
                    account.ledger.reduce(operator, reason, count)
        return account.loss("kernel-description")

    def following(self, output: Path) -> str:
        return f"kcap validate {shlex.quote(str(output))}/*.json"


def _refuse(case: Case) -> str | None:
    try:
        from_definition(case.definition)
    except FormatError as error:
        return error.reason
    return None


def _write(root: Path, definition: Definition) -> list[str]:
    """Write `definition`, and say what that leaves out."""
    description, left_out = from_definition(definition)
    kernel_description.write(root / f"{definition.name}.json", description)
    return left_out
