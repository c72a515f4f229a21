"""A constraint is worked out, and never run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcap.schemas.derive.constraints import BrokenConstraint, check, evaluate, names, solved_axis

VALUES = {
    "batch_size": 3,
    "len_indptr": 4,
    "heads": 32,
    "kv_indptr": torch.tensor([0, 2, 5, 9], dtype=torch.int32),
    "w": torch.empty(6, 5, device="meta"),
}


@pytest.mark.parametrize(
    "text",
    [
        "len_indptr == batch_size + 1",
        "9 == kv_indptr[-1].item()",
        "w.shape[1] == 2 * batch_size - 1",
        "w.shape[-2] == 6 and w.dim() == 2",
        "heads % 8 == 0 and not heads < batch_size",
        "1 < batch_size <= 3",
        "len(w.shape) == 2 or batch_size / 0 == 1",
        "kv_indptr.size(0) == len_indptr",
        "max(batch_size, heads) == heads // 1",
    ],
)
def test_what_constraints_say_holds(text: str) -> None:
    check([text], VALUES, "k")


def test_a_constraint_that_does_not_hold_is_told_with_its_numbers() -> None:
    with pytest.raises(
        BrokenConstraint, match=r"k: its constraint 'len_indptr == batch_size' does not hold \(batch_size=3, len_"
    ):
        check(["len_indptr == batch_size"], VALUES, "k")
    with pytest.raises(
        BrokenConstraint, match=r"'kv_indptr\[-1\].item\(\) == 8' does not hold \(kv_indptr=\[4\], last 9\)"
    ):
        check(["kv_indptr[-1].item() == 8"], VALUES, "k")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('false') == 0",
        "w.__class__ == 1",
        "kv_indptr.tolist() == [0, 2, 5, 9]",
        "len(kv_indptr.tolist()) == 4",
        "kv_indptr.zero_().sum().item() == 0",
        "open('/etc/passwd')",
        "(lambda: 1)() == 1",
        "[x for x in w.shape] == 1",
        "9**9**9 > 1",
        "'a' * 3 == 'aaa'",
        "unknown == 1",
        "kv_indptr[99].item() == 1",
        "batch_size % 0 == 1",
        "batch_size.shape == 1",
        "kv_indptr == 9",
    ],
)
def test_what_a_constraint_may_not_say_is_refused_and_named(text: str) -> None:
    with pytest.raises(BrokenConstraint) as caught:
        check([text], VALUES, "k")
    assert "cannot be worked out" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_beyond_any_size_is_refused_before_the_next_is_larger() -> None:
    with pytest.raises(BrokenConstraint, match="larger than any size"):
        check([" * ".join(["99999999999"] * 400) + " > 1"], {}, "k")


def test_names_and_solutions() -> None:
    assert names("num_kv == kv_indptr[-1].item() + len(w.shape)") == {"num_kv", "kv_indptr", "w"}
    assert solved_axis("len_indptr == batch_size + 1") == ("len_indptr", "batch_size + 1")
    assert solved_axis("batch_size + 1 == len_indptr") == ("len_indptr", "batch_size + 1")
    assert solved_axis("a * 2 == b + 1") is None
    assert solved_axis("a >= b") is None


@given(st.text(max_size=60))
def test_any_text_is_a_value_or_a_refusal(text: str) -> None:
    try:
        evaluate(text, VALUES)
    except (ValueError, TypeError, IndexError, ArithmeticError, RuntimeError):
        return


@given(st.integers(-50, 50), st.integers(-50, 50), st.sampled_from(["+", "-", "*", "//", "%"]))
def test_arithmetic_is_pythons(left: int, right: int, operator: str) -> None:
    if operator in ("//", "%") and right == 0:
        return
    assert evaluate(f"a {operator} b", {"a": left, "b": right}) == eval(f"{left} {operator} ({right})")
