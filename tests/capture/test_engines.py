"""Every adapter has what the interface asks for, and a new engine is one new file."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from shard_lines import MATRIX, call, step_lines, write_shard

import kcap as kcap_package
from kcap.capture import activate, engines
from kcap.capture.controller import frameworks
from kcap.capture.controller.output import report_recording
from kcap.capture.controller.run import NoRecordingError, explain_silence, own_caches, recorded_environment
from kcap.capture.engines.pytorch import adapter
from kcap.capture.engines.sglang import adapter as sglang_adapter
from kcap.capture.engines.trtllm import adapter as trtllm_adapter
from kcap.capture.engines.vllm import adapter as vllm_adapter
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.taps.kernels.fragments import CACHE_TAG
from kcap.errors import CallError
from kcap.system.native_build import Unavailable

Kcap = Callable[..., Any]
ROOT = Path(__file__).parents[2]
CONFORMING: list[engines.Engine] = [vllm_adapter, sglang_adapter, adapter]  # what mypy proves
MEMBERS = ("arguments", "hook")


def adapters() -> dict[str, engines.Engine]:
    return {found.FRAMEWORK.name: found for found in engines.adapters().values()}


def test_the_adapters_are_those_of_the_folder() -> None:
    assert [found for found in CONFORMING if found not in engines.adapters().values()] == []
    assert engines.of_framework("VLLM") is vllm_adapter
    assert engines.of_framework("llama.cpp") is engines.of_framework(None) is None


@pytest.mark.parametrize("name", sorted(adapters()))
class TestEachAdapter:
    def test_has_what_the_interface_asks_for(self, name: str) -> None:
        adapter = adapters()[name]
        assert isinstance(adapter, ModuleType)
        assert isinstance(adapter.FRAMEWORK, engines.Framework)
        for member in MEMBERS:
            wanted = list(inspect.signature(getattr(engines.Engine, member)).parameters)[1:]
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
            (own,) = (key for key, engine in engines.adapters().items() if engine is adapter)
            assert points[adapter.FRAMEWORK.plugin.group] == {
                engines.PLUGIN_NAME: f"kcap.capture.activate:activate_{own}"
            }

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


def test_a_program_that_outlived_its_session_hears_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A daemon, or what it starts."""
    monkeypatch.setenv("KCAP_SESSION", str(tmp_path / "gone.json"))
    monkeypatch.setattr(activate, "_name", None)
    activate.activate("pytorch")
    assert capsys.readouterr() == ("", "")


def test_a_rank_whose_activation_fails_makes_the_recording_partial(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    session = Session(str(tmp_path / "shards"), command=["engine"])
    session.write()
    monkeypatch.setenv("KCAP_SESSION", str(session.file))
    monkeypatch.setattr(activate, "_name", None)
    activate.activate_nothing()
    with pytest.raises(NoRecordingError, match=r"nothing was recorded: kcap could not hook the engine: .*nothing"):
        explain_silence(session, 1, None)
    write_shard(session, 0, [call(0, "aten::mm", MATRIX, MATRIX), *step_lines([0])], [3])
    metadata = (recording := fold_session(session, tmp_path / "out")).metadata
    assert not metadata.complete
    assert [(tap.name, tap.pid) for tap in metadata.taps if tap.status == "failed"] == [("window", os.getpid())]
    capsys.readouterr()
    report_recording(recording, tmp_path / "out")
    said = capsys.readouterr().err
    assert f"window failed in process {os.getpid()}" in said and "1 of 2 ranks were recorded here" in said


def test_each_engine_starts_the_model_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "_cached_config", lambda model: None)
    target = frameworks.find_model("kcap/tiny-llama", "dummy")
    start = engines.Start(target, "dummy", 1, True, {"max_model_len": 9, "context_length": 9}, 5000)
    of_vllm, of_sglang = (adapter.arguments(start) for adapter in (vllm_adapter, sglang_adapter))
    assert (of_vllm["model"], of_vllm["hf_overrides"]) == (target.path, {"num_hidden_layers": 1})
    assert of_vllm["enforce_eager"] is True
    assert (of_sglang["model_path"], of_sglang["disable_cuda_graph"]) == (target.path, True)
    assert json.loads(of_sglang["json_model_override_args"]) == {"num_hidden_layers": 1}
    assert of_vllm["max_model_len"] == of_sglang["context_length"] == 9, "the user's own argument wins"
    longest = sglang_adapter.arguments(engines.Start(target, "dummy", None, False, {}, 5000))
    assert longest["context_length"] > 5000
    assert not {"json_model_override_args", "disable_cuda_graph"} & set(longest)


