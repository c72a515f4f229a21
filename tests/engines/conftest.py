"""Real engines, started by the command line as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mixed_batches import ARGUMENTS, BLOCKS, LAYERS, OUTPUT, PROMPTS

from kcap.capture.controller.models import find_config
from kcap.capture.controller.run import own_caches
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import SESSION_VARIABLE, Session
from kcap.schemas.recording.recording import Recording, load

MODEL_LAYERS, VOCABULARY = 3, 60_000
ENGINE_ARGUMENTS = ("dtype=bfloat16", "max_model_len=512", f"num_gpu_blocks_override={BLOCKS}")
STARTING = Path(__file__).parent / "starting"
KCAP = """
from kcap.cli import main
from kcap.system import machine

machine.has_gpu = lambda: True  # --check-coverage: the profiler works without one
main()
"""
Kcap = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of MODEL_LAYERS layers, whose vocabulary has room for token ids that are nothing else."""
    source = find_config("kcap/tiny-llama")
    assert source is not None
    config = json.loads((source / "config.json").read_text())
    directory = tmp_path_factory.mktemp("model")
    changed = {**config, "num_hidden_layers": MODEL_LAYERS, "vocab_size": VOCABULARY}
    (directory / "config.json").write_text(json.dumps(changed))
    return directory


@pytest.fixture(scope="session")
def own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The key that seals recorded sources is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, own_key: None) -> dict[str, str]:
    """No hub, no statistics, a small cache, a compile cache of its own, and quick imports."""
    small = {
        "PYTHONPATH": str(STARTING),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm-cache")),
    }
    kept = {name: value for name, value in os.environ.items() if name not in ("KCAP_SESSION", "VLLM_PLUGINS")}
    return {**kept, **small}


@pytest.fixture(scope="session")
def one_process(environment: dict[str, str]) -> dict[str, str]:
    """An offline vLLM's engine and worker are in the process that asks them: in its own each imports all of vLLM."""
    return {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="session")
def kcap_record(one_process: dict[str, str]) -> Kcap:
    """`kcap_record(output, words…, NAME="VALUE")` runs `kcap record`, with these variables in its environment, too."""

    def run(output: Path, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KCAP, "record", "-o", str(output), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, env={**one_process, **more})

    return run


@pytest.fixture(scope="session")
def offline(model: Path, kcap_record: Kcap) -> Kcap:
    """`offline(output, prompts, words…)` records vLLM, eagerly unless told otherwise, on prompts of token ids."""

    def run(
        output: Path, prompts: list[list[int]], *words: object, compiled: bool = False, **more: str
    ) -> subprocess.CompletedProcess[str]:
        file = output.with_suffix(".jsonl")
        file.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
        arguments = [word for argument in ENGINE_ARGUMENTS for word in ("--engine-arg", argument)]
        start = ("--model", model, "--load-format", "dummy", "--num-layers", LAYERS, "--prompts", file)
        eager = () if compiled else ("--eager",)
        return kcap_record(output, *start, *eager, *arguments, *words, **more)

    return run


@pytest.fixture(scope="session")
def generate(model: Path, one_process: dict[str, str]) -> Callable[..., list[list[int]]]:
    """`generate(directory, prompts, …)`: the tokens that vLLM generates, recorded if `recorded` is set."""

    def run(
        directory: Path, prompts: list[list[int]], output_len: int, recorded: bool, fail: str = "", **arguments: Any
    ) -> list[list[int]]:
        session = Session(str(directory / "shards"), framework="vLLM", model="tiny", fail=fail)
        session.write()
        always = {"model": str(model), "load_format": "dummy", "hf_overrides": {"num_hidden_layers": LAYERS}}
        sizes = {"max_model_len": 512, "num_gpu_blocks_override": BLOCKS}
        given = {"skip_tokenizer_init": True, "dtype": "bfloat16", **sizes}
        job = {
            "session": str(session.file),
            "workload": {"prompts": prompts, "output_len": output_len},
            "engine_arguments": always | given | arguments,
            "outputs": str(directory / "outputs.json"),
        }
        (directory / "job.json").write_text(json.dumps(job))
        recorder = {**own_caches(one_process), SESSION_VARIABLE: str(session.file)}
        env = {**one_process, **(recorder if recorded else {})}
        command = [sys.executable, "-m", "kcap.capture.engines.vllm.offline", str(directory / "job.json")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
        assert ran.returncode == 0, ran.stderr
        if recorded:
            fold_session(session, directory / "out")
        return json.loads((directory / "outputs.json").read_text())

    return run


Batches = Callable[..., tuple[list[list[int]], Path]]


@pytest.fixture(scope="session")
def batches(tmp_path_factory: pytest.TempPathFactory, generate: Callable[..., list[list[int]]]) -> Batches:
    """`batches(recorded, …)`: prefills, mixed steps and decodes, compiled: their tokens, and where the Recording is."""

    def once(recorded: bool, **more: Any) -> tuple[list[list[int]], Path]:
        directory = tmp_path_factory.mktemp("run")
        arguments = {**ARGUMENTS, "enforce_eager": False, **more}
        return generate(directory, PROMPTS, OUTPUT, recorded, **arguments), directory / "out"

    return once


@pytest.fixture(scope="session")
def compiled(batches: Batches) -> tuple[list[list[int]], Recording]:
    """Compiled by the engine while the recorder was in its processes: nothing is in the compile cache yet."""
    outputs, path = batches(True)
    return outputs, load(path)


@pytest.fixture(scope="session")
def unrecorded(compiled: tuple[list[list[int]], Recording], batches: Batches) -> list[list[int]]:
    """The same requests' tokens without recording, after it: compiled by the engine alone."""
    return batches(False)[0]
