"""Files that give no Solution: the reason, and that one bad file costs itself only."""

from __future__ import annotations

import os

import orjson
import pytest
from bench_datasets import SCALE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solution_files import NAMED, RETURNING, document, one, read, reason, write

from kcap.bench import solutions as contents_module
from kcap.schemas.flashinfer import solution as solutions_file

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
    "assigned.py": ("run = print\n", "names no Definition: write '# definition: NAME'"),
    "unassigned.py": ("# definition: scale\nruns = 1\n", "defines no plain function run at its top level"),
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
