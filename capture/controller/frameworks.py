"""The frameworks that kcap knows: which are installed here, how to get the rest, and which models they can start."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import click

from kcap import version
from kcap.capture import engines
from kcap.capture.controller import models
from kcap.capture.engines import Engine, Framework, Target, adapters, lacks_plugins, of_framework
from kcap.errors import CallError, KcapError
from kcap.system.machine import Check, State, pip, version_of

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
TOKENIZERS = ("tokenizer*", "vocab.*", "*.tiktoken", "tekken.json", "spiece.model", "sentencepiece*")


def find_adapter(name: str) -> Engine:
    """The adapter of the framework `name`, in any case; CallError where there is none."""
    engine = of_framework(name)
    if engine is None:
        names = ", ".join(framework.name for framework in known_frameworks())
        raise CallError(f"unknown framework {name}: one of {names}")
    return engine


def find_framework(name: str) -> Engine:
    """As `find_adapter`, and it can start a model offline, here; KcapError with the way to install it otherwise."""
    engine = find_adapter(name)
    framework = engine.FRAMEWORK
    if engine.OFFLINE is None:
        raise CallError(f"{framework.name} starts no model by itself: kcap record -o DIR -- COMMAND records a program")
    if importlib.util.find_spec(framework.package) is None:
        raise KcapError(f"{framework.name} is not installed: {install_command(framework)}")
    if framework.plugin and lacks_plugins(framework):
        raise KcapError(f"this {framework.name} loads no plugins: {framework.plugin.since} or newer does")
    return engine


def find_model(model: str, load_format: str) -> Target:
    """Where to load `model` from: a directory, the hub's cache, or (dummy weights) kcap's own configuration."""
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise CallError(f"{model} is no model: it has no config.json")
        return Target(model, str(folder), *_sizes(file), tokenizer=has_tokenizer(folder))
    bundled, cached = models.find_config(model), _cached_config(model)
    if bundled is None and cached is None:
        _refuse_unknown(model, load_format)
    if bundled and (load_format == "dummy" or model.lower().startswith(models.OWN)) and cached is None:
        return Target(model, str(bundled), *_sizes(bundled / "config.json"), tokenizer=False, bundled=True)
    sizes = _sizes(cached or (bundled / "config.json" if bundled else None))
    return Target(model, model, *sizes, weights_from_hub=bundled is not None and cached is None)


def _refuse_unknown(model: str, load_format: str) -> None:
    """CallError at once where no hub can have `model`, which is neither kcap's own nor in the hub's cache."""
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CallError(f"no such model directory: {model}")
    names = ", ".join(models.model_names())
    if not HUB_ID.fullmatch(model):
        raise CallError(f"unknown model {model}: give a directory or a hub id, such as {names}")
    if load_format == "dummy" and os.environ.get("HF_HUB_OFFLINE") == "1":
        raise CallError(f"unknown model {model}: kcap has no configuration of it, and the hub is off; it has {names}")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's directory has any of the files that tokenizers are loaded from."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZERS)


def _cached_config(model: str) -> Path | None:
    """The model's config.json in the hub's local cache: it wins over kcap's own."""
    if not HUB_ID.fullmatch(model):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    file = try_to_load_from_cache(model, "config.json")
    return Path(file) if isinstance(file, str) else None


CONTEXT_KEYS = ("max_position_embeddings", "max_target_positions")


def _sizes(file: Path | None) -> tuple[int | None, int | None]:
    """Layers and context of the model with this config.json."""
    import orjson

    if file is None:
        return None, None
    try:
        config = orjson.loads(file.read_bytes())
    except ValueError as error:
        raise CallError(f"{file}: {error}") from None
    if not isinstance(config, dict):
        raise CallError(f"{file}: it holds no JSON object")
    text = config.get("text_config")
    text = text if isinstance(text, dict) and text else config
    layers, *contexts = (text.get(key) for key in ("num_hidden_layers", *CONTEXT_KEYS))
    context = next((size for size in contexts if isinstance(size, int)), None)
    return layers if isinstance(layers, int) else None, context


def known_frameworks() -> list[Framework]:
    """Those that kcap records."""
    return [engine.FRAMEWORK for engine in adapters().values()]


def install_command(framework: Framework) -> str:
    """What to type to have `framework`: in this environment, or in one of its own where another engine has this one.

    Depends on whether there is an NVIDIA GPU. Engines need different versions of the same packages.
    """
    gpu = shutil.which("nvidia-smi") is not None
    steps = framework.pip if gpu else framework.pip_cpu or framework.pip
    if framework.elsewhere or not (framework.plugin and _other_engine(framework)):
        return framework.elsewhere or " && ".join(map(pip, steps))
    folder = f".venv-{framework.name.lower()}"
    installs = (*steps, f"install {shlex.quote(str(_clone() or 'kcap'))}")
    return " && ".join(
        [f"{sys.executable} -m venv {folder}", *(f"{folder}/bin/python -m pip {step}" for step in installs)]
    )


