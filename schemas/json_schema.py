"""JSON Schema files of every format and of what commands print with `--json`, made from the models that read it.

`python -m kcap.schemas.json_schema` writes them anew into schemas/json/, one `<format>.schema.json` each; that of a
file of lines describes one line. A schema holds what JSON Schema can express; the models check more (that a reference
parses, that axes are declared), and `kcap validate` reports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kcap.schemas.files.jsonfile import dump_json
from kcap.schemas.results.command_output import OUTPUTS, format_of_output
from kcap.schemas.validation.formats import FORMATS

FOLDER = Path(__file__).parent / "json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMAS: dict[str, TypeAdapter[Any]] = {
    **{name: known.adapter for name, known in FORMATS.items() if known.adapter is not None},
    **{format_of_output(command): adapter for command, adapter in OUTPUTS.items()},
}


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of the format `name`, a key of SCHEMAS."""
    return {"$schema": DIALECT, **SCHEMAS[name].json_schema()}


def schema_file(name: str) -> Path:
    """Where the schema of the format `name` lies in the package."""
    return FOLDER / f"{name}.schema.json"


def write_schemas() -> None:
    """Write every schema file."""
    FOLDER.mkdir(exist_ok=True)
    for name in SCHEMAS:
        schema_file(name).write_bytes(dump_json(json_schema(name)))


if __name__ == "__main__":
    write_schemas()
