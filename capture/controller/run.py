"""One recorded run: starts the engine, follows it, stops it so that its shards are closed, and makes the Recording."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import orjson

from kcap.capture import engines
from kcap.capture.controller import window_control
from kcap.capture.controller.child import END_SIGNALS, Child, SignalLog, ending_text, last_lines, status_text
from kcap.capture.controller.output import WorkingDirectory
from kcap.capture.controller.progress import (
    Phase,
    Progress,
    Silence,
    any_registered,
    engine_phase,
    last_phase,
    registered_adapters,
    shown_progress,
)
from kcap.capture.engines import adapters, of_framework, serving_framework
from kcap.capture.fold.metadata import NEVER_OPENED
from kcap.capture.fold.recording import fold_session, load_derivation
from kcap.capture.session import SESSION_VARIABLE, Session
from kcap.capture.shards.counts import close_shards, steps_so_far, window_over
from kcap.capture.shards.lines import TapLine
from kcap.capture.shards.reader import read_shards
from kcap.capture.taps.kernels.fragments import CACHE_TAG
from kcap.capture.turns.relay import turns_received
from kcap.errors import KcapError
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Metadata
from kcap.system.native_build import Unavailable, cache_folder, is_writable

POLL = 0.2  # seconds between two looks at what runs
NOTHING_KEPT = "nothing was recorded, and nothing is kept"
CLOSE_IN_A_HURRY = 1.0  # seconds for all processes to close their shards, in a run that is to end within five
STARTUP = Path(__file__).resolve().parents[1] / "startup"  # what Python runs first there


@dataclass(frozen=True)
class RunControl:
    """`attend`: call it several times a second, with what is being done.

    `ending`: true once a signal has asked to end the run. `progress`: what is shown of it.
    """

    session: Session
    progress: Progress
    attend: Callable[[Phase], None]
    ending: SignalLog

    def in_a_hurry(self) -> bool:
        """Whether it is to end within seconds; a program that may have something to save is asked twice."""
        return bool(self.ending) and (runs_engine(self.session) or self.ending.insists)

    def ending_text(self) -> str:
        """What asked to end it, and when."""
        return f"{self.ending.name} after {self.progress.seconds:.0f} s ({self.progress.phase})"


def runs_engine(session: Session) -> bool:
    """Whether kcap started an engine or a server, or the user's command is an engine."""
    own = not session.command or bool(session.client) or serving_framework(session.command) is not None
    return own or any((engine := adapters().get(name)) and engine.OFFLINE for name in registered_adapters(session))


def recorded_environment(session: Session) -> dict[str, str]:
    """The environment of a recorded process: it names the session, and where the engine's caches are.

    A user's own command, and an engine that loads no plugins, look at STARTUP first.
    """
    env = {**os.environ, **own_caches(os.environ), SESSION_VARIABLE: str(session.file.resolve())}
    engine = None if session.command else of_framework(session.framework)
    if session.command or (engine and engine.FRAMEWORK.plugin is None):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), env.get("PYTHONPATH")]))
    for variable in filter(None, (each.FRAMEWORK.handed_on for each in adapters().values())):
        env[variable] = ",".join(filter(None, [env.get(variable), SESSION_VARIABLE]))
    return {**engine.FRAMEWORK.environment, **env} if engine else env


