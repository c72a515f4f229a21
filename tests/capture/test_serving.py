"""A server recorded under a client: waited for, recorded while the client runs, ended; and whatever may go wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from processes import ended
from serving_programs import CLIENT, DIES, NEVER, OF_TWO_PROCESSES, SERVER, SILENT, STUBBORN

import kcap as kcap_package
from kcap.capture.controller import serving
from kcap.capture.fold.metadata import NEVER_OPENED
from kcap.capture.session import SESSION_VARIABLE

Kcap = Callable[..., Any]
SLOW = 30.0  # seconds: five and a busy machine's; without a hurry it would be eighty


@pytest.fixture
def port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


@pytest.fixture
def serve(kcap: Kcap, tmp_path: Path, port: int) -> Callable[..., Any]:
    """`serve(server, *client's words, options=[…])` runs `kcap record --client`; its output is `tmp_path / "out"`."""

    def run(server: str, *words: object, options: tuple[str, ...] = (), client: str = CLIENT) -> Any:
        for name, text in (("server.py", server), ("client.py", client)):
            (tmp_path / name).write_text(text)
        output = tmp_path / "out"
        asks = " ".join(map(str, (sys.executable, tmp_path / "client.py", port, output, *words)))
        where = ("--ready", f"http://127.0.0.1:{port}/health")
        command = (sys.executable, str(tmp_path / "server.py"), str(port))
        return kcap("record", "-o", output, "--client", asks, *where, *options, "--", *command)

    return run


def is_free(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def counted(path: Path) -> tuple[int, int]:
    recording = kcap_package.load(path)
    calls = sum(call.total for call in recording.calls if call.operator == "aten::mm")
    return sum(recording.metadata.steps.values()), calls


def test_only_what_ran_while_the_client_ran_counts(
    serve: Callable[..., Any], tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SESSION_VARIABLE, str(tmp_path / "another"))
    ran = serve(SERVER, "steps?5", "stop", "steps?7", "start", "steps?2")
    assert ran.code == 0, ran.err
    assert counted(tmp_path / "out") == (7, 7)
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert metadata.client[-1] == "steps?2"
    assert metadata.windows == [{"first": 1, "steps": 5}, {"first": 13, "steps": 2}]
    assert metadata.complete
    assert ran.err.count("1 of 1 processes follow") == 2
    assert "the server ended in order" in ran.err
    assert is_free(port)


def test_a_client_may_open_the_window_itself(serve: Callable[..., Any], tmp_path: Path) -> None:
    ran = serve(SERVER, "steps?5", "start", "steps?3", "stop", options=("--window", "manual"))
    assert ran.code == 0, ran.err
    assert counted(tmp_path / "out") == (3, 3)


def test_a_client_that_fails_leaves_the_recording_and_says_why(
    serve: Callable[..., Any], tmp_path: Path, port: int
) -> None:
    ran = serve(SERVER, "steps?4", "fail")
    assert ran.code == 3, ran.err
    assert "the client failed, with status 1:\n  AssertionError: a request failed" in ran.err
    assert counted(tmp_path / "out") == (4, 4)
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert metadata.notes == ["the client failed, with status 1"]
    assert is_free(port)


def test_a_server_that_dies_under_its_client_leaves_what_it_ran(serve: Callable[..., Any], tmp_path: Path) -> None:
    ran = serve(SERVER, "steps?4", "die")
    assert ran.code == 3, ran.err
    assert "the server ended before kcap ended it, with status 7:\n  ValueError: out of memory" in ran.err
    assert counted(tmp_path / "out") == (4, 4)
    assert not kcap_package.load(tmp_path / "out").metadata.complete


def test_a_server_that_failed_is_named_where_its_client_ends_first(serve: Callable[..., Any], tmp_path: Path) -> None:
    ran = serve(SERVER, "steps?4", "break")
    assert ran.code == 3, ran.err
    assert "no longer served when the client ended, with status 1 (it answered 503 no engine):\n" in ran.err
    assert "\n  RuntimeError: the engine is dead" in ran.err
    assert counted(tmp_path / "out") == (4, 4)


def test_a_client_that_ends_its_server_has_not_failed(serve: Callable[..., Any], tmp_path: Path) -> None:
    ran = serve(SERVER, "steps?4", "quit")
    assert ran.code == 0, ran.err
    assert counted(tmp_path / "out") == (4, 4)


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_that_is_slow_is_named_only_where_its_client_failed(
    serve: Callable[..., Any], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ANSWER_TIMEOUT", 0.5)
    ran = serve(SERVER, "steps?4", "stall", *(["fail"] if fails else []))
    assert ran.code == (3 if fails else 0), ran.err
    assert ("when the client ended, with status 1 (no answer: timed out)" in ran.err) == fails


def test_a_server_whose_engine_was_killed_is_not_taken_for_a_slow_one(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serving, "ANSWER_TIMEOUT", 0.5)
    monkeypatch.setattr(serving, "ENDING", 0.5)
    ran = serve(OF_TWO_PROCESSES, "steps?4", "kill")
    assert ran.code == 3, ran.err
    assert re.search(r"ended, with status 0 \(no answer: timed out; its process \d+ ended without closing\):", ran.err)
    assert counted(tmp_path / "out") == (4, 4)


@pytest.mark.parametrize(("server", "words", "code"), [(SERVER, ("steps?4", "hang"), 0), (SILENT, (), 1)])
def test_ctrl_c_ends_what_heeds_no_signal_in_a_hurry(
    serve: Callable[..., Any],
    server: str,
    words: tuple[str, ...],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = serve(STUBBORN + server, *words, client=STUBBORN + CLIENT)
    assert ran.code == code, ran.err
    lived = [file.stat().st_mtime - (tmp_path / "hangs").stat().st_mtime for file in tmp_path.glob("*.lives")]
    assert len(lived) == (2 if words else 1) and max(lived) < SLOW


def test_a_server_that_never_becomes_ready_is_ended_with_its_last_lines(
    serve: Callable[..., Any], tmp_path: Path, port: int
) -> None:
    ran = serve(NEVER, options=("--ready-timeout", "6"))
    assert ran.code == 1
    assert f"not ready after 6 s (http://127.0.0.1:{port}/health: it answered 503 still loading)" in ran.err
    assert "--ready-timeout" in ran.err and "loading the weights" in ran.err
    assert is_free(port)
    assert {path.name for path in tmp_path.iterdir()} == {"server.py", "client.py"}, "nothing is left"


def test_a_server_that_dies_first_is_told_at_once(serve: Callable[..., Any], tmp_path: Path) -> None:
    began = time.monotonic()
    ran = serve(DIES)
    assert ran.code == 1
    assert "the server ended before it was ready, with status 5:\n  RuntimeError: no such model" in ran.err
    assert time.monotonic() - began < 30
    assert not (tmp_path / "out").exists()


def test_a_server_without_kcap_in_it_is_told_before_the_client_runs(serve: Callable[..., Any], tmp_path: Path) -> None:
    ran = serve(
        NEVER.replace('self.send_error(503, "still loading")', "self.send_response(200); self.end_headers()"), "fail"
    )
    assert ran.code == 1
    assert "nothing was recorded: the command imports no torch" in ran.err
    assert "a request failed" not in ran.err


def test_what_serves_there_already_is_not_taken_for_the_server(
    serve: Callable[..., Any], tmp_path: Path, port: int
) -> None:
    (tmp_path / "health").touch()
    words = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    other = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        while is_free(port):
            time.sleep(0.05)
        ran = serve(SERVER)
    finally:
        other.kill()
        other.wait()
    assert ran.code == 2
    assert "answers before the server is started" in ran.err


def test_what_holds_an_engines_port_is_told_whatever_it_speaks(kcap: Kcap, tmp_path: Path, port: int) -> None:
    """Where a URL is given, what answers there may stand before the server: it answers that there is none."""
    engine = tmp_path / "vllm"
    engine.write_text("#!/bin/sh\nexit 5\n")
    engine.chmod(0o755)
    words = ("record", "-o", tmp_path / "out", "--client", "true")
    with socket.create_server(("127.0.0.1", port)):  # which never answers
        held = kcap(*words, "--", engine, "serve", "--port", port)
    assert held.code == 2 and f"something listens where http://127.0.0.1:{port}/health is to be" in held.err
    free = kcap(*words, "--", engine, "serve", "--port", port)
    assert free.code == 1 and "the server ended before it was ready, with status 5" in free.err


def test_a_given_url_may_answer_that_there_is_no_server(kcap: Kcap, tmp_path: Path, port: int) -> None:
    with HTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler) as gateway:  # which knows no method: 501
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        where = ("--ready", f"http://127.0.0.1:{port}/health")
        ran = kcap("record", "-o", tmp_path / "out", "--client", "true", *where, "--", "sh", "-c", "exit 5")
        gateway.shutdown()
    assert ran.code == 1 and "the server ended before it was ready, with status 5" in ran.err


# ---- the window by signals, and by nobody ----


@pytest.fixture
def recorder(tmp_path: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`kcap record --window manual` of the server in a shell, as a user starts it."""
    (tmp_path / "server.py").write_text(SERVER)
    words = ["record", "-o", str(tmp_path / "out"), "--window", "manual", "--", "sh", "-c"]
    server = f"{sys.executable} {tmp_path / 'server.py'} {port}; true"
    command = [sys.executable, "-m", "kcap", *words, server]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def said(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"it never said: {text}")


