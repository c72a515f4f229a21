"""A Kernel Description of the older set whose code is the Solution: `run` takes the inputs and then the outputs."""

from __future__ import annotations

from kcap.bench.solutions import Form, SolutionText, find_definition, form
from kcap.bench.solutions.python_file import from_source
from kcap.errors import FormatError
from kcap.schemas.flashinfer import kernel_description as older
from kcap.schemas.flashinfer.kernel_description import check_kernel_description
from kcap.schemas.flashinfer.solution import Solution

CODE = frozenset({"reference_code", "code"})  # keys that only this form has


@form(".json")
class KernelDescription(Form):
    def claims(self, given: SolutionText) -> bool:
        return bool(given.document.keys() & CODE)

    def definition(self, given: SolutionText) -> str | None:
        return given.word("id") or given.word("name")

    def read(self, given: SolutionText) -> Solution:
        """`id` names the Definition, whose inputs and outputs it must have in their order."""
        description = older.from_bytes(given.text.encode(), given.file)
        for reason in check_kernel_description(description):
            raise FormatError(given.file, reason)
        definition = find_definition(given, description.id)
        for kind in ("inputs", "outputs"):
            own, wanted = list(getattr(description, kind)), list(getattr(definition, kind))
            if own != wanted:
                there = ", ".join(own), ", ".join(wanted)
                raise FormatError(given.file, f"{kind}: {there[0]}; the Definition has {there[1]}, in this order")
        code = description.reference_code
        return from_source(given, description.id, f"{given.stem}.py", code, destination_passing=True)
