"""`kcap replay DATASET`: each Definition's reference on each of its Workloads, each at its own cost alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from definitions import DATASET, definition, tensor, workload
from hypothesis import given
from hypothesis import strategies as st

from kcap.replay.datasets.workloads import workload_weights
from kcap.schemas.flashinfer.dataset import Dataset, WorkloadCount, blob_path, write_dataset
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.recording.records import Count
from kcap.schemas.results.measurement import Measurement, read_measurements

Kcap = Callable[..., Any]
LOOKUP = definition(
    {"table": tensor("bfloat16", "v", "h"), "ids": tensor("int32", "n")},
    {"v": 8, "h": 4, "n": None},
    reference="def run(table, ids):\n    return table[ids.long()]\n",
    outputs={"out": tensor("bfloat16", "n", "h")},
).model_copy(update={"name": "lookup_h4", "op_type": "embedding"})
PAGED = "mla_paged_prefill_causal_h16_ckv512_kpe64_ps1"
COPY = "def run(x):\n    return x.clone()\n"


def scaled(reference: str = COPY, name: str = "copy_h4") -> Definition:
    x = tensor("float32", "m", "h")
    of = definition({"x": x}, {"m": None, "h": 4}, reference=reference, outputs={"out": x})
    return of.model_copy(update={"name": name})


def of_size(of: Definition, uuid: str, **axes: int) -> Any:
    return workload(of, **axes).model_copy(update={"uuid": uuid})


def counted(name: str, uuid: str, call: int, samples: int = 1, **counts: int) -> WorkloadCount:
    told = [Count.model_validate({"phase": phase, "count": count}) for phase, count in counts.items()]
    return WorkloadCount(definition=name, workload=uuid, operator="x::y", call=call, samples=samples, counts=told)


COUNTS = [
    counted("copy_h4", "c1", 0, prefill=3),
    counted("copy_h4", "c2", 1, decode=40),
    counted("lookup_h4", "l1", 2, samples=2, decode=5),
    counted("lookup_h4", "l2", 2, samples=2, decode=5),
]


def small(root: Path, *more: Definition, counts: list[WorkloadCount] = COUNTS) -> Path:
    """`copy_h4` in two sizes, `lookup_h4` with ids in a blob that is there and one that is not, and `more` of one."""
    paths = {uuid: f"./{blob_path(LOOKUP, uuid)}" for uuid in ("l1", "l2")}
    looked = [workload(LOOKUP, {"ids": path}, n=2).model_copy(update={"uuid": uuid}) for uuid, path in paths.items()]
    workloads = {
        "copy_h4": [of_size(scaled(), "c1", m=2), of_size(scaled(), "c2", m=3)],
        "lookup_h4": looked,
        **{of.name: [of_size(of, of.name, m=2)] for of in more},
    }
    write_dataset(root, [scaled(), LOOKUP, *more], workloads, {"l1": {"ids": torch.tensor([7, 0]).int()}}, counts)
    return root


def replayed(kcap: Kcap, root: Path, *args: object) -> tuple[int, dict[str, Any], dict[str, Measurement]]:
    """Exit code, the JSON, and the measurements by the uuid of their Workload."""
    out = root / "m.jsonl"
    done = kcap("replay", root, "--trust", "--device", "cpu", "--seconds", 0.001, "--json", "-o", out, "--force", *args)
    assert done.out, done.err
    lines = list(read_measurements(out))
    assert len({line.workload for line in lines}) == len(lines)
    return done.code, orjson.loads(done.out), {str(line.workload): line for line in lines}


def test_every_workload_is_timed_and_its_line_names_it(kcap: Kcap, tmp_path: Path) -> None:
    code, result, lines = replayed(kcap, small(tmp_path))
    assert code == 0
    assert {uuid: (line.definition, line.operator, line.dtype) for uuid, line in lines.items()} == {
        "c1": ("copy_h4", "copy_h4", "float32"),
        "c2": ("copy_h4", "copy_h4", "float32"),
        "l1": ("lookup_h4", "lookup_h4", "bfloat16"),
        "l2": ("lookup_h4", "lookup_h4", "bfloat16"),
    }
    assert all(line.median_us and line.method == "host" and line.call is None for line in lines.values())
    assert all(line.device_name and line.torch and line.threads for line in lines.values())
    assert (lines["c2"].bytes, lines["l1"].bytes) == (48, 72)
    assert result["replayed"] == {"calls": 4, "count": 48, "share": 1.0}


def test_a_blob_that_is_missing_is_said_and_one_that_is_there_is_read(kcap: Kcap, tmp_path: Path) -> None:
    _, _, lines = replayed(kcap, small(tmp_path), "--op", "lookup*")
    made_up = {uuid: [note for note in line.notes if note.startswith("made up")] for uuid, line in lines.items()}
    assert made_up == {"l1": [], "l2": [f"made up for want of ./{blob_path(LOOKUP, 'l2')}: ids"]}


def test_counts_times_times_are_the_whole(kcap: Kcap, tmp_path: Path) -> None:
    _, result, lines = replayed(kcap, small(tmp_path))
    rows = {row["workload"]: row for row in result["calls"]}
    assert {uuid: line.count for uuid, line in lines.items()} == {"c1": 3, "c2": 40, "l1": 3, "l2": 2}
    assert rows["c2"]["axes"] == {"m": 3}
    assert rows["c2"]["total_us"] == pytest.approx(40 * (lines["c2"].median_us or 0))
    assert result["host_time_us"] == pytest.approx(sum(row["total_us"] for row in rows.values()))


def test_the_table_has_definitions_their_sizes_and_their_phases(kcap: Kcap, tmp_path: Path) -> None:
    done = kcap("replay", small(tmp_path), "--trust", "--device", "cpu", "--seconds", 0.001)
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if "m=3" in line]
    assert line.split()[-6:] == ["40", "decode", "host", "copy_h4", "m=3", "c2"]
    assert "replayed 48 of 48 invocations (100.0%)" in done.out
    assert "made up for want of blobs: index inputs of 1 Workloads" in done.out


@pytest.mark.parametrize(
    ("args", "uuids"),
    [
        (["--op", "look*"], {"l1", "l2"}),
        (["--op", "look*", "--op", "copy_h4"], {"c1", "c2", "l1", "l2"}),
        (["--phase", "prefill"], {"c1"}),
        (["--top", "1"], {"c2"}),
        (["--phase", "decode", "--top", "2"], {"c2", "l1"}),
    ],
)
def test_globs_phases_and_counts_choose_workloads(kcap: Kcap, tmp_path: Path, args: list[str], uuids: set[str]) -> None:
    assert replayed(kcap, small(tmp_path), *args)[2].keys() == uuids


def test_without_counts_each_workload_counts_as_one(kcap: Kcap, tmp_path: Path) -> None:
    _, _, lines = replayed(kcap, small(tmp_path, counts=[]))
    assert [line.count for line in lines.values()] == [1, 1, 1, 1]


def test_nothing_runs_without_trust(kcap: Kcap, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    spy = scaled(f"open({str(mark)!r}, 'w')\n{COPY}", "spy")
    done = kcap("replay", small(tmp_path / "d", spy))
    assert done.code == 2
    assert "--trust" in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not mark.exists()


def test_a_reference_never_runs_in_the_command(kcap: Kcap, tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    spy = scaled(f"import os\nopen({str(mark)!r}, 'a').write(str(os.getpid()) + ' ')\n{COPY}", "spy")
    assert replayed(kcap, small(tmp_path / "d", spy))[0] == 0
    assert mark.read_text().split() not in ([], [str(os.getpid())])


BAD = {
    "raises": ("def run(x):\n    raise ValueError('mine')\n", "ValueError: mine (line 2 of the reference)"),
    "exits": ("import os\ndef run(x):\n    os._exit(0)\n", "the reference ended its process with exit code 0"),
    "leaves": ("import sys\ndef run(x):\n    sys.exit(0)\n", "SystemExit: 0 (line 3 of the reference)"),
    "crashes": ("import os\ndef run(x):\n    os.kill(os.getpid(), 11)\n", "the reference crashed: SIGSEGV"),
    "returns_less": (
        "def run(x):\n    return x[:1]\n",
        "ValueError: out: has shape [1, 4], the Definition's is [2, 4]",
    ),
    "lies": (
        "import os\ndef run(x):\n    for fd in range(3, 60):\n        try:\n"
        '            os.write(fd, b\'{"status": "ok", "call": 7, "operator": "forged", "median_us": 0}\')\n'
        "        except OSError:\n            pass\n    os._exit(0)\n",
        None,
    ),
}


def test_a_bad_reference_costs_its_own_line_and_exits_1(kcap: Kcap, tmp_path: Path) -> None:
    bad = [scaled(text, name) for name, (text, _) in BAD.items()]
    code, _, lines = replayed(kcap, small(tmp_path, *bad))
    assert code == 1
    failed = {uuid: line.reason for uuid, line in lines.items() if line.status == "failed"}
    assert failed == {name: reason for name, (_, reason) in BAD.items() if reason}
    assert {lines[uuid].status for uuid in ("c1", "c2", "l1", "l2")} == {"ok"}
    assert (lines["lies"].operator, lines["lies"].call, lines["lies"].count) == ("lies", None, 1)


def test_what_names_and_reasons_hold_never_reaches_the_terminal_as_it_is(kcap: Kcap, tmp_path: Path) -> None:
    x = tensor("float32", "m", "\x1b[31m")
    run = "def run(x):\n    if len(x) > 1:\n        raise ValueError('\\x1b]0;title')\n    return x\n"
    of = definition({"x": x}, {"m": None, "\x1b[31m": None}, reference=run)
    given = [of_size(of, f"u{m}", m=m, **{"\x1b[31m": 2}) for m in (1, 2)]
    write_dataset(tmp_path, [of], {of.name: given}, {})
    done = kcap("replay", tmp_path, "--trust", "--device", "cpu", "--seconds", 0.001)
    assert done.code == 1
    assert "\x1b" not in done.out + done.err
    assert r"\x1b]0;title" in done.out


def test_what_one_reference_changes_the_next_does_not_see(kcap: Kcap, tmp_path: Path) -> None:
    spoil = scaled(f"import torch\ntorch.Tensor.clone = None\ntorch.clone = None\n{COPY}", "a_spoiler")
    assert (
        replayed(kcap, small(tmp_path, spoil, counts=[counted("a_spoiler", "a_spoiler", 9, decode=99)]))[2]["c1"].status
        == "ok"
    )


def test_a_reference_that_hangs_is_skipped_at_its_limit_and_exits_3(kcap: Kcap, tmp_path: Path) -> None:
    hang = scaled("def run(x):\n    while True:\n        pass\n", "hangs")
    began = time.monotonic()
    code, result, lines = replayed(kcap, small(tmp_path, hang), "--timeout", 5)
    assert code == 3
    assert time.monotonic() - began < 60
    assert (lines["hangs"].status, lines["hangs"].reason) == ("skipped", "took longer than 5 s (--timeout)")
    assert result["skipped"]["calls"] == 1
    assert {lines[uuid].status for uuid in ("c1", "c2", "l1", "l2")} == {"ok"}


def test_a_workload_that_does_not_fit_is_skipped_with_the_reason(kcap: Kcap, tmp_path: Path) -> None:
    huge = scaled(name="huge")
    write_dataset(tmp_path, [huge], {"huge": [of_size(huge, "big", m=1 << 40), of_size(huge, "tiny", m=1)]}, {})
    code, _, lines = replayed(kcap, tmp_path)
    assert code == 3
    assert (lines["big"].status, lines["tiny"].status) == ("skipped", "ok")
    assert "its tensors take 3.28e+04 GiB" in str(lines["big"].reason)


def test_an_input_that_the_reference_writes_to_is_put_back(kcap: Kcap, tmp_path: Path) -> None:
    """Grown from sample to sample, it would overflow; 64 invocations of one sample do not take it that far."""
    text = "def run(x):\n    assert x.isfinite().all()\n    return x.mul_(2)\n"
    _, _, lines = replayed(kcap, small(tmp_path, scaled(text, "doubles")), "--op", "doubles", "--seconds", 0.1)
    assert lines["doubles"].status == "ok", lines["doubles"].reason
    assert len(lines["doubles"].samples_us) * lines["doubles"].n > 150


@pytest.mark.parametrize(
    ("args", "words"),
    [(["--op", "nothing*"], "kcap show"), (["--phase", "mixed"], "counts.jsonl"), ([], "no Workloads")],
)
def test_nothing_to_replay_is_a_wrong_call(kcap: Kcap, tmp_path: Path, args: list[str], words: str) -> None:
    small(tmp_path)
    if not args:
        for path in (*tmp_path.glob("workloads/*/*.jsonl"), tmp_path / "counts.jsonl"):
            path.unlink()
    done = kcap("replay", tmp_path, "--trust", *args)
    assert done.code == 2
    assert words in done.err


@given(
    samples=st.integers(1, 5),
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=4),
)
def test_a_calls_invocations_are_shared_among_its_samples_and_none_is_lost(samples: int, counts: list[int]) -> None:
    phases = dict(zip(("prefill", "decode", "mixed", "other"), counts, strict=False))
    weights = workload_weights([counted("d", str(n), 0, samples, **phases) for n in range(samples)])
    for phase, count in phases.items():
        assert sum(weights["d", str(n)][phase] for n in range(samples)) == count
    totals = [sum(weights["d", str(n)].values()) for n in range(samples)]
    assert max(totals) - min(totals) <= 1


def test_definitions_of_flashinfers_dataset_are_timed_on_their_workloads(kcap: Kcap, tmp_path: Path) -> None:
    whole = Dataset.load(DATASET)
    picked = {name: whole.workloads[name][:1] for name in ("gemm_n128_k2048", PAGED)}
    write_dataset(tmp_path, [whole.definitions[name] for name in picked], picked, {})
    code, _, lines = replayed(kcap, tmp_path)
    assert code == 0
    assert lines.keys() == {one.uuid for (one,) in picked.values()}
    paged = lines[picked[PAGED][0].uuid]
    assert paged.definition == PAGED
    assert any(note.startswith("caches cut to the pages in use: num_pages") for note in paged.notes)
    assert any(note.startswith("made up for want of") for note in paged.notes)