def test_overrides_of_the_configuration_keep_the_cut_to_the_first_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "_cached_config", lambda model: None)
    target = frameworks.find_model("kcap/tiny-llama", "dummy")
    dictionaries = ((vllm_adapter, "hf_overrides"), (trtllm_adapter, "model_kwargs"))
    for engine, name in (*dictionaries, (sglang_adapter, "json_model_override_args")):

        def overrides(own: Any, layers: int | None = 2, engine: ModuleType = engine, name: str = name) -> Any:
            arguments = engine.arguments(engines.Start(target, "dummy", layers, True, {name: own}, 160))[name]
            return arguments if engine is not sglang_adapter else json.loads(arguments)

        cut = {"num_hidden_layers": 2, "rope_theta": 5000}
        assert overrides({"rope_theta": 5000}) == overrides('{"rope_theta": 5000}') == cut
        assert overrides({"num_hidden_layers": 3}) == {"num_hidden_layers": 3}, "the user's own member wins"
        assert overrides({"rope_theta": 5000}, None) == {"rope_theta": 5000}
        for own in ("gpt", None, 4, [1]):
            with pytest.raises(CallError, match=f"--engine-arg {name}: with --num-layers give a JSON object"):
                overrides(own)


@pytest.mark.parametrize(("file", "skipped"), [("generation_config.json", True), ("tokenizer.json", False)])
def test_a_directory_without_a_tokenizer_needs_none(file: str, skipped: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).touch()
    target = frameworks.find_model(str(tmp_path), "auto")
    for engine, own in ((vllm_adapter, "tokenizer"), (sglang_adapter, "tokenizer_path")):
        arguments = engine.arguments(engines.Start(target, "auto", None, False, {}, 160))
        assert arguments.get("skip_tokenizer_init", False) is skipped
        elsewhere = engine.arguments(engines.Start(target, "auto", None, False, {own: "elsewhere"}, 160))
        assert "skip_tokenizer_init" not in elsewhere


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
from kcap.capture.engines import Framework, Plugin
from kcap.capture.window.window import StepShape

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


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an adapter and nothing else; its framework is in another, and both can be imported."""
    folder, framework = tmp_path / "toy", tmp_path / "toy" / "framework"
    framework.mkdir(parents=True)
    (framework / "toyframework.py").write_text(TOY_FRAMEWORK)
    (folder / "toyengine.py").write_text(TOY_ADAPTER)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{framework}")
    yield folder
    for name in ("toyengine", f"{engines.__name__}.toyengine"):
        sys.modules.pop(name, None)


@pytest.fixture
def record_toy(kcap: Kcap, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`record_toy(text)` records the model offline with `text` for an adapter, into `tmp_path / "out"`."""
    monkeypatch.syspath_prepend(toy / "framework")
    monkeypatch.syspath_prepend(toy)
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(toy)])
    model = ("--model", "kcap/tiny-llama", "--load-format", "dummy", "--engine-arg", "answer=42")

    def run(text: str) -> Any:
        (toy / "toyengine.py").write_text(text)
        return kcap("record", "--framework", "toy", *model, "--input-len", 5, "--output-len", 3, "-o", tmp_path / "out")

    return run


def test_a_new_engine_is_one_new_file(record_toy: Callable[..., Any], tmp_path: Path) -> None:
    ran = record_toy(TOY_ADAPTER)
    assert ran.code == 0, ran.err
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert (metadata.framework, metadata.steps) == ("Toy", {"decode": 2, "prefill": 1})
    assert metadata.totals["kernels"] == 3 * 3, "two fills and a product a step, and nothing of the warm-up"
    assert "Toy" in [framework.name for framework in frameworks.known_frameworks()]


@pytest.mark.parametrize("file", ["tensor_rt.py", "tensor_rt/adapter.py"])
def test_an_adapter_whose_name_has_an_underscore_is_found(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an adapter of one file, or of a folder
    path = tmp_path / file
    if path.parent != tmp_path:
        path.parent.mkdir()
        (path.parent / "__init__.py").touch()
    path.write_text(TOY_ADAPTER.replace("Toy", "TensorRT"))
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    # then it is among the adapters, under its file's name
    try:
        assert engines.adapters()["tensor_rt"].FRAMEWORK.name == "TensorRT"
        assert engines.of_framework("tensorrt") is engines.find("tensor_rt")
    finally:
        for name in ("tensor_rt", "tensor_rt.adapter"):
            sys.modules.pop(f"{engines.__name__}.{name}", None)


def test_the_engine_of_the_page_is_recorded_as_it_stands(
    kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given the three files of capture/README.md, each where a reader would put it
    page = (ROOT / "capture" / "README.md").read_text().partition("## Adding an engine")[2]
    engine, adapter, program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    in_folder = f"from kcap.capture import engines\nengines.__path__.append({str(tmp_path / 'engines')!r})\n"
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "toy.py").write_text(adapter)
    (tmp_path / "toyengine.py").write_text(engine)
    (tmp_path / "toy.py").write_text(in_folder + program)
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path / "engines")])
    # when the program is recorded
    out = tmp_path / "toy.kcap"
    try:
        ran = kcap("record", "--framework", "Toy", "-o", out, "--", sys.executable, tmp_path / "toy.py")
    finally:
        sys.modules.pop(f"{engines.__name__}.toy", None)
    # then it is what the page says
    assert ran.code == 0, ran.err
    assert "40 invocations of 8 distinct calls in steps: 7 decode, 1 prefill" in ran.err
    assert kcap_package.load(out).metadata.framework == "Toy"


