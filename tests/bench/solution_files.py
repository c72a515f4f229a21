"""Solutions of the Definitions in bench_datasets, as files and as objects."""

from __future__ import annotations

import json

from bench_datasets import SCALE, TWO

from kcap.bench.solutions import read_solutions
from kcap.schemas.flashinfer.solution import Solution

DEFINITIONS = {one.name: one for one in (SCALE, TWO)}
RETURNING = "def run(x, eps):\n    return x * eps\n"
NAMED = f"# definition: scale\nimport torch\n{RETURNING}"
WRITING = "def run(x, eps, y):\n    y.copy_(x * eps)\n"


def document(sources, entry="main.py::run", language="python", **more):
    """A Solution of `scale` as its JSON object; `sources` by path. Other keys go where they belong."""
    spec = {"language": language, "target_hardware": ["any"], "entry_point": entry}
    spec |= {key: more.pop(key) for key in ("binding", "destination_passing_style") if key in more}
    contents = [{"path": path, "content": content} for path, content in sources.items()]
    return {"name": "mine", "definition": "scale", "author": "me", "spec": spec, "sources": contents} | more


def solution(sources, entry="main.py::run", language="python", **more):
    return Solution.model_validate(document(sources, entry, language, **more))


def write(folder, **files):
    """Write `files`, by name with __ for the dot: text, bytes, or an object as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        path = folder / name.replace("__", ".")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def read(folder, default=None):
    return read_solutions(folder, DEFINITIONS, default)


def one(folder, default=None):
    """The only Solution in `folder`."""
    found, refused = read(folder, default)
    assert not refused, refused
    return found[0].solution


def reason(folder, default=None):
    """Why the only file in `folder` is refused."""
    found, refused = read(folder, default)
    assert not found
    assert len(refused) == 1
    return refused[0].reason
