"""Recordings of the calls in bench_calls, and their exports."""

from __future__ import annotations

import os
import random
import secrets
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import orjson
import pytest
from bench_calls import ADD, METADATA, MM, SCALED, TROUBLE, numbered
from bench_datasets import SCALE
from judging import Benches
from judging import bench as judge_worker

from kcap.bench.judge.worker import open_judge
from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.recording.recording import Sample, write_recording


@pytest.fixture(autouse=True)
def draws(request, monkeypatch):
    """What a judge in this process draws is as property tests' examples: new, or in .ci/run the same each time."""
    if os.environ.get("KCAP_EXAMPLES") == "fixed":
        drawn = random.Random(request.node.nodeid)
        monkeypatch.setattr(secrets, "randbits", drawn.getrandbits)
        monkeypatch.setattr(secrets, "randbelow", drawn.randrange)


@pytest.fixture
def recorded(tmp_path):
    """Writes a Recording of these calls and gives its path."""

    def write(calls, metadata=METADATA, name="tiny.kcap"):
        path: Path = tmp_path / name
        samples = [
            Sample(call=one.id, phase="decode", scalars={"1": 0.5})
            for one in numbered(calls)
            if one.operator == SCALED.operator
        ]
        write_recording(path, metadata, numbered(calls), samples=samples)
        return path

    return write


@pytest.fixture
def everything(recorded):
    return recorded([MM, ADD, SCALED, *TROUBLE.values()])


@pytest.fixture
def exported(kcap, tmp_path):
    """Exports a Recording to a target; gives the folder and its loss.json, checked to add up."""

    def run(path, target, *options):
        output = tmp_path / f"{path.stem}.{target}"
        done = kcap("export", path, "--to", target, "-o", output, *options)
        assert done.code == 0, done.err
        loss = orjson.loads((output / "loss.json").read_bytes())
        assert loss["target"] == target
        assert loss["exported"] + sum(lost["count"] for lost in loss["lost"]) == loss["total"]
        return output, loss

    return run


@pytest.fixture
def faked(monkeypatch):
    """`kcap bench` asks the judge in fake_judge; gives the environment in which it can be found."""
    from kcap.bench.run import bench_run
    from kcap.bench.run.executors import SlotRequest

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(bench_run, "SlotRequest", partial(SlotRequest, module="fake_judge"))


@pytest.fixture
def bench(kcap, faked, tmp_path):
    """Runs `kcap bench` on the dataset and the Solutions in `tmp_path`; the output is `tmp_path / "out"`."""

    def run(*options, path=None):
        args = ("--solutions", tmp_path / "solutions", "-o", tmp_path / "out", "--trust", "--device", "cpu")
        return kcap("bench", path or tmp_path / "dataset", *args, *options)

    return run


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """Judge workers by kind (see Benches), which end with the module."""
    with ExitStack() as stack:
        yield Benches(tmp_path_factory.mktemp("benches"), stack)


@pytest.fixture
def judged_alone(tmp_path):
    """Opens a judge worker of its own."""
    return lambda: judge_worker(tmp_path)


@pytest.fixture(scope="session")
def judge(tmp_path_factory):
    """One that runs in this process, and whose dataset has no blobs."""
    root, scratch = tmp_path_factory.mktemp("dataset"), tmp_path_factory.mktemp("scratch")
    write_dataset(root, [SCALE], {}, {})
    session = {"device": "cpu", "threads": 1, "seconds": 0.02, "timeout": 20, "memory": 2 << 30, "root": str(root)}
    opened = open_judge({**session, "scratch": str(scratch)})
    yield opened
    opened.close()
    opened.server.close()
