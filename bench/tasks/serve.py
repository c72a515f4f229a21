"""A judge that stays warm: one JSON object a line in, one for each Workload and one with the verdict out.

{"id": 1, "path": "solution/solution.py", "quick": true}      path: without it the task's own Solution
{"id": 2, "source": "import torch\\n\\ndef run(x): ..."}        a Python file's text instead of a path

{"event": "ready", "definition": "rmsnorm_h4096", ...}        once, when requests are taken
{"event": "workload", "id": 1, "workload": {...}}             as soon as it is there
{"event": "verdict", "id": 1, "verdict": {...}}               the end of a request
{"event": "error", "id": 2, "error": "..."}                   or this: the request could not be judged
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kcap.bench.tasks.folder import OpenTask, find_solution
from kcap.bench.tasks.warm_judge import OnWorkload, WarmJudge, ignore
from kcap.errors import FormatError, KcapError
from kcap.schemas.files.jsonfile import parse_json
from kcap.schemas.results.verdict import Verdict, WorkloadVerdict

Say = Callable[[Mapping[str, Any]], object]
MOST_SOURCE = 1 << 20  # characters


class JudgeRequest(BaseModel):
    """One request. `id` comes back with what is answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: int | str | None = None
    path: str | None = None
    source: Annotated[str, Field(max_length=MOST_SOURCE)] | None = None
    quick: bool = False


REQUEST = TypeAdapter(JudgeRequest)


def serve(judge: WarmJudge, requests: Iterable[bytes], say: Say) -> None:
    """Answer `requests`, a line each, until there are no more."""
    task = judge.opened.task
    ready = {"definition": task.definition, "workloads": len(judge.opened.workloads), **_machine(judge)}
    say({"event": "ready", **ready})
    for number, line in enumerate(requests, 1):
        if line.strip():
            _answer(judge, line, number, say)


def _answer(judge: WarmJudge, line: bytes, number: int, say: Say) -> None:
    name = None
    try:
        name = _id_of(line)
        request = parse_json(line, REQUEST, f"request {number}")
        on_workload = partial(_say_workload, say, request.id)
        say(
            {
                "event": "verdict",
                "id": request.id,
                "verdict": judge_request(judge, request, on_workload).model_dump(mode="json"),
            }
        )
    except (KcapError, OSError, ValueError) as error:  # of a path that cannot be one, too
        say({"event": "error", "id": name, "error": str(error)})


def _say_workload(say: Say, name: int | str | None, workload: WorkloadVerdict) -> None:
    say({"event": "workload", "id": name, "workload": workload.model_dump(mode="json")})


def _id_of(line: bytes) -> int | str | None:
    """The request's id, if it has one that can come back."""
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    name = document.get("id") if isinstance(document, dict) else None
    return name if isinstance(name, int | str) else None


def _machine(judge: WarmJudge) -> dict[str, Any]:
    return {name: judge.environment.get(name) for name in ("device", "device_name", "torch")}


def judge_request(judge: WarmJudge, request: JudgeRequest, on_workload: OnWorkload = ignore) -> Verdict:
    """The Verdict of what `request` names; KcapError where it names nothing that could be judged."""
    opened = judge.opened
    if request.source is None:
        path = opened.root if request.path is None else resolve_path(opened, request.path)
        return judge.verdict(find_solution(opened, path), request.quick, on_workload)
    if request.path is not None:
        raise FormatError("request", "has path and source: give one of them")
    with tempfile.TemporaryDirectory(prefix="kcap-source-") as folder:
        file = Path(folder) / "solution.py"
        file.write_text(request.source, encoding="utf-8")
        return judge.verdict(find_solution(opened, file), request.quick, on_workload)


def resolve_path(opened: OpenTask, path: str) -> Path:
    """`path` as it is, or below the task's folder."""
    here = Path(path)
    return here if here.is_absolute() or here.exists() else opened.root / here