HARMLESS = "    print('ValueError: Tokenizer not available', flush=True)\n"


@pytest.mark.parametrize(
    ("ending", "how", "last"),
    [
        ("raise RuntimeError('the second load is too long')", "1", "RuntimeError: the second load is too long"),
        ("print('the last line', flush=True)\n    os.kill(os.getpid(), 9)", "-9 (SIGKILL)", "the last line"),
    ],
)
def test_an_offline_engine_that_fails_after_its_first_steps_leaves_them_and_says_why(
    ending: str, how: str, last: str, record_toy: Callable[..., Any], tmp_path: Path
) -> None:
    main, start = TOY_ADAPTER.rsplit("\n\n", 1)
    ran = record_toy(f"{main}\n{HARMLESS}    {ending}\n\n{start}")
    assert ran.code == 3, ran.err
    assert ran.err.partition("kcap: the engine ended with ")[2].startswith(f"status {how}:\n  ")
    assert f"  {last}\n" in ran.err
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert metadata.steps == {"decode": 2, "prefill": 1}
    assert f"the engine ended with status {how}" in metadata.notes


def test_an_offline_engine_that_fails_before_its_first_step_leaves_nothing(
    record_toy: Callable[..., Any], tmp_path: Path
) -> None:
    ran = record_toy(TOY_ADAPTER.replace("    for tokens in", "    raise RuntimeError('no memory')\n    for tokens in"))
    assert ran.code == 1
    why = "kcap: the engine ended before its first step, with status 1:\n  RuntimeError: no memory\n"
    assert ran.err.endswith(f"{why}--engine-log FILE keeps its whole output\n")
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


STARTS_AN_ENGINE = """
import os, sys
import torch
import toyframework
from kcap.capture import activate, engines

engines.__path__.append(sys.argv[1])  # as if its file were in the folder
module, own_call = torch.nn.Linear(4, 3), torch.nn.Module.__call__
child = os.fork()
if child == 0:
    activate.activate_toyengine()  # as its entry point would be
    toyframework.warm_up()
    toyframework.forward(5)
    module(torch.ones(7, 4))
    assert torch.nn.Module.__call__ is not own_call, "PyTorch's own again"
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
module(torch.ones(2, 4))
activate.activate_toyengine()
toyframework.warm_up()
toyframework.forward(6)
module(torch.ones(3, 4))
"""


def test_an_engine_takes_a_program_over(kcap: Kcap, toy: Path, tmp_path: Path) -> None:
    """Before a module was called, and after one was: what follows is the engine's alone."""
    (tmp_path / "program.py").write_text(STARTS_AN_ENGINE)
    ran = kcap("record", "-o", tmp_path / "out", "--", sys.executable, tmp_path / "program.py", toy)
    assert ran.code == 0, ran.err
    recording = kcap_package.load(tmp_path / "out")
    assert recording.metadata.steps == {"other": 1, "prefill": 2}
    assert sorted(step.queries for step in recording.steps) == [[], [5], [6]]
    assert sum(call.total for call in recording.calls if call.operator == "aten::linear") == 1
    assert sum(call.total for call in recording.calls if call.operator == "aten::add.Tensor") == 0, "of the warm-up"


def test_an_engine_that_a_setting_keeps_kcap_out_of_is_not_recorded_as_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert adapter.engine_left_out() == ""
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert adapter.engine_left_out() == "VLLM_PLUGINS=other leaves kcap out of vLLM"


def test_what_an_engine_compiles_while_recorded_lies_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    users = tmp_path / "users"
    assert own_caches({"VLLM_CACHE_ROOT": str(users)}) == {"VLLM_CACHE_ROOT": str(users / f"vllm-{CACHE_TAG}")}
    kcaps = {"VLLM_CACHE_ROOT": str(tmp_path / "home/kcap" / f"vllm-{CACHE_TAG}")}
    assert own_caches({}) == kcaps
    (tmp_path / "file").touch()
    assert own_caches({"VLLM_CACHE_ROOT": str(tmp_path / "file/below")}) == kcaps, "nothing can be written there"
    monkeypatch.setattr("kcap.capture.controller.run.cache_folder", no_place)
    assert own_caches({}) == {}


def test_an_engines_workers_in_a_ray_cluster_are_told_of_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's processes were there before it: the engine hands on what it is told to."""
    session, variable = Session(str(tmp_path / "shards"), command=["vllm", "serve"]), "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
    for users, all_ in (("", "KCAP_SESSION"), ("HF_TOKEN", "HF_TOKEN,KCAP_SESSION")):
        monkeypatch.setenv(variable, users)
        assert recorded_environment(session)[variable] == all_


def no_place() -> Path:
    raise Unavailable("nowhere")
