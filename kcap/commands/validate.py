"""`kcap validate`: what is wrong with files of the formats that kcap knows."""

from __future__ import annotations

from pathlib import Path

import click
import orjson

from kcap.errors import FAILED, CallError
from kcap.schemas.validation.formats import FORMATS, detect_format
from kcap.schemas.validation.report import Report, printable

UNKNOWN = "no format that kcap knows: give the one that it should have with --format"


@click.command(epilog="\b\nExample:\n  kcap validate llama.kcap dataset/")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@click.option("--format", "name", type=click.Choice(list(FORMATS)), help="The format.  [default: told by the content]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(paths: tuple[Path, ...], name: str | None, as_json: bool) -> None:
    """Tell what is wrong with Recordings, datasets and files: each problem's file, place and reason.

    PATH is of any format that kcap reads or writes. Warnings leave it valid. Exit code: 0 all are valid, 1 one is not.
    """
    for path in paths:
        if not path.is_file() and not path.is_dir():
            raise CallError(f"{path}: no such file or directory")
    checked = [(path, name or detect_format(path)) for path in paths]
    reports = [_check(path, found) for path, found in checked]
    if as_json:
        _print_json(checked, reports)
    else:
        for (path, found), report in zip(checked, reports, strict=True):
            _print(path, found, report)
    if not all(report.valid for report in reports):
        raise click.exceptions.Exit(FAILED)


def _check(path: Path, name: str | None) -> Report:
    report = Report()
    if name is None:
        report.error(path, UNKNOWN)
    else:
        FORMATS[name].check(report, path)
    return report


def _print(path: Path, name: str | None, report: Report) -> None:
    for problem in report.problems:
        click.echo(str(problem))
    if report.valid and name:
        click.echo(f"{printable(str(path))}: valid, {FORMATS[name].title}")


def _print_json(checked: list[tuple[Path, str | None]], reports: list[Report]) -> None:
    documents = [
        {
            "path": printable(str(path)),
            "format": name,
            "valid": report.valid,
            "problems": [
                {
                    "place": problem.place,
                    "reason": problem.reason,
                    "severity": "warning" if problem.warning else "error",
                }
                for problem in report.problems
            ],
        }
        for (path, name), report in zip(checked, reports, strict=True)
    ]
    click.echo(orjson.dumps(documents, option=orjson.OPT_INDENT_2))
