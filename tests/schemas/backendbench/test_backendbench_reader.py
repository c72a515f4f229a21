from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.backendbench import Problems, TraceLine, read, write
from kcap.schemas.backendbench.line import MAX_LINE
from kcap.schemas.recording.values import TensorSpec

TRACES = sorted((Path(__file__).parents[2] / "data" / "backendbench-traces").glob("*.txt"))
GOOD = ["Operator: aten.relu.default", "cnt: 3, ((T([8], f32),), {})"]


def refusal(lines):
    with pytest.raises(FormatError) as caught:
        list(read(lines))
    return caught.value


def test_a_line_has_its_operator_count_arguments_and_number():
    (line,) = read(["", *GOOD])
    assert line == TraceLine("aten.relu.default", 3, [TensorSpec((8,), "float32", device="cuda")], {})
    assert (line.line, line.name) == (3, "aten::relu")


def test_repeated_operator_blocks_concatenate():
    found = [(line.operator, line.count) for line in read([*GOOD, "Operator: aten.neg.default", GOOD[1], *GOOD])]
    assert found == [("aten.relu.default", 3), ("aten.neg.default", 3), ("aten.relu.default", 3)]


def test_synthetic_lines_have_a_count_of_zero():
    (line,) = read([GOOD[0], "cnt: 0, ((), {})"])
    assert line.count == 0


def test_line_ends_and_trailing_blanks_do_not_matter(tmp_path):
    file = tmp_path / "trace.txt"
    file.write_bytes(b"Operator: aten.relu.default  \r\n\r\ncnt: 3, ((T([8], f32),), {})\t\r\n")
    assert list(read(file)) == list(read(GOOD)) == list(read([line.encode() for line in GOOD]))


@pytest.mark.parametrize(
    ("lines", "place", "reason"),
    [
        (["\ufeff" + GOOD[0], GOOD[1]], "1:1", "byte order mark"),
        ([GOOD[1]], "1:1", "before any 'Operator:' line"),
        ([GOOD[0], "cnt: -3, ((1,), {})"], "2:6", "count N from 0"),
        ([GOOD[0], "cnt: 3,((1,), {})"], "2:8", "count N from 0"),
        ([GOOD[0], "cnt: x, ((1,), {})"], "2:6", "count N from 0"),
        ([GOOD[0], "cnt: 99999999999999999999, ((1,), {})"], "2:6", "count N from 0"),
        ([GOOD[0], "cnt: 9999999999999999999, ((1,), {})"], "2:6", "more than 2**40"),
        ([GOOD[0], "cnt: 3, ((1,), {}) # x"], "2:20", "the end of the line"),
        ([GOOD[0], "cnt: 3, ((1, oops), {})"], "2:14", "unknown word 'oops'"),
        ([GOOD[0], " cnt: 3, ((1,), {})"], "2:1", "blanks before"),
        ([GOOD[0], "# a remark"], "2:1", "neither"),
        (["operator: aten.relu.default"], "1:1", "neither"),
        ([b"Operator: aten.relu.default", b"cnt: 3, (('\xc3\xa9', '\xff'), {})"], "2:17", "not UTF-8"),
        (["Operator: aten.from_file.default"], "1:16", "reaches files or libraries"),
        (["Operator: __import__('os').system('true').x"], "1:21", "not an operator's name"),
        (["Operator: aten.mm.load_library"], "1:19", "reaches files or libraries"),
        ([GOOD[0], "cnt: 1, ((T([1000000000000000], u8),), {})"], "2:11", "TiB"),
        ([GOOD[0], "cnt: 1, ((1,), {'x': '" + "a" * MAX_LINE + "'})"], f"2:{MAX_LINE + 1}", "more than 4 MiB"),
    ],
)
def test_a_bad_line_is_named_with_line_and_column(lines, place, reason):
    error = refusal(lines)
    assert error.place == f"<lines>:{place}"
    assert reason in error.reason


def test_a_bad_file_is_named(tmp_path):
    file = tmp_path / "bad.txt"
    file.write_text("nonsense\n")
    assert refusal(file).place == f"{file}:1:1"
    assert "cannot be read" in refusal(tmp_path / "missing.txt").reason
    assert "cannot be read" in refusal(tmp_path).reason


def test_bad_lines_are_skipped_and_counted():
    refused = ["Operator: aten.from_file.default", GOOD[1], GOOD[1]]
    problems = Problems()
    found = list(
        read(["junk", "junk", *GOOD, "cnt: 1, ((oops,), {})", *refused, *GOOD], keep_going=True, problems=problems)
    )
    assert [line.line for line in found] == [4, 10]
    assert problems.lines == 6
    assert sorted(problems.reasons.values()) == [1, 1, 2, 2]
    assert [error.place for error in problems.first][:3] == ["<lines>:1:1", "<lines>:2:1", "<lines>:5:11"]
    assert list(read(["junk", *GOOD], keep_going=True)) == list(read(GOOD))


def test_counted_reasons_are_bounded():
    problems = Problems()
    lines = (f"cnt: 1, ((x{n},), {{}})" for n in range(1000))
    assert list(read(itertools.chain(GOOD[:1], lines), problems=problems)) == []
    assert (problems.lines, problems.reasons.total()) == (1000, 1000)
    assert len(problems.reasons) <= 101 and len(problems.first) <= 100


def test_a_line_too_long_is_skipped_to_its_end(tmp_path):
    file = tmp_path / "trace.txt"
    with file.open("w") as out:
        out.write("\n".join(GOOD) + "\ncnt: 1, ((")
        out.writelines("1, " * 100_000 for _ in range(40))
        out.write("), {})\n" + GOOD[1] + "\n")
    problems = Problems()
    assert [line.line for line in read(file, problems=problems)] == [2, 4]
    assert problems.first[0].place == f"{file}:3:{MAX_LINE + 1}"


def test_a_long_file_is_read_in_bounded_memory():
    lines = (f"cnt: {n}, ((T([{n % 100}, 64], bf16), [{n}, 'x{n}']), {{}})" for n in range(60_000))
    stream = read(itertools.chain(GOOD[:1], lines))
    assert sum(1 for _ in itertools.islice(stream, 20_000)) == 20_000
    tracemalloc.start()
    assert sum(1 for _ in stream) == 40_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


def test_reading_begins_before_the_stream_has_ended():
    def lines():
        yield from (GOOD[0], GOOD[1], GOOD[1])
        pytest.fail("read ahead")

    assert len(list(itertools.islice(read(lines()), 2))) == 2


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_real_traces_read_back_as_written(trace, tmp_path):
    lines = list(read(trace))
    again = tmp_path / "trace.txt"
    loss = write(again, lines)
    assert lines and list(read(again)) == lines
    assert loss.totals.written == sum(line.count for line in lines) and loss.totals.not_carried == 0
    text = trace.read_text().splitlines()
    assert loss.totals.lines == sum(line.startswith("cnt: ") for line in text)


def test_there_are_real_traces():
    assert len(TRACES) == 8


@given(st.lists(st.text() | st.binary() | st.sampled_from(GOOD), max_size=5))
def test_any_lines_are_read_or_refused(lines):
    with_problems = list(read(lines, keep_going=True))
    try:
        assert list(read(lines)) == with_problems
    except FormatError as error:
        assert error.place.startswith("<lines>:")


@given(st.binary())
def test_any_file_is_read_or_refused(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("files") / "trace.txt"
    file.write_bytes(b"Operator: aten.mm.default\ncnt: 1, ((" + content)
    assert all(line.operator == "aten.mm.default" for line in read(file, keep_going=True) if line.line == 2)
