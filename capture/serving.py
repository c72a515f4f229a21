"""A server recorded under a client: started, waited for, recorded for as long as the client runs, and ended."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from kcap.capture import follow, launch, ready, windows
from kcap.capture.child import Child
from kcap.capture.config import SESSION_VARIABLE, Session
from kcap.capture.merge import discard
from kcap.capture.output import Place
from kcap.errors import CallError, KcapError
from kcap.schemas.recording import Recording

ASK = 0.5  # seconds between two looks whether the server serves


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
    url = url or ready.url_of(server)
    if url is None:
        raise CallError("pass --ready URL: kcap cannot tell from the command where its server answers once it is ready")
    if not ready.is_whole(url):
        raise CallError(f"--ready {url}: give an http:// or https:// URL with a host")
    if not ready.why_not(url):
        raise CallError(f"{url} answers before the server is started: end what serves there, or take another port")
    return Client(command, url, patience, opens)


def serve(command: list[str], client: Client, session: Session, place: Place) -> tuple[Recording, str]:
    """Record the server `command` under `client` into `place`; the Recording, and what failed ("" if nothing did).

    KcapError if the server does not become ready.
    """
    log = Path(session.directory) / "server.log"  # gone with the shards, as are secrets in it
    with follow.attending(session, place.noted) as at:
        follow.prepare_recorder(session)
        server = Child(command, launch.environment(session), log)
        try:
            failure = _Run(server, client, session, at).whole()
        except KcapError:
            discard(session)
            raise
        at.over()
        return follow.finish(session, place.directory, None, log, failure), failure


@dataclass(frozen=True)
class _Run:
    server: Child
    client: Client
    session: Session
    at: launch.At

    def whole(self) -> str:
        """From the server's start to its end; what failed."""
        try:
            self._wait_until_ready()
            return self._client_to_its_end()
        finally:
            self.at.attend("ending the server")
            launch.end(self.server, self.session)
            self.server.show()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.client.patience
        while why := ready.why_not(self.client.ready):
            self._look(f"waiting for {self.client.ready}")
            if self.at.ending:
                raise KcapError("ended before the server was ready")
            if self.server.status is not None:
                raise KcapError(f"the server ended before it was ready{self._how(self.server)}")
            if time.monotonic() > deadline:
                patience = f"{self.client.patience:g} s ({self.client.ready}: {why})"
                fix = "pass a longer --ready-timeout, or another --ready URL"
                raise KcapError(f"the server was not ready after {patience}: {fix}. Its output:\n{self._lines()}")
            time.sleep(ASK)
        if not launch.registered(self.session):
            follow.explain_silence(self.session, None, None)

    def _client_to_its_end(self) -> str:
        """Run the client, in the open window; what failed."""
        if self.client.opens:
            windows.start(self.session)
        env = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
        child = Child(self.client.command, env, Path(self.session.directory) / "client.log")
        while child.status is None and self.server.status is None and not self.at.ending:
            self._look(launch.status(self.session))
            child.show()
            time.sleep(launch.POLL)
        died = self.server.status is not None
        ended_by_itself = child.status is not None
        if not died:
            launch.close(self.session)
        child.end()
        child.show()
        if died:
            return f"the server ended while the client ran{self._how(self.server)}"
        return f"the client failed{self._how(child)}" if ended_by_itself and child.status else ""

    def _look(self, text: str) -> None:
        self.at.attend(text)
        self.server.show()

    def _how(self, child: Child) -> str:
        return f", with {child.how_it_ended()}"

    def _lines(self) -> str:
        return self.server.last_lines() or "  (none)"
