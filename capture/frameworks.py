"""The frameworks that `kcap record --framework` takes, and the engine arguments that start a model in each."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcap.capture import models
from kcap.capture.installed import ENGINES, Engine, install_command, recordable
from kcap.capture.plugins import PLUGINS, lacks_plugins
from kcap.errors import CallError, KcapError

SGLANG_SPARE = 8  # tokens of its context that it keeps from a request


@dataclass(frozen=True)
class Target:
    """A model as an engine is to load it. `path`: what the engine is given; `model`: what the user named."""

    model: str
    path: str
    layers_model: int | None
    bundled: bool

    @property
    def weights_from_hub(self) -> bool:
        """Whether the engine must ask the hub, though kcap's own configuration would do for dummy weights."""
        return not self.bundled and models.find(self.model) is not None and _cached(self.model) is None


def find_adapter(name: str) -> Engine:
    """The engine called `name`, in any case; CallError if kcap does not know it or has no adapter for it."""
    engine = next((engine for engine in ENGINES if engine.framework.lower() == name.lower()), None)
    if engine is None:
        raise CallError(f"unknown framework {name}: one of {', '.join(engine.framework for engine in ENGINES)}")
    if not recordable(engine):
        raise CallError(f"{engine.framework} cannot be recorded yet: use --framework vLLM")
    return engine


def find_framework(name: str) -> Engine:
    """As `find_adapter`, and installed here; KcapError with the way to install it otherwise."""
    engine = find_adapter(name)
    if importlib.util.find_spec(engine.module) is None:
        raise KcapError(f"{engine.framework} is not installed: {install_command(engine.framework)}")
    if lacks_plugins(engine.module, PLUGINS[engine.framework]):
        raise KcapError(f"this {engine.framework} loads no plugins: {PLUGINS[engine.framework].since} or newer does")
    return engine


def find_model(model: str, load_format: str) -> Target:
    """Where to load `model` from: a directory, the hub's cache, or (dummy weights) kcap's own configuration."""
    if os.path.isdir(model):
        file = Path(model) / "config.json"
        if not file.is_file():
            raise CallError(f"{model} is no model: it has no config.json")
        return Target(model, model, _layers(file), False)
    if model.count("/") != 1:
        raise CallError(f"unknown model {model}: give a directory or a hub id, such as {', '.join(models.names())}")
    bundled = models.find(model)
    if load_format == "dummy" and _cached(model) is None:
        if bundled is None:
            _no_hub(model)
            return Target(model, model, None, False)
        return Target(model, str(bundled), _layers(bundled / "config.json"), True)
    return Target(model, model, _layers(_cached(model) or (bundled / "config.json" if bundled else None)), False)


def _no_hub(model: str) -> None:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        known = ", ".join(models.names())
        raise CallError(f"unknown model {model}: kcap has no configuration of it, and the hub is off; it has {known}")


def _cached(model: str) -> Path | None:
    """The model's config.json in the hub's local cache: it wins over kcap's own."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(model, "config.json")
    return Path(found) if isinstance(found, str) else None


def _layers(file: Path | None) -> int | None:
    import orjson

    if file is None:
        return None
    try:
        config = orjson.loads(file.read_bytes())
    except ValueError as error:
        raise CallError(f"{file}: {error}") from None
    layers = (config.get("text_config") or config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else None


@dataclass(frozen=True)
class Start:
    """How a model is to be started offline. `longest`: the tokens of the longest request, which a bundled model's
    context must hold; `given`: the user's own arguments, which win."""

    target: Target
    load_format: str
    num_layers: int | None
    eager: bool
    given: dict[str, Any]
    longest: int


def vllm_arguments(start: Start) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    arguments: dict[str, Any] = {"model": start.target.path, "load_format": start.load_format}
    if start.target.bundled:
        arguments |= {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": max(2048, start.longest)}
    if start.num_layers is not None:
        arguments["hf_overrides"] = {"num_hidden_layers": start.num_layers}
    if start.eager:
        arguments["enforce_eager"] = True
    return arguments | start.given


def sglang_arguments(start: Start) -> dict[str, Any]:
    """The arguments of `sglang.Engine`, less those that depend on the machine."""
    arguments: dict[str, Any] = {"model_path": start.target.path, "load_format": start.load_format}
    if start.target.bundled:
        context = max(2048, start.longest + SGLANG_SPARE)
        arguments |= {"skip_tokenizer_init": True, "dtype": "bfloat16", "context_length": context}
    if start.num_layers is not None:
        arguments["json_model_override_args"] = f'{{"num_hidden_layers": {start.num_layers}}}'
    if start.eager:
        arguments["disable_cuda_graph"] = True
    return arguments | start.given


ARGUMENTS: dict[str, Callable[[Start], dict[str, Any]]] = {"vllm": vllm_arguments, "sglang": sglang_arguments}
