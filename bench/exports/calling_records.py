"""`calling-records`: kernel calling records of an agent trace, one for each session and one for each kind of turn.

`session-N.json` and `turn-NAME.json`, in the form of the FlashInfer schema set; `kinds.json` has the latter's kinds. A
record counts the kernels of the steps that the Recording lists and that a request of the session, or of such a turn,
was in. A step runs once for its whole batch, and counts in the record of each that was in it.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.errors import CallError
from kcap.schemas.derive.derive import derive
from kcap.schemas.files.jsonfile import write_json
from kcap.schemas.flashinfer import calling_record
from kcap.schemas.flashinfer.calling_record import CallingRecord, KernelCount, framework_of
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.turns import Turn, kind_of, programs_by, read_turns
from kcap.schemas.results.export_loss import ExportLoss, LossLedger

KINDS_FILE = "kinds.json"
MOST_NAME = 60  # characters of a kind in a file's name
NOT_LISTED = "it ran in steps that the Recording does not list, or in none of a turn"
SHARED = "it ran in steps of several sessions, each of which counts it whole"


@exporter("calling-records")
class CallingRecords(Exporter):
    """CallError for a Recording without turns, or of a framework that the form has no name for."""

    takes = "turns"

    def write(self, request: ExportRequest) -> ExportLoss:
        recording = request.contents.recording
        turns = read_turns(recording.path) if recording is not None else []
        if recording is None or not turns:
            raise CallError(f"{request.contents.path}: tells of no turns: kcap record --agent-trace keeps them")
        names, programs = kernel_names(recording), _Programs(recording)
        sessions = programs_by(recording.steps, _by_request(turns, {turn.number: turn.session for turn in turns}))
        for session in sorted({turn.session for turn in turns}):
            _write(request.output / f"session-{session}.json", recording, programs.kernels(sessions[session]), names)
        kinds = {turn.number: kind_of(turn) for turn in turns}
        by_kind = programs_by(recording.steps, _by_request(turns, kinds))
        files = _file_names(kinds.values())
        for kind, file in files.items():
            _write(request.output / file, recording, programs.kernels(by_kind[kind]), names)
        write_json(request.output / KINDS_FILE, {file: kind for kind, file in files.items()})
        ledger = LossLedger()
        everything = {place: [True] for turn in turns for place in turn.requests}
        listed = programs.kernels(programs_by(recording.steps, everything)[True])
        counted = sum((programs.kernels(of_session) for of_session in sessions.values()), Counter[int]())
        for call in request.contents.kernels:
            if call.total > listed[call.id]:
                ledger.lose(call.operator, NOT_LISTED, call.total - listed[call.id])
            if counted[call.id] > listed[call.id]:
                ledger.reduce(call.operator, SHARED, listed[call.id])
        return ledger.loss("calling-records", request.contents.total)

    def following(self, output: Path) -> str:
        return f"kcap validate {shlex.quote(str(output))}/session-*.json"


def kernel_names(recording: Recording) -> dict[int, str]:
    """By the Call's id, as `calling_record.json` has them: of its Definition, else of its operator.

    What is inside a region that has a Definition is not named, nor are views.
    """
    derived = derive(recording)
    refused = {number: recording.calls[number].operator for number in derived.refused}
    return refused | {use.call.id: kernel.definition.name for kernel in derived.kernels for use in kernel.uses}


class _Programs:
    """Calls of Programs, each of which is read once."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._calls: dict[int, Counter[int]] = {}

    def kernels(self, programs: Mapping[int, int]) -> Counter[int]:
        """Invocations by Call of so many runs of each Program."""
        counts: Counter[int] = Counter()
        for program, times in programs.items():
            if program not in self._calls:
                ran = self._recording.ran(self._recording.program(program))
                self._calls[program] = Counter(call.id for call in ran)
            for call, count in self._calls[program].items():
                counts[call] += count * times
        return counts


def _by_request(turns: Iterable[Turn], keys: Mapping[int, int | str]) -> dict[int, list[int | str]]:
    """Of each request the keys of its turns; `keys`: by the turn's number."""
    found: dict[int, list[int | str]] = defaultdict(list)
    for turn in turns:
        for place in turn.requests:
            found[place].append(keys[turn.number])
    return found


def _file_names(kinds: Iterable[str]) -> dict[str, str]:
    """A file for each kind, of the characters of its name that any file system takes."""
    files: dict[str, str] = {}
    for kind in sorted(set(kinds)):
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", kind)[:MOST_NAME].strip("-.") or "unknown"
        again = sum(file == f"turn-{name}.json" or file.startswith(f"turn-{name}.again") for file in files.values())
        files[kind] = f"turn-{name}.again{again}.json" if again else f"turn-{name}.json"
    return files


def _write(file: Path, recording: Recording, kernels: Mapping[int, int], names: Mapping[int, str]) -> None:
    framework, model = framework_of(recording.metadata), recording.metadata.model
    if framework is None or not model:
        engine = recording.metadata.framework or "no framework"
        raise CallError(f"{recording.path}: a calling record has no form for {engine} with {model or 'no model'}")
    counts: Counter[str] = Counter()
    for call, count in kernels.items():
        if call in names:
            counts[names[call]] += count
    ordered = [KernelCount(id=name, count=count) for name, count in counts.items()]
    calling_record.write(file, CallingRecord(model=model, framework=framework, kernels=ordered))
