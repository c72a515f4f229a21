"""While an engine starts, `kcap record` says what it does; Ctrl-C ends all of it within seconds, and says so."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.capture.controller import child, output, progress, run
from kcap.capture.controller.progress import Phase, Progress, engine_phase, last_line
from kcap.capture.session import Session
from kcap.capture.shards.counts import is_alive
from kcap.capture.window.hooking import announce
from kcap.capture.window.window import Window
from kcap.errors import KcapError

SLOW = 30.0  # seconds: five and a busy machine's; without a hurry it would be eighty
RECORD = """
import sys
from pathlib import Path

from kcap import cli
from kcap.capture.controller import output, run
from kcap.capture.session import Session
from kcap.errors import KcapError

try:
    with output.working_directory(Path("out"), False) as working:
        session = Session(str((working.directory / "shards").resolve()), recorder="python", check_coverage=False)
        session.write()
        run.record_command_line([sys.executable, "engine.py"], session, working, Path("engine.log"))
except KcapError as error:
    sys.exit(f"kcap: {error}")
"""
STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
if len(sys.argv) == 1:  # as inductor's compile workers, in a session of their own
    child = subprocess.Popen([sys.executable, __file__, "worker"], start_new_session=True)
    print("Loading weights: 10%\\rLoading weights: 20%", flush=True)
    with open("pids.part", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename("pids.part", "pids")
time.sleep(600)
"""
KNOWS_NO_SUCH_MODEL = "import sys\nsys.exit('ValueError: Model architectures [\\'Nobody\\'] are not supported')\n"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(engine)` records a stand-in of an engine, offline; whatever is left of it is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(engine: str, **options: Any) -> subprocess.Popen[str]:
        (tmp_path / "engine.py").write_text(engine)
        words = [sys.executable, "-c", RECORD]
        process = subprocess.Popen(words, cwd=tmp_path, **{"stderr": subprocess.PIPE, "text": True, **options})
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
    with contextlib.suppress(OSError):
        for number in (tmp_path / "pids").read_text().split():
            os.kill(int(number), signal.SIGKILL)


def written(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.05)
    return path.read_text()


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_nobody_asks_for_its_status_has_ended() -> None:
    child = subprocess.Popen(["sleep", "600"])
    assert is_alive(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is left as it is
    assert not is_alive(child.pid)
    child.wait()
    assert not is_alive(child.pid)


def test_in_a_hurry_all_has_ended_within_five_seconds() -> None:
    """What is waited for; how long a busy machine takes for the rest is its own."""
    signals = sum(hurried for _, _, hurried in child.KILL_SEQUENCE)
    assert signals + child.LEFT_IN_A_HURRY + run.CLOSE_IN_A_HURRY < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_heeds_no_signal_is_ended_in_a_hurry(number: int, start: Start, tmp_path: Path) -> None:
    kcap = start(STUBBORN)
    processes = [int(word) for word in written(tmp_path / "pids").split()]
    time.sleep(0.5)
    asked = time.monotonic()
    kcap.send_signal(number)
    _, errors = kcap.communicate(timeout=60)
    assert time.monotonic() - asked < SLOW, errors
    assert [process for process in processes if runs(process)] == []
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert re.search(rf"kcap: {name} after \d+ s \(starting the engine\): all that was started has ended\n", errors)
    assert errors.endswith("kcap: nothing was recorded, and nothing is kept\n")
    assert kcap.returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.log", "engine.py", "pids"]


def test_a_server_that_is_ended_before_its_first_step_leaves_nothing(tmp_path: Path) -> None:
    """It has torch in it, so that kcap is in it, too."""
    server = tmp_path / "vllm"
    server.write_text(f"#!{sys.executable}\nimport time, torch\nopen('up', 'w').write('1')\ntime.sleep(600)\n")
    server.chmod(0o700)
    command = [sys.executable, "-m", "kcap", "record", "-o", "out.kcap", "--", str(server), "serve", "model"]
    kcap = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    written(tmp_path / "up")
    kcap.send_signal(signal.SIGINT)
    _, errors = kcap.communicate(timeout=60)
    assert errors.endswith("kcap: nothing was recorded, and nothing is kept\n")
    assert kcap.returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["up", "vllm"]


def test_where_there_is_no_terminal_a_line_says_each_phase(start: Start, tmp_path: Path) -> None:
    kcap = start(STUBBORN)
    written(tmp_path / "pids")
    time.sleep(1)
    kcap.send_signal(signal.SIGINT)
    _, errors = kcap.communicate(timeout=60)
    phases = [line.partition(" s, ")[2].partition(":")[0] for line in errors.splitlines() if " s, " in line]
    assert phases == ["starting the engine", "Ctrl-C"]


def test_on_a_terminal_one_line_has_the_engines_last(start: Start, tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    kcap = start(STUBBORN, stderr=end, env={**os.environ, "COLUMNS": "60", "TERM": "xterm"})
    os.close(end)
    shown = b""
    while b"Loading weights: 20%" not in shown:
        shown += os.read(terminal, 1000)
    kcap.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 1000):
            shown += data
    assert re.search(rb"\d+ s, starting the engine: Loading weights: 20%", shown)
    assert b"10%" not in shown


def test_an_engine_that_fails_says_why_and_keeps_its_output(start: Start, tmp_path: Path) -> None:
    kcap = start("print('x' * 5000)\n" + KNOWS_NO_SUCH_MODEL)
    _, errors = kcap.communicate(timeout=60)
    assert "the engine did not start (status 1):\n  ValueError: Model architectures ['Nobody']" in errors
    assert errors.endswith("its whole output is in engine.log\n")
    assert len((tmp_path / "engine.log").read_text()) > 5000
    assert (tmp_path / "engine.log").stat().st_mode & 0o077 == 0


def test_what_another_engine_wrote_last_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before this one writes its first line: the recorder may take a minute to compile."""
    log, shown = tmp_path / "engine.log", list[str]()
    log.write_text("RuntimeError: of another engine\n")
    monkeypatch.setattr(run, "run_to_end", lambda *given: shown.append(last_line(log)) or 0)
    with output.working_directory(tmp_path / "out", False) as working:
        session = Session(str(working.directory / "shards"))
        session.write()
        with pytest.raises(KcapError, match="no process of the engine had kcap in it"):
            run.record_command_line(["engine"], session, working, log)
    assert shown == [""]


class Worker:
    """Stands for an engine's: what the session says while it loads is its result."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def load_model(self) -> str:
        return self.session.doing

    def warm_up(self) -> tuple[str, str]:
        before = self.session.doing
        return before + "/" + self.load_model(), self.session.doing

    def fails(self) -> None:
        raise RuntimeError("of the engine")


PHASES = {"load_model": "loading weights", "warm_up": "warming up", "fails": "failing", "of_another_release": "none"}


def test_an_adapter_announces_what_a_method_does_while_it_runs(window: Window) -> None:
    kind = type("Kind", (Worker,), dict(vars(Worker)))
    announce(window.session, kind, PHASES)
    worker = kind(window.session)
    assert worker.warm_up() == ("warming up/loading weights", "warming up")
    with pytest.raises(RuntimeError, match="of the engine"):
        worker.fails()
    assert window.session.doing == ""


def test_the_engine_goes_on_where_a_phase_cannot_be_written(tmp_path: Path) -> None:
    session = Session(str(tmp_path / "gone"))
    kind = type("Kind", (Worker,), dict(vars(Worker)))
    announce(session, kind, PHASES)
    announce(session, None, PHASES)
    assert kind(session).load_model() == ""


def test_phases_follow_what_the_processes_leave(window: Window) -> None:
    session = window.session
    assert engine_phase(session) == Phase("starting the engine")
    window.register("vllm")
    assert engine_phase(session) == Phase("loading the engine")
    session.doing_file.write_text("loading weights")
    assert engine_phase(session) == Phase("loading weights")
    session.doing_file.write_text("")
    window.start()
    assert engine_phase(session) == Phase("recording", "0 steps")
    session.window_file.write_text("closed")
    assert engine_phase(session) == Phase("the window is closed", "0 steps")
    unrecorded = replace(session, window="manual", extension={"window": "with a plan"})
    assert engine_phase(unrecorded) == Phase("the engine runs")
    window.close()
    assert engine_phase(session) == Phase("all is recorded, the engine ends", "0 steps")
    assert engine_phase(unrecorded) == Phase("the engine ends")


@pytest.mark.parametrize(
    ("adapter", "command", "client", "engine"),
    [
        ("", [], [], True),
        ("", ["serve"], ["client"], True),
        ("vllm", ["serve"], [], True),
        ("", ["python", "-m", "vllm.entrypoints.openai.api_server"], [], True),
        ("pytorch", ["/usr/bin/vllm", "serve", "model"], [], True),
        ("pytorch", ["python"], [], False),
        ("", ["python"], [], False),
    ],
)
def test_only_a_program_of_the_users_own_has_time_to_end(
    adapter: str, command: list[str], client: list[str], engine: bool, tmp_path: Path
) -> None:
    session = Session(str(tmp_path / "shards"), command=command, client=client)
    session.write()
    if adapter:
        with contextlib.closing(Window(session)) as window:
            window.register(adapter)
    assert run.runs_engine(session) is engine


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", ""),
        ("one\ntwo\n\n", "two"),
        ("shards: 10%\rshards: 50%", "shards: 50%"),
        ("\x1b[32mgreen\x1b[0m \x1b]0;title\x07text\x1b[2K\n", "green text"),
        ("(EngineCore pid=12) INFO 11-24 00:46:57 [core.py:93] Initializing\n", "Initializing"),
        ("(EngineCore pid=12) (Worker pid=13) WARNING 11-24 00:46:57 [a/b.py:3] slow\n", "slow"),
        ("[2026-11-24 00:46:57 TP0] Load weight begin.\n", "Load weight begin."),
        ("args: {'hf_token': 'hf_abcdefghijklmnop'}\n", "args: {'hf_token': REDACTED}"),
        ("x" * 9000, "x" * progress.TAIL),
        ("one\n/a/b.py:7: SyntaxWarning: odd\n  code = '\\.'\n", "/a/b.py:7: SyntaxWarning: odd"),
        ("(Worker pid=3) /a b.py:7: UserWarning: odd\n(Worker pid=3)   code\n", "/a b.py:7: UserWarning: odd"),
        ("INFO: one\n  two\n", "two"),
    ],
)
def test_the_last_line_is_what_a_reader_looks_for(text: str, last: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(text.encode())
    assert last_line(tmp_path / "log") == last


@given(st.binary(max_size=300))
def test_the_last_line_is_one_and_commands_no_terminal(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        file.write(data)
        assert all(map(str.isprintable, last_line(Path(file.name))))


def test_a_phase_is_told_once_and_again_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Progress(None, None, began=0.0)
    for now in range(0, 80, 2):
        monkeypatch.setattr(progress.time, "monotonic", lambda now=now: float(now))
        shown.show(Phase("recording", f"{now} steps"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"kcap: {now} s, recording, {now} steps" for now in (0, 32, 64)]


def modules_of(framework: Any) -> dict[str, ModuleType]:
    """Stand-ins of the modules that its `hooks` name, which have these and nothing else."""
    modules: dict[str, Any] = {}
    for hook in framework.hooks:
        place, name = hook.split(":")
        module = modules.setdefault(f"{framework.package}.{place}", ModuleType(place))
        owner, _, method = name.rpartition(".")
        if owner and not hasattr(module, owner):
            setattr(module, owner, type(owner, (), {}))
        setattr(getattr(module, owner) if owner else module, method, lambda *args: None)
    return modules


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_adapter_hooks_what_it_says_and_needs_no_more(
    name: str, window: Window, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kcap.capture import engines

    engine = engines.find(name)
    modules = modules_of(engine.FRAMEWORK)
    for path, module in modules.items():
        monkeypatch.setitem(sys.modules, path, module)
    engine.hook(window)
    for hook in engine.FRAMEWORK.hooks:
        place, function = hook.split(":")
        hooked: Any = modules[f"{engine.FRAMEWORK.package}.{place}"]
        for part in function.split("."):
            hooked = getattr(hooked, part)
        assert hasattr(hooked, "__wrapped__"), hook
    assert list((tmp_path / "shards").glob("*.notes")) == []


ENDS_LATE = """
import sys, time
from pathlib import Path

deadline = time.monotonic() + 60
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
    assert time.monotonic() < deadline
"""


def test_what_writes_a_recording_is_imported_while_the_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = tmp_path / "imported"
    monkeypatch.setattr(run, "window_over", lambda directory: True)
    monkeypatch.setattr(run, "load_derivation", imported.touch)
    with output.working_directory(tmp_path / "out", False) as working:
        session = Session(str((working.directory / "shards").resolve()), recorder="python", check_coverage=False)
        session.write()
        command = [sys.executable, "-c", ENDS_LATE, str(imported)]
        with pytest.raises(KcapError, match="no process of the engine had kcap in it"):  # which ended by itself
            run.record_command_line(command, session, working, tmp_path / "engine.log")
    assert imported.exists()
