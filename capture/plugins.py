"""Whether a framework would load kcap's plugin: the variables that name the only ones to load, its version."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from kcap.capture.engines import adapters
from kcap.capture.engines.engine import Framework

NAME = "kcap"


def excluded(framework: str | None) -> str | None:
    """The setting (`ITS_PLUGINS=a,b`) that keeps kcap out of the engine, or None where none does.

    None for `framework`: any engine's.
    """
    for known in (engine.FRAMEWORK for engine in adapters()):
        plugin = known.plugin
        if framework not in (None, known.name) or plugin is None:
            continue
        listed = os.environ.get(plugin.variable)
        if listed is None or (plugin.empty_is_all and not listed):
            continue
        if NAME not in (word.strip() for word in listed.split(",")):
            return f"{plugin.variable}={listed}"
    return None


def lacks_plugins(framework: Framework) -> bool:
    """Whether the `framework` that is installed is too old to load plugins. It is not imported."""
    if framework.plugin is None:
        return False
    spec = importlib.util.find_spec(framework.package)
    places = getattr(spec, "submodule_search_locations", None)
    return bool(places) and not any((Path(place) / framework.plugin.module).is_dir() for place in places or ())


def loading() -> str:
    """The frameworks that load plugins, each with its first release that does."""
    known = (engine.FRAMEWORK for engine in adapters())
    return ", ".join(f"{one.name} {one.plugin.since} or newer" for one in known if one.plugin is not None)
