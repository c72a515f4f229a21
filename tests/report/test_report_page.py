"""A report in a browser: its sums, its table, its keys; wide and narrow, light and dark; for those who hear it, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reported import HOSTILE, PRODUCT, Texts, write_reported

from kcap.schemas.validation.report import printable
from kcap.show.kernel_name import shorten

DATASET = Path(__file__).parent.parent / "bench" / "judged_dataset"
Open = Callable[..., Any]
SECTIONS = ["phases", "kernels", "roofline", "batches", "steps", "agents"]
SECTIONS += ["against", "judged", "applied", "fidelity", "unknown"]


def test_every_section_is_there_in_order(open_page: Open, everything: Path) -> None:
    sections = open_page(everything).page.locator("section")
    assert sections.evaluate_all("all => all.map(one => one.id)") == SECTIONS


def test_sums_on_the_page_are_those_of_show(
    open_page: Open, kcap: Callable[..., Any], everything: Path, tmp_path: Path
) -> None:
    recorded = everything.parent / "recording"
    shown = json.loads(kcap("show", recorded, "--by", "operator", "--json").out)
    opened = open_page(everything)
    assert opened.text("[data-fact=total] dd") == f"{shown['total']:,}"
    assert opened.text("[data-fact=profiled] dd") == f"{shown['gpu_us']:.0f} µs"
    assert opened.text("[data-sum=count]") == f"{shown['total']:,}"
    opened.page.select_option("#kernels label:has-text('Rows are') select", "operator")
    rows = dict(zip(opened.column("name"), opened.column("count"), strict=True))
    assert {name.split()[0]: count for name, count in rows.items()} == {
        row["name"]: f"{row['count']:,}" for row in shown["rows"]
    }
    profiled = dict(zip(opened.column("name"), opened.column("gpu"), strict=True))
    assert {name.split()[0]: us for name, us in profiled.items()} == {
        row["name"]: f"{row['gpu_us']:.0f} µs" if row["gpu_us"] else "·" for row in shown["rows"]
    }


def test_rows_say_source_family_seam_and_reference(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    facts = ("name", "source", "family", "seam", "reference")
    rows = [dict(zip(facts, cells, strict=True)) for cells in zip(*map(opened.column, facts), strict=True)]
    found = {row["name"].split()[0]: [row[fact] for fact in facts[1:]] for row in rows}
    assert found[PRODUCT] == ["aten", "gemm", "operator", "verified"]
    assert found["triton::lost"] == ["Triton", "(none)", "none", ""]


def test_what_only_one_recording_runs_is_said(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    rows = {
        cells[0]: cells[1:]
        for cells in map(_cells, opened.page.locator("#against .wide[aria-label^=Kernels] tbody tr").all())
    }
    assert rows["::operator"] == ["of no family", "1", "·", "only A"]
    assert rows[PRODUCT][-1] == "both"
    assert "decode: 20 steps in A; 20 in B" in opened.text("#against")


def test_what_only_the_other_recording_runs_is_said(open_page: Open, kcap: Callable[..., Any], tmp_path: Path) -> None:
    less = write_reported(tmp_path / "less.kcap", Texts(), profiled=False, attention=False)
    more = write_reported(tmp_path / "more.kcap", Texts())
    found = json.loads(kcap("diff", less, more, "--by", "family", "--json").out)
    assert found["equal"] is False
    alone = [line["name"] for phase in found["phases"] for line in phase["lines"] if line["a"] is None]
    assert kcap("report", less, "--against", more, "-o", tmp_path / "r.html").code == 0
    opened = open_page(tmp_path / "r.html")
    rows = [_cells(row) for row in opened.page.locator("#against .wide[aria-label^=Kernels] tbody tr").all()]
    assert [row[0] for row in rows if row[-1] == "only B"] == alone == ["::operator"] * 2
    assert [row[2:4] for row in rows if row[-1] == "only B"] == [["·", "1"], ["·", "1"]]


def _cells(row: Any) -> list[str]:
    return list(row.locator("th, td").all_inner_texts())


def test_words_filter_rows_and_their_sums(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    opened.search("triton fused")
    assert opened.text("[data-sum=count]") == "60" and len(opened.column("name")) == 1
    opened.search("triton attention")
    assert opened.text("[data-sum=count]") == "0" and opened.text(".none") == "No kernel holds these words."
    opened.search("")
    opened.page.select_option("#kernels label:has-text('Phase') select", "prefill")
    assert opened.text("[data-sum=count]") == "4"
    assert opened.text("#kernels .sum").endswith("4 invocations"), "no prefill step was profiled"
    opened.page.select_option("#kernels label:has-text('Phase') select", "decode")
    assert "100.0% of decode time" in opened.text("#kernels .sum")


def test_a_heading_sorts_down_then_up(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    table = opened.page.get_by_role("treegrid")
    counts = table.get_by_role("columnheader", name="invocations")
    counts.get_by_role("button").click()
    down = [int(text.replace(",", "")) for text in opened.column("count")]
    assert down == sorted(down, reverse=True) and counts.get_attribute("aria-sort") == "descending"
    counts.get_by_role("button").click()
    assert [int(text.replace(",", "")) for text in opened.column("count")] == sorted(down)
    names = table.get_by_role("columnheader", name="kernel")
    names.get_by_role("button").click()
    assert names.get_attribute("aria-sort") == "ascending" and counts.get_attribute("aria-sort") == "none"


def test_keys_walk_the_table_open_a_kernel_and_a_call(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    opened.page.select_option("#kernels label:has-text('Rows are') select", "operator")
    opened.search("mm")
    assert opened.active().startswith("aten::mm")
    opened.press("ArrowRight")
    assert opened.page.locator(".grid .depth-2").count() == 2
    opened.press("End")
    assert opened.page.locator(".grid .active.depth-2").count() == 1
    opened.press("ArrowLeft")
    assert opened.active().startswith("aten::mm")
    opened.press("ArrowDown", "Enter")
    assert "bf16[" in opened.text("dialog .signature") and opened.text("dialog h2") == "aten::mm"
    opened.close_dialog()
    assert opened.page.evaluate("document.activeElement.className") == "grid", "the focus is back"
    opened.press("Home", "i")
    opened.page.wait_for_selector("dialog .bars")
    assert opened.text("dialog h3") == "self[0]"
    assert [text.split() for text in opened.page.locator("dialog .bars tr").all_inner_texts()] == [
        ["1", "42"],
        ["16", "20"],
    ]
    opened.close_dialog()
    opened.page.locator(".grid .active .shapes").click()
    assert opened.text("dialog h2") == "Shapes of aten::mm"
    opened.close_dialog()
    opened.page.locator(".grid").focus()
    opened.press("ArrowLeft")
    assert opened.page.locator(".grid .depth-2").count() == 0


def test_a_call_shows_arguments_samples_and_sources(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    opened.page.select_option("#kernels label:has-text('Rows are') select", "call")
    opened.search("triton::fused")
    opened.press("Enter")
    opened.page.wait_for_selector("dialog .code")
    said = opened.text("dialog")
    for text in (
        "in_ptr0",
        "cuda:0, strides 64, 1",
        "function, grid 24 × 1 × 1",
        "XBLOCK=1024",
        "fragment",
        "def f():",
    ):
        assert text in said
    opened.close_dialog()
    opened.search("operator")
    opened.press("Enter")
    opened.page.wait_for_selector("dialog .samples li")
    for text in ("decode, step 0", "argument: 3 to 511", "2 more Samples", "inside", "default"):
        assert text in opened.text("dialog")


def test_a_bar_opens_into_kernels_and_these_into_the_table(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    opened.page.locator("[data-phase=decode] button[aria-label^='gemm']").click()
    segments = opened.page.locator("[data-phase=decode] button")
    assert all("gemm_" in text for text in segments.evaluate_all("all => all.map(one => one.ariaLabel)"))
    segments.first.click()
    assert opened.page.input_value("#kernels input").startswith("gemm_")
    assert len(opened.column("name")) == 1
    opened.page.get_by_role("button", name="← all").click()
    assert opened.page.locator("[data-phase=decode] button").count() > 1


def test_the_step_names_its_gap_and_opens_a_call(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    said = opened.text("#steps")
    assert "21 µs of 46 µs the GPU was busy, with 5 kernels; 25 µs (54.3%) it waited, in 1 gap of" in said
    assert opened.page.locator("#steps rect[data-kernel]").count() == 5
    opened.page.locator("#steps rect[data-kernel='0']").click()
    assert opened.text("dialog h2") == "aten::mm"


def test_sessions_and_turns_have_the_numbers_of_show(
    open_page: Open, kcap: Callable[..., Any], everything: Path
) -> None:
    recorded = everything.parent / "recording"
    shown = json.loads(kcap("show", recorded, "--by", "turn", "--json").out)
    opened = open_page(everything)
    for name, tokens in (("prompts", "prompt"), ("found in the prefix cache", "cached"), ("missed", "missed")):
        assert opened.text(f"#agents [data-tokens='{name}'] b") == f"{shown['total'][tokens]:,}"
    assert shown["rule"] in opened.text("#agents .notes")
    turns = opened.page.locator("#agents .wide[aria-label='Turns of the session'] tbody tr")
    names = []
    for session in ("0: 2 turns", "1: 1 turn"):
        opened.page.get_by_role("button", name=session).click()
        opened.settle()
        for name, prompt, cached, *_ in map(_cells, turns.all()):
            names.append(name)
            row = next(row for row in shown["rows"] if row["name"] == name)
            assert [prompt, cached] == [f"{row[of]:,}" if row[of] else "·" for of in ("prompt", "cached")]
    assert names == [row["name"] for row in shown["rows"]]


def test_a_turn_opens_into_its_messages_time_and_kernels(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    tools = [opened.page.locator(f"#agents [data-tools='{turn}']").count() for turn in range(3)]
    assert tools == [1, 0, 0], "what a turn called ran until the next one"
    opened.page.locator("#agents [data-turn='1'] rect").last.click()
    opened.page.wait_for_selector("dialog .message")
    said = opened.text("dialog")
    for text in ("result", "answered", "finish: finish", "Of 10 of its 42 steps", "an estimate"):
        assert text in said
    opened.page.get_by_role("button", name="0.0 calls tool").last.click()
    assert opened.text("dialog h2") == "0.0 calls tool" and "reasoning" in opened.text("dialog")
    opened.page.get_by_role("dialog").get_by_role("button", name=PRODUCT).first.click()
    assert opened.text("dialog h2") == "aten::mm"
    opened.close_dialog()
    opened.page.get_by_role("button", name="0.0 calls tool").click()
    opened.page.locator("dialog [data-family=gemm] button").click()
    assert opened.page.input_value("#kernels input") == "gemm"


def test_sessions_are_searched_by_what_their_turns_did(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    opened.page.fill("#agents input", "refused")
    assert opened.text("#agents h3[data-session]") == "Turns of session 1: 1 turn"
    opened.page.fill("#agents input", "no such tool")
    assert "No session holds these words." in opened.text("#agents")


def test_judged_solutions_say_what_was_wrong(open_page: Open, everything: Path) -> None:
    said = open_page(everything).text("#judged")
    assert "author/good for definition: 2 of 2 passed, 2.00× its reference by count" in said
    assert "author/bad for definition: 1 of 2 passed, not ranked" in said
    assert "verdict; output[3] is 2, expected 1; 1 of 4 are wrong: row 3 alone" in said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280, 2560])
def test_nothing_is_wider_than_the_window(open_page: Open, everything: Path, width: int, scheme: str) -> None:
    page = open_page(everything, width, scheme).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")


def test_the_scheme_can_be_changed(open_page: Open, everything: Path) -> None:
    opened = open_page(everything)
    opened.page.get_by_role("button", name="Dark").click()
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    opened.page.get_by_role("button", name="Light").click()
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_no_fault(open_page: Open, everything: Path, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    axe = Axe()
    opened = open_page(everything, width, scheme)
    assert _faults(axe, opened.page) == []
    opened.search("fused")
    opened.press("ArrowRight", "ArrowDown")
    assert _faults(axe, opened.page) == []
    opened.press("Enter")
    opened.page.wait_for_selector("dialog .code")
    assert _faults(axe, opened.page) == []


def _faults(axe: Any, page: Any) -> list[str]:
    found = axe.run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}: {node['failureSummary']}" for one in found for node in one["nodes"]]


def test_an_ordinary_report_is_small(everything: Path) -> None:
    assert everything.stat().st_size < 2_000_000


def test_a_report_without_times_or_steps_says_so(open_page: Open, kcap: Callable[..., Any], tmp_path: Path) -> None:
    recorded = write_reported(tmp_path / "r.kcap", Texts(), profiled=False)
    page = tmp_path / "r.html"
    assert kcap("report", recorded, "-o", page).code == 0
    opened = open_page(page)
    assert "an estimate" in opened.text("#phases .note")
    assert "Not known: no step was profiled" in opened.text("#steps")
    assert "No kernel's time was measured" in opened.text("#roofline")


def test_a_trace_file_shows_invocations(open_page: Open, kcap: Callable[..., Any], tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.txt", tmp_path / "t.html"
    trace.write_text("Operator: aten.mm.default\ncnt: 7, ((T([4, 8], bf16), T([8, 2], bf16)), {})\n")
    assert kcap("report", trace, "-o", page).code == 0
    opened = open_page(page)
    assert opened.text("#phases h2") == "What runs how often?" and opened.text("[data-sum=count]") == "7"


def test_a_definition_opens_into_its_reference_and_sizes(
    open_page: Open, kcap: Callable[..., Any], tmp_path: Path
) -> None:
    page = tmp_path / "d.html"
    assert kcap("report", DATASET, "-o", page).code == 0
    opened = open_page(page)
    assert opened.page.locator("section").evaluate_all("all => all.map(one => one.id)") == ["definitions", "unknown"]
    opened.page.fill("#definitions input", "mean_rows")
    assert opened.text("[data-sum=workloads]") == "3"
    opened.page.get_by_role("button", name="mean_rows").click()
    opened.page.wait_for_selector("dialog .code")
    assert "def run" in opened.text("dialog .code")
    assert [text.split() for text in opened.page.locator("dialog .bars tr").all_inner_texts()] == [
        ["32", "1"],
        ["128", "1"],
        ["1,024", "1"],
    ]


def test_hostile_texts_stay_texts(open_page: Open, hostile: tuple[Path, set[str]]) -> None:
    """In every place: nothing of them runs, nothing becomes an element, and each is shown as it is."""
    file, places = hostile
    opened = open_page(file)
    shown = [opened.page.title(), _text(opened, "body")]
    opened.page.select_option("#kernels label:has-text('Rows are') select", "call")
    for words in ("triton::fused", "triton::lost", "operator </script>"):
        opened.search(words)
        opened.press("Enter")
        opened.page.wait_for_selector("dialog h3:has-text('Samples')")
        shown.append(_text(opened, "dialog"))
        opened.close_dialog()
    for session in opened.page.locator("#agents .wide[aria-label=Sessions] button").all():
        session.click()
        for turn in opened.page.locator("#agents .wide[aria-label='Turns of the session'] button").all():
            turn.click()
            opened.page.wait_for_selector("dialog h3:has-text('What it answered')")
            shown.append(_text(opened, "dialog"))
            opened.close_dialog()
    assert opened.page.evaluate("typeof hacked") == "undefined"
    assert opened.page.locator("img").count() == 0 and opened.page.locator("script").count() == 5
    everything = "\n".join(shown)
    texts = {place: f"{place} {HOSTILE}" for place in places}
    texts["kernel"] = shorten(texts["kernel"])
    (name,) = [path.name for path in file.parent.iterdir() if path.name.startswith("recording")]
    texts["recording"] = printable(name)
    assert {place for place, text in texts.items() if text not in everything and repr(text) not in everything} == set()


def _text(opened: Any, selector: str) -> str:
    return str(opened.page.evaluate("one => document.querySelector(one).textContent", selector))


def test_the_file_holds_no_text_of_the_recording(hostile: tuple[Path, set[str]]) -> None:
    """Whatever a browser takes for markup, it finds only the page's own."""
    text = hostile[0].read_text()
    assert "onerror" not in text and text.count("</script>") == 5
    assert "http://" not in text.replace("http://www.w3.org/", "").replace("http://www.apache.org/", "")


def test_the_page_of_what_ran_on_a_gpu(open_page: Open, kcap: Any, llama_on_h100: Path, tmp_path: Path) -> None:
    """By the command that the page on reports gives."""
    file, data = tmp_path / "report.html", llama_on_h100
    judged = ("--judged", data / "judged", "--ab", data / "compared.json")
    done = kcap("report", data / "model.kcap", "--measurements", data / "measurements.jsonl", *judged, "-o", file)
    assert not done.code and file.stat().st_size < 500_000
    opened = open_page(file)
    assert "gemm 87" in opened.text("#phases") and "12,807" in opened.text("main")
    chosen = opened.text("#applied tbody tr")
    assert chosen.split()[0] == "chosen" and "−3.1% ± 0.4%" in chosen and "−1.4%" in chosen
    assert "useless: no Solution ran in any step" in opened.text("#applied")
