"""What the judge makes of a process that answers too early, too often or for another: the other end is played here."""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kcap.bench.judge.driver import protocol
from kcap.bench.judge.process import Process, ProcessEnded, SpokeUnasked

FINE = struct.pack("<IIIQQQ", *[0] * 6)


@pytest.fixture
def both():
    """A process that runs nothing, and its end of the channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = SimpleNamespace(end=lambda request: {"how": "ended"})
    with ours, theirs, tempfile.TemporaryFile() as log:
        yield Process(server, SimpleNamespace(timeout=5.0), 0, ours, Path("/nowhere"), log, []), theirs


def asked(both, answers):
    """What the judge takes for the answer, where the other end sends what `answers` makes of its question's number."""
    one, theirs = both

    def answer():
        nonce = theirs.recv(protocol.LONGEST)[: protocol.NONCE]
        for content in answers(nonce):
            theirs.send(content)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        return one.ask(protocol.check_message())
    finally:
        thread.join()


def test_an_answer_repeats_the_number_of_its_question(both):
    told = {asked(both, lambda nonce: [nonce + FINE + nonce.hex().encode()]).text for _ in range(3)}
    assert len(told) == 3


@pytest.mark.parametrize("nonce", [b"", bytes(protocol.NONCE)], ids=["none", "another"])
def test_an_answer_without_it_is_refused(both, nonce):
    with pytest.raises(SpokeUnasked):
        asked(both, lambda _: [nonce + FINE])
    assert both[0].how == "ended"


def test_who_answers_twice_is_refused_before_the_next_question(both):
    assert asked(both, lambda nonce: [nonce + FINE] * 2).code == protocol.FINE
    with pytest.raises(SpokeUnasked):
        both[0].ask(protocol.check_message())
    assert both[0].how == "ended"
    with pytest.raises(ConnectionResetError):  # it was not asked: what it had said was never read
        both[1].recv(protocol.LONGEST)


def test_a_process_that_is_gone_has_ended_and_said_nothing(both):
    both[1].close()
    with pytest.raises(ProcessEnded) as ended:
        both[0].ask(protocol.check_message())
    assert not isinstance(ended.value, SpokeUnasked)
