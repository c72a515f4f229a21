"""Hooks on modules to come, and what the recorder's own import pulls into an engine."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kcap.capture.hooks.imports import when_imported

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `kcapfake` with the modules `one` and `two`; `two` imports `one`."""
    (tmp_path / "kcapfake").mkdir()
    (tmp_path / "kcapfake" / "__init__.py").write_text("")
    (tmp_path / "kcapfake" / "one.py").write_text("value = 1\n")
    (tmp_path / "kcapfake" / "two.py").write_text("from kcapfake.one import value\n")
    (tmp_path / "kcapfake" / "broken.py").write_text("raise ImportError('of its own')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("kcapfake")]:
        del sys.modules[name]


def hook(seen: list[str]) -> Callable[[ModuleType], None]:
    return lambda module: seen.append(f"{module.__name__} {getattr(module, 'value', None)}")


@pytest.mark.usefixtures("package")
def test_a_hook_runs_once_the_module_is_whole() -> None:
    seen: list[str] = []
    when_imported("kcapfake.one", hook(seen))
    assert seen == []
    importlib.import_module("kcapfake.two")
    assert seen == ["kcapfake.one 1"]
    importlib.reload(sys.modules["kcapfake.one"])
    assert seen == ["kcapfake.one 1"]


@pytest.mark.usefixtures("package")
def test_a_hook_on_an_imported_module_runs_at_once() -> None:
    importlib.import_module("kcapfake.one")
    seen: list[str] = []
    when_imported("kcapfake.one", hook(seen))
    assert seen == ["kcapfake.one 1"]


@pytest.mark.usefixtures("package")
def test_several_hooks_on_a_module_all_run() -> None:
    seen: list[str] = []
    when_imported("kcapfake.one", hook(seen))
    when_imported("kcapfake.one", hook(seen))
    importlib.import_module("kcapfake.one")
    assert len(seen) == 2


@pytest.mark.usefixtures("package")
def test_who_only_looks_for_a_module_takes_no_hook_away() -> None:
    """As transformers looks for torch before it imports it."""
    seen: list[str] = []
    when_imported("kcapfake.one", hook(seen))
    spec = importlib.util.find_spec("kcapfake.one")
    assert spec is not None and spec.loader is not None
    assert "value = 1" in spec.loader.get_source("kcapfake.one")  # type: ignore[attr-defined]
    assert seen == []
    importlib.import_module("kcapfake.one")
    assert seen == ["kcapfake.one 1"]


@pytest.mark.usefixtures("package")
def test_a_module_keeps_its_loader_and_source() -> None:
    when_imported("kcapfake.one", hook([]))
    module = importlib.import_module("kcapfake.one")
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__name__ == "SourceFileLoader"


@pytest.mark.usefixtures("package")
def test_a_module_that_is_missing_or_broken_fails_as_before() -> None:
    seen: list[str] = []
    when_imported("kcapfake.missing", hook(seen))
    when_imported("kcapfake.broken", hook(seen))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kcapfake.missing")
    with pytest.raises(ImportError, match="of its own"):
        importlib.import_module("kcapfake.broken")
    assert seen == []


PULLED = """
import sys
import {known}
before = set(sys.modules)
import kcap.capture.activate, kcap.capture.window.window, kcap.capture.recorder.recorder
import kcap.capture.engines.vllm.adapter
import kcap.capture.engines.sglang.adapter, kcap.capture.engines.pytorch.adapter
kcap.capture.activate.follow_imports()
kcap.capture.activate.activate_vllm()
kcap.capture.activate.activate_sglang()
tops = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(tops - set(sys.stdlib_module_names) - {{"kcap", "orjson"}}))
"""


@pytest.mark.parametrize("known", ["sys", "torch"])
def test_the_recorder_pulls_nothing_heavy_into_an_engine(known: str, python: Python) -> None:
    ran = python(PULLED.format(known=known))
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stderr


OPENED = """
import sys
import torch, torch._dynamo, torch._subclasses.fake_tensor
before = set(sys.modules)
from kcap.capture.session import Session
from kcap.capture.window.window import Window
window = Window(Session(sys.argv[1], recorder=sys.argv[2]))
window.session.write()
window.start()
window.close()
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(tops - set(sys.stdlib_module_names) - {"kcap", "orjson", "torch"}))
"""


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_an_open_window_pulls_in_nothing_heavy(recorder: str, python: Python, tmp_path: Path) -> None:
    ran = python(OPENED, tmp_path / "shards", recorder)
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stderr


DERIVES = """
import sys
import kcap
from kcap.capture.fold.recording import derive_files, load_derivation

load_derivation()
before = set(sys.modules)
derive_files(kcap.load(sys.argv[1]))
print([name for name in set(sys.modules) - before if name.startswith(("torch.", "sympy."))])
"""


def test_nothing_of_torch_is_left_to_import_when_files_are_derived(python: Python, recording: Path) -> None:
    ran = python(DERIVES, recording)
    assert ran.stdout == "[]\n", ran.stderr
    assert (recording / "calling_record.json").exists()
