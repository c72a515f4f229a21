from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import kcap as package
from kcap.cli import COMMANDS, group
from kcap.errors import first_line

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "pydantic", "rich", "numpy", "orjson", "vllm")


def help_of(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kcap", *args, "--help"], capture_output=True, text=True, check=True)


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from kcap.cli import main
try:
    main(["--help"])
except SystemExit as stop:
    assert not stop.code
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_help_answers_in_under_three_tenths_of_a_second() -> None:
    """Of a processor's time: what else runs on this machine is not kcap's."""
    took = []
    for _ in range(5):
        before = processor_seconds()
        help_of()
        took.append(processor_seconds() - before)
    print(f"kcap --help: {min(took):.3f} s")
    assert min(took) < 0.3


def processor_seconds() -> float:
    """Those of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_lists_every_command() -> None:
    out = help_of().stdout
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_ends_with_an_example(name: str) -> None:
    with click.Context(group) as context:
        command = group.get_command(context, name)
    assert command is not None
    lines = (command.epilog or command.help or "").rstrip().splitlines()
    assert any(line.strip() in ("Example:", "Examples:") for line in lines)
    assert lines[-1].strip().startswith(f"kcap {name}")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    with click.Context(group) as context:
        command = group.get_command(context, name)
    assert command is not None
    bare = [p.name for p in command.params if isinstance(p, click.Option) and not (p.help or p.hidden)]
    assert bare == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README yet")
    assert f"kcap {name}" in readme.read_text()


def test_version_is_the_packages(kcap: Callable[..., Any]) -> None:
    assert package.__version__ in kcap("--version").out


@pytest.mark.parametrize("args", [("nothing",), ("show",), ("show", "--nothing", "x"), ("show", "x", "--by", "color")])
def test_a_wrong_call_exits_with_2_and_no_traceback(kcap: Callable[..., Any], args: tuple[str, ...]) -> None:
    ran = kcap(*args)
    assert (ran.code, ran.out) == (2, "")
    assert "Error" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e10", "0"])
@pytest.mark.parametrize(
    "command",
    [
        ("replay", "x", "--timeout"),
        ("replay", "x", "--seconds"),
        ("bench", "x", "--timeout"),
        ("judge", "x", "--seconds"),
    ],
    ids=" ".join,
)
def test_what_is_no_time_is_refused(command: tuple[str, ...], value: str) -> None:
    ran = CliRunner().invoke(group, [*command, value])
    assert ran.exit_code == 2 and "range" in ran.output, ran.output


@pytest.mark.parametrize("words", [("show",), ("report", "-o", "out.html")], ids=lambda words: words[0])
@pytest.mark.parametrize(
    "setting",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=str,
)
def test_no_locale_ends_a_command(
    words: tuple[str, ...], setting: dict[str, str], recording: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kcap", words[0], str(recording), *words[1:]]
    ran = subprocess.run(command, env={**os.environ, **setting}, cwd=tmp_path, capture_output=True)
    assert ran.returncode == 0 and b"Traceback" not in ran.stderr, ran.stderr


def test_a_closed_standard_output_ends_no_command() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m kcap doctor >&-"
    ran = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, timeout=300)
    assert b"Traceback" not in ran.stderr, ran.stderr


def test_more_threads_than_a_machine_has_are_refused() -> None:
    ran = CliRunner().invoke(group, ["replay", "x", "--threads", "1000000"])
    assert ran.exit_code == 2 and "1<=x<=4096" in ran.output


@pytest.mark.parametrize(
    "script", ["scripts/environment", "scripts/environment-sglang", "scripts/test", "scripts/demo", ".ci/run"]
)
def test_scripts_parse_and_may_be_run(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert (ROOT / script).stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("one\ntwo"), "one"),
        (NotImplementedError(), "NotImplementedError"),
        (ValueError("\n  after\n"), "after"),
        (ValueError("long" * 9), "longlo"),
    ],
)
def test_an_error_that_says_nothing_is_told_by_its_kind(error: Exception, line: str) -> None:
    assert first_line(error, len(line)) == line
