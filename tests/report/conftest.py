"""A browser without a network, and pages opened in it from a disk.

Without a browser these tests are skipped; with KCAP_BROWSER=required that is a failure.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from reported import Texts, write_applied, write_fidelity, write_judged, write_reported

from kcap.cli import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def lacks(what: str) -> None:
    if os.environ.get("KCAP_BROWSER") == "required":
        pytest.fail(f"{what}, and KCAP_BROWSER says that the report's pages must be tried")
    pytest.skip(what)


@pytest.fixture(scope="module")  # while playwright runs, its event loop keeps asyncio.run from starting one
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        lacks("needs playwright: pip install -e .[dev]")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        lacks("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])  # which root needs
        yield started
        started.close()


@dataclass
class Opened:
    """A page in the browser, and what it complained of or asked the network for."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """Until what was done last is drawn."""
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def text(self, selector: str) -> str:
        self.settle()
        return str(self.page.locator(selector).first.inner_text())

    def search(self, words: str) -> None:
        self.page.fill("#kernels input", words)
        self.page.locator(".grid").focus()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.settle()
            self.page.keyboard.press(key)
        self.settle()

    def close_dialog(self) -> None:
        self.page.keyboard.press("Escape")
        self.page.wait_for_selector("dialog", state="detached")

    def active(self) -> str:
        """The active row's name."""
        return self.text(".grid .active [data-column=name]").lstrip("▸▾")

    def column(self, name: str) -> list[str]:
        """The cells in the document of a column of the table."""
        self.settle()
        return [text.lstrip("▸▾") for text in self.page.locator(f".grid .rows [data-column={name}]").all_inner_texts()]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    """`open_page(file, width=1280, scheme="light")`; at the end nothing may have been complained of."""
    pages: list[Opened] = []

    def open_file(file: Path, width: int = 1280, scheme: str = "light") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        opened = Opened(context.new_page())
        pages.append(opened)
        complain = opened.complaints.append
        opened.page.on("console", lambda message: complain(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: complain(str(error)))
        opened.page.on("request", lambda request: request.url.startswith("file:") or complain(request.url))
        opened.page.goto(file.resolve().as_uri())
        opened.page.wait_for_selector("html[data-ready]")
        return opened

    yield open_file
    for opened in pages:
        opened.page.context.close()
    assert [complaint for opened in pages for complaint in opened.complaints] == []


def write_page(folder: Path, texts: Texts) -> Path:
    """A report with every section, of inputs whose names are as hostile as their texts."""
    recording = write_reported(folder / texts("recording").replace("/", "_"), texts)
    options = {
        "--against": write_reported(folder / "other.kcap", texts, profiled=False, attention=False),
        "--judged": write_judged(folder / "judged", texts),
        "--ab": write_applied(folder / "applied.json", texts),
        "--fidelity": write_fidelity(folder / "fidelity", texts),
    }
    page = folder / "report.html"
    words = [str(word) for option in options.items() for word in option]
    with pytest.raises(SystemExit) as stop:
        main(["report", str(recording), "-o", str(page), *words])
    assert not stop.value.code
    return page


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("report"), Texts())


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """The report, and the places that have hostile texts."""
    texts = Texts(hostile=True)
    return write_page(tmp_path_factory.mktemp("hostile"), texts), texts.places
