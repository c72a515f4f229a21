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
    def claims(self, solution_text: SolutionText) -> bool:
        return bool(solution_text.document.keys() & CODE)

    def definition(self, solution_text: SolutionText) -> str | None:
        return solution_text.word("id") or solution_text.word("name")

    def read(self, solution_text: SolutionText) -> Solution:
        """`id` names the Definition, whose inputs and outputs it must have in their order."""
        description = older.from_bytes(solution_text.text.encode(), solution_text.file)
        for reason in check_kernel_description(description):
            raise FormatError(solution_text.file, reason)
        definition = find_definition(solution_text, description.id)
        for kind in ("inputs", "outputs"):
            own, wanted = list(getattr(description, kind)), list(getattr(definition, kind))
            if own != wanted:
                names = ", ".join(own), ", ".join(wanted)
                raise FormatError(
                    solution_text.file, f"{kind}: {names[0]}; the Definition has {names[1]}, in this order"
                )
        code = description.reference_code
        return from_source(solution_text, description.id, f"{solution_text.stem}.py", code, destination_passing=True)
