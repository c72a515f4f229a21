"""The figures of a report for papers: which there are, and that names in them are no formulas and no markup."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from reported import HOSTILE, Texts, write_fidelity, write_reported

from kcap.report import figures

pytest.importorskip("matplotlib")

Kcap = Callable[..., Any]
WITH_TIMES = ["batches", "phases", "roofline", "step"]


def draw(kcap: Kcap, recorded: Path, folder: Path, *options: object) -> list[str]:
    done = kcap("report", recorded, "-o", folder.with_suffix(".html"), "--figures", folder, *options)
    assert done.code == 0, done.err
    return sorted(path.name for path in folder.iterdir())


def test_each_figure_is_there_as_svg_and_png(kcap: Kcap, tmp_path: Path) -> None:
    recorded = write_reported(tmp_path / "r.kcap", Texts())
    fidelity = write_fidelity(tmp_path / "fidelity", Texts())
    (fidelity / "fidelity.png").write_bytes(b"a picture")
    names = draw(kcap, recorded, tmp_path / "f", "--against", recorded, "--fidelity", fidelity)
    expected = [f"{name}.{suffix}" for name in ["against", *WITH_TIMES] for suffix in ("png", "svg")]
    assert names == sorted([*expected, "fidelity.png"])
    assert (tmp_path / "f" / "fidelity.png").read_bytes() == b"a picture"
    assert all((tmp_path / "f" / name).stat().st_size > 1000 for name in expected)


def test_without_times_there_is_neither_roofline_nor_step(kcap: Kcap, tmp_path: Path) -> None:
    recorded = write_reported(tmp_path / "r.kcap", Texts(), profiled=False)
    assert draw(kcap, recorded, tmp_path / "f") == ["batches.png", "batches.svg", "phases.png", "phases.svg"]


def test_the_same_report_gives_the_same_figures(kcap: Kcap, tmp_path: Path) -> None:
    recorded = write_reported(tmp_path / "r.kcap", Texts())
    names = draw(kcap, recorded, tmp_path / "1")
    assert draw(kcap, recorded, tmp_path / "2") == names
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes() for name in names)


@pytest.mark.filterwarnings("ignore:Glyph")
def test_hostile_names_are_drawn_as_text(kcap: Kcap, tmp_path: Path) -> None:
    recorded = write_reported(tmp_path / HOSTILE.replace("/", "_"), Texts(hostile=True))
    for name in draw(kcap, recorded, tmp_path / "f", "--against", recorded):
        if name.endswith(".svg"):
            tags = {node.tag.split("}")[-1] for node in ElementTree.parse(tmp_path / "f" / name).iter()}
            assert not tags & {"script", "img", "image", "foreignObject"}


def test_sums_of_families_are_those_of_show(kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    monkeypatch.setattr(figures, "draw_figures", lambda report, folder, fidelity: reports.append(report) or [])
    recorded = write_reported(tmp_path / "r.kcap", Texts())
    assert kcap("report", recorded, "-o", tmp_path / "r.html", "--figures", tmp_path / "f").code == 0
    gain = json.loads(kcap("gain", recorded, "--json").out)
    times = figures.family_times(reports[0].calls)
    assert {phase: sum(of_phase.values()) for phase, of_phase in times.items()} == pytest.approx(
        {phase: us for phase, us in gain["total_us"].items() if us and phase != "all"}
    )


def test_without_matplotlib_it_says_how_to_get_it(kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    recorded = write_reported(tmp_path / "r.kcap", Texts())
    done = kcap("report", recorded, "-o", tmp_path / "r.html", "--figures", tmp_path / "f")
    assert done.code == 2 and "pip install kcap[plots]" in done.err
    assert not (tmp_path / "r.html").exists()
