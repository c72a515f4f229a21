"""Solutions read from a folder: each form, what is refused and why, and that one bad file costs itself only."""

from __future__ import annotations

import os

import orjson
import pytest
from bench_datasets import SCALE, write_small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solution_files import DEFINITIONS, RETURNING, WRITING, document, write

from kcap.bench.solutions import contents as contents_module
from kcap.bench.solutions import read_solutions
from kcap.errors import CallError
from kcap.schemas import kernel_description as older
from kcap.schemas import solution as solutions_file
from kcap.schemas.definition import AxisConst
from kcap.schemas.kernel_conversion import from_definition

NAMED = f"# definition: scale\nimport torch\n{RETURNING}"


def read(folder, default=None):
    return read_solutions(folder, DEFINITIONS, default)


def one(folder, default=None):
    """The only Solution in `folder`."""
    found, refused = read(folder, default)
    assert not refused, refused
    return found[0].solution


def reason(folder, default=None):
    """Why the only file in `folder` is refused."""
    found, refused = read(folder, default)
    assert not found
    assert len(refused) == 1
    return refused[0].reason


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


LACKING = document({"main.py": "import torch\n"})
BAD = {
    "broken.json": ('{"name": "a",\n "definition": }', "broken.json:2:16: "),
    "list.json": ("[]", "list.json: "),
    "field.json": ({**LACKING, "surplus": 1}, "surplus: Extra inputs"),
    "unknown.json": (
        document({"main.py": RETURNING}, definition="scael"),
        "no Definition 'scael': did you mean scale?",
    ),
    "far.json": (document({"main.py": RETURNING}, definition="zzz"), "there is no Definition 'zzz'"),
    "lacking.json": (LACKING, "main.py defines no run"),
    "nested.json": (document({"main.py": "class A:\n    def run(self): pass\n"}), "main.py defines no run"),
    "syntax.json": (document({"main.py": "def run(:\n"}), "main.py: no valid Python: invalid syntax (line 1)"),
    "suffix.json": (document({"main.cu": "int x;"}, "main.cu::run"), "main.cu is no .py file"),
    "entry.json": (document({"main.py": RETURNING}, "other.py::run"), "other.py is not among sources"),
    "latin.json": (b'{"name": "\xe9"}', "not UTF-8 (byte 10)"),
    "definition.json": (SCALE.model_dump(mode="json"), "a Definition, not a Solution"),
    "latin.py": (b"# caf\xe9\n" + RETURNING.encode(), "not UTF-8 (byte 5)"),
    "helper.py": ("def help():\n    return 1\n", "helper.py: defines no plain function run at its top level"),
    "assigned.py": ("run = print\n", "defines no plain function run at its top level"),
    "nobody.py": (RETURNING, "names no Definition: write '# definition: NAME'"),
    "typo.py": (f"# definition: scal\n{RETURNING}", "did you mean scale?"),
    "broken.py": ("def run(x, eps)\n", "broken.py: no valid Python: expected ':' (line 1)"),
    "zero.py": (b"def run(): pass\0", "zero byte"),
    "empty.py": ("", "defines no plain function run"),
    "a::b.py": (NAMED, "must be file::function"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_refused_with_its_reason(tmp_path, name):
    content, wanted = BAD[name]
    write(tmp_path, **{name.replace(".", "__"): content})
    assert wanted in reason(tmp_path)


def test_bad_files_cost_themselves_only(tmp_path):
    for name, (content, _) in BAD.items():
        write(tmp_path, **{name.replace(".", "__"): content})
    write(tmp_path, mine__py=NAMED)
    found, refused = read(tmp_path)
    assert [one.solution.name for one in found] == ["mine"]
    assert [one.file.name for one in refused] == sorted(BAD)
    told = {one.file.name: (one.name, one.definition) for one in refused}
    assert told["lacking.json"] == ("mine", "scale")
    assert told["broken.json"] == ("broken", None)
    assert told["typo.py"] == ("typo", "scal")


@pytest.mark.parametrize(
    "text",
    [
        "from helpers import run",
        "from helpers import *",
        "run = make()",
        "if True:\n    def run(): pass",
        "class run: pass",
        "async def run(): pass",
    ],
)
def test_entry_point_may_be_bound_in_other_ways(tmp_path, text):
    assert one(write(tmp_path, a__json=document({"main.py": text}))).name == "mine"


@pytest.mark.parametrize("text", ["print(run)", "def f():\n    run = 1", "import x.run"])
def test_entry_point_that_is_only_mentioned_is_lacking(tmp_path, text):
    assert "defines no run" in reason(write(tmp_path, a__json=document({"main.py": text})))


def test_two_solutions_of_one_name_for_one_definition_are_one(tmp_path):
    same = document({"main.py": RETURNING})
    write(tmp_path, a__json=same, b__json=same, c__json=document({"main.py": RETURNING}, definition="two"))
    found, refused = read(tmp_path)
    assert [one.file.name for one in found] == ["a.json", "c.json"]
    assert "scale has a Solution mine already" in refused[0].reason
    assert str(tmp_path / "a.json") in refused[0].reason


def test_links_that_leave_the_folder_are_refused(tmp_path):
    outside = write(tmp_path / "outside", secret__py=NAMED)
    inside = write(tmp_path / "inside", mine__py=NAMED)
    (inside / "out.py").symlink_to(outside / "secret.py")
    (inside / "gone.py").symlink_to(inside / "nowhere.py")
    (inside / "loop.py").symlink_to(inside / "loop.py")
    (inside / "folder").symlink_to(outside)
    found, refused = read(inside)
    assert [one.file.name for one in found] == ["mine.py"]
    assert {one.file.name: one.reason.split(": ", 1)[1][:18] for one in refused} == {
        "out.py": "a link that leads ",
        "gone.py": "not readable (No s",
        "loop.py": refused[2].reason.split(": ", 1)[1][:18],
        "folder": "a link that leads ",
    }


def test_link_within_the_folder_is_a_file_like_others(tmp_path):
    write(tmp_path / "deep", mine__py=NAMED)
    (tmp_path / "other.py").symlink_to("deep/mine.py")
    assert sorted(one.solution.name for one in read(tmp_path)[0]) == ["mine", "other"]


def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    assert reason(tmp_path) == "pipe.py: no regular file"


def test_huge_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(contents_module, "MAX_BYTES", 1 << 20)
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate((1 << 20) + 1)
    assert reason(tmp_path) == "huge.json: larger than 1 MiB"


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


PIECES = st.sampled_from(
    ["def run", "(", ")", ":", "\n", "x, eps", "    return x", "# definition: scale", '"""', "\\", "\0"]
)
KEYS = st.sampled_from(["name", "definition", "spec", "sources", "code", "axes", "id", "inputs", "reference"])
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["scale", "main.py::run", "python"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
CONTENT = st.one_of(
    st.binary(max_size=200),
    st.lists(PIECES, max_size=20).map(lambda pieces: "".join(pieces).encode()),
    st.dictionaries(KEYS, VALUES, max_size=6).map(lambda found: write_json(found)),
    st.sampled_from([b"[" * 100_000, b"(" * 100_000, b"-" * 100_000 + b"1", b"x=" + b"1+" * 50_000 + b"1"]),
)


def write_json(found):
    return orjson.dumps(found, option=orjson.OPT_NON_STR_KEYS) if _fits(found) else b"{}"


def _fits(found):
    if isinstance(found, dict):
        return all(_fits(one) for one in found.values())
    if isinstance(found, list):
        return all(_fits(one) for one in found)
    return not isinstance(found, int) or abs(found) < 1 << 63


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CONTENT, st.sampled_from(["a.json", "a.py"]), st.sampled_from([None, "scale", "none"]))
def test_any_bytes_are_read_or_refused(tmp_path, content, name, default):
    folder = write(tmp_path / "any")
    for old in folder.iterdir():
        old.unlink()
    (folder / name).write_bytes(content)
    found, refused = read(folder, default)
    assert len(found) + len(refused) == 1
    assert all("\n" not in one.reason for one in refused)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(
        st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="/\\"), min_size=1, max_size=40
    ).filter(lambda name: name not in (".", "..")),
    body=st.text(st.characters(codec="utf-8"), min_size=1, max_size=100),
    path=st.sampled_from(["main.py", "deep/er/main.py"]),
)
def test_any_solution_written_is_read_back(tmp_path, name, body, path):
    wanted = solutions_file.Solution.model_validate(
        document({path: RETURNING, "notes.txt": body}, f"{path}::run", name=name)
    )
    folder = write(tmp_path / "back")
    solutions_file.write(folder / "a.json", wanted)
    assert one(folder) == wanted
