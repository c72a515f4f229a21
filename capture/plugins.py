"""How engines find plugins: their entry-point groups, and the variables that name the only ones to load."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

NAME = "kcap"


@dataclass(frozen=True)
class Plugin:
    """`module`: where the engine loads plugins, relative to its package; `since`: the first release that does.

    `empty_is_all`: an empty list lets every plugin in.
    """

    group: str
    variable: str
    module: str
    since: str
    empty_is_all: bool = False


PLUGINS = {
    "vLLM": Plugin("vllm.general_plugins", "VLLM_PLUGINS", "plugins", "0.8"),
    "SGLang": Plugin("sglang.srt.plugins", "SGLANG_PLUGINS", "srt/plugins", "0.5.11", empty_is_all=True),
}


def excluded(framework: str | None) -> str | None:
    """The setting (`VLLM_PLUGINS=a,b`) that keeps kcap out of the engine, or None where none does.

    None for `framework`: any engine's.
    """
    for name, plugin in PLUGINS.items():
        listed = os.environ.get(plugin.variable)
        if framework not in (None, name) or listed is None or (plugin.empty_is_all and not listed):
            continue
        if NAME not in (word.strip() for word in listed.split(",")):
            return f"{plugin.variable}={listed}"
    return None


def lacks_plugins(package: str, plugin: Plugin) -> bool:
    """Whether the installed `package` is too old to load plugins. It is not imported."""
    spec = importlib.util.find_spec(package)
    places = getattr(spec, "submodule_search_locations", None)
    return bool(places) and not any((Path(place) / plugin.module).is_dir() for place in places or ())