def test_signals_open_and_close_the_window(recorder: subprocess.Popen[str], tmp_path: Path, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    while serving.why_not_ready(url):
        assert recorder.poll() is None, recorder.communicate()[1]
        time.sleep(0.1)
    assert not serving.why_not_ready(f"{url}/?3")
    for number, state in ((signal.SIGUSR1, "open"), (signal.SIGUSR2, "closed")):
        recorder.send_signal(number)
        said(recorder, f"the window is {state}: 1 of 1")
        assert not serving.why_not_ready(f"{url}/?4")
    recorder.send_signal(signal.SIGUSR2)
    said(recorder, "the window is closed already")
    recorder.send_signal(signal.SIGINT)
    _, rest = recorder.communicate(timeout=60)
    assert recorder.returncode == 0, rest
    assert counted(tmp_path / "out") == (4, 4)


def test_the_server_ends_with_a_recorder_that_is_killed(
    recorder: subprocess.Popen[str], tmp_path: Path, port: int, kcap: Kcap
) -> None:
    url = f"http://127.0.0.1:{port}"
    while serving.why_not_ready(url):
        assert recorder.poll() is None, recorder.communicate()[1]
        time.sleep(0.1)
    recorder.send_signal(signal.SIGUSR1)
    said(recorder, "the window is open: 1 of 1")
    assert not serving.why_not_ready(f"{url}/?4")
    groups = Path(f"/proc/{recorder.pid}/task/{recorder.pid}/children").read_text().split()
    recorder.kill()
    assert {ended(int(group)) for group in groups} == {True}, "the server is still there"
    assert is_free(port)
    (left,) = tmp_path.glob(".out.*")
    assert kcap("recover", left, "-o", tmp_path / "out").code == 3
    assert counted(tmp_path / "out") == (4, 4)


def test_a_window_that_never_opened_fails_and_names_the_fix(kcap: Kcap, tmp_path: Path) -> None:
    program = SERVER.partition("class Handler")[0] + "window.begin(StepShape('decode', [1], [1])); window.end()"
    (tmp_path / "engine.py").write_text(program)
    ran = kcap("record", "-o", tmp_path / "out", "--window", "manual", "--", sys.executable, tmp_path / "engine.py")
    assert ran.code == 1
    assert f"nothing was recorded: {NEVER_OPENED}" in ran.err
    assert NEVER_OPENED in kcap_package.load(tmp_path / "out").metadata.notes


def test_the_window_of_nothing(kcap: Kcap, tmp_path: Path) -> None:
    ran = kcap("window", "start", tmp_path / "out")
    assert ran.code == 1
    assert f"no kcap record -o {tmp_path / 'out'} runs on this machine" in ran.err
