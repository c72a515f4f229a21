"""The real SGLang where it fails: a rank that is killed, an engine that does not start, a model that is unknown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sglang_runs import TINY, TWO_RANKS, command, environment, marks, recorded
from shard_steps import steps_by_process

import kcap
from kcap.errors import PARTIAL

pytestmark = marks
Ran = tuple[subprocess.CompletedProcess[str], Path]
SHORT = ("--num-prompts", 2, "--input-len", 16)
UNKNOWN = "NobodyForCausalLM"


def killed(directory: Path) -> Ran:
    """Two ranks, one of which is killed after three steps."""
    words = (*TINY, *SHORT, "--output-len", 1500, "--engine-arg", "tp_size=2", "-o", directory / "out")
    pipe = subprocess.PIPE
    process = subprocess.Popen(command(*words), env=environment(**TWO_RANKS), stdout=pipe, stderr=pipe, text=True)
    deadline = time.monotonic() + 600
    while len(steps := steps_by_process(directory)) < 2 or min(steps.values()) < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.2)
    os.kill(max(steps), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess([], process.returncode, out, err), directory / "out"


def bad_argument(directory: Path) -> Ran:
    """Known only in the scheduler's process, whose end SGLang makes its parent's."""
    return recorded(*TINY, *SHORT, "--engine-arg", "attention_backend=nonsense", "-o", directory / "out"), directory


def unknown_model(directory: Path) -> Ran:
    model = directory / "model"
    model.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    (model / "config.json").write_text(json.dumps({"architectures": [UNKNOWN], "model_type": "llama", **sizes}))
    words = ("--model", model, "--framework", "SGLang", "--load-format", "dummy", *SHORT, "-o", directory / "out")
    return recorded(*words), directory


@pytest.fixture(scope="module")
def runs(own_key: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ran]]]:
    with ThreadPoolExecutor(2) as pool:
        yield {
            run.__name__: pool.submit(run, tmp_path_factory.mktemp("fault"))
            for run in (killed, bad_argument, unknown_model)
        }


def test_a_rank_that_is_killed_leaves_a_recording_that_says_so(runs: dict[str, Future[Ran]]) -> None:
    ran, path = runs["killed"].result()
    assert ran.returncode == PARTIAL, ran.stderr
    assert "the engine ended with status" in ran.stderr and "Recording is partial" in ran.stderr
    recording = kcap.load(path)
    assert not recording.metadata.complete
    assert sum(recording.metadata.steps.values()) >= 3
    assert any("ended without closing" in note for note in recording.metadata.notes)
    assert {count.rank for call in recording.calls for count in call.counts} == {0, 1}


def test_an_engine_that_does_not_start_shows_its_last_lines(runs: dict[str, Future[Ran]]) -> None:
    ran, directory = runs["bad_argument"].result()
    assert ran.returncode == 1, ran.stderr
    assert "nonsense" in ran.stderr and "Traceback" not in ran.stderr
    assert list(directory.iterdir()) == [], "nothing is left"


def test_a_model_that_sglang_does_not_know_is_named(runs: dict[str, Future[Ran]]) -> None:
    ran, directory = runs["unknown_model"].result()
    assert ran.returncode == 1, ran.stderr
    assert UNKNOWN in ran.stderr and "Traceback" not in ran.stderr
    assert [path.name for path in directory.iterdir()] == ["model"]
