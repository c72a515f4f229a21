"""The judge's messages as the driver reads them, and its reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.judge.driver import protocol


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(max_size=200), st.binary(max_size=50))
def test_a_report_is_read_whatever_its_text(code, iteration, text, rest):
    found = protocol.read_report(protocol.REPORT.pack(code, iteration, 1, len(text)) + text + rest)
    assert (found.code, found.iteration, found.method) == (code, iteration, 1)
    assert found.text == text.decode(errors="replace")


def test_a_report_that_no_driver_wrote_has_no_endless_text():
    content = protocol.REPORT.pack(protocol.RAISED, 0, 0, 2**32 - 1) + bytes([0x1B]) * protocol.REPORT_BYTES
    assert len(protocol.read_report(content).text) == protocol.MOST_TEXT


@given(st.binary(min_size=protocol.REPORT.size, max_size=300))
def test_whatever_a_candidate_leaves_is_read(content):
    assert len(protocol.read_report(content).text) <= len(content)


@pytest.mark.parametrize(
    "value, kind", [(None, protocol.NOTHING), (True, protocol.BOOLEAN), (3, protocol.INTEGER), (2.5, protocol.REAL)]
)
def test_scalars_are_told_by_their_type(value, kind):
    assert protocol.scalar_content(value).kind == kind
