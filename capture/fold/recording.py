"""Folds the shards of a session into the Recording, and derives the calling record and the trace file from it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kcap.capture.fold.calls import Fold, rounded_notes
from kcap.capture.fold.coverage import summarize
from kcap.capture.fold.coverage.session import session_coverage
from kcap.capture.fold.metadata import first_ranks, make_metadata, why_empty
from kcap.capture.fold.programs import Programs
from kcap.capture.fold.requests import Requests
from kcap.capture.fold.samples import merge_samples
from kcap.capture.fold.turns import merge_turns
from kcap.capture.session import Session
from kcap.capture.shards.counts import CLOSED, KERNELS
from kcap.capture.shards.reader import read_shards
from kcap.errors import KcapError
from kcap.schemas.recording.rank_agreement import disagreements
from kcap.schemas.recording.recording import Call, Recording, is_named_by, load, write_recording
from kcap.schemas.recording.seal import seal
from kcap.schemas.recording.turns import write_turns
from kcap.schemas.results import coverage as coverage_format

NO_TURNS = "--agent-trace: the server answered no chat or text completion, or kcap is not in front of it"
UNSEALED = "its kernel sources are not sealed: look at them in kernels/, then pass --trust to replay"


def fold_session(session: Session, output: Path, sealed: bool = True) -> Recording:
    """Write the Recording of `session` into `output`; it says what failed, and may be empty.

    `sealed`: this user's own session left the kernel sources just now, so that replay may run them.
    """
    shards = read_shards(Path(session.directory))
    fold = Fold(shards)
    programs = Programs(fold)
    fold.count_loose()
    calls, ids = fold.calls(programs.order())
    samples, values = merge_samples(fold, ids, programs)
    kernels = _kernel_sources(Path(session.directory), calls)
    coverage, notes = session_coverage(fold, programs, ids)
    notes += rounded_notes(calls, all(shard.header(CLOSED) for shard in shards if shard.process))
    facts: dict[str, Any] = {"seal": _seal_of(kernels, notes, sealed)}
    if coverage:
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
        coverage_format.write(output / coverage_format.FILE, coverage)
        facts["coverage"] = summarize(coverage).model_dump(mode="json", exclude_defaults=True)
    metadata = make_metadata(session, shards, programs, calls, notes)
    requests = Requests(shards, first_ranks(metadata.ranks))
    ran, steps = programs.records(ids), programs.steps(requests)
    facts["block_size"] = requests.block_size
    facts["disagreements"] = disagreements(metadata.ranks, calls, ran, steps)
    metadata = metadata.model_copy(update=facts)
    if not any(call.total for call in calls):
        why = why_empty(metadata)
        metadata.notes += [] if why in metadata.notes else [f"nothing was recorded: {why}"]
    turns, torn = merge_turns(Path(session.directory), requests.records)
    if session.agent_trace:
        metadata.notes += torn if turns else [*torn, NO_TURNS]
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_turns(output, turns)
    write_recording(output, metadata, calls, ran, steps, samples, values, kernels, requests.records)
    recording = load(output)
    derive_files(recording)
    return recording


def _kernel_sources(directory: Path, calls: list[Call]) -> dict[str, bytes]:
    """The sources and fragments that the calls name; one that is missing, or not what its name says, is left out."""
    sources = {}
    launches = [call.launch for call in calls if call.launch]
    for name in {name for launch in launches for name in (launch.kernel, launch.fragment) if name}:
        file = directory / KERNELS / Path(name).name
        if file.name != name or not file.is_file():
            continue
        content = file.read_bytes()
        if is_named_by(content, name):
            sources[name] = content
    return sources


def _seal_of(kernels: Iterable[str], notes: list[str], sealed: bool) -> str | None:
    if kernels and not sealed:
        notes.append(UNSEALED)
        return None
    try:
        return seal(kernels) if kernels else None
    except (OSError, KcapError) as error:
        notes.append(f"the sources in kernels/ are not sealed, replay asks for --trust: {error}")
        return None


def derive_files(recording: Recording) -> None:
    """Write the trace file and then the calling record of a Recording into it; only the latter needs torch."""
    from kcap.schemas import backendbench

    lines, loss = backendbench.from_recording(recording)
    backendbench.write(recording.path / "trace.txt", lines, loss)
    from kcap.schemas.derive.derive import calling_record_of
    from kcap.schemas.flashinfer import calling_record

    record = calling_record_of(recording)
    if record is not None:
        calling_record.write(recording.path / "calling_record.json", record)


def load_derivation() -> None:
    """Import what `derive_files` needs, which takes seconds: for a thread beside what has to be waited for anyway."""
    from kcap.schemas.derive.families import family_of
    from kcap.schemas.derive.generic.tracing import fake_mode

    family_of("")
    fake_mode()


def discard_shards(session: Session) -> None:
    """Remove a session's shards, once its Recording stands."""
    shutil.rmtree(session.directory, ignore_errors=True)
