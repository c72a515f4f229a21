"""What an adapter of an inference framework has, and how adapters are found: each is a file or a folder here.

>>> FRAMEWORK = Framework("vLLM", "vllm", ("vllm",), pip=("install vllm",), plugin=Plugin(...))
>>> OFFLINE = "kcap.capture.engines.vllm.offline"
>>> def arguments(start: Start) -> dict[str, Any]: ...
>>> def hook(window: Window) -> None: ...

A small engine is one file, `NAME.py`, with these members. A larger one is a folder, `NAME/`, whose `adapter.py` has
them. Nothing else lies here. What an adapter imports is imported inside the engine: the standard library and orjson
only; torch and the framework itself where a hook runs. An adapter hooks the engine with `kcap.capture.hooks.imports`
and `kcap.capture.window.hooking`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from kcap.errors import CallError
from kcap.system.registry import plugin_names

if TYPE_CHECKING:
    from kcap.capture.window.window import Window


@dataclass(frozen=True)
class Plugin:
    """How a framework finds plugins. `group`: of entry points; `variable`: names the only ones to load, if set.

    `module`: where the framework loads them, relative to its package; `since`: the first release that does.
    `empty_is_all`: an empty list lets every plugin in.
    """

    group: str
    variable: str
    module: str
    since: str
    empty_is_all: bool = False


@dataclass(frozen=True)
class Server:
    """A command that serves. `words`: its command line has them all; `port`: where it listens unless told otherwise by
    --host and --port; `ready`: what answers there once it serves. `elsewhere`: options that put it at another place."""

    words: tuple[str, ...]
    port: int
    ready: str = "/health"
    elsewhere: tuple[str, ...] = ("--config", "--ssl-keyfile", "--uds", "--headless")

    def is_started_by(self, command: Sequence[str]) -> bool:
        return {*command, *(Path(word).name for word in command)}.issuperset(self.words)


@dataclass(frozen=True)
class Framework:
    """An inference framework. `name`: in commands and Recordings; `package`: what Python imports.

    `distributions`: those that bring it, the likeliest first. `pip`, `pip_cpu`: the pip commands that install it, with
    an NVIDIA GPU and (where they differ) without; `elsewhere`: where to get it if pip has it not. `plugin`: None where
    the framework loads none. `environment`: what an offline start gets unless the user's environment says otherwise.
    `cache`: the variable that names the folder in which it keeps what it compiled. `handed_on`: the one that lists,
    with commas, the variables that its workers in a Ray cluster get.
    `servers`: its commands that serve. `middleware`: words that put kcap in front of what they are asked; none where
    the adapter does it, None where nothing can. `tried`: the newest release that kcap was tried with; `hooks`: what the
    adapter hooks there (`module:Class.method`, relative to the package). `untried`: what kcap says everywhere of an
    adapter that nobody has run with the real engine; `tried` is then the release in whose source its hooks were read.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    pip: tuple[str, ...] = ()
    pip_cpu: tuple[str, ...] = ()
    elsewhere: str = ""
    plugin: Plugin | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None
    handed_on: str | None = None
    servers: tuple[Server, ...] = ()
    middleware: tuple[str, ...] | None = None
    tried: str = ""
    untried: str = ""
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A model as an engine is to load it. `path`: what the engine is given; `model`: what the user named.

    `layers_model`: None where unknown. `context`: the tokens that it was made for, None where unknown. `tokenizer`:
    False where `path` is a directory without one. `bundled`: `path` is kcap's own configuration, without weights.
    `weights_from_hub`: the engine must ask the hub, though kcap's own configuration would do for dummy weights.
    """

    model: str
    path: str
    layers_model: int | None
    context: int | None = None
    tokenizer: bool = True
    bundled: bool = False
    weights_from_hub: bool = False


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

    @property
    def context(self) -> int:
        """The context of a bundled model: as the requests need, 2,048 at least, and no more than it was made for."""
        wanted = max(2048, self.longest)
        return min(wanted, self.target.context or wanted)

    def merged(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """`chosen` with the user's own arguments. What is a dictionary in `chosen` keeps the members that the user
        leaves alone; CallError where the user's own is no dictionary, nor JSON of one."""
        arguments = chosen | self.given
        for name in self.given.keys() & {name for name, value in chosen.items() if isinstance(value, dict)}:
            own = self.given[name]
            try:
                own = orjson.loads(own) if isinstance(own, str) else own
                arguments[name] = chosen[name] | own
            except (ValueError, TypeError):
                raise CallError(f"--engine-arg {name}: with --num-layers give a JSON object, not {own!r}") from None
        return arguments


