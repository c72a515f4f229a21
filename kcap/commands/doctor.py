"""`kcap doctor`: what of this machine kcap can use, and how to get the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
import orjson

from kcap.capture.controller.frameworks import check_engine, check_hooks, check_plugin, known_frameworks
from kcap.capture.engines import Framework, of_framework
from kcap.system.machine import (
    Check,
    check_compiler,
    check_gpu,
    check_misfits,
    check_python,
    check_torch,
    gpus,
    torch_here,
)

if TYPE_CHECKING:
    from rich.table import Table

MARKS = {"ok": ("✓", "green"), "missing": ("–", "dim"), "problem": ("✗", "bold red")}


@click.command(epilog="\b\nExample:\n  kcap doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Tell what of this machine kcap can use, and how to get the rest."""
    machine = list(check_machine())
    works = list(check_work(machine))
    if as_json:
        report = {"machine": [asdict(check) for check in machine], "works": [asdict(check) for check in works]}
        click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    else:
        _print(machine, works)


def check_machine() -> Iterator[Check]:
    """Everything that kcap would use, found or not."""
    torch = torch_here()
    yield check_python()
    yield check_torch(torch)
    yield check_gpu(torch, gpus())
    yield check_compiler()
    yield from check_misfits(torch)
    for framework in filter(_is_engine, known_frameworks()):
        engine = check_engine(framework)
        yield engine
        if engine.state == "ok":
            yield from check_plugin(framework)
            yield from check_hooks(framework)
    yield from check_confinement()


def _is_engine(framework: Framework) -> bool:
    """False for a program's own framework, of which there is nothing else to look for."""
    return framework.package != "torch"


def check_confinement() -> Iterator[Check]:
    """What confines the Solutions that `kcap bench` runs, and why this machine refuses what it refuses."""
    from kcap.bench.sandbox import HOLDS, probe

    features = probe()
    held = [feature for feature, state in features.items() if state == HOLDS]
    yield Check("bench: confinement", "ok" if held else "missing", ", ".join(held) or "none")
    for feature, state in features.items():
        if state != HOLDS:
            yield Check(f"bench: {feature}", "missing", state)


def check_work(machine: Sequence[Check]) -> Iterator[Check]:
    """What can be done here; the fix is that of the first thing in the way."""
    by_name = {check.name: check for check in machine}
    for framework in known_frameworks():
        engine = of_framework(framework.name)
        starts = engine is not None and engine.OFFLINE is not None
        how = f"--framework {framework.name}" if starts else f"-- COMMAND, a program of {framework.name}"
        needs = [by_name[framework.name], *_in_the_way(machine, framework.name)] if _is_engine(framework) else []
        yield _work(f"kcap record {how}", [by_name["torch"], *needs])
    yield _work("kcap.record() in a PyTorch program", [by_name["torch"]])
    yield _work("kcap replay --device cpu", [by_name["torch"]])
    yield _work("kcap replay --device cuda", [by_name["torch"], by_name["GPU"]])


def _in_the_way(machine: Sequence[Check], framework: str) -> list[Check]:
    names = (f"kcap in {framework}", "torchvision", "torchaudio", "torchcodec")
    return [check for check in machine if check.name in names]


def _work(name: str, needs: Sequence[Check]) -> Check:
    for need in needs:
        if need.state != "ok":
            return Check(name, "missing", f"{need.name}: {need.found}", need.fix)
    return Check(name, "ok", "works")


def _print(machine: Sequence[Check], works: Sequence[Check]) -> None:
    from rich.text import Text

    from kcap.show.console import console

    out = console()
    for title, checks in (("This machine", machine), ("What works", works)):
        out.print(Text(title, "bold"))
        out.print(_table(checks))
        out.print()
    lacking = [check for check in machine if check.fix]
    if lacking:
        out.print(Text("How to get the rest", "bold"))
    for check in lacking:
        out.print(Text(f"  {check.name}: {check.fix}"), soft_wrap=True)
    click.echo("Next: kcap record --help", err=True)


def _table(checks: Sequence[Check]) -> Table:
    from rich.table import Table
    from rich.text import Text

    out = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    out.add_column()
    out.add_column(no_wrap=True)
    out.add_column(overflow="fold")
    for check in checks:
        out.add_row(Text(*MARKS[check.state]), Text(check.name), Text(check.found))
    return out
