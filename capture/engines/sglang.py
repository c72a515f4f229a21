"""SGLang: where its steps begin and end, and which phase they are.

A step is one `ModelRunner.forward` and the sampling that belongs to it. Sampling may come later, after `run_batch` has
returned (grammars), or never (a pipeline's earlier ranks, embeddings): `run_batch` then ends the step. The window opens
when the scheduler has been made, so profiling, warm-up and graph capture never count. A server's own warm-up requests
look like any other: the server's process has every window pause meanwhile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kcap.capture.engines import sglang_operators
from kcap.capture.engines.engine import Framework, Plugin, Server, Start
from kcap.capture.engines.groups import Groups
from kcap.capture.engines.hooking import Around, contained, wrap
from kcap.capture.engines.sglang_batches import Scheduled, shape
from kcap.capture.engines.sglang_graphs import hook_graphs
from kcap.capture.imports import Hook, when_imported
from kcap.capture.process import place
from kcap.capture.window import StepShape, Window

FRAMEWORK = Framework(
    "SGLang",
    "sglang",
    ("sglang",),
    pip=("install sglang",),
    plugin=Plugin("sglang.srt.plugins", "SGLANG_PLUGINS", "srt/plugins", "0.5.11", empty_is_all=True),
    servers=(Server(("sglang.launch_server",), 30000), Server(("sglang", "serve"), 30000)),
)
OFFLINE = "kcap.capture.engines.sglang_offline"
SPARE = 8  # tokens of its context that it keeps from a request
SCHEDULER = "sglang.srt.managers.scheduler"
RUNNER = "sglang.srt.model_executor.model_runner"
SERVER = "sglang.srt.entrypoints.http_server"
STATE = "sglang.srt.distributed.parallel_state"
MISSED = "a batch ran and no ModelRunner.forward was seen: another plugin, or this SGLang, runs it elsewhere"


def arguments(start: Start) -> dict[str, Any]:
    """The arguments of `sglang.Engine`, less those that depend on the machine."""
    chosen: dict[str, Any] = {"model_path": start.target.path, "load_format": start.load_format}
    if start.target.bundled:
        context = max(2048, start.longest + SPARE)
        chosen |= {"skip_tokenizer_init": True, "dtype": "bfloat16", "context_length": context}
    if start.num_layers is not None:
        chosen["json_model_override_args"] = f'{{"num_hidden_layers": {start.num_layers}}}'
    if start.eager:
        chosen["disable_cuda_graph"] = True
    return chosen | start.given


def hook(window: Window) -> None:
    """Hook SGLang's scheduler and runner, now or as their modules are imported."""
    steps, groups = Steps(window), Groups(window, STATE)
    hooks: dict[str, Hook] = {
        SCHEDULER: functools.partial(_hook_scheduler, steps=steps, window=window, groups=groups),
        RUNNER: functools.partial(_hook_runner, steps=steps, window=window),
        SERVER: functools.partial(_hook_server, window=window),
        sglang_operators.MODULE: functools.partial(sglang_operators.hook_operators, window=window),
        sglang_operators.PLANNING: sglang_operators.hook_plan,
    }
    for module, hook_module in hooks.items():
        when_imported(module, contained(window, hook_module))
    hook_graphs(window, groups.tell)


def _hook_runner(module: ModuleType, steps: Steps, window: Window) -> None:
    def load(original: Around, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        sglang_operators.name_fused(window)
        return result

    _wrap(module.ModelRunner, "load_model", load)
    _wrap(module.ModelRunner, "forward", steps.forward)
    _wrap(module.ModelRunner, "sample", steps.sample)
    if hasattr(module.ModelRunner, "compute_logprobs_only"):
        _wrap(module.ModelRunner, "compute_logprobs_only", steps.sample)


def _wrap(owner: type, name: str, around: Around) -> None:
    """Also where `owner` inherits it: what is a mixin's in one release is its own in another."""
    wrap(next((kind for kind in owner.__mro__ if name in vars(kind)), owner), name, around)


def _hook_scheduler(module: ModuleType, steps: Steps, window: Window, groups: Groups) -> None:
    def made(original: Around, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        try:
            window.start(**_facts(scheduler))
            groups.tell()
        except Exception as error:
            window.failed(error)

    _wrap(module.Scheduler, "__init__", made)
    _wrap(module.Scheduler, "run_batch", steps.run_batch)


def _hook_server(module: Any, window: Window) -> None:
    """Pause every process's window while the server warms itself up; it first waits a second, which is enough."""
    original = module._wait_and_warmup
    pause = window.session.pause_file

    @functools.wraps(original)
    def warm_up(*args: Any, **kwargs: Any) -> Any:
        pause.touch(mode=0o600)
        try:
            return original(*args, **kwargs)
        finally:
            pause.unlink(missing_ok=True)

    module._wait_and_warmup = warm_up


def _facts(scheduler: Any) -> dict[str, Any]:
    import sglang

    config, server = scheduler.model_config, scheduler.server_args
    return {
        **place(_replica(scheduler), not server.enable_dp_attention, server.dp_size),
        "model": config.model_path,
        "layers": getattr(config, "num_hidden_layers", None),
        "framework": FRAMEWORK.name,
        "framework_version": sglang.__version__,
    }


def _replica(scheduler: Any) -> int:
    """Which of data parallelism's: the scheduler knew it, then its `ps` (0.5.15), then a context."""
    holder = scheduler if hasattr(scheduler, "dp_rank") else getattr(scheduler, "ps", None)
    context = sys.modules.get("sglang.srt.runtime_context")
    if context is not None and not hasattr(holder, "dp_rank"):
        holder = context.get_parallel()
    return getattr(holder, "dp_rank", None) or 0


class Steps:
    """Brackets the steps of a process."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._scheduled = Scheduled()
        self._forwards = 0

    def run_batch(self, original: Around, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        phase = self._guarded(self._scheduled.look, batch)
        before = self._forwards
        result = original(batch, *args, **kwargs)
        if phase and self._forwards == before:
            self._window.failed(RuntimeError(MISSED))
        if getattr(result, "delay_sample_func", None) is None:
            self._window.end()
        return result

    def forward(self, original: Around, runner: Any, *args: Any, **kwargs: Any) -> Any:
        self._forwards += 1
        if not self._window.following:
            self._window.settle()
            return original(*args, **kwargs)
        batch = args[0] if args else kwargs.get("forward_batch")
        step: StepShape | None = self._guarded(shape, batch, runner, self._scheduled)
        began = step is not None and self._window.begin(step)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            self._window.discard()
            raise
        if began:
            self._window.pause()
        return output

    def sample(self, original: Around, runner: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._window.resume():
            return original(*args, **kwargs)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            self._window.discard()
            raise
        self._window.end()
        return output

    def _guarded(self, read: Callable[..., Any], *args: Any) -> Any:
        """What `read` makes of SGLang's objects; a failure ends the recording, and the engine goes on."""
        if not self._window.following:
            return None
        try:
            return read(*args)
        except Exception as error:
            self._window.failed(error)
            return None
