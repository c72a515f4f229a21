"""`--num-prompts` and `--input-len` with several numbers: how they are read, paired and refused, what they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import orjson
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kcap.capture.controller import frameworks
from kcap.capture.controller import run as controller_run
from kcap.capture.session import as_list
from kcap.capture.turns.sender import Load
from kcap.capture.window.profiled import MOST_OFFLINE, TOKENS, profiled_loads
from kcap.commands import record
from kcap.commands.record import NumbersRange

WORDS = ("--model", "meta-llama/Llama-3.1-8B", "--load-format", "dummy", "-o")


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6))
def test_numbers_are_read_as_they_are_written(numbers: list[int]) -> None:
    read = NumbersRange(1).convert(",".join(map(str, numbers)), None, None)
    assert as_list(read) == numbers
    assert read == (numbers[0] if len(numbers) == 1 else tuple(numbers)), "a single one stays a number"


@pytest.mark.parametrize("wrong", ["", ",", "1,", ",1", "1,,2", "1,0", "-1,2", "1,2.5", "1,x", "1 2"])
def test_what_is_no_such_list_is_refused(wrong: str) -> None:
    with pytest.raises(click.BadParameter):
        NumbersRange(1).convert(wrong, None, None)


def test_a_list_says_which_number_is_wrong_as_one_alone_does() -> None:
    for words in ("0", "4,0"):
        with pytest.raises(click.BadParameter, match=r"^0 is not in the range x>=1\.$"):
            NumbersRange(1).convert(words, None, None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`started(words…)`: the job that an engine would be started with, or the error."""

    def run(*words: object) -> Any:
        jobs: list[Any] = []

        def start(command_line: list[str], *others: object) -> None:
            jobs.append(orjson.loads(Path(command_line[-1]).read_bytes()))
            raise KeyboardInterrupt

        monkeypatch.setattr(controller_run, "record_command_line", start)
        found = frameworks.find_adapter("vLLM")
        monkeypatch.setattr(frameworks, "find_framework", lambda name: found)
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        ran = CliRunner().invoke(record.command, [*WORDS, str(tmp_path / "out"), *map(str, words)])
        return jobs[0] if jobs else str(ran.exception)

    return run


def test_a_single_number_starts_what_it_did(started: Any) -> None:
    job = started("--num-prompts", 3, "--input-len", 2100)
    assert (job["workload"]["num_prompts"], job["workload"]["input_len"]) == (3, 2100)
    assert job["engine_arguments"]["max_model_len"] == 2132
    job = started()
    assert (job["workload"]["num_prompts"], job["workload"]["input_len"], job["workload"]["output_len"]) == (8, 128, 32)


def test_an_engine_that_would_not_find_kcap_is_not_started(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkout that is not installed, say: its entry points are nowhere."""
    monkeypatch.setattr(frameworks.metadata, "entry_points", lambda group: [])
    assert "vLLM would not load kcap: its plugin is not registered in this environment: " in started()


def test_the_longest_prompt_decides_the_context(started: Any) -> None:
    job = started("--num-prompts", "1,16,128", "--input-len", "256,4096,128", "--output-len", 16)
    assert job["engine_arguments"]["max_model_len"] == 4096 + 16
    assert (job["workload"]["num_prompts"], job["workload"]["input_len"]) == ([1, 16, 128], [256, 4096, 128])


def test_no_context_is_longer_than_the_model_was_made_for(started: Any) -> None:
    """vLLM refuses one that is; a model that embeds needs no room for an answer."""
    longest = ("--input-len", 512, "--output-len", 16)
    assert started("--model", "BAAI/bge-large-en-v1.5", *longest)["engine_arguments"]["max_model_len"] == 512


def test_one_length_holds_for_all_loads(started: Any) -> None:
    assert started("--num-prompts", "1,2", "--input-len", 9)["workload"]["input_len"] == 9


@pytest.mark.parametrize(("counts", "lengths"), [("8", "1,2"), ("1,2", "1,2,3"), ("1,2,3", "1,2")])
def test_lengths_that_do_not_pair_are_an_error(counts: str, lengths: str, started: Any) -> None:
    said = started("--num-prompts", counts, "--input-len", lengths)
    many = f"--input-len has {lengths.count(',') + 1} numbers, --num-prompts {counts.count(',') + 1}"
    assert said == f"{many}: give one for all loads, or as many as those"


@pytest.mark.parametrize("words", [("--num-prompts", 8), ("--input-len", "1,2")])
def test_prompts_of_a_file_have_their_own_number_and_lengths(
    words: tuple[str, object], started: Any, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text("[1, 2]\n")
    assert "--prompts FILE has the prompts" in started("--prompts", tmp_path / "p.jsonl", *words)
    assert started("--prompts", tmp_path / "p.jsonl")["workload"]["prompts"] == [[1, 2]]


def test_a_trace_is_run_without_a_server(started: Any, tmp_path: Path) -> None:
    lines = [{"timestamp": at, "input_length": 900, "output_length": 30, "session_id": "a"} for at in (0, 40, 80)]
    (tmp_path / "load.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    job = started("--workload", tmp_path / "load.jsonl", "--speed", 2)
    assert (job["workload"]["num_prompts"], job["workload"]["input_len"], job["workload"]["output_len"]) == (1, 900, 30)
    load = Load.of(job["load"])
    assert [(request.parent, request.prompt and request.prompt.length) for request in load.requests] == [
        (None, 900),
        (0, 900),
        (1, 900),
    ]
    assert "leave other options" in started("--workload", tmp_path / "load.jsonl", "--output-len", 2)
    assert "are of --workload" in started("--concurrency", 2)


@given(st.integers(1, 200))
def test_the_profiled_steps_are_shared_by_the_loads(loads: int) -> None:
    chosen, tokens = profiled_loads(range(loads), 100)
    assert tokens >= 2, "a prefill and a decode"
    assert len(chosen) * tokens <= MOST_OFFLINE
    assert chosen == sorted(set(chosen)), "each once"
    assert chosen == list(range(loads)) or (len(chosen) == MOST_OFFLINE // 2 and chosen[-1] == loads - 1)
    assert chosen[0] == 0


def test_the_profiled_steps_have_few_tokens_of_each_request() -> None:
    assert [profiled_loads(range(loads), 100)[1] for loads in (1, 8, 9, 32, 33)] == [TOKENS, TOKENS, 7, 2, 2]
    assert profiled_loads([1, 2], 3) == ([1, 2], 3)
