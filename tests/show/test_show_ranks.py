"""`kcap show` of ranks: where each stands and what it ran, whose steps end early, and which must agree and do not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcap.schemas.recording.recording import Call, Count, Metadata, write_recording
from kcap.schemas.recording.records import Difference, Disagreement, Rank

Kcap = Callable[..., Any]
GROUPS = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
LACKING = Disagreement(
    ranks=[0, 1], phase="decode", steps=[2, 2], calls=[Difference(operator="x::a", signature="bf16[4]", counts=[4, 2])]
)


def rank(number: int, **more: Any) -> Rank:
    group = GROUPS[number]
    places = {"tp": group.index(number), "dp": number // 2}
    return Rank(rank=number, places=places, groups={"tp": group}, **{"steps": {"prefill": 1, "decode": 1200}, **more})


def recorded(path: Path, ranks: list[Rank], **more: Any) -> Path:
    counts = [Count(phase="decode", rank=one.rank, count=10 * (one.rank + 1)) for one in ranks if one.steps]
    metadata = Metadata(world_size=4, ranks=ranks, **more)
    write_recording(path / "four.kcap", metadata, [Call(id=0, operator="aten::mm", counts=counts)])
    return path / "four.kcap"


@pytest.fixture
def four(tmp_path: Path) -> Path:
    killed = rank(1, ended=False, steps={"prefill": 1, "decode": 700})
    return recorded(tmp_path, [rank(0), killed, rank(2), rank(3, steps={})], disagreements=[LACKING])


def cells(out: str, name: str) -> list[str]:
    (row,) = (line for line in out.splitlines() if line.startswith(name))
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def test_each_rank_has_a_row_in_order_with_its_place_and_its_steps(kcap: Kcap, four: Path) -> None:
    out = kcap("show", four, "--by", "rank").out
    assert cells(out, "rank 0")[:3] == ["rank 0", "dp 0 of 2, tp 0 of 2", "1 prefill, 1,200 decode"]
    assert cells(out, "rank 0")[3:] == ["1", "10", "10", "16.7%"]
    assert cells(out, "rank 2")[:2] == ["rank 2", "dp 1 of 2, tp 0 of 2"]
    assert re.findall(r"^rank \d", out, re.MULTILINE) == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_a_rank_that_was_killed_and_one_that_ran_nothing_say_so(kcap: Kcap, four: Path) -> None:
    out = kcap("show", four, "--by", "rank").out
    assert cells(out, "rank 1")[2] == "1 prefill, 700 decode, then killed"
    assert cells(out, "rank 3")[1:] == ["dp 1 of 2, tp 1 of 2", "none", "0", "·", "0", "0.0%"]


def test_ranks_that_differ_are_told_above_any_table(kcap: Kcap, four: Path) -> None:
    told = "RANKS DIFFER: ranks 0 and 1 must agree and did not in 2 and 2 decode steps: x::a bf16[4] 4 and 2 times"
    for by in ("rank", "operator"):
        assert told in kcap("show", four, "--by", by).out.replace("\n", " ")


def test_ranks_of_other_hosts_are_missed(kcap: Kcap, four: Path, tmp_path: Path) -> None:
    assert "4 ranks" in kcap("show", four).out
    half = recorded(tmp_path / "half", [rank(2), rank(3)])
    assert "ranks 2–3 of 4" in kcap("show", half).out


def test_the_json_has_the_ranks_and_rows_in_order(kcap: Kcap, four: Path) -> None:
    shown = json.loads(kcap("show", four, "--by", "rank", "--json").out)
    assert [row["name"] for row in shown["rows"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert shown["recording"]["ranks"][1]["ended"] is False
    assert shown["recording"]["disagreements"][0]["calls"][0]["counts"] == [4, 2]


def test_a_recording_of_before_shows_its_ranks_without_their_places(kcap: Kcap, recording: Path) -> None:
    out = kcap("show", recording, "--by", "rank").out
    assert cells(out, "rank 1")[0] == "rank 1" and "stands at" not in out
