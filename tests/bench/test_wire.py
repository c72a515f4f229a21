"""The judge's messages as the driver reads them, and its answers."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.judge import wire

NUMBERS = st.integers(0, (1 << 64) - 1)


@given(NUMBERS, st.integers(0, 4000), st.integers(0, 4095))
def test_mixed_numbers_have_64_bits_and_differ_by_invocation(seed, i, j):
    found = wire.mixed(seed, i, j)
    assert 0 <= found < 1 << 64
    assert found != wire.mixed(seed, i + 1, j)


def test_mixed_is_splitmix64():
    """The first outputs of splitmix64 seeded with 1234567, as published with its reference implementation."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [wire.mixed(1234567, 0, j) for j in range(3)] == published


@given(NUMBERS, st.integers(0, 4000), st.integers(2, 5))
def test_one_variant_in_four_is_another(seed, i, variants):
    assert 0 <= wire.variant(seed, i, variants) < variants
    assert wire.variant(seed, i, 1) == 0


def test_variants_are_mostly_the_workloads_own():
    own = sum(wire.variant(7, i, 3) == 0 for i in range(2000))
    assert 1350 < own < 1650


@given(NUMBERS, st.binary(max_size=200))
def test_an_answer_is_read_whatever_its_text(stray, text):
    content = struct.pack("<IIIQQQ", 1, 2, 3, 4, stray, 5) + text
    answer = wire.answered(content, 9)
    assert (answer.code, answer.iteration, answer.stray_ns, answer.wall_ns) == (1, 2, stray, 9)


@given(st.binary(max_size=wire.ANSWER.size - 1))
def test_less_than_an_answer_is_none(content):
    with pytest.raises(ValueError):
        wire.answered(content, 0)


@pytest.mark.parametrize(
    "value, kind", [(None, wire.NOTHING), (True, wire.BOOLEAN), (3, wire.INTEGER), (2.5, wire.REAL)]
)
def test_scalars_are_told_by_their_type(value, kind):
    assert wire.scalar(value).kind == kind
