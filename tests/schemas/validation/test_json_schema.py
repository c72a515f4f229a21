from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import orjson
import pytest

from kcap.cli import COMMANDS, group
from kcap.schemas.flashinfer.trace import Correctness
from kcap.schemas.json_schema import FOLDER, SCHEMAS, json_schema, schema_file
from kcap.schemas.results.command_output import OUTPUTS, OWN, format_of_output
from kcap.schemas.validation.formats import FORMATS

DATA = Path(__file__).parents[2] / "data"


def schema(name: str) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(schema_file(name).read_bytes())
    return document


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_file_is_what_the_models_give(name: str) -> None:
    assert schema(name) == json_schema(name), "write it anew: python -m kcap.schemas.json_schema"


def test_every_format_of_json_has_a_schema_and_no_file_is_left_over() -> None:
    assert {file.name.removesuffix(".schema.json") for file in FOLDER.iterdir()} == set(SCHEMAS)
    assert set(FORMATS) - set(SCHEMAS) == {"recording", "dataset", "bench-run", "task-folder", "trace-file", "parquet"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_is_a_schema(name: str) -> None:
    pytest.importorskip("jsonschema").Draft202012Validator.check_schema(schema(name))


def test_the_published_dataset_keeps_to_the_schemas() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    definitions, workloads = validator(schema("definition")), validator(schema("workload"))
    for path in (DATA / "flashinfer-trace" / "definitions").rglob("*.json"):
        definitions.validate(orjson.loads(path.read_bytes()))
    for path in (DATA / "flashinfer-trace" / "workloads").rglob("*.jsonl"):
        for line in path.read_bytes().splitlines():
            workloads.validate(orjson.loads(line))


def test_a_schema_refuses_what_the_models_refuse() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema("definition"))
    document = orjson.loads((DATA / "documents" / "definition_1.json").read_bytes())
    assert validator.is_valid(document)
    assert not validator.is_valid(document | {"more": 1})
    assert not validator.is_valid(document | {"axes": {"M": {"type": "const", "value": -1}}})
    assert not validator.is_valid({key: value for key, value in document.items() if key != "op_type"})


def test_errors_that_are_not_finite_keep_to_the_schema() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema("trace"))
    worst = Correctness(max_relative_error=float("nan"), max_absolute_error=float("inf")).model_dump(mode="json")
    evaluation = {"status": "INCORRECT_NUMERICAL", "environment": {"hardware": "cpu"}, "timestamp": "now"}
    workload = {"uuid": "u", "axes": {}, "inputs": {}}
    validator.validate({"definition": "d", "workload": workload, "evaluation": evaluation | {"correctness": worst}})


def test_every_command_that_prints_json_has_a_schema() -> None:
    context = click.Context(group)
    commands = {name: group.get_command(context, name) for name in COMMANDS}
    printing = {
        name for name, command in commands.items() if command and any("--json" in one.opts for one in command.params)
    }
    assert printing == OUTPUTS.keys() | OWN.keys()
    assert {format_of_output(name) for name in printing} <= SCHEMAS.keys()


def test_the_page_names_the_schema_of_every_command() -> None:
    page = (Path(__file__).parents[3] / "schemas" / "README.md").read_text()
    for name in OUTPUTS.keys() | OWN.keys():
        assert f"| `kcap {name}` | `{format_of_output(name)}` |" in page
