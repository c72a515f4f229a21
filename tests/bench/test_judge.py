"""The judge on real processes: what it says of Solutions, and of Definitions that are at fault themselves."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
import torch
from bench_datasets import SCALE, definition, of, stored, workload
from judge_here import ROWS, judged, made, outcome, scale
from solution_files import RETURNING, WRITING, solution

from kcap.bench.accuracy import Difference
from kcap.bench.judge import reference
from kcap.bench.judge.candidate import FEW, Ran
from kcap.bench.judge.driver import gpu_memory, protocol
from kcap.bench.judge.driver.gpu_memory import GpuMemory
from kcap.bench.judge.judge import timing_caveats
from kcap.bench.judge.process import inherited
from kcap.bench.judge.reference import AtFault
from kcap.bench.judge.timing import Batch
from kcap.bench.judge.trial import Trial
from kcap.bench.judge.verdict import Rejected
from kcap.schemas.results.outcome import Clocked

pytestmark = pytest.mark.alone

HANGS = "while True:\n        pass"
FALLS = [
    ("raises", "x[9999999]", "its reference fails: IndexError"),
    ("nan", "x * float('nan')", "no number of its reference's output y is finite"),
    ("random", "torch.rand_like(x)", "gives other outputs for the same inputs: it draws numbers"),
    ("narrow", "x[:1]", "its reference fails: y: has shape"),
    ("ends", "__import__('os')._exit(3)", "its reference's process ended: exit code 3"),
    ("mutates", "x.mul_(eps)", "its reference changed its input x"),
]


def test_what_is_right_passes_with_its_times(judge):
    found = outcome(judge, RETURNING)
    assert found.status == "PASSED" and found.reason is None
    assert found.accuracy.truth == "reference in float64" and found.accuracy.compared >= 1
    assert found.time.median_us > 0 and found.reference.median_us > 0 and 0 < found.time.way_us < found.time.median_us
    assert found.time.n > 1 and found.time.samples_us and found.threads == 1


def test_what_writes_into_its_outputs_passes(judge):
    assert outcome(judge, WRITING, destination_passing_style=True).status == "PASSED"


def test_what_returns_rows_that_lie_apart_passes(judge):
    padded = "def run(x, eps):\n    out = torch.empty(x.shape[0], 8)[:, :4]\n    return torch.mul(x, eps, out=out)\n"
    found = outcome(judge, f"import torch\n\n\n{padded}", m=5 * ROWS)
    assert found.status == "PASSED", found.reason


@pytest.mark.parametrize(
    "body, status, reason",
    [
        ("x + eps", "INCORRECT_NUMERICAL", "y: is off by"),
        ("x", "INCORRECT_NUMERICAL", "y: is off by"),
        ("torch.zeros_like(x)", "REWARD_HACK", "its outputs do not depend on its inputs"),
        ("(x * eps).half()", "INCORRECT_DTYPE", "is Half, the Definition's is Float"),
        ("(x * eps)[:1]", "INCORRECT_SHAPE", "has shape [1, 4], the Definition's is [4096, 4]"),
        ("(x * eps, x)", "RUNTIME_ERROR", "returns 2 outputs, the Definition has 1"),
        ("None", "RUNTIME_ERROR", "y: is a NoneType, no tensor"),
        ("[][1]", "RUNTIME_ERROR", "IndexError: list index out of range"),
        ("x * eps * float('nan')", "INCORRECT_NUMERICAL", "inf or nan where the reference has numbers"),
        ("x.mul_(eps)", "REWARD_HACK", "it changed its input x"),
        ("torch.empty(x.shape, device='meta')", "RUNTIME_ERROR", "y: is no plain tensor"),
    ],
)
def test_what_is_wrong_is_said(judge, body, status, reason):
    found = outcome(judge, f"import torch\n\n\ndef run(x, eps):\n    return {body}\n")
    assert (found.status, reason in found.reason) == (status, True), found
    assert found.time is None and found.speedup is None


def test_a_tensor_of_another_type_is_as_good_as_any(judge):
    assert (
        outcome(judge, "import torch\n\n\ndef run(x, eps):\n    return torch.nn.Parameter(x * eps)\n").status
        == "PASSED"
    )


def test_an_output_left_unwritten_is_said(judge):
    found = outcome(judge, "def run(x, eps, y):\n    pass\n", destination_passing_style=True)
    assert found.status in ("INCORRECT_NUMERICAL", "REWARD_HACK")


def test_what_does_not_build_is_said_for_each_workload(judge):
    found = outcome(judge, "def run(x, eps:\n    return x\n")
    assert found.status == "COMPILE_ERROR" and "SyntaxError" in found.reason


def test_a_process_that_ends_costs_one_workload_and_not_the_next(judge):
    source = "import os\n\n\ndef run(x, eps):\n    if x.shape[0] == 3:\n        os._exit(7)\n    return x * eps\n"
    made = solution({"main.py": source}, destination_passing_style=False)
    found = [judged(judge, made, SCALE, scale(f"w{m}", m)) for m in (5, 3, 6)]
    assert [one.status for one in found] == ["PASSED", "RUNTIME_ERROR", "PASSED"]
    assert "exit code 7" in found[1].reason


def test_after_three_deaths_the_rest_is_not_tried(judge):
    made = solution({"main.py": "import os\n\n\ndef run(x, eps):\n    os._exit(7)\n"}, destination_passing_style=False)
    found = [judged(judge, made, SCALE, scale(f"w{m}", m)) for m in range(2, 6)]
    assert [one.status for one in found] == ["RUNTIME_ERROR"] * 4
    assert "not tried again" in found[3].reason and found[3].seconds < found[0].seconds + 1


@pytest.mark.parametrize("name, body, reason", FALLS)
def test_a_reference_at_fault_is_not_the_solutions(judge, name, body, reason):
    at_fault = made(name, body)
    mine = solution({"main.py": RETURNING}, definition=name, destination_passing_style=False)
    found = judged(judge, mine, at_fault, scale(of_definition=at_fault))
    assert found.status == "NOT_JUDGED" and reason in found.reason, found.reason
    assert outcome(judge, RETURNING).status == "PASSED"


def test_a_reference_with_some_inf_is_the_measure(judge):
    gives_inf = made("gives_inf", "torch.where(x > 0, x * eps, float('-inf'))")
    source = "import torch\n\n\ndef run(x, eps):\n    return torch.where(x > 0, x * eps, float({}))\n"
    for value, status in (("'-inf'", "PASSED"), ("'nan'", "INCORRECT_NUMERICAL"), ("0", "INCORRECT_NUMERICAL")):
        mine = solution({"main.py": source.format(value)}, definition="gives_inf", destination_passing_style=False)
        found = judged(judge, mine, gives_inf, scale(of_definition=gives_inf))
        assert found.status == status
        assert any("of the reference's numbers are inf or nan" in note for note in found.notes)


def test_an_input_beside_which_all_else_is_large_has_to_be_read(judge):
    """Of a product of bytes a bias is a millionth, as it is drawn; and what no output shows is named."""
    inputs = {"x": of("m n", "int8"), "bias": of("n"), "unread": of("n")}
    biased = definition("biased", inputs, {"y": of("m n", "bfloat16")}, "(x.float() * 1e4 + bias).bfloat16()")
    for body, status in (("x.float() * 1e4 + bias", "PASSED"), ("x.float() * 1e4", "INCORRECT_NUMERICAL")):
        source = f"def run(x, bias, unread):\n    return ({body}).bfloat16()\n"
        mine = solution({"main.py": source}, name=status, definition="biased", destination_passing_style=False)
        found = judged(judge, mine, biased, workload(biased, "w", 4096))
        assert found.status == status, found.reason
        larger, unread = found.notes
        assert larger.startswith("bias: drawn ") and unread == "unread: outputs are right without it"


def test_inputs_that_there_is_no_time_to_leave_out_are_named(judge, monkeypatch):
    monkeypatch.setattr(reference, "SHOWING_SHARE", 1e12)
    found = judged(judge, solution({"main.py": RETURNING}, destination_passing_style=False), SCALE, scale("late", 64))
    assert found.status == "PASSED"
    assert found.notes == ["not known whether outputs are right without x: too slow to try"]


def test_a_reference_that_takes_no_other_dtype_is_run_in_its_own(judge):
    strict = made("strict", "torch.mm(x, torch.eye(4)) * eps")
    mine = solution({"main.py": RETURNING}, definition="strict", destination_passing_style=False)
    found = judged(judge, mine, strict, scale(of_definition=strict))
    assert found.status == "PASSED" and found.accuracy.truth != "reference in float64"


def test_a_missing_blob_that_no_rule_makes_is_named(judge):
    picky = definition("picky", {"x": of("m n"), "places": of("m", "int32")}, {"y": of("m n")}, "x[places.long()]")
    mine = solution({"main.py": "def run(x, places):\n    return x[places.long()]\n"}, definition="picky")
    found = judged(judge, mine, picky, workload(picky, "w", 4, places=stored(picky, "w", "places")))
    assert found.status == "NOT_JUDGED" and "picky_w.safetensors is not there" in found.reason


UNSUPPORTED = "outputs.y: a Definition with outputs of float4_e2m1 is not supported"
PACKED = "torch.zeros(x.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)"
packed = pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")


@packed
def test_outputs_of_a_dtype_that_nothing_compares_are_named(judge):
    four = made("four", PACKED, outputs={"y": of("m n", "float4_e2m1")})
    found = outcome(judge, f"import torch\n\n\ndef run(x, eps):\n    return {PACKED}\n", of_definition=four)
    assert (found.status, found.reason) == ("NOT_JUDGED", UNSUPPORTED)
    assert outcome(judge, RETURNING).status == "PASSED"


@packed
def test_inputs_of_that_dtype_are_drawn(judge):
    body = "x.view(torch.uint8).float() * 2"
    unpack = definition("unpack", {"x": of("m n", "float4_e2m1")}, {"y": of("m n")}, body)
    source = f"import torch\n\n\ndef run(x):\n    return {body}\n"
    mine = solution({"main.py": source}, definition="unpack", destination_passing_style=False)
    assert judged(judge, mine, unpack, workload(unpack, "w", 4096)).status == "PASSED"


def test_keys_and_tokens_of_the_environment_do_not_reach_a_solution():
    given = {"HF_TOKEN": "x", "OPENAI_API_KEY": "y", "PATH": "/bin", "DB_PASSWORD": "z", "TOKENIZERS_PARALLELISM": "0"}
    assert inherited(given) == {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "0"}


@pytest.mark.parametrize("more", [{}, {"constraints": ["ids.max() < 8"]}])
def test_integers_that_a_reference_seldom_takes_are_drawn_smaller(judge, more):
    """One in thirty of the larger ones is too large: some judgements find that out when they time it."""
    inputs = {"ids": of("n", "int64"), "others": of("m", "int64")}
    seldom = definition(
        "bounded" if more else "seldom", inputs, {"y": of("n", "int64")}, "torch.arange(62)[ids] + others[0]", **more
    )
    mine = solution({"main.py": seldom.reference}, definition=seldom.name, destination_passing_style=False)
    found = judged(judge, mine, seldom, workload(seldom, "w", 64))
    assert found.status == "PASSED", found.reason


@pytest.mark.parametrize(
    ("raises", "gpu"), [(AtFault("its reference fails: IndexError"), None), (None, None), (None, 1)]
)
def test_what_a_solution_raises_is_not_its_fault_where_the_reference_does(raises, gpu):
    asked = []

    def truths(seed, numbers):
        asked.append((seed, numbers))
        if raises:
            raise raises

    raised = protocol.Report(protocol.RAISED, iteration=1, text="IndexError")
    candidate = SimpleNamespace(
        open=lambda drawn: None,
        run=lambda numbers, chosen: Ran(raised, 0, 7),
        report=lambda: raised,
        limits=SimpleNamespace(gpu=gpu, gpu_memory=None),
        workload=SimpleNamespace(arena=SimpleNamespace(filled=(7, range(3, 6)))),
    )
    with pytest.raises(AtFault if raises else Rejected, match="IndexError"):
        Trial(candidate, SimpleNamespace(drawn=None, truths=truths), 0).run()
    assert asked == ([] if gpu else [(7, [4])])


def test_how_torch_allocates_is_the_drivers_choice():
    given = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert inherited({**given, "PATH": "/bin"}) == {"PATH": "/bin"}


def test_a_probe_in_which_the_judge_lost_its_core_says_nothing(monkeypatch):
    gpu = GpuMemory.__new__(GpuMemory)
    gpu._probed, lost = torch.zeros(1), iter([0, 1, 1, 1])  # before and after the first probe, and the second
    monkeypatch.setattr(gpu_memory, "_cores_lost", lost.__next__)
    monkeypatch.setattr(GpuMemory, "wait", lambda self: time.sleep(0.05 if self._probed.item() == 1 else 0))
    assert gpu._probe() < 0.05
    assert gpu._probed.item() == 2


def test_nothing_is_left_when_a_solution_has_been_judged(judge):
    outcome(judge, RETURNING, name="first")
    before = len(os.listdir("/proc/self/fd")), len(os.listdir(judge.limits.scratch))
    for number in range(4):
        outcome(judge, RETURNING, name=f"s{number}")
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir(judge.limits.scratch))) == before


def test_a_timed_out_solution_does_not_hold_the_run(judge):
    from dataclasses import replace

    limits = judge.limits
    judge.limits = replace(limits, timeout=2, build_timeout=3)
    try:
        found = outcome(judge, f"def run(x, eps):\n    {HANGS}\n")
    finally:
        judge.limits = limits
    assert found.status == "TIMEOUT" and "took longer than 3 s (--build-timeout)" in found.reason


def test_a_process_that_lost_its_gpu_is_started_again_for_the_next_workload(judge):
    """What CUDA does then: every later call in that process fails, whatever it is."""
    once = """CALLS = []

