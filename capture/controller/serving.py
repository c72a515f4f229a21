"""A server recorded under a client: started, waited for, recorded for as long as the client runs, and ended."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from kcap.capture.controller import run, window_control
from kcap.capture.controller.child import Child, status_text
from kcap.capture.controller.output import WorkingDirectory
from kcap.capture.controller.progress import Phase, any_registered, engine_phase, last_phase, shown_progress
from kcap.capture.engines import Server, adapters
from kcap.capture.fold.recording import discard_shards
from kcap.capture.session import SESSION_VARIABLE, Session
from kcap.capture.shards.counts import lost_processes
from kcap.capture.turns.relay import turns_received
from kcap.errors import CallError, KcapError

READY_POLL = 0.5  # seconds between two looks whether the server serves


@dataclass(frozen=True)
class Client:
    """`command`: the client's; `ready`: the URL that answers once the server serves; `patience`: seconds until it must.

    `opens`: the window opens when the client starts; otherwise it is left to whoever asks for it, the client perhaps.
    """

    command: list[str]
    ready: str
    patience: float
    opens: bool = True


def make_client(command: list[str], url: str | None, patience: float, opens: bool, server: list[str]) -> Client:
    """The client of `server`; CallError where it cannot be started, or it is not plain when the server is ready."""
    if not command or shutil.which(command[0]) is None:
        raise CallError(f"--client: there is no command {command[0] if command else ''}".rstrip())
    given, url = url, url or ready_url(server)
    if url is None:
        raise CallError("pass --ready URL: kcap cannot tell from the command where its server answers once it is ready")
    if not is_full_url(url):
        raise CallError(f"--ready {url}: give an http:// or https:// URL with a host")
    if given and not why_not_ready(given):  # what stands before the server may answer that there is none
        raise CallError(f"{url} answers before the server is started: end what serves there, or take another port")
    if not given and is_taken(url):
        raise CallError(f"something listens where {url} is to be: end it, or take another port")
    return Client(command, url, patience, opens)


def serve(
    command: list[str], client: Client, session: Session, working: WorkingDirectory, log: Path | None = None
) -> run.Run:
    """Record the server `command` under `client` into `working`. KcapError if the server does not become ready.

    `log`: where its output is kept; None: as long as it runs.
    """
    log = log or Path(session.directory) / "server.log"  # gone with the shards, as are secrets in it
    with run.attended(session, working.noted, shown_progress(None)) as at:  # what the server writes is shown anyway
        try:
            with turns_received(session):
                server = Child(command, run.recorded_environment(session), log)
                failure = _ServerRun(server, client, session, at).whole()
        except KcapError:
            discard_shards(session)
            raise
        at.attend(last_phase(session))
        return run.Run(run.make_recording(session, working.directory, None, log, failure), failure)


@dataclass(frozen=True)
class _ServerRun:
    server: Child
    client: Client
    session: Session
    at: run.RunControl

    def whole(self) -> str:
        """From the server's start to its end; what failed."""
        children = [self.server]
        try:
            self._wait_until_ready()
            if self.client.opens:
                window_control.open_window(self.session)
            env = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
            children.append(Child(self.client.command, env, Path(self.session.directory) / "client.log"))
            return self._failure_under(children[-1])
        finally:
            self.at.attend(Phase("ending what was started"))
            run.end_children(children, self.at)
            for child in children:
                child.show()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.client.patience
        phase = Phase(f"waiting for {self.client.ready}", self.session.doing)
        while why := self._attended(lambda: why_not_ready(self.client.ready), phase):
            if self.at.ending:
                raise KcapError(f"{self.at.ending_text()}: {run.NOTHING_KEPT}")
            if self.server.status is not None:
                raise KcapError(f"the server ended before it was ready{self._how(self.server)}")
            if time.monotonic() > deadline:
                patience = f"{self.client.patience:g} s ({self.client.ready}: {why})"
                fix, said = "pass a longer --ready-timeout, or another --ready URL", self.server.last_lines()
                raise KcapError(f"the server was not ready after {patience}: {fix}. Its output:\n{said}")
            time.sleep(READY_POLL)
        if not any_registered(self.session):
            run.explain_silence(self.session, 0, None)

    def _failure_under(self, client: Child) -> str:
        """What failed until the `client` ended, or the server, or a signal came."""
        lost_before = lost_processes(Path(self.session.directory))
        while client.status is None and self.server.status is None and not self.at.ending:
            self._look(engine_phase(self.session))
            client.show()
            time.sleep(run.POLL)
        asked = self.server.status is None and not self.at.ending
        why = self._attended(self._why_no_more, engine_phase(self.session)) if asked else ""
        lost = lost_processes(Path(self.session.directory)) - lost_before if why else set()
        busy = why.endswith(SLOW) and not lost
        gone = time.monotonic() + (ENDING if why.startswith(NO_ANSWER) and not busy else 0)
        while self.server.status is None and not self.at.ending and time.monotonic() < gone:
            self._look(engine_phase(self.session))
            time.sleep(run.POLL)
        if self.at.ending:
            click.echo(f"kcap: {self.at.ending_text()}: ending the client and the server", err=True)
            return ""
        if self.server.status is not None:
            if client.status == self.server.status == 0:  # the client ended it
                return ""
            return f"the server ended before kcap ended it{self._how(self.server)}"
        if why and (client.status or not busy):  # one that is only busy serves
            how = status_text(client.status or 0)
            why += "".join(f"; its process {process} ended without closing" for process in sorted(lost))
            return f"the server no longer served when the client ended, with {how} ({why}):\n{self.server.last_lines()}"
        return f"the client failed{self._how(client)}" if client.status else ""

    def _why_no_more(self) -> str:
        """Why the server does not serve after its client's end."""
        with suppress(KcapError):  # the window has closed for good
            window_control.close_window(self.session)  # some servers run a step to answer
        return why_not_ready(self.client.ready)

    def _attended(self, ask: Callable[[], str], phase: Phase) -> str:
        """What `ask` returns; SLOW if a signal came first."""
        threads = ThreadPoolExecutor(1)
        answer = threads.submit(ask)
        threads.shutdown(wait=False)  # it ends with the server
        while not self.at.ending:
            self._look(phase)
            if wait([answer], run.POLL).done:
                return answer.result()
        return SLOW

    def _look(self, phase: Phase) -> None:
        self.at.attend(phase)
        self.server.show()

    def _how(self, child: Child) -> str:
        return f", with {child.how_it_ended()}"


