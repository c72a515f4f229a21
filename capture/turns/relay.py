"""Exchanges on their way from a server's process to that of `kcap record`, where turns are made of them.

A turn takes about a millisecond to make, and would block the server's event loop for that long. The exchanges go over a
socket in the session's directory, each as a line of JSON and its bytes; a thread sends them, so that a slow reader
holds up nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO

import orjson

from kcap.capture.session import Session
from kcap.capture.turns.exchange import Exchange
from kcap.capture.turns.log import TurnLog, note_failure
from kcap.errors import KcapError

SOCKET = "turns.socket"
MOST_WAITING = 64 << 20  # bytes of exchanges that are not sent yet; of those beyond, only times and sizes are kept
LAST_EXCHANGES = 10.0  # seconds for those that are on their way as the server ends


@contextlib.contextmanager
def socket_address(session: Session) -> Iterator[str]:
    """That of the session's socket, by the descriptor of its directory: a path may be too long for an address."""
    directory = os.open(session.directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET}"
    finally:
        os.close(directory)


class ExchangeSender:
    """Sends what has ended, in the server's process. A failure ends the trace, with a note in the Recording."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._added = self._sent = 0  # bytes, each counted by one thread alone
        self._failed = False

    def add(self, exchange: Exchange) -> None:
        """OSError once nobody takes it."""
        if self._failed:
            raise BrokenPipeError("kcap record takes no more of it")
        if self._added - self._sent + exchange.size > MOST_WAITING:
            exchange.drop()
        self._added += exchange.size
        self._queue.put(exchange)
        if self._thread is None:  # started here, as the serving process may be a fork of the one that built this object
            self._thread = threading.Thread(target=self._send, name="kcap-turns", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Send what is on its way, as the server ends."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(LAST_EXCHANGES)

    def _send(self) -> None:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                with socket_address(self._session) as address:
                    connection.connect(address)
                while (exchange := self._queue.get()) is not None:
                    connection.sendall(packed(exchange))
                    self._sent += exchange.size
        except Exception:  # nobody there, or what nobody thought of: `add` says so
            self._failed = True


def packed(exchange: Exchange) -> bytes:
    """As `read_packed` reads it."""
    sizes = {"request": len(exchange.request), "answer": len(exchange.answer)}
    members = {**vars(exchange), **sizes}
    return orjson.dumps(members) + b"\n" + exchange.request + exchange.answer


def read_packed(file: BinaryIO) -> Exchange | None:
    """The next one; None at the end, also at that of a server which was killed as it sent."""
    line = file.readline()
    if not line.endswith(b"\n"):
        return None
    members = orjson.loads(line)
    request, answer = members["request"], members["answer"]
    content = file.read(request + answer)
    if len(content) < request + answer:
        return None
    return Exchange(**members | {"request": bytearray(content[:request]), "answer": bytearray(content[request:])})


class ExchangeReceiver:
    """Takes the exchanges of all of a session's server processes, and writes their turns; a context manager.

    At its end what was sent is read first, as far as the servers have ended.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._log = TurnLog(session)
        self._writing = threading.Lock()
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> ExchangeReceiver:
        self._listening = socket.socket(socket.AF_UNIX)
        try:
            with socket_address(self._session) as address:
                self._listening.bind(address)
        except OSError as error:
            self._listening.close()
            raise KcapError(f"--agent-trace needs a socket in {self._session.directory}: {error}") from None
        self._listening.listen()
        self._accepting = threading.Thread(target=self._accept, name="kcap-turns", daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()
        deadline = time.monotonic() + LAST_EXCHANGES
        for reader in self._readers:
            reader.join(max(deadline - time.monotonic(), 0))
        if any(reader.is_alive() for reader in self._readers):
            note_failure(self._session, TimeoutError("a server went on, or sent more than could be read at the end"))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # it was shut down
                return
            reader = threading.Thread(target=self._read, args=(connection,), name="kcap-turns", daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, connection: socket.socket) -> None:
        """Until the server ends; a failure closes the connection, by which the server knows."""
        with connection, connection.makefile("rb") as file:
            try:
                while (exchange := read_packed(file)) is not None:
                    with self._writing:
                        self._log.add(exchange)
            except Exception as error:  # a full disk, or what nobody thought of
                note_failure(self._session, error)


def turns_received(session: Session) -> contextlib.AbstractContextManager[object]:
    """While the session's servers run: their turns are written, if it asks for them."""
    return ExchangeReceiver(session) if session.agent_trace else contextlib.nullcontext()
