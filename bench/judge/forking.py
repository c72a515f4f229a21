"""The fork server seen from the judge."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kcap.capture.redact import SECRET_NAME
from kcap.errors import KcapError

MODULE = "kcap.bench.judge.fork_server"
GONE = "the fork server is gone"
START_LIMIT_S = 300.0  # importing torch, and compiling the driver at its first use
ANSWER_LIMIT_S = 60.0


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are none of a Solution's business left out: API keys, tokens, passwords."""
    return {name: value for name, value in environment.items() if not SECRET_NAME.search(name)}


class Gone(Exception):
    """The fork server is dead, and no candidate can be started or ended any more: a judge ends with it."""


class ForkServer:
    """One process that candidates are forked from; used by one thread at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", MODULE]
            env = {**without_secrets(os.environ), **environment}
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=env)
        self._channel.settimeout(START_LIMIT_S)
        try:
            self._answer()
        except Gone as gone:
            self.close()
            raise KcapError(f"the fork server does not start: {gone}") from None
        self._channel.settimeout(ANSWER_LIMIT_S)

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Its answer to one request. KcapError where it could not do it, OSError where its machine lacks what that
        takes, Gone if it has died.
        """
        with self._lock:
            try:
                socket.send_fds(self._channel, [orjson.dumps(request)], list(descriptors))
            except OSError as error:
                raise Gone(f"{GONE}: {error}") from None
            return self._answer()

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        try:
            content = self._channel.recv(1 << 16)
        except (TimeoutError, ConnectionError):
            content = b""
        if not content:
            raise Gone(f"{GONE}: see its message on standard error")
        answer: dict[str, Any] = orjson.loads(content)
        if "lack" in answer:
            raise OSError(str(answer["lack"]))
        if "error" in answer:
            raise KcapError(str(answer["error"]))
        return answer
