"""How large the report of a Recording is, and how long a browser takes to open it.

    python scripts/report_size.py llama.kcap
    python scripts/report_size.py --calls 100000    # of a Recording made up of so many Calls

Needs Chromium and playwright (pip install kcap[dev]). Opening ends when the first figures and rows are drawn; then the
table is searched, and scrolled to its end.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from playwright.sync_api import Page, sync_playwright

from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, write_recording
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage

OPERATORS = 400  # among which Calls are shared out
RUNS = 5


def made_up_calls(number: int) -> Iterator[Call]:
    for i in range(number):
        sizes = (1 + i // OPERATORS, 64 * (1 + i % 63))
        tensors = [
            Argument(name=name, value=TensorSpec(sizes, "bfloat16", device="cuda:0", storage=place))
            for place, name in enumerate(("input", "other", "out"))
        ]
        counts = [Count(phase="decode", mode="graph", count=1 + i % 97), Count(phase="prefill", count=1 + i % 3)]
        yield Call(id=i, operator=f"library::kernel_{i % OPERATORS}", args=tensors, counts=counts)


def make_up(path: Path, number: int) -> Path:
    """A Recording of so many Calls, each of which ran in a profiled step."""
    metadata = Metadata(model="made up", framework="vLLM", steps={"decode": 10, "prefill": 2}, coverage={"share": 1.0})
    write_recording(path, metadata, made_up_calls(number))
    kernels = [KernelTime(name="k", us=1 + i % 50, call=i, start_us=60.0 * i) for i in range(number)]
    coverage.write(path / coverage.FILE, [StepCoverage(index=0, phase="decode", kernels=kernels)])
    return path


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def open_report(page: Page, file: Path) -> None:
    page.goto(file.resolve().as_uri())
    page.wait_for_selector("html[data-ready]", timeout=120_000)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def search(page: Page, words: str) -> None:
    page.fill("#kernels input", words)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def scroll(page: Page) -> None:
    """To the end of a table with a row for each Call."""
    page.select_option("#kernels label:has-text('Rows are') select", "call")
    page.focus(".grid")
    page.keyboard.press("End")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, nargs="?")
    parser.add_argument("--calls", type=int, help="make up a Recording of so many Calls")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        recording = options.recording or make_up(Path(folder, "made-up.kcap"), options.calls or 100_000)
        file = Path(folder, "report.html")
        command = [sys.executable, "-m", "kcap", "report", str(recording), "-o", str(file)]
        print(f"written in {seconds(lambda: subprocess.run(command, check=True, capture_output=True)):.1f} s")
        print(f"{file.stat().st_size / 1e6:.2f} MB")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = []
        for _ in range(RUNS):
            page = browser.new_context(offline=True).new_page()
            opened.append(seconds(lambda page=page: open_report(page, file)))  # type: ignore[misc]
        print(f"opened in {median(opened):.2f} s (median of {RUNS}, {min(opened):.2f} to {max(opened):.2f})")
        print(f"searched in {seconds(lambda: search(page, 'kernel_7 64')):.2f} s")
        search(page, "")
        print(f"a row for each Call, scrolled to the last: {seconds(lambda: scroll(page)):.2f} s")
        browser.close()


if __name__ == "__main__":
    main()
