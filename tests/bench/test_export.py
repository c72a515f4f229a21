"""The command: what it refuses, what it says, and that it destroys nothing it did not make."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest
import torch

from kcap import bench
from kcap.bench import exports
from kcap.bench.contents import open_contents
from kcap.bench.exports import ExportRequest, find_exporter, targets
from kcap.bench.solutions import read_solutions
from kcap.errors import FormatError
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, DefinitionTensor
from kcap.schemas.results import export_loss as loss_file

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
    assert loss["total"] == 100 + 2 * 10 + 100 + 12 * 10  # the region is none of them
    assert all(lost["share"] == lost["count"] / loss["total"] for lost in loss["lost"] + loss["reduced"])


@pytest.mark.parametrize("target", [name for name in OF_CALLS if name != "parquet"])
def test_views_are_lost_by_name(target, everything, exported):
    _, loss = exported(everything, target)
    (view,) = [lost for lost in loss["lost"] if lost["operator"] == "aten::view"]
    assert (view["reason"], view["calls"], view["count"]) == (loss_file.VIEW, 1, 100)


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
    assert loss_file.VIEW in done.out
    assert done.err.startswith("Next: python -m BackendBench")


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
        ("REC", ("--measurements", "nothing"), "kcap replay"),
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
    assert sum(int(row.split(",")[1]) for row in rows) == loss.exported < loss.total
