"""The judge's messages as the driver reads them, and its answers."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.judge.driver import protocol

NONCE = bytes(range(protocol.NONCE))
NUMBERS = st.integers(0, (1 << 64) - 1)


@given(NUMBERS, st.binary(max_size=200))
def test_an_answer_is_read_whatever_its_text(stray, text):
    content = NONCE + struct.pack("<IIIQQQ", 1, 2, 3, 4, stray, 5) + text
    answer = protocol.read_answer(content, NONCE, 9)
    assert (answer.code, answer.iteration, answer.stray_ns, answer.wall_ns) == (1, 2, stray, 9)


@given(st.binary(max_size=protocol.ANSWER.size - 1))
def test_less_than_an_answer_is_none(content):
    with pytest.raises(ValueError):
        protocol.read_answer(content, content[: protocol.NONCE], 0)


@given(st.binary(min_size=protocol.NONCE, max_size=protocol.NONCE).filter(lambda other: other != NONCE))
def test_the_answer_to_another_message_is_none(other):
    with pytest.raises(ValueError):
        protocol.read_answer(other + struct.pack("<IIIQQQ", *[0] * 6), NONCE, 0)


@pytest.mark.parametrize(
    "value, kind", [(None, protocol.NOTHING), (True, protocol.BOOLEAN), (3, protocol.INTEGER), (2.5, protocol.REAL)]
)
def test_scalars_are_told_by_their_type(value, kind):
    assert protocol.scalar_content(value).kind == kind
