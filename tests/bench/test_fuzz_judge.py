"""Programs that `scripts/fuzz_judge.py` draws: the same for a seed, and found out where a judge believes them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.schemas.results.outcome import Clocked, Outcome

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
fuzz: Any = importlib.import_module("fuzz_judge")


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(0, 100))
def test_a_program_is_the_same_for_its_number_and_seed_and_is_python(number, seed):
    program = fuzz.drawn(number, seed)
    assert program == fuzz.drawn(number, seed)
    compile(program.source, "program", "exec")
    assert all(name in program.source for name in program.tricks)


def test_every_trick_is_drawn():
    drawn = {name for number in range(200) for name in fuzz.drawn(number, 0).tricks}
    assert drawn == {trick.__name__ for trick in fuzz.judge_tricks.TRICKS}


@pytest.mark.parametrize(
    ("us", "wrong", "found"), [(100, False, 0), (61, False, 0), (50, False, 1), (100, True, 1)], ids=str
)
def test_a_judge_that_believes_a_program_is_found_out(monkeypatch, us, wrong, found):
    fuzzer = fuzz.Fuzzer(0, None)
    program = fuzz.Program(7, "softmax", ("nothing",), "", wrong)

    def judged(asked):
        time = Clocked(median_us=us if asked is program else 100, q1_us=1, q3_us=1)
        return Outcome(solution="s", definition=asked.kernel, workload="w", status="PASSED", time=time)

    monkeypatch.setattr(fuzzer, "judge", judged)
    assert fuzzer.measure("softmax") == 100
    fuzzer.try_one(program)
    assert len(fuzzer.found) == found


def test_an_honest_kernel_is_judged_again_on_a_busy_machine_and_found_where_it_is_condemned(monkeypatch):
    fuzzer, time = fuzz.Fuzzer(0, None), Clocked(median_us=100, q1_us=1, q3_us=1)
    ends = [("TIMEOUT", None), None, ("NOT_JUDGED", None), ("PASSED", time), ("REWARD_HACK", None)]

    def judged(asked):
        end = ends.pop(0)
        return end and Outcome(solution="s", definition=asked.kernel, workload="w", status=end[0], time=end[1])

    monkeypatch.setattr(fuzzer, "judge", judged)
    assert fuzzer.measure("softmax") == 100 and not fuzzer.found and len(ends) == 1
    fuzzer.measure("softmax")
    assert "is condemned: REWARD_HACK" in fuzzer.found[0] and fuzzer.own_us["softmax"] == 100


@pytest.mark.alone
def test_a_few_programs_pass_in_no_time_that_they_did_not_take(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz_judge.py", "--programs", "8", "--seed", "1"])
    with pytest.raises(SystemExit) as ended:
        fuzz.main()
    assert ended.value.code is False and "8 programs in" in capsys.readouterr().out
