from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcap.capture.controller.offline import read_prompts
from kcap.capture.session import Prompt, Workload
from kcap.errors import FormatError

PROMPT = st.one_of(st.text(min_size=1), st.lists(st.integers(0, 2**31), min_size=1))
FORM = st.sampled_from(["plain", "prompt", "prompt_token_ids"])
here = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@here
@given(written=st.lists(st.tuples(PROMPT, FORM), min_size=1), blank=st.booleans())
def test_every_form_of_a_prompt_reads_back(written: list[tuple[Prompt, str]], blank: bool, tmp_path: Path) -> None:
    lines = [json.dumps(prompt if form == "plain" else {form: prompt, "more": 1}) for prompt, form in written]
    (tmp_path / "p.jsonl").write_text(("\n\n" if blank else "\n").join(lines))
    assert read_prompts(tmp_path / "p.jsonl") == [prompt for prompt, _ in written]


@here
@given(content=st.binary(max_size=300))
def test_any_bytes_are_prompts_or_an_error_with_its_place(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    try:
        prompts = read_prompts(file)
    except FormatError as error:
        assert str(error).startswith(str(file))
        assert "\n" not in str(error)
    else:
        assert prompts


@pytest.mark.parametrize(
    "bad", ['{"prompt": ""}', "[]", "[1, -2]", "[1, 2.5]", "[true]", "17", "null", '{"text": "x"}', "[1, 2", '{"a"']
)
def test_a_bad_line_is_named(bad: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'"good"\n{bad}\n"good"\n')
    with pytest.raises(FormatError) as error:
        read_prompts(file)
    assert error.value.place == f"{file}:2"


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_a_file_without_a_prompt_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(FormatError, match="no prompt"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_text_with_a_line_separator_of_unicode_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps("a\u2028b\x85c", ensure_ascii=False))
    assert read_prompts(tmp_path / "p.jsonl") == ["a\u2028b\x85c"]


@given(st.integers(1, 20), st.integers(1, 50), st.integers(1, 100_000), st.integers(0, 5))
def test_random_prompts_have_their_size_and_repeat(count: int, length: int, vocabulary: int, seed: int) -> None:
    work = Workload(num_prompts=count, input_len=length, seed=seed)
    (prompts,) = work.loads(vocabulary)
    assert [len(prompt) for prompt in prompts] == [length] * count
    assert all(0 <= token < vocabulary for prompt in prompts for token in prompt if isinstance(token, int))
    assert [prompts] == work.loads(vocabulary)


def test_another_seed_draws_other_prompts() -> None:
    assert Workload(seed=0).loads(1000) != Workload(seed=1).loads(1000)


def test_given_prompts_are_asked_as_they_are() -> None:
    prompts: list[Prompt] = ["text", [1, 2]]
    assert Workload(prompts=prompts).loads(1) == [prompts]


SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=2, max_size=5)


@given(SIZES, st.integers(110, 10_000), st.integers(0, 5))
def test_loads_have_their_sizes_and_none_begins_as_an_earlier_one(
    sizes: list[tuple[int, int]], vocabulary: int, seed: int
) -> None:
    counts, lengths = zip(*sizes, strict=True)
    work = Workload(counts, lengths, output_len=3, seed=seed)
    loads = work.loads(vocabulary)
    assert [[len(prompt) for prompt in load] for load in loads] == [[length] * count for count, length in sizes]
    assert all(type(token) is int and 0 <= token < vocabulary for load in loads for prompt in load for token in prompt)
    firsts = [{prompt[0] for prompt in load} for load in loads]
    assert sum(map(len, firsts)) == len(set[str | int]().union(*firsts))
    assert loads == work.loads(vocabulary)
    assert work.longest == max(lengths) + 3
    assert work.largest == max(count * (length + 3) for count, length in sizes)


@given(SIZES, st.integers(2, 10_000))
def test_the_first_of_several_loads_is_what_it_is_alone(sizes: list[tuple[int, int]], vocabulary: int) -> None:
    counts, lengths = zip(*sizes, strict=True)
    assert Workload(counts, lengths).loads(vocabulary)[:1] == Workload(counts[0], lengths[0]).loads(vocabulary)


def test_the_prompts_of_a_single_load_stay_as_they_were() -> None:
    assert Workload(2, 4, seed=0).loads(1000) == [[[864, 394, 776, 911], [430, 41, 265, 988]]]


def test_a_vocabulary_too_small_for_other_beginnings_is_no_endless_loop() -> None:
    assert [len(load) for load in Workload((3, 2), 2).loads(1)] == [3, 2]


def test_one_length_is_of_every_load() -> None:
    assert Workload((1, 3), 7).sizes == Workload((1, 3), (7, 7)).sizes == [[7], [7, 7, 7]]


def test_given_prompts_have_the_sizes_that_they_have() -> None:
    work = Workload(prompts=[[1, 2, 3], [4]], output_len=10)
    assert (work.sizes, work.longest, work.largest) == ([[3, 1]], 13, 24)
