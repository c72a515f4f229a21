"""Every adapter has what the interface asks for, and a new engine is one new file."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kcap as kcap_package
from kcap.capture import activate, engines, frameworks, plugins
from kcap.capture.engines import engine, pytorch, sglang, vllm

Kcap = Callable[..., Any]
ROOT = Path(__file__).parents[2]
CONFORMING: list[engine.Engine] = [vllm, sglang, pytorch]  # what mypy proves
MEMBERS = ("arguments", "hook")


def adapters() -> dict[str, engine.Engine]:
    return {found.FRAMEWORK.name: found for found in engines.adapters()}


def test_the_adapters_are_those_of_the_folder() -> None:
    assert [found for found in CONFORMING if found not in engines.adapters()] == []
    assert engines.of_framework("VLLM") is vllm
    assert engines.of_framework("TRT-LLM") is engines.of_framework(None) is None


@pytest.mark.parametrize("name", sorted(adapters()))
class TestEachAdapter:
    def test_has_what_the_interface_asks_for(self, name: str) -> None:
        adapter = adapters()[name]
        assert isinstance(adapter, ModuleType)
        assert isinstance(adapter.FRAMEWORK, engine.Framework)
        for member in MEMBERS:
            wanted = list(inspect.signature(getattr(engine.Engine, member)).parameters)[1:]
            assert list(inspect.signature(getattr(adapter, member)).parameters) == wanted

    def test_has_a_main_where_it_starts_offline(self, name: str) -> None:
        offline = adapters()[name].OFFLINE
        if offline is not None:
            assert list(inspect.signature(importlib.import_module(offline).main).parameters) == ["job_file"]

    def test_has_its_entry_point_where_the_framework_loads_plugins(self, name: str) -> None:
        import tomllib

        adapter = adapters()[name]
        points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        if adapter.FRAMEWORK.plugin is not None:
            file = Path(inspect.getfile(adapter)).stem  # type: ignore[arg-type]
            assert points[adapter.FRAMEWORK.plugin.group] == {plugins.NAME: f"kcap.capture.activate:activate_{file}"}

    def test_no_other_file_names_it(self, name: str) -> None:
        package, files = adapters()[name].FRAMEWORK.package, [*(ROOT / "capture").glob("*.py"), ROOT / "kcap/cli.py"]
        if adapters()[name].FRAMEWORK.plugin is None:
            pytest.skip("its package is PyTorch, which the recorder is for")
        for file in files:
            lines = file.read_text().splitlines()
            code = [line for line in lines if package in line and not told(line)]
            assert not code, f"{file}: {code}"


def told(line: str) -> bool:
    """Help, documentation and comments may give an engine as an example."""
    return any(mark in line for mark in ('"""', "help=", "kcap record", "`", "#"))


def test_entry_points_are_named_after_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KCAP_SESSION", raising=False)
    activate.activate_vllm()
    with pytest.raises(AttributeError, match="no_such"):
        _ = activate.no_such


def test_an_activation_that_fails_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("KCAP_SESSION", str(tmp_path / "gone.json"))
    monkeypatch.setattr(activate, "_name", None)
    activate.activate_vllm()
    assert "kcap: not recording this process: FileNotFoundError" in capsys.readouterr().err


def test_each_engine_starts_the_model_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "_cached", lambda model: None)
    target = frameworks.find_model("kcap/tiny-llama", "dummy")
    start = engine.Start(target, "dummy", 1, True, {"max_model_len": 9, "context_length": 9}, 5000)
    of_vllm, of_sglang = (adapter.arguments(start) for adapter in (vllm, sglang))
    assert (of_vllm["model"], of_vllm["hf_overrides"]) == (target.path, {"num_hidden_layers": 1})
    assert of_vllm["enforce_eager"] is True
    assert (of_sglang["model_path"], of_sglang["disable_cuda_graph"]) == (target.path, True)
    assert json.loads(of_sglang["json_model_override_args"]) == {"num_hidden_layers": 1}
    assert of_vllm["max_model_len"] == of_sglang["context_length"] == 9, "the user's own argument wins"
    longest = sglang.arguments(engine.Start(target, "dummy", None, False, {}, 5000))
    assert longest["context_length"] > 5000
    assert not {"json_model_override_args", "disable_cuda_graph"} & set(longest)


TOY_FRAMEWORK = """
import torch
def warm_up():
    torch.zeros(2) + 1
def forward(tokens):
    a = torch.ones(tokens, 4)
    return a @ torch.ones(4, 3)
"""
TOY_ADAPTER = """
import sys
from pathlib import Path
import orjson
from kcap.capture.engines.engine import Framework, Plugin
from kcap.capture.window import StepShape

FRAMEWORK = Framework("Toy", "toyframework", ("toy",), pip=("install toy",), environment={"TOY_CACHE": "small"})
OFFLINE = "toyengine"

def arguments(start):
    return {"model": start.target.path, **start.given}

def hook(window):
    import toyframework
    warm_up, forward = toyframework.warm_up, toyframework.forward
    def warmed():
        warm_up()
        window.start(framework="Toy", framework_version="1")
    def step(tokens):
        window.begin(StepShape("prefill" if tokens > 1 else "decode", [tokens], [tokens]))
        result = forward(tokens)
        window.end()
        return result
    toyframework.warm_up, toyframework.forward = warmed, step

def main(job_file):
    import os
    import toyframework
    from kcap.capture import activate, engines
    engines.__path__.append(str(Path(__file__).parent))  # as if its file were in the folder
    activate.activate_toyengine()  # as its entry point would be
    job = orjson.loads(Path(job_file).read_bytes())
    assert os.environ["TOY_CACHE"] == "small" and job["engine_arguments"]["answer"] == 42
    toyframework.warm_up()
    for tokens in (job["workload"]["input_len"], *[1] * (job["workload"]["output_len"] - 1)):
        toyframework.forward(tokens)

if __name__ == "__main__":
    main(sys.argv[1])
"""


def test_a_new_engine_is_one_new_file(kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toyframework.py").write_text(TOY_FRAMEWORK)
    (tmp_path / "toyengine.py").write_text(TOY_ADAPTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    model = ("--model", "kcap/tiny-llama", "--load-format", "dummy", "--engine-arg", "answer=42")
    words = (*model, "--input-len", 5, "--output-len", 3, "-o", tmp_path / "out")
    ran = kcap("record", "--framework", "toy", *words)
    assert ran.code == 0, ran.err
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert (metadata.framework, metadata.steps) == ("Toy", {"decode": 2, "prefill": 1})
    assert metadata.totals["kernels"] == 3 * 3, "two fills and a product a step, and nothing of the warm-up"
    assert "Toy" in kcap("doctor").out
    for name in ("toyengine", f"{engines.__name__}.toyengine"):
        sys.modules.pop(name, None)
