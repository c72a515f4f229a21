"""Solutions read from a folder: each form, and in which order."""

from __future__ import annotations

import pytest
from bench_datasets import SCALE, write_small
from solution_files import NAMED, RETURNING, WRITING, document, one, read, reason, write

from kcap.errors import CallError
from kcap.schemas.flashinfer import kernel_description as older
from kcap.schemas.flashinfer.definition import AxisConst
from kcap.schemas.flashinfer.kernel_description import from_definition


def test_flashinfer_bench_solutions_are_read_at_any_depth(tmp_path):
    write(tmp_path / "solutions" / "me" / "test" / "scale", mine__json=document({"main.py": RETURNING}))
    write(tmp_path, other__json=document({"main.py": RETURNING}, name="other"))
    found, refused = read(tmp_path)
    assert [(one.solution.name, one.file.name) for one in found] == [("other", "other.json"), ("mine", "mine.json")]
    assert not refused


def test_a_datasets_definitions_are_not_taken_for_solutions(tmp_path):
    dataset = write_small(tmp_path / "dataset")
    write(dataset / "solutions" / "me", mine__json=document({"main.py": RETURNING}))
    assert one(dataset).name == "mine"


def test_plain_file_names_its_definition_in_a_comment(tmp_path):
    read_ = one(write(tmp_path, mine__py=NAMED))
    assert (read_.name, read_.definition, read_.author, read_.spec.language) == ("mine", "scale", "local", "python")
    assert read_.spec.entry_point == "mine.py::run"
    assert read_.sources[0].content == NAMED
    assert one(write(tmp_path, mine__py=NAMED.replace("# d", "#D"))).definition == "scale"


@pytest.mark.parametrize(
    "head", ["#!/usr/bin/env python\n# definition: two\n", '"""Text\n# more"""\n\n# definition: two\n']
)
def test_comment_may_follow_a_shebang_or_the_docstring(tmp_path, head):
    assert one(write(tmp_path, mine__py=f"{head}def run(x):\n    return x, x\n"), "scale").definition == "two"


def test_comment_below_a_statement_names_nothing(tmp_path):
    assert one(write(tmp_path, mine__py=f"import torch\n# definition: two\n{RETURNING}"), "scale").definition == "scale"
    assert "--definition" in reason(write(tmp_path, mine__py=f"@staticmethod\n# definition: scale\n{RETURNING}"))


def test_plain_file_called_as_its_definition_needs_no_comment(tmp_path):
    assert one(write(tmp_path, scale__py=RETURNING)).definition == "scale"
    assert reason(write(tmp_path, scale__py=RETURNING), "two").startswith("scale.py: run takes 2 parameters")


@pytest.mark.parametrize(
    ("parameters", "writes"),
    [
        ("x, eps", False),
        ("x, eps, y", True),
        ("x, eps, y=None", False),
        ("x, eps, block=64", False),
        ("*arguments", False),
        ("x, eps, /, y", True),
    ],
)
def test_outputs_are_passed_if_run_cannot_be_called_without(tmp_path, parameters, writes):
    text = f"def run({parameters}):\n    return x\n"
    assert one(write(tmp_path, mine__py=text), "scale").spec.destination_passing_style is writes


@pytest.mark.parametrize(
    "source",
    ["run = partial(scaled, 2)", "if fast:\n    def run(x, eps): ...", "class run: ...", "from kernels import run"],
)
def test_run_that_is_no_plain_function_returns_its_outputs(tmp_path, source):
    write(tmp_path, mine__py=f"# definition: scale\n{source}\n")
    (found,), refused = read(tmp_path)
    assert not refused and not found.solution.spec.destination_passing_style


@pytest.mark.parametrize("parameters", ["", "x", "x, eps, y, z", "x, eps, *, key"])
def test_run_with_other_parameters_is_refused(tmp_path, parameters):
    said = reason(write(tmp_path, mine__py=f"def run({parameters}):\n    return 1\n"), "scale")
    assert "scale has 2 inputs, and 1 outputs that may follow them" in said


@pytest.mark.parametrize(
    ("line", "language"),
    [
        ("import triton", "triton"),
        ("import triton.language as tl", "triton"),
        ("from triton import jit", "triton"),
        ("def f():\n    import triton", "triton"),
        ("import tritonish", "python"),
        ("from .triton import x", "python"),
    ],
)
def test_file_that_imports_triton_is_of_triton(tmp_path, line, language):
    assert one(write(tmp_path, mine__py=f"{line}\n{RETURNING}"), "scale").spec.language == language


def test_file_is_never_run(tmp_path):
    target = tmp_path / "ran"
    write(tmp_path / "in", mine__py=f"# definition: scale\nopen({str(target)!r}, 'w')\n{RETURNING}")
    assert one(tmp_path / "in").name == "mine"
    assert not target.exists()


def test_older_sets_code_is_a_solution_that_is_given_its_outputs(tmp_path):
    description, _ = from_definition(SCALE.model_copy(update={"axes": {**SCALE.axes, "n": AxisConst(value=4)}}))
    path = write(tmp_path, fast__json=older.to_bytes(description.model_copy(update={"reference_code": WRITING})))
    read_ = one(path)
    assert (read_.name, read_.definition, read_.spec.entry_point) == ("fast", "scale", "fast.py::run")
    assert read_.spec.destination_passing_style
    assert read_.sources[0].content == WRITING
    renamed = {"name": "scale", "code": WRITING} | {
        key: value for key, value in description.model_dump(mode="json").items() if key not in ("id", "reference_code")
    }
    assert one(write(tmp_path, fast__json=renamed)) == read_


def test_older_sets_code_must_fit_the_definition(tmp_path):
    described = from_definition(SCALE)[0].model_dump(mode="json") | {"reference_code": WRITING}
    turned = described | {"inputs": dict(reversed(described["inputs"].items()))}
    assert "eps, x; the Definition has x, eps, in this order" in reason(write(tmp_path, a__json=turned))
    assert "defines no plain function run" in reason(write(tmp_path, a__json=described | {"reference_code": "..."}))
    assert "there is no Definition 'scalee'" in reason(write(tmp_path, a__json=described | {"id": "scalee"}))


def test_hidden_folders_and_caches_are_left_out(tmp_path):
    for name in (".git", "__pycache__", ".ipynb_checkpoints"):
        write(tmp_path / name, mine__py=NAMED)
    assert one(write(tmp_path, mine__py=NAMED)).name == "mine"


def test_folder_without_solutions_is_a_wrong_call(tmp_path):
    for path, said in ((tmp_path / "nowhere", "no such folder"), (write(tmp_path, a__txt=""), "has no Solution")):
        with pytest.raises(CallError, match=said):
            read(path)


def test_order_is_that_of_the_paths(tmp_path):
    for name in ("b", "a/z", "d", "a/c"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(NAMED)
    order = [one.file.relative_to(tmp_path).as_posix() for one in read(tmp_path)[0]]
    assert order == ["a/c.py", "a/z.py", "b.py", "d.py"]