class Engine(Protocol):
    """An adapter. Its file's name is that of its entry point: `kcap.capture.activate:activate_NAME`."""

    FRAMEWORK: Framework
    OFFLINE: str | None
    """A module with `main(job_file)`, run as `python -m OFFLINE JOB`; None where only a COMMAND can be recorded.

    The job is JSON: `session` (its file), `workload` (the members of `Workload`), `engine_arguments`, and perhaps
    `outputs` (a file for each request's token ids). `main` returns when all is generated and the shards are closed."""

    def arguments(self, start: Start) -> dict[str, Any]:
        """What the framework's offline class is called with for `start`; JSON."""

    def hook(self, window: Window) -> None:
        """Have the framework's steps call `window.begin` and `window.end`, and the end of its warm-up `window.start`.

        Runs in every process of the engine, once, before its model is built; must import nothing of the framework that
        the process has not imported itself (see `kcap.capture.hooks.imports`).
        """


def find(name: str) -> Engine:
    """The adapter `name`: the file `NAME.py`, or `adapter.py` in the folder `NAME`."""
    module = importlib.import_module(f"{__name__}.{name}")
    return cast(
        "Engine", importlib.import_module(f"{module.__name__}.adapter") if hasattr(module, "__path__") else module
    )


def adapters() -> dict[str, Engine]:
    """Every adapter by its name: what names its framework. ValueError where two are for one framework."""
    modules = {name: find(name) for name in plugin_names(__name__)}
    by_name = {name: engine for name, engine in modules.items() if hasattr(engine, "FRAMEWORK")}
    frameworks: dict[str, str] = {}
    for name, engine in by_name.items():
        other = frameworks.setdefault(engine.FRAMEWORK.name.lower(), name)
        if other != name:
            raise ValueError(f"two adapters for {engine.FRAMEWORK.name}: {other} and {name}")
    return by_name


def of_framework(framework: str | None) -> Engine | None:
    """The adapter of `framework`, in any case; None where there is none."""
    wanted = (framework or "").lower()
    return next((engine for engine in adapters().values() if engine.FRAMEWORK.name.lower() == wanted), None)


def serving_framework(command: Sequence[str]) -> Framework | None:
    """The framework whose server `command` starts; None where that is not plain."""
    frameworks = (engine.FRAMEWORK for engine in adapters().values())
    return next((f for f in frameworks if any(server.is_started_by(command) for server in f.servers)), None)


PLUGIN_NAME = "kcap"


def excluding_setting(framework: str | None) -> str | None:
    """The setting (`ITS_PLUGINS=a,b`) that keeps kcap out of the engine, or None where none does.

    None for `framework`: any engine's.
    """
    for candidate in (engine.FRAMEWORK for engine in adapters().values()):
        plugin = candidate.plugin
        if framework not in (None, candidate.name) or plugin is None:
            continue
        listed = os.environ.get(plugin.variable)
        if listed is None or (plugin.empty_is_all and not listed):
            continue
        if PLUGIN_NAME not in (word.strip() for word in listed.split(",")):
            return f"{plugin.variable}={listed}"
    return None


def lacks_plugins(framework: Framework) -> bool:
    """Whether the `framework` that is installed is too old to load plugins. It is not imported."""
    if framework.plugin is None:
        return False
    spec = importlib.util.find_spec(framework.package)
    locations = getattr(spec, "submodule_search_locations", None)
    return bool(locations) and not any(
        (Path(location) / framework.plugin.module).is_dir() for location in locations or ()
    )


def plugin_frameworks() -> str:
    """The frameworks that load plugins, each with its first release that does."""
    frameworks = (engine.FRAMEWORK for engine in adapters().values())
    return ", ".join(
        f"{framework.name} {framework.plugin.since} or newer"
        for framework in frameworks
        if framework.plugin is not None
    )
