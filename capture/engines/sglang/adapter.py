"""SGLang: where its steps begin and end, and what its batches say of them: phase, lengths, hits in the radix cache."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import orjson

from kcap.capture.engines import Framework, Plugin, Server, Start
from kcap.capture.engines.sglang import operators, reruns
from kcap.capture.engines.sglang.graphs import hook_graphs
from kcap.capture.hooks.imports import Hook, when_imported
from kcap.capture.session import Session
from kcap.capture.turns.blocks import BLOCK, BlockHashes
from kcap.capture.turns.middleware import TurnRecorder
from kcap.capture.window.hooking import Around, Groups, announce, contained, run_after_pause, wrap
from kcap.capture.window.process import rank_facts
from kcap.capture.window.requests import Requests
from kcap.capture.window.window import StepShape, Window

FRAMEWORK = Framework(
    "SGLang",
    "sglang",
    ("sglang",),
    pip=("install sglang",),
    plugin=Plugin("sglang.srt.plugins", "SGLANG_PLUGINS", "srt/plugins", "0.5.11", empty_is_all=True),
    servers=(Server(("sglang.launch_server",), 30000), Server(("sglang", "serve"), 30000)),
    middleware=(),
    tried="0.5.23",
    hooks=(
        "srt.managers.scheduler:Scheduler.__init__",
        "srt.managers.scheduler:Scheduler.run_batch",
        "srt.managers.scheduler:Scheduler.process_batch_result",
        "srt.model_executor.model_runner:ModelRunner.load_model",
        "srt.model_executor.model_runner:ModelRunner.forward",
        "srt.model_executor.model_runner:ModelRunner.sample",
        "srt.entrypoints.http_server:_wait_and_warmup",
    ),
)


OFFLINE = "kcap.capture.engines.sglang.offline"


SPARE = 8  # tokens of its context that it keeps from a request


SCHEDULER = "sglang.srt.managers.scheduler"


RUNNER = "sglang.srt.model_executor.model_runner"


SERVER = "sglang.srt.entrypoints.http_server"


STARTING = {  # what a runner does before its window opens
    "load_model": "loading weights",
    "alloc_memory_pool": "allocating the cache",
    "init_cuda_graphs": "capturing CUDA graphs",
    "init_device_graphs": "capturing CUDA graphs",  # as it was called before
}


OVERRIDES = "json_model_override_args"
TRANSFER = "process_disagg_prefill_inflight_queue"
MISSED = "a batch ran and no ModelRunner.forward was seen: another plugin, or this SGLang, runs it elsewhere"


def arguments(start: Start) -> dict[str, Any]:
    """The arguments of `sglang.Engine`, less those that depend on the machine."""
    chosen: dict[str, Any] = {"model_path": start.target.path, "load_format": start.load_format}
    if not start.target.tokenizer and "tokenizer_path" not in start.given:
        chosen["skip_tokenizer_init"] = True
    if start.target.bundled:
        chosen |= {"dtype": "bfloat16", "context_length": max(start.context, start.longest + SPARE)}
    if start.num_layers is not None:
        chosen[OVERRIDES] = {"num_hidden_layers": start.num_layers}
    if start.eager:
        chosen["disable_cuda_graph"] = True
    arguments = start.merged(chosen)
    if isinstance(arguments.get(OVERRIDES), dict):
        arguments[OVERRIDES] = orjson.dumps(arguments[OVERRIDES]).decode()
    return arguments


def hook(window: Window) -> None:
    """Hook SGLang's scheduler and runner, now or as their modules are imported."""
    steps, groups = Steps(window), Groups(window, reruns.STATE)
    hooks: dict[str, Hook] = {
        SCHEDULER: functools.partial(_hook_scheduler, steps=steps, window=window, groups=groups),
        RUNNER: functools.partial(_hook_runner, steps=steps, window=window),
        SERVER: functools.partial(_hook_server, window=window),
        operators.MODULE: functools.partial(operators.hook_operators, window=window),
        operators.PLANNING: operators.hook_plan,
    }
    for module, hook_module in hooks.items():
        when_imported(module, contained(window, hook_module))
    hook_graphs(window, groups.tell)
    reruns.hook_captures(window)