def _other_engine(framework: Framework) -> bool:
    """Whether this environment has an engine that is not `framework`."""
    others = (engine.FRAMEWORK for engine in adapters().values() if engine.FRAMEWORK.name != framework.name)
    return any(other.plugin and importlib.util.find_spec(other.package) for other in others)


def _clone() -> Path | None:
    """The clone that this kcap runs from, or None where it was installed from a wheel."""
    root = Path(version.__file__).parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def check_engine(framework: Framework) -> Check:
    """Whether `framework` is installed; the way to get it is told only where this kcap can record it."""
    version = version_of(*framework.distributions)
    tried = framework.untried or (f"tried up to {framework.tried}" if framework.tried else "")
    told = f"; {tried}" if tried else ""
    if version is None and importlib.util.find_spec(framework.package) is None:
        fix = install_command(framework) if of_framework(framework.name) else ""
        return Check(framework.name, "missing", f"not installed{told}", fix)
    return Check(framework.name, "ok", f"{version or 'installed, version unknown'}{told}")


def check_hooks(framework: Framework) -> Iterable[Check]:
    """Of a framework that kcap was not tried with, or only older releases: which of kcap's hooks are there."""
    version = version_of(*framework.distributions)
    if version is None or not framework.tried:
        return
    if _numbers(version) <= _numbers(framework.tried) and not framework.untried:
        return
    missing = [hook for hook in framework.hooks if not _has(_folder(framework.package), *hook.split(":"))]
    newer = framework.untried or f"{version} is newer than {framework.tried}, the newest that kcap was tried with"
    count = len(framework.hooks)
    there = f": {count - len(missing)} of {count} hooks are there" if count else ""
    lacking = f", not {', '.join(missing)}" if missing else ""
    judge = "kcap record --check-coverage tells what of its GPU time is recorded"
    state: State = "problem" if missing else "ok"
    yield Check(f"kcap's hooks in {framework.name}", state, f"{newer}{there}{lacking}; {judge}")


def runs_here(command: Sequence[str]) -> bool:
    """Whether `command` is one of kcap's own environment, of whose packages kcap knows the versions."""
    return Path(shutil.which(command[0]) or "").parent == Path(sys.executable).parent


def tell_hooks(framework: Framework) -> None:
    """Say before a start what `check_hooks` finds."""
    for newer in check_hooks(framework):
        click.echo(f"kcap: {framework.name} {newer.found}", err=True)


def _numbers(version: str) -> list[int]:
    """Of a release: those before any mark of a build (`0.32.1+cpu`, `0.5.23.post1`)."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    return Path(next(iter((spec and spec.submodule_search_locations) or ()), "/nonexistent"))


def _has(folder: Path, module: str, name: str) -> bool:
    """Whether a module of the package in `folder` has the function or method `name`, by its source alone."""
    path = folder / module.replace(".", "/")
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not file.is_file():
        return False
    tree = ast.parse(file.read_bytes())
    owner, _, method = name.rpartition(".")
    if not owner:
        return any(isinstance(node, ast.FunctionDef) and node.name == method for node in tree.body)
    kind = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner), None)
    if kind is None:
        return False
    if any(isinstance(node, ast.FunctionDef) and node.name == method for node in kind.body):
        return True
    bases = {base.id for base in kind.bases if isinstance(base, ast.Name)}
    modules = dict.fromkeys(bases - {owner}, module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{folder.name}."):
            inside = (node.module or "").removeprefix(f"{folder.name}.")
            modules |= {alias.name: inside for alias in node.names if alias.name in bases}
    return any(_has(folder, inside, f"{base}.{method}") for base, inside in modules.items())


def check_plugin(framework: Framework) -> Iterable[Check]:
    """A framework finds kcap by its entry point, unless its list of plugins names others only."""
    if framework.plugin is None:
        return
    name, points = f"kcap in {framework.name}", metadata.entry_points(group=framework.plugin.group)
    if not any(point.name == engines.PLUGIN_NAME for point in points):
        source = _clone()
        fix = pip(f"install -e {shlex.quote(str(source))}" if source else "install --force-reinstall kcap")
        yield Check(name, "problem", "its plugin is not registered in this environment", fix)
        return
    excluded = engines.excluding_setting(framework.name)
    if excluded:
        variable, _, allowed = excluded.partition("=")
        fix = f"export {variable}={','.join(filter(None, [*allowed.split(','), engines.PLUGIN_NAME]))}"
        yield Check(name, "problem", f"{excluded} leaves kcap out", fix)
        return
    yield Check(name, "ok", f"{framework.name}'s processes load kcap's plugin")