def own_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Where each engine keeps what it compiles while recorded: in its cache or, if that is read-only, in kcap's.

    What was compiled without kcap lacks what `fragments` adds, and what is compiled with it concerns no other start.
    """
    found = {}
    for framework in (engine.FRAMEWORK for engine in adapters().values()):
        if variable := framework.cache:
            users = Path(environment.get(variable, ""))
            with contextlib.suppress(Unavailable):  # then it has its own or none: not for kcap to say
                apart = users if is_writable(users) else cache_folder()
                found[variable] = str(apart / f"{framework.package}-{CACHE_TAG}")
    return found


def run_to_end(command: list[str], session: Session, at: RunControl, log: Path | None = None) -> int | None:
    """Run `command` to its end under `session`; its exit status, None if kcap ended it.

    Ctrl-C stops it, after its shards are closed. `log`: as in Child.
    """
    with ThreadPoolExecutor(1) as beside:
        with turns_received(session):
            child = Child(command, recorded_environment(session), log)
            loading = None
            while child.status is None and not at.ending:
                at.attend(engine_phase(session))
                if loading is None and session.records and window_over(Path(session.directory)):
                    loading = beside.submit(load_derivation)
                child.follow_stop()
                time.sleep(POLL)
            ended = child.status
            at.progress.log = None  # its last line says nothing of what follows
            asked = ""
            if ended is None:
                asked = at.ending_text()
                at.attend(Phase(f"{at.ending.name}: ending {'the command' if session.command else 'the engine'}"))
                if runs_engine(session) and steps_so_far(Path(session.directory))[1]:
                    beside.submit(load_derivation)
            end_children([child], at)
        if ended is None:
            follows = f"; {last_phase(session)}" if any_registered(session) else ""
            click.echo(f"kcap: {asked}: all that was started has ended{follows}", err=True)
    return ended


def end_children(children: list[Child], at: RunControl) -> None:
    """Close the windows, then end all children at once, or what is left of their process groups."""
    with ThreadPoolExecutor(1 + len(children)) as threads:
        closing = threads.submit(close_windows, at.session)  # waits for processes that may be stuck
        began = time.monotonic()
        while not closing.done() and not (at.in_a_hurry() and time.monotonic() - began > CLOSE_IN_A_HURRY):
            time.sleep(0.02)
        for ending in [threads.submit(child.end, at.in_a_hurry) for child in children]:
            ending.result()
        closing.result()
    at.ending.answer = "nothing runs any more, and kcap is finishing, which is not cut short"


def close_windows(session: Session) -> None:
    """Close every process's window after the same step, and its shard."""
    with contextlib.suppress(KcapError):  # it has closed for good
        window_control.close_window(session)
    window_control.catch_up(session)
    close_shards(session)


@dataclass(frozen=True)
class Run:
    """What came of a run. `failure`: what failed, or ""; `status`: with which it ended, None where kcap ended it."""

    recording: Recording
    failure: str
    status: int | None = None


class NoRecordingError(KcapError):
    """A run of which there is no Recording. `status`: as in Run."""

    def __init__(self, reason: str, status: int | None) -> None:
        super().__init__(reason)
        self.status = status


def record_command_line(command_line: list[str], session: Session, working: WorkingDirectory, log: Path | None) -> Run:
    """Run `command_line` under `session`, and merge into `working`. `log`: where its output goes, if not kcap's."""
    if log is not None and log.exists():
        os.truncate(log, 0)  # what another engine wrote last is not this one's
    shown = shown_progress(log) if log else nullcontext(Silence(None, None))
    with attended(session, working.noted, shown) as at:
        status = run_to_end(command_line, session, at, log)
        failure = _failure_text(session, status, log)
        if any_registered(session):
            at.attend(last_phase(session))
        recording = make_recording(session, working.directory, status, log, failure)
        if at.ending and runs_engine(session) and not recording.calls:
            shutil.rmtree(working.directory)
            never = f"nothing was recorded: {NEVER_OPENED}; nothing is kept"
            raise KcapError(never if NEVER_OPENED in recording.metadata.notes else NOTHING_KEPT)
        return Run(recording, failure, status)


def _failure_text(session: Session, status: int | None, log: Path | None) -> str:
    """How the engine, or the user's command, ended by itself; "" after status 0."""
    if not status:
        return ""
    return f"the {'command' if session.command else 'engine'} ended with {ending_text(status, log)}"


def make_recording(session: Session, directory: Path, status: int | None, log: Path | None, failure: str) -> Recording:
    """The Recording of a session whose engine has ended with `status` (None where kcap ended it), in `directory`.

    `failure`: what failed; the Recording has its first line.
    """
    if not any_registered(session):
        explain_silence(session, status, log)
    _note_failure(session, failure)
    recording = fold_session(session, directory)
    nothing = not recording.calls and not any(tap.status == "failed" for tap in recording.metadata.taps)
    if (
        nothing
        and status
        and (log or (session.records and runs_engine(session) and _began_no_step(recording.metadata)))
    ):
        why = f"the engine ended before its first step, with {ending_text(status, log)}"
        error = KcapError(f"{why}\n{_whole_output(session, log)}") if log else NoRecordingError(why, status)
        shutil.rmtree(directory)  # with the log, perhaps
        raise error
    return recording


def _began_no_step(metadata: Metadata) -> bool:
    """Whether nothing tells of more than a start."""
    return not (sum(metadata.steps.values()) or metadata.dropped.get("off_step") or NEVER_OPENED in metadata.notes)


