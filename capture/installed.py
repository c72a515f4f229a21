"""Which inference engines are installed here, whether kcap can record them, and how to get the rest."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import kcap
from kcap.capture import plugins
from kcap.capture.engines import adapters, of_framework
from kcap.capture.engines.engine import Framework
from kcap.capture.machine import Check, pip, version_of

PLANNED = (
    Framework("TRT-LLM", "tensorrt_llm", ("tensorrt-llm",), pip=("install tensorrt-llm",)),
    Framework(
        "MLC-LLM",
        "mlc_llm",
        ("mlc-llm", "mlc-llm-nightly", "mlc-llm-cpu", "mlc-llm-nightly-cpu"),
        elsewhere="its project's own wheels: MLC-LLM is not on PyPI",
    ),
)


def frameworks() -> list[Framework]:
    """Those that kcap records, then those that it only knows by name."""
    recorded = [engine.FRAMEWORK for engine in adapters()]
    return recorded + [planned for planned in PLANNED if of_framework(planned.name) is None]


def install_command(framework: Framework) -> str:
    """What to type so that this interpreter has `framework`; by whether there is an NVIDIA GPU."""
    gpu = shutil.which("nvidia-smi") is not None
    steps = framework.pip if gpu else framework.pip_cpu or framework.pip
    return framework.elsewhere or " && ".join(map(pip, steps))


def _source() -> Path | None:
    """The clone that this kcap runs from, or None where it was installed from a wheel."""
    root = Path(kcap.__file__).parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def check_engine(framework: Framework) -> Check:
    """Whether `framework` is installed; the way to get it is told only where this kcap can record it."""
    version = version_of(*framework.distributions)
    if version is None and importlib.util.find_spec(framework.package) is None:
        fix = install_command(framework) if of_framework(framework.name) else ""
        return Check(framework.name, "missing", "not installed", fix)
    return Check(framework.name, "ok", version or "installed, version unknown")


def check_plugin(framework: Framework) -> Iterable[Check]:
    """A framework finds kcap by its entry point, unless its list of plugins names others only."""
    if framework.plugin is None:
        return
    name, points = f"kcap in {framework.name}", metadata.entry_points(group=framework.plugin.group)
    if not any(point.name == plugins.NAME for point in points):
        source = _source()
        fix = pip(f"install -e {shlex.quote(str(source))}" if source else "install --force-reinstall kcap")
        yield Check(name, "problem", "its plugin is not registered in this environment", fix)
        return
    excluded = plugins.excluded(framework.name)
    if excluded:
        variable, _, allowed = excluded.partition("=")
        fix = f"export {variable}={','.join(filter(None, [*allowed.split(','), plugins.NAME]))}"
        yield Check(name, "problem", f"{excluded} leaves kcap out", fix)
        return
    yield Check(name, "ok", f"{framework.name}'s processes load kcap's plugin")
