from __future__ import annotations

import ast
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.schemas.files.python_source import MAX_SOURCE, check_positional, function, parameters, parse

TOKENS = st.sampled_from(
    ["def run(", "a", ",", "):", "\n", "    ", "(", ")", "[", "lambda ", ":", "+", "-", '"', "\\", "if "]
)


@given(st.text() | st.lists(TOKENS, max_size=60).map("".join))
def test_arbitrary_text_is_parsed_or_a_value_error(source: str) -> None:
    try:
        assert isinstance(parse(source), ast.AST)
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    "source",
    ["-" * 400_000 + "1", "1" + "+1" * 200_000, "not " * 100_000 + "1", "a" + ".a" * 200_000, "lambda:" * 50_000 + "1"],
    ids=["minus", "plus", "not", "dot", "lambda"],
)
def test_source_that_is_nested_without_end_neither_crashes_nor_hangs(source: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x\0", "it has a zero byte"),
        ("(" * 5_000, "too many nested parentheses"),
        ("x = (\n1", r"was never closed \(line 1\)"),
        ("\ud800", "surrogates not allowed"),
        ("#" * (MAX_SOURCE + 1), "longer than"),
    ],
    ids=["zero", "parentheses", "open", "surrogate", "long"],
)
def test_what_is_no_python_says_why(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(source)


def test_a_doubtful_escape_warns_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse(r'x = "\d"')


def test_the_last_function_of_a_name_counts_as_python_has_it() -> None:
    source = "def run(a): ...\ndef run(a, b): ...\ndef other(): ..."
    assert parameters(function(source, "run")) == ["a", "b"]


@pytest.mark.parametrize(
    ("signature", "counts"),
    [
        ("a, b", {2}),
        ("a, b=1", {1, 2}),
        ("*a", {0, 1, 2, 3}),
        ("a, *b", {1, 2, 3}),
        ("a, /, b", {2}),
        ("a, *, b=1", {1}),
        ("a, *, b", set()),
    ],
)
def test_how_many_arguments_a_function_takes_is_what_python_says(signature: str, counts: set[int]) -> None:
    node = function(f"def run({signature}): ...", "run")
    taken = set()
    for count in range(4):
        try:
            check_positional(node, count)
            taken.add(count)
        except ValueError:
            pass
    assert taken == counts