ANSWER_TIMEOUT = 5.0  # seconds that an answer may take
ENDING = 5.0  # seconds that a server may take to end once nothing answers there
NO_ANSWER, SLOW = "no answer: ", "timed out"

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def ready_url(command: list[str], servers: Iterable[Server] | None = None) -> str | None:
    """The URL that answers once `command` serves; None where that is not plain. `servers`: of all adapters if None."""
    candidates = (
        (server for engine in adapters().values() for server in engine.FRAMEWORK.servers)
        if servers is None
        else servers
    )
    server = next((server for server in candidates if server.is_started_by(command)), None)
    if server is None or any(word.partition("=")[0] in server.elsewhere for word in command):
        return None
    host = _option(command, "--host") or "127.0.0.1"
    port = _option(command, "--port") or str(server.port)
    host = ANY_ADDRESS.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}{server.ready}" if port.isdigit() else None


def _option(command: list[str], name: str) -> str | None:
    """The last value of an option, written `name value` or `name=value`."""
    value = None
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word == name:
            value = after
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def is_full_url(url: str) -> bool:
    """Whether it can be asked for at all."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        named = bool(host) and parts.port != 0
    except ValueError:  # a port that is no number, half of an address
        return False
    return named and parts.scheme in ("http", "https") and url.isascii() and url.isprintable() and " " not in url


def is_taken(url: str) -> bool:
    """Whether anything listens at the host and port of `url`, whatever it speaks."""
    parts = urllib.parse.urlsplit(url)
    with suppress(OSError), socket.create_connection((parts.hostname, parts.port), ANSWER_TIMEOUT):
        return True
    return False


def why_not_ready(url: str) -> str:
    """Why the server at `url` does not serve; empty if it does: a success was answered, by no proxy."""
    context = ssl._create_unverified_context()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=ANSWER_TIMEOUT):
            return ""
    except urllib.error.HTTPError as error:
        return f"it answered {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return f"{NO_ANSWER}{getattr(error.reason, 'strerror', None) or error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return f"{NO_ANSWER}{error or type(error).__name__}"
