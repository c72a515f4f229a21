"""Exchanges on their way from a server's process to that which writes their turns."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_turns import Server, ask

from kcap.capture.session import SESSION_VARIABLE, Session
from kcap.capture.turns import log, relay
from kcap.capture.turns.exchange import CHAT, Exchange
from kcap.capture.turns.middleware import TurnRecorder
from kcap.capture.turns.relay import ExchangeSender, packed, read_packed, turns_received
from kcap.errors import KcapError

EXCHANGES = st.builds(
    Exchange,
    api=st.just(CHAT),
    sent=st.floats(0, 1e10),
    first=st.none() | st.floats(0, 1e10),
    ended=st.floats(0, 1e10),
    status=st.none() | st.integers(100, 599),
    streamed=st.booleans(),
    complete=st.booleans(),
    dropped=st.booleans(),
    request=st.binary(max_size=50).map(bytearray),
    answer=st.binary(max_size=50).map(bytearray),
)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    directory = tmp_path / ("a long name" * 12)  # longer than the address of a socket may be
    session = Session(str(directory), agent_trace=True)
    session.write()
    return session


def exchange(size: int = 100) -> Exchange:
    body = orjson.dumps({"messages": [{"role": "user", "content": "w" * size}]})
    return Exchange(CHAT, sent=1.0, first=2.0, ended=3.0, status=None, request=bytearray(body))


def lines(session: Session) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in log.read_lines(Path(session.directory))]


def notes(session: Session) -> list[bytes]:
    return [path.read_bytes() for path in Path(session.directory).glob("*.notes")]


@given(st.lists(EXCHANGES, max_size=4), st.integers(1, 60))
def test_what_is_packed_is_read_again(exchanges: list[Exchange], lost: int) -> None:
    content = b"".join(map(packed, exchanges))
    whole = io.BytesIO(content)
    assert [read_packed(whole) for _ in exchanges] == exchanges and read_packed(whole) is None
    cut = io.BytesIO(content[:-lost])
    read = []
    while (one := read_packed(cut)) is not None:
        read.append(one)
    assert read == exchanges[: len(read)] and (len(read) < len(exchanges) or not exchanges)


def test_every_exchange_is_a_turn_when_the_servers_have_ended(session: Session) -> None:
    """Also of a server that is killed: what it has sent is read."""
    program = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_turn_relay import ExchangeSender, exchange
        from kcap.capture.session import read_session
        sender = ExchangeSender(read_session({str(session.file)!r}))
        for _ in range(200):
            sender.add(exchange(5_000))
        if sys.argv[1] == "killed":
            while sender._sent < sender._added:
                time.sleep(0.001)
            print("sent", flush=True)
            time.sleep(60)
    """
    with turns_received(session):
        servers = [
            subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), how], stdout=subprocess.PIPE)
            for how in ("ends", "killed")
        ]
        assert servers[1].stdout is not None and servers[1].stdout.readline() == b"sent\n"
        servers[1].send_signal(signal.SIGKILL)
        assert [server.wait() for server in servers] == [0, -signal.SIGKILL]
    assert sorted(line["number"] for line in lines(session)) == list(range(400))
    assert not notes(session)


def test_a_reader_that_is_slow_holds_up_no_server(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what may wait only times and sizes are kept."""
    monkeypatch.setattr(relay, "MOST_WAITING", 10_000_000)
    went_on, sent = [], threading.Event()

    def add(self: log.TurnLog, exchange: Exchange) -> None:
        sent.wait(60)
        went_on.append(exchange.dropped)

    monkeypatch.setattr(log.TurnLog, "add", add)
    with turns_received(session):
        sender = ExchangeSender(session)
        for _ in range(40):
            sender.add(exchange(1_000_000))
        assert not went_on
        sent.set()
        sender.close()
    assert len(went_on) == 40 and any(went_on) and not all(went_on)


def test_a_full_disk_ends_the_trace_and_is_said_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log.TurnLog, "add", full)
    with turns_received(session):
        sender = ExchangeSender(session)
        with pytest.raises(OSError, match="takes no more"):
            for _ in range(1_000):
                sender.add(exchange())
                time.sleep(0.01)
    (said,) = notes(session)
    assert said.count(b"No space left") == 1


def test_a_request_that_cannot_be_told_costs_its_own_turn(session: Session) -> None:
    """JSON is read deeper than it is written."""
    nested = b'{"messages": [{"role": "user", "content": ' + b"[" * 300 + b"]" * 300 + b"}]}"
    with turns_received(session):
        sender = ExchangeSender(session)
        for body in (b"{}", nested, exchange().request):
            sender.add(Exchange(CHAT, sent=1.0, ended=2.0, status=400, request=bytearray(body)))
        sender.close()
    assert [line["number"] for line in lines(session)] == [0, 1, 2]
    assert "unread" in lines(session)[1] and "unread" not in lines(session)[2]
    assert not notes(session)


def test_a_server_goes_on_where_nobody_takes_its_turns(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the Recording says that they are missing."""
    monkeypatch.setenv(SESSION_VARIABLE, str(session.file))
    answer = (200, b"application/json", [b"{}"])
    app = TurnRecorder(Server(*[answer] * 100))
    for _ in range(100):
        assert b"".join(ask(app, b"{}")) == b"{}"
        time.sleep(0.01)
    (said,) = notes(session)
    assert b"takes no more" in said


def test_a_server_and_kcap_record_together(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SESSION_VARIABLE, str(session.file))
    answer = (200, b"application/json", [orjson.dumps({"id": "chat-1", "choices": []})])
    with turns_received(session):
        app = TurnRecorder(Server(*[answer] * 3))
        for _ in range(3):
            ask(app, bytes(exchange().request))
        assert app._log is not None
        app._log.close()
    assert [(line["status"], line["id"]) for line in lines(session)] == [(200, "chat-1")] * 3


def test_where_there_can_be_no_socket_is_said(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SOCKET", "longer than an address" * 10)
    with pytest.raises(KcapError, match="--agent-trace needs a socket in "), turns_received(session):
        pass
