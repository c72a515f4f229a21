"""A Solution as FlashInfer-Bench writes it: a JSON object, anywhere in the folder."""

from __future__ import annotations

from kcap.bench.solutions import Form, SolutionText, form
from kcap.bench.solutions.kernel_description import CODE
from kcap.errors import FormatError
from kcap.schemas.flashinfer import solution as solutions_file
from kcap.schemas.flashinfer.solution import Solution

OTHERS = {"reference": "a Definition", "axes": "a Workload or a Definition", "workload": "a Trace"}


@form(".json")
class FlashInferBench(Form):
    def claims(self, solution_text: SolutionText) -> bool:
        return not solution_text.document.keys() & CODE

    def name(self, solution_text: SolutionText) -> str:
        return solution_text.word("name") or solution_text.stem

    def definition(self, solution_text: SolutionText) -> str | None:
        return solution_text.word("definition")

    def read(self, solution_text: SolutionText) -> Solution:
        other = next((kind for key, kind in OTHERS.items() if key in solution_text.document), None)
        if other and "spec" not in solution_text.document:
            raise FormatError(solution_text.file, f"{other}, not a Solution")
        return solutions_file.from_bytes(solution_text.text.encode(), solution_text.file)
