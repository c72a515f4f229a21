"""schemas/README.md against the code: the fields of a Recording's files, and a glossary with each word once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kcap.schemas.recording.records import (
    Argument,
    Call,
    Count,
    Launch,
    Metadata,
    Program,
    Rank,
    Request,
    Sample,
    Step,
    Tap,
)
from kcap.schemas.recording.turns import Turn
from kcap.schemas.results.command_output import OUTPUTS, format_of_output
from kcap.schemas.validation.formats import FORMATS

FOLDER = Path(__file__).parents[2] / "schemas"
README = (FOLDER / "README.md").read_text()


def cells(row: str) -> str:
    """What follows the first cell of the table's row that begins with `row`."""
    return next(line.removeprefix(row) for line in README.splitlines() if line.startswith(row))


@pytest.mark.parametrize(
    ("row", "model"),
    [
        ("| `recording.json` |", Metadata),
        ("| `calls.jsonl` |", Call),
        ("| `programs.jsonl` |", Program),
        ("| `steps.jsonl` |", Step),
        ("| `requests.jsonl` |", Request),
        ("| `turns.jsonl` |", Turn),
        ("| `samples.jsonl` |", Sample),
        ("| argument (`args`) |", Argument),
        ("| launch |", Launch),
        ("| count |", Count),
        ("| rank |", Rank),
        ("| tap |", Tap),
    ],
)
def test_the_fields_of_a_file_are_the_models(row: str, model: type) -> None:
    assert model.model_fields.keys() <= set(re.findall(r"`(\w+)`", cells(row)))


def test_a_word_of_the_glossary_stands_there_once() -> None:
    glossary = README.split("## Glossary")[1].split("\n## ")[0]
    words = [word.lower() for word in re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)][1:]
    assert len(words) == len(set(words)) >= 30


def test_every_module_that_the_page_names_is_there() -> None:
    roots = (FOLDER, FOLDER.parent)
    named = set(re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", README)) - {"values/", "kernels/"}
    own = [path for path in named if not path.startswith("data/") and "parquet" not in path]  # others' sources
    missing = [path for path in own if not any((root / path).exists() for root in roots)]
    assert missing == ["derive/families/gather.py"]  # the one to write


def test_every_json_format_has_its_schema_where_the_page_says() -> None:
    names = {name for name, entry in FORMATS.items() if entry.adapter is not None} | {*map(format_of_output, OUTPUTS)}
    assert {path.name.removesuffix(".schema.json") for path in (FOLDER / "json").iterdir()} == names