def _hook_runner(module: ModuleType, steps: Steps, window: Window) -> None:
    def load(original: Around, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        operators.name_fused(window)
        window.loaded(**rank_facts(), **_framework())
        return result

    announce(window.session, module.ModelRunner, STARTING)
    _wrap(module.ModelRunner, "load_model", load)
    _wrap(module.ModelRunner, "forward", steps.forward)
    _wrap(module.ModelRunner, "sample", steps.sample)
    if hasattr(module.ModelRunner, "compute_logprobs_only"):
        _wrap(module.ModelRunner, "compute_logprobs_only", steps.sample)


def _wrap(owner: type, name: str, around: Around) -> None:
    """Also where `owner` inherits it: what is a mixin's in one release is its own in another."""
    wrap(next((kind for kind in owner.__mro__ if name in vars(kind)), owner), name, around)


def _hook_scheduler(module: ModuleType, steps: Steps, window: Window, groups: Groups) -> None:
    def initialize(original: Around, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        try:
            window.requests.blocks = _blocks(window.session, scheduler)
            window.start(**_facts(scheduler))
            groups.tell()
        except Exception as error:
            window.failed(error)

    _wrap(module.Scheduler, "__init__", initialize)
    _wrap(module.Scheduler, "run_batch", steps.run_batch)
    _wrap(module.Scheduler, "process_batch_result", steps.process_result)
    if hasattr(module.Scheduler, TRANSFER):
        _wrap(module.Scheduler, TRANSFER, steps.transferred)


def _hook_server(module: Any, window: Window) -> None:
    """Pause every process's window while the server warms itself up; it first waits a second, which is enough."""
    if window.session.agent_trace:
        module.app.add_middleware(TurnRecorder)
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


def _blocks(session: Session, scheduler: Any) -> BlockHashes | None:
    """As large as the pages of the radix cache, which may be of one token: then larger."""
    if not session.agent_trace:
        return None
    return BlockHashes(session.hash_key, max(getattr(scheduler.server_args, "page_size", None) or 1, BLOCK))


def _framework() -> dict[str, str]:
    import sglang

    return {"framework": FRAMEWORK.name, "framework_version": sglang.__version__}


def _facts(scheduler: Any) -> dict[str, Any]:
    config, server = scheduler.model_config, scheduler.server_args
    return {
        **rank_facts(_replica(scheduler), not server.enable_dp_attention, server.dp_size),
        "model": config.model_path,
        "layers": getattr(config, "num_hidden_layers", None),
        **_framework(),
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
        self._finished: list[str] = []  # requests, since the last batch began
        self._forwards = 0

    def run_batch(self, original: Around, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        phase = self._guarded(self._look, scheduler, batch)
        before = self._forwards
        result = original(batch, *args, **kwargs)
        if phase and self._forwards == before:
            self._window.failed(RuntimeError(MISSED))
        if getattr(result, "delay_sample_func", None) is None:
            self._window.end()
        return result

    def _look(self, scheduler: Any, batch: Any) -> str | None:
        for name in self._finished:
            self._window.requests.finish(name)
        self._finished.clear()
        return self._scheduled.look(batch, self._window.requests, getattr(scheduler, "is_generation", True))

    def process_result(self, original: Around, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """What SGLang makes of a batch that has run: some requests finish in it, and may yet be in the batch that has
        begun meanwhile, whose token of theirs it throws away."""
        result = original(batch, *args, **kwargs)
        self._guarded(self._note_finished, batch.reqs)
        return result

    def transferred(self, original: Around, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """A server that only prefills is done with a request once its cache has gone to another."""
        requests = original(*args, **kwargs)
        self._guarded(self._note_finished, requests or ())
        return requests

    def _note_finished(self, requests: Any) -> None:
        for request in requests:
            if request.finished_reason is not None:
                self._window.requests.tell_returned(request.rid, len(request.output_ids))
                self._finished.append(request.rid)

    def forward(self, original: Around, runner: Any, *args: Any, **kwargs: Any) -> Any:
        self._forwards += 1
        batch = args[0] if args else kwargs.get("forward_batch")
        run = functools.partial(original, *args, **kwargs)
        if self._window.session.extension and reruns.may_run_again(runner) and _decodes(batch):
            run = functools.partial(self._window.forward, reruns.forward(runner, run))
        if not self._window.following:
            self._window.finish_profiling()
            return run()
        step: StepShape | None = self._guarded(shape, batch, runner, self._scheduled)
        began = step is not None and self._window.begin(step)
        try:
            output = run()
        except BaseException:
            self._window.discard()
            raise
        if began:
            self._window.pause()
        return output

    def sample(self, original: Around, runner: Any, *args: Any, **kwargs: Any) -> Any:
        return run_after_pause(self._window, original, *args, **kwargs)

    def _guarded(self, read: Callable[..., Any], *args: Any) -> Any:
        """What `read` makes of SGLang's objects; a failure ends the recording, and the engine goes on."""
        if not self._window.following:
            return None
        try:
            return read(*args)
        except Exception as error:
            self._window.failed(error)
            return None


VERIFY = "TARGET_VERIFY"  # of a draft's tokens, which the batch's lengths do not count


PHASES = {
    "EXTEND": "prefill",
    "SPLIT_PREFILL": "prefill",
    "DECODE": "decode",
    VERIFY: "decode",
    "MIXED": "mixed",
}


def _decodes(batch: Any) -> bool:
    return PHASES.get(getattr(getattr(batch, "forward_mode", None), "name", "")) == "decode"


HEALTH_CHECK = "HEALTH_CHECK"  # how the names of a server's own probes begin


class Scheduled:
    """What the scheduler knows of the batch that runs.

    `requests`: the name of each one's, in order. `hits`: where it prefills, what each found in the radix cache, in
    tokens. `prompts`: where it prefills, the tokens of each one's prompt, 0 of one that decodes. `probe`: the batch is
    a server's health check, and no request's.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}  # request -> its hits so far: a chunk's are those that came since
        self.requests: list[str] = []
        self.hits: list[int] = []
        self.prompts: list[int] = []
        self.probe = False

    def look(self, batch: Any, requests: Requests, generates: bool) -> str | None:
        """Read `ScheduleBatch`, before it runs: the phase of its forward, None where it need have none.

        A request that decodes in it has no hits. `requests` learns of those that prefill; `generates`: the model does.
        """
        phase = PHASES.get(batch.forward_mode.name)
        self.requests = [request.rid for request in batch.reqs]
        self.hits, self.prompts = [], []
        self.probe = bool(self.requests) and all(name.startswith(HEALTH_CHECK) for name in self.requests)
        if phase not in ("prefill", "mixed"):
            return phase
        decoding = {id(request) for request in getattr(batch, "decoding_reqs", None) or ()}
        before, self._known = self._known, {}
        for request in batch.reqs:
            if id(request) in decoding:
                self.hits.append(0)
                self.prompts.append(0)
                continue
            total, prompt = int(request.cached_tokens), request.origin_input_ids
            self._known[request.rid] = total
            self.hits.append(total - before.get(request.rid, 0) if total else 0)
            self.prompts.append(len(prompt))
            if not self.probe:
                requests.begin(request.rid, len(prompt), total, generates, prompt)
        return phase


def shape(batch: Any, runner: Any, scheduled: Scheduled) -> StepShape:
    """The step that `ForwardBatch` is, before it runs: the runner may rewrite a mixed one.

    In phase `other` are forwards of no request (data parallel, health checks) and those of a draft model, each of which
    is a step of its own. Where drafts are verified no request is named: how many were accepted nobody tells here.
    """
    mode = batch.forward_mode.name
    apart = scheduled.probe or getattr(runner, "is_draft_worker", False)
    phase = "other" if apart else PHASES.get(mode, "other")
    queries, lengths = _queries(batch), _lengths(batch)
    if mode == VERIFY:
        lengths = [length + drafts for length, drafts in zip(lengths, queries, strict=False)]
    step = StepShape(phase, queries, lengths)
    if phase == "other" or len(scheduled.requests) != len(queries):
        return step
    if any(scheduled.hits):
        step.cached = scheduled.hits
    if (lengths and mode != VERIFY) or (phase == "decode" and step.tokens == len(queries)):
        step.requests = scheduled.requests
        contexts = zip(lengths, queries, scheduled.prompts, strict=False)  # a step that only decodes has no prompts
        step.prefilling = [place for place, (after, new, prompt) in enumerate(contexts) if after - new < prompt]
    return step


def _queries(batch: Any) -> list[int]:
    """Each sequence's new tokens; where they are not listed, all have as many."""
    listed = getattr(batch, "extend_seq_lens_cpu", None)
    if listed is not None and not batch.forward_mode.is_decode():
        return [int(length) for length in listed]
    sequences, tokens = int(batch.batch_size), batch.input_ids
    every = 1 if tokens is None or batch.forward_mode.is_decode() else len(tokens) // max(sequences, 1)
    return [every] * sequences


def _lengths(batch: Any) -> list[int]:
    """Each sequence's context after the step; none where only the GPU knows them, which is not waited for."""
    lengths = getattr(batch, "seq_lens_cpu", None)
    if lengths is None or getattr(lengths, "is_cuda", False):
        return []
    return [int(length) for length in (lengths.tolist() if hasattr(lengths, "tolist") else lengths)]