def run(x, eps):
    CALLS.append(x)
    if CALLS[0].shape[0] == 4096:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return x * eps
"""
    mine = solution({"main.py": once}, name="poisoned", destination_passing_style=False)
    first, second = (judged(judge, mine, SCALE, scale(f"w{m}", m)) for m in (ROWS, 64))
    assert (first.status, "illegal memory access" in first.reason) == ("RUNTIME_ERROR", True)
    assert second.status == "PASSED", second.reason


@pytest.mark.parametrize("way, told", [(None, False), (2.0, False), (10.0, True)])
def test_a_time_of_which_the_way_is_much_is_named(way, told):
    time = Clocked(median_us=100, q1_us=90, q3_us=110, way_us=way)
    assert bool(timing_caveats(time)) is told
    assert timing_caveats(None) == []


def test_each_output_is_compared_as_often_as_it_needs():
    """A flag beside numbers that never recur: who returns it as a constant is right in the numbers."""
    truths = [[bytes([number]), b"off" if number % 9 == 0 else b"on"] for number in range(18)]
    assert Trial(None, None, 0, truths=truths).comparisons_lacking > 32
    assert Trial(None, None, 0, truths=[[number] for number, _ in truths]).comparisons_lacking <= 0


@pytest.mark.parametrize(
    "first, later, status",
    [(0.9, 1.46, "INCORRECT_NUMERICAL"), (0.9, 40.0, "REWARD_HACK"), (0.9, float("inf"), "REWARD_HACK")],
)
def test_what_is_at_the_edge_of_what_is_allowed_is_no_hack(monkeypatch, first, later, status):
    """Right at first and wrong in most timed invocations: by a little, as chance has it, or by a leap."""
    trial = Trial(None, None, 0, differences=[Difference(first)] * FEW, first_error=first)

    def compare(batch):
        trial.differences += [Difference(later)] * 2
        return [("y: is off", None)] * 2

    monkeypatch.setattr(trial, "_compare", compare)
    with pytest.raises(Rejected, match="right at first, wrong in timed invocations: y: is off") as rejected:
        trial._compare_timed(Batch(0, {}))
    assert rejected.value.status == status


def test_an_output_that_was_always_the_same_is_named(judge):
    body = "(x * eps, x.isnan().any(-1))"
    flagged = made("flagged", body, outputs={"y": of("m n"), "found": of("m", "bool")})
    found = outcome(judge, RETURNING.replace("x * eps", body), of_definition=flagged)
    assert found.status == "PASSED", found.reason
    assert [note.split(" in all ")[0] for note in found.notes] == ["found: is the same"]


def test_an_end_is_a_solutions_own_where_another_form_of_the_reference_has_ended(judge):
    greatest = made("greatest", "x.argmax(-1) + 0 * int(eps)", outputs={"y": of("m", "int64")})
    found = outcome(judge, "import os\n\n\ndef run(x, eps):\n    os._exit(3)\n", of_definition=greatest, m=64)
    assert (found.status, "exit code 3" in found.reason) == ("RUNTIME_ERROR", True)