def _note_failure(session: Session, failure: str) -> None:
    """Only the first line is for the Recording: the output may hold secrets."""
    if failure:
        line = {"t": "note", "detail": failure.splitlines()[0].rstrip(":")}
        (Path(session.directory) / "failure.notes").write_bytes(orjson.dumps(line) + b"\n")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Each signal that ends kcap is as Ctrl-C, so that it tidies up: until `attended` takes them over."""
    with SignalLog(*END_SIGNALS) as ending:
        ending.raised = KeyboardInterrupt()  # which no import on the way takes for a failure of its own
        yield


@contextmanager
def attended(session: Session, noted: ExitStack, shown: AbstractContextManager[Progress]) -> Iterator[RunControl]:
    """Handle the signals that kcap gets, and build the recorder; once it is there, no signal ends kcap until `noted`
    ends."""
    asked = noted.enter_context(SignalLog(signal.SIGUSR1, signal.SIGUSR2))
    ending = noted.enter_context(SignalLog(*END_SIGNALS))
    with window_control.marked_running(session), shown as progress:

        def attend(phase: Phase) -> None:
            progress.show(phase)
            for number in asked.take():
                _set_window(session, number == signal.SIGUSR1)

        ending.raised = KcapError("ended before anything was started; nothing is kept")
        _prepare_recorder(session, attend)
        ending.raised = None
        yield RunControl(session, progress, attend, ending)


def _set_window(session: Session, opened: bool) -> None:
    try:
        answer = window_control.open_window(session) if opened else window_control.close_window(session)
        click.echo(f"kcap: {window_control.answer_text(answer, opened)}", err=True)
    except KcapError as error:
        click.echo(f"kcap: {error}", err=True)


def _prepare_recorder(session: Session, attend: Callable[[Phase], None]) -> None:
    """Build the native recorder before the engine starts; a failure is the engine processes' own to report."""
    from kcap.capture.recorder.native_recorder import build

    if session.recorder == "python":
        return
    attend(Phase("preparing the recorder"))
    try:
        build()
    except (Unavailable, ImportError) as error:
        click.echo(f"kcap: {error}", err=True)


def explain_silence(session: Session, status: int | None, log: Path | None) -> None:
    """NoRecordingError: why no process had a recorder in it. `status`: of its end; None where kcap ended it."""
    if status is None and runs_engine(session):
        raise KcapError(NOTHING_KEPT)
    if session.command:
        raise NoRecordingError(f"nothing was recorded: {_why_silent(session, status)}", status)
    if status and log:
        lines = last_lines(log, status)
        raise KcapError(f"the engine did not start ({status_text(status)}):\n{lines}\n{_whole_output(session, log)}")
    no_plugin = "no process of the engine had kcap in it: kcap doctor says whether its plugin is registered"
    raise KcapError(_hooking_failures(session) or no_plugin)


def _hooking_failures(session: Session) -> str:
    """What failed in the processes that kcap was in, before they had its taps."""
    lines = [line for shard in read_shards(Path(session.directory)) for line in shard.lines(TapLine)]
    details = {line.detail for line in lines if (line.name, line.status) == ("window", "failed")}
    return f"kcap could not hook the engine: {'; '.join(sorted(details))}" if details else ""


def _whole_output(session: Session, log: Path) -> str:
    if log.parent == Path(session.directory):
        return "--engine-log FILE keeps its whole output"
    total, _, free = shutil.disk_usage(log.parent)
    if total and not free:
        return f"{log} holds only a part of its output: its disk is full"
    return f"its whole output is in {log}"


def _why_silent(session: Session, status: int | None) -> str:
    """By the marks that each Python process of the command left (see `kcap.capture.startup`)."""
    if failures := _hooking_failures(session):
        return failures
    directory = Path(session.directory)
    ended = f" ({status_text(status)})" if status else ""
    if lacking := sorted({path.read_text() for path in directory.glob("*.lacks-kcap")}):
        return f"kcap is not installed in the environment of {', '.join(lacking)}"
    if any(directory.glob("*.followed")):
        imports_none = "the command imports no torch"
        return imports_none if status == 0 else f"the command ended{ended} before it imported torch"
    if excluded := engines.excluding_setting(None):
        return f"no process of the engine had kcap in it{ended}: {excluded} leaves it out; add kcap to it"
    return (
        f"{shlex.quote(session.command[0])} ran no Python that kcap could follow{ended}; it follows none with -I, -E "
        "or -S, in a container, or with a PYTHONPATH of its own"
    )
