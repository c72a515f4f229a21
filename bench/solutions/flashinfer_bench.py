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
    def claims(self, given: SolutionText) -> bool:
        return not given.document.keys() & CODE

    def name(self, given: SolutionText) -> str:
        return given.word("name") or given.stem

    def definition(self, given: SolutionText) -> str | None:
        return given.word("definition")

    def read(self, given: SolutionText) -> Solution:
        other = next((said for key, said in OTHERS.items() if key in given.document), None)
        if other and "spec" not in given.document:
            raise FormatError(given.file, f"{other}, not a Solution")
        return solutions_file.from_bytes(given.text.encode(), given.file)
