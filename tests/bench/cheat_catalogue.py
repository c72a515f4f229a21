"""Solutions that lie as files with a header: what each does, and what a judge must say of it.

# definition: NAME      what it claims to implement (a Definition of judged_dataset)
# row: 7 12             which of the published ways to fool a kernel evaluator
# does: …               (a line may go on in the next, indented)
# naive: …              what a judge that does not look reports
# expect: STATUS …      any of these
# reason: REGEX         found in the reason, or in the log
# at_least_us: 3000     what a call really takes: it may pass only with a time that says so
# at_most_speedup: 1.3  it may pass only with a speedup that says it gained nothing
# missed: …             why the judge does not catch it, where it does not yet
# patient: …            of an honest one: a compiler runs in its first call
# hasty: …              why the judge that catches it has little patience
# impatient: …          of a hostile one: why its judge has the least patience
# needs: …              what this test needs: confinement, idle processors, x86_64
# binding, entry        of C++ and CUDA
# workloads: 2          on how many it runs (1)
# devices: cpu cuda     where it makes sense (cpu); those in gpu/ need a GPU
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from kcap.schemas.flashinfer import solution as solutions_file
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.solution import BuildSpec, Solution, SourceFile

HERE = Path(__file__).parent
DATASET = HERE / "judged_dataset"
LANGUAGES = {".py": "python", ".cpp": "cpp", ".cu": "cuda"}
LINE = re.compile(r"(?:#|//)? ?(\w+): (.*)")


@dataclass(frozen=True)
class Entry:
    """One Solution and its header."""

    file: Path
    solution: Solution
    header: dict[str, str]

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def expect(self) -> set[str]:
        return set(self.header["expect"].split())

    @property
    def rows(self) -> set[int]:
        return {int(row) for row in self.header["row"].split()}

    @property
    def at_least_us(self) -> float | None:
        return float(self.header["at_least_us"]) if "at_least_us" in self.header else None

    @property
    def at_most_speedup(self) -> float | None:
        return float(self.header["at_most_speedup"]) if "at_most_speedup" in self.header else None

    @property
    def workloads(self) -> int:
        return int(self.header.get("workloads", 1))


def entries(folder: str) -> list[Entry]:
    """Every Solution in `folder` (below this one), not those in its folders."""
    return [read(path) for path in sorted((HERE / folder).iterdir()) if path.suffix in (*LANGUAGES, ".json")]


def read(path: Path) -> Entry:
    """The Solution in `path`; KeyError where its header names no Definition."""
    if path.suffix == ".json":
        solution = solutions_file.read(path)
        return Entry(path, solution, header(solution.description or ""))
    text = path.read_text()
    return Entry(path, _solution(path, text, header(text)), header(text))


def header(text: str) -> dict[str, str]:
    """The keys of the comment that `text` begins with."""
    found: dict[str, str] = {}
    key = ""
    for line in text.splitlines():
        if match := LINE.fullmatch(line):
            key = match[1]
            found[key] = match[2]
        elif key and (more := re.fullmatch(r"(?:#|//)     ?(\S.*)", line)):
            found[key] += " " + more[1]
        else:
            break
    return found


def _solution(path: Path, text: str, header: dict[str, str]) -> Solution:
    language = "triton" if re.search(r"^import triton", text, re.MULTILINE) else LANGUAGES[path.suffix]
    entry = header.get("entry", "run")
    spec = BuildSpec(
        language=language,
        target_hardware=["cuda"] if path.parent.name == "gpu" else ["cpu", "cuda"],
        entry_point=f"{path.name}::{entry}",
        destination_passing_style=_destination(path, text, header),
        binding=header.get("binding"),
    )
    sources = [SourceFile(path=path.name, content=text)]
    author = path.parent.name if path.parent.name != "gpu" else path.parent.parent.name
    return Solution(name=path.stem, definition=header["definition"], author=author, spec=spec, sources=sources)


def _destination(path: Path, text: str, header: dict[str, str]) -> bool:
    """As `kcap bench` takes a plain file: `run` has a parameter for each input and each output."""
    if path.suffix != ".py":
        return header.get("binding") != "torch"
    definition = definitions()[header["definition"]]
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    run = next(node for node in functions if node.name == "run")
    return len(run.args.args) == len(definition.inputs) + len(definition.outputs)


def definitions() -> dict[str, object]:
    """The Definitions that the Solutions here implement."""
    return Dataset.load(DATASET).definitions
