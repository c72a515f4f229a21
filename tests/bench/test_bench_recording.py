"""`kcap bench RECORDING`: Definitions and Workloads are derived once, and only for what there are Solutions for."""

from __future__ import annotations

import orjson
import pytest
from derived_calls import METADATA, floats, linear
from derived_calls import call as named
from judged import outcomes_in, statuses

from kcap.bench.run import options, subject
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.recording.recording import write_recording
from kcap.schemas.recording.signature import call_key
from kcap.schemas.results import measurement as measurements_file
from kcap.schemas.results.measurement import Measurement
from kcap.schemas.results.outcome import ReferenceCheck

GEMM = "gemm_bf16_n16_k32"
SILU = named(2, "aten::silu", self=floats(4, 32))
CALLS = [linear(0, 1, count=30), linear(1, 7, count=2), SILU]


def write_py(folder, name="mine", definition=GEMM, run="A, B", **told):
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(f"# {orjson.dumps(told).decode()}\n# definition: {definition}\ndef run({run}):\n    return None\n")
    return path


@pytest.fixture
def llama(tmp_path):
    write_recording(tmp_path / "a.kcap", METADATA, CALLS)
    write_py(tmp_path / "solutions", us=5, reference_us=20)
    return tmp_path / "a.kcap"


@pytest.fixture
def checked(monkeypatch):
    """Which Definitions' references were checked, in each run; what the checks say can be changed."""
    runs, says = [], {"status": "agrees"}

    def check(checkers, derived):
        runs.append([kernel.definition.name for kernel in derived.kernels])
        for kernel in derived.kernels:
            call = kernel.uses[0].call
            yield ReferenceCheck(definition=kernel.definition.name, operator=call.operator, call=call.id, **says)

    monkeypatch.setattr(subject, "check_references", check)
    return runs, says


def test_a_recording_is_judged_on_what_was_derived_from_it(bench, llama, checked, tmp_path):
    done = bench(path=llama)
    assert done.code == 0, done.err + done.out
    assert set(statuses(tmp_path / "out").values()) == {"PASSED"}
    assert sorted(one.count for one in outcomes_in(tmp_path / "out")) == [2, 30]
    dataset = Dataset.load(tmp_path / "out" / "dataset")
    assert list(dataset.definitions) == [GEMM]
    assert "status:verified" in dataset.definitions[GEMM].tags
    assert len(dataset.workloads[GEMM]) == 2


def test_only_definitions_that_have_solutions_are_checked_and_only_once(bench, llama, checked, tmp_path):
    bench(path=llama)
    bench("--resume", path=llama)
    write_py(tmp_path / "solutions", "new")
    bench("--resume", path=llama)
    assert checked[0] == [[GEMM]]


def test_a_definition_that_a_new_solution_is_of_joins_the_dataset(bench, llama, checked, tmp_path):
    bench(path=llama)
    derived = sorted(subject.open_subject(llama, trust=False).definitions)
    (other,) = set(derived) - {GEMM}
    write_py(tmp_path / "solutions", "other", other, run="x")
    assert bench("--resume", path=llama).code == 0
    assert checked[0] == [[GEMM], [other]]
    assert sorted(Dataset.load(tmp_path / "out" / "dataset").definitions) == derived
    assert len(outcomes_in(tmp_path / "out")) == 3


def test_a_reference_that_differs_from_the_operator_judges_nobody(bench, llama, checked, tmp_path):
    checked[1].update(status="differs", reason="output C is off by 9 of what is allowed")
    done = bench(path=llama)
    assert done.code == 1
    assert set(statuses(tmp_path / "out").values()) == {"NOT_JUDGED"}
    reason = outcomes_in(tmp_path / "out")[0].reason
    assert reason.startswith("its reference differs from the recorded operator aten::linear: output C is off")
    again = bench("--resume", path=llama)
    assert (again.code, checked[0]) == (1, [[GEMM]])


def test_a_check_that_could_not_run_here_is_no_fault(bench, llama, checked):
    checked[1].update(status="skipped", reason="no such operator on a CPU")
    assert bench(path=llama).code == 0


def test_an_output_of_another_recording_names_both(bench, llama, checked, tmp_path):
    bench(path=llama)
    write_recording(tmp_path / "b.kcap", METADATA, [linear(0, 1, count=31)])
    done = bench("--resume", path=tmp_path / "b.kcap")
    assert (done.code, str(llama) in done.err, "b.kcap" in done.err) == (2, True, True)


def test_an_output_never_lies_in_the_recording(kcap, llama, tmp_path):
    done = kcap("bench", llama, "--solutions", tmp_path / "solutions", "-o", llama / "out")
    assert (done.code, "lies in" in done.err) == (2, True)


def test_fewer_layers_than_the_model_has_are_said(bench, checked, tmp_path):
    write_recording(tmp_path / "a.kcap", METADATA.model_copy(update={"layers_model": 32}), CALLS)
    write_py(tmp_path / "solutions")
    assert "recorded 2 of the model's 32 layers" in bench(path=tmp_path / "a.kcap").out


def test_the_share_is_of_the_engines_own_kernels(bench, llama, checked, tmp_path):
    times = zip(CALLS, (10, 50, 100), strict=True)
    lines = [
        Measurement(call=one.id, key=call_key(one), operator=one.operator, count=one.total, median_us=us)
        for one, us in times
    ]
    measurements_file.write_measurements(tmp_path / "m.jsonl", lines)
    out = bench("--measurements", tmp_path / "m.jsonl", path=llama).out
    of_engine = ", the engine's kernels)"
    assert f"{GEMM}/local/mine saves 16.7% of decode time (150.00 µs of 900.00 µs{of_engine}" in out
    assert f"{GEMM}/local/mine saves 90.0% of prefill time (90.00 µs of 100.00 µs{of_engine}" in out


def test_references_are_checked_beside_the_recorded_operators(bench, llama, tmp_path):
    done = bench(path=llama)
    assert done.code == 0, done.err
    checks = (tmp_path / "out" / "dataset" / "checks.jsonl").read_bytes().splitlines()
    assert {orjson.loads(line)["status"] for line in checks} == {"agrees"}


def test_what_no_solution_may_see_is_hidden_and_nothing_else(bench, llama, checked, tmp_path, monkeypatch):
    seen, session = [], options.Options.session
    monkeypatch.setattr(options.Options, "session", lambda self, root: seen.append(session(self, root)) or seen[0])
    bench("--memory", 2, "--build-timeout", 30, path=llama)
    (told,) = seen
    assert told["root"] == str(tmp_path / "out" / "dataset")
    assert (told["memory"], told["build_timeout"]) == (2 << 30, 30)
    assert {str(llama), str(tmp_path / "out"), str(tmp_path / "out" / "dataset" / "workloads")} <= set(told["hidden"])
    assert str(tmp_path) not in told["hidden"]


def test_a_trace_file_is_judged_on_what_is_derived_from_it(bench, tmp_path):
    trace = "Operator: aten.mm.default\ncnt: 7, ((T([4, 64], bf16), T([64, 16], bf16)), {})\n"
    (tmp_path / "trace.txt").write_text(trace)
    (name,) = subject.open_subject(tmp_path / "trace.txt", trust=False).definitions
    write_py(tmp_path / "solutions", definition=name)
    done = bench(path=tmp_path / "trace.txt")
    assert done.code == 0, done.err
    assert [(one.status, one.count) for one in outcomes_in(tmp_path / "out")] == [("PASSED", 7)]
