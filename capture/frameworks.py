"""The frameworks that `kcap record --framework` takes, and the models that it can start in them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from kcap.capture import models
from kcap.capture.engines import of_framework
from kcap.capture.engines.engine import Engine, Target
from kcap.capture.installed import frameworks, install_command
from kcap.capture.plugins import lacks_plugins
from kcap.errors import CallError, KcapError


def find_adapter(name: str) -> Engine:
    """The adapter of the framework `name`, in any case; CallError if kcap does not know it or has none for it."""
    engine = of_framework(name)
    if engine is not None:
        return engine
    known = [framework.name for framework in frameworks()]
    here = next((framework for framework in known if framework.lower() == name.lower()), None)
    if here is None:
        raise CallError(f"unknown framework {name}: one of {', '.join(known)}")
    raise CallError(f"{here} cannot be recorded yet: use one of {', '.join(k for k in known if of_framework(k))}")


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
    cached = _cached(model)
    layers = _layers(cached or (bundled / "config.json" if bundled else None))
    return Target(model, model, layers, False, weights_from_hub=bundled is not None and cached is None)


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
