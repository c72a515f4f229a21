"""What the pages say is there: commands and their options, scripts, files, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from kcap.capture.controller.models import model_names
from kcap.cli import COMMANDS, group

ROOT = Path(__file__).parent.parent
FOLDERS = ("kcap", "capture", "schemas", "replay", "bench")
READMES = ("README.md", *(f"{folder}/README.md" for folder in FOLDERS))
PAGES = (*READMES, "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
MOST_LINES = 170
ONCE_ADDED = {"kcap export llama.kcap --to csv -o llama.csv", "capture/engines/toy.py"}  # what pages show how to add
ELSEWHERE = {"scripts/parquet_trace_converter.py"}  # of BackendBench
OLD_SPELLINGS = {  # command -> an option's spelling today, and those of before, which go on working
    "record": [("--max-steps", "--steps")],
    "replay": [("--include-views", "--all"), ("--kernel-durations", "--kernels"), ("--compare-engine", "--fidelity")],
}

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
PATH_IN_REPOSITORY = re.compile(rf"^(?:{'|'.join(FOLDERS)}|scripts|tests|\.ci|\.github)/[\w./-]*$")
SCRIPT = re.compile(r"(?<![\w/])scripts/[\w./-]+")


@dataclass(frozen=True)
class Page:
    """A page's text, apart from what its code says."""

    name: str
    text: str

    @classmethod
    def read(cls, name: str) -> Page:
        return cls(name, (ROOT / name).read_text())

    def shell_lines(self) -> Iterator[str]:
        """The lines of the fenced blocks without a language, continued ones joined."""
        for _, language, body in FENCE.findall(self.text):
            if language in ("", "bash", "console", "sh"):
                yield from (line.strip().removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines())

    def spans(self) -> list[str]:
        """Inline code."""
        return SPAN.findall(FENCE.sub("", self.text))

    def links(self) -> list[str]:
        return LINK.findall(FENCE.sub("", self.text))


def command_of(name: str) -> click.Command:
    with click.Context(group) as context:
        command = group.get_command(context, name)
    assert command is not None, f"there is no kcap {name}"
    return command


def parse(line: str, whole: bool) -> None:
    """Fail for a `kcap …` line with an unknown command or option, or a value that the option does not take.

    whole: what the command requires is there, too. Nothing runs, and no file needs to exist.
    """
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "…"]
    if not words or words[0].startswith("-"):
        assert not set(words) - {"--help", "--version"}, line
        return
    command = command_of(words[0])
    context = click.Context(command, info_name=words[0], **command.context_settings)
    try:
        values, rest, _ = command.make_parser(context).parse_args(words[1:])
        assert not rest, f"{line}: {rest} is left over"
        for parameter in command.params:
            value = values.get(parameter.name or "")
            value = value if isinstance(value, (str, list, tuple)) else None  # else click's mark of what is missing
            if value and not isinstance(parameter.type, click.Path):
                parameter.type_cast_value(context, value)
            missing = not value and parameter.required
            assert not (whole and missing), f"{line}: no {parameter.name}"
    except click.BadOptionUsage as error:  # prose names an option without its value: `kcap replay -o`
        assert not whole and words[-1].startswith("-"), f"{line}: {error.format_message()}"
    except click.UsageError as error:
        raise AssertionError(f"{line}: {error.format_message()}") from None


def known_options() -> set[str]:
    commands = [command_of(name) for name in COMMANDS]
    options = {spelling for c in commands for p in c.params for spelling in (*p.opts, *p.secondary_opts)}
    return options | {"--help", "--version"}


def headings(path: Path) -> set[str]:
    """The anchors that a page's headings make on GitHub."""
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_commands_parse(name: str) -> None:
    page = Page.read(name)
    for line in page.shell_lines():
        if line.startswith("kcap "):
            parse(line, whole=True)
    for span in set(page.spans()) - ONCE_ADDED:
        if re.match(r"kcap [a-z]+( |$)", span) and not re.search(r"[A-Z]…|\||\[", span):
            parse(span, whole=False)


@pytest.mark.parametrize("name", PAGES)
def test_options_exist(name: str) -> None:
    """Those of kcap, and those of the scripts that the page names."""
    page = Page.read(name)
    known = known_options()
    scripts = "\n".join(path.read_text() for path in sorted((ROOT / "scripts").rglob("*")) if path.is_file())
    starts = ("--", "-o ")
    named = {option for span in page.spans() if span.startswith(starts) for option in OPTION.findall(span)}
    assert {option for option in named if option not in known and f'"{option}"' not in scripts} == set()


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = Page.read(name)
    for link in page.links():
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), f"{name}: {link}"
        assert not anchor or anchor in headings(path), f"{name}: {link}"


@pytest.mark.parametrize("name", [page for page in PAGES if page != "CHANGELOG.md"])  # which names what was
def test_files_that_are_named_exist(name: str) -> None:
    page = Page.read(name)
    scripts = {script for code in (*page.spans(), *page.shell_lines()) for script in SCRIPT.findall(code)}
    spans = {span for span in page.spans() if PATH_IN_REPOSITORY.match(span)}
    paths = (scripts | spans) - ELSEWHERE - ONCE_ADDED - set(model_names())
    named = {path for path in paths if not re.search(r"[A-Z]{4}", path.removesuffix("README.md"))}
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_every_folder_has_a_page_that_the_readme_links() -> None:
    links = Page.read("README.md").links()
    assert all((ROOT / page).is_file() and page in links for page in READMES[1:])


@pytest.mark.parametrize("command", OLD_SPELLINGS)
def test_old_spellings_of_options_are_aliases(command: str) -> None:
    for new, old in OLD_SPELLINGS[command]:
        (option,) = [parameter for parameter in command_of(command).params if old in parameter.opts]
        assert new in option.opts


@pytest.mark.parametrize(
    "line",
    [
        "kcap nothing x",
        "kcap show --nothing x",
        "kcap show x --by color",
        "kcap show x y",
        "kcap export x --to flashinfer-bench",
        "kcap replay x --top many",
        "kcap --nothing",
    ],
)
def test_a_line_that_would_not_run_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        parse(line, whole=True)


def test_a_page_is_taken_apart() -> None:
    page = Page(
        "page", "# It's a page\n`one --two` [x](y#z)\n```\nkcap a \\\n  b\n```\n```python\n`no` [no](no)\n```\n"
    )
    assert list(page.shell_lines()) == ["kcap a    b"]
    assert (page.spans(), page.links()) == (["one --two"], ["y#z"])
