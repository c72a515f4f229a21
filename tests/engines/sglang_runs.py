"""How the tests start SGLang: an interpreter of an environment of its own, two engines at a time."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from kcap.capture.session import SESSION_VARIABLE

HERE = Path(__file__).parent
MADE = HERE.parents[1] / ".venv-sglang"
PYTHON = Path(os.environ.get("KCAP_SGLANG_PYTHON", MADE / "bin/python"))
GPU = os.path.exists("/dev/nvidiactl")
THERE = PYTHON.exists() and ("KCAP_SGLANG_PYTHON" in os.environ or any(MADE.glob("kcap-*")))
REQUIRED = os.environ.get("KCAP_SGLANG") == "required"
marks = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not THERE and not REQUIRED, reason="no SGLang here: scripts/environment-sglang makes it, or KCAP_SGLANG_PYTHON"
    ),
]
TINY = ("--model", "kcap/tiny-llama", "--framework", "SGLang", "--load-format", "dummy")
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def environment(**more: str) -> dict[str, str]:
    """No hub, and quick imports; stand-ins for what has no build for a CPU, where there is no GPU.

    The clone that the tests run in stays off the path: its kcap.egg-info may be of another environment, and older.
    """
    kept = {name: value for name, value in os.environ.items() if name not in (SESSION_VARIABLE, "SGLANG_PLUGINS")}
    folders = [HERE / "starting", *([] if GPU else [HERE / "sglang_cpu/stubs"])]
    path = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return {**kept, **path, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", **more}


def command(*words: object) -> list[str]:
    return [str(PYTHON), "-m", "kcap", "record", *map(str, words)]


def recorded(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
    """`kcap record` by SGLang's interpreter, to its end."""
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=600, env=environment(**more))


def write_prompts(file: Path, prompts: Iterable[list[int]]) -> Path:
    file.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    return file
