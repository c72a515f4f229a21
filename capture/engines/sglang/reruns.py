"""A decode of SGLang's that runs again with other kernels: by CUDA graphs that were captured with each, or without."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from kcap.capture.hooks.imports import when_imported
from kcap.capture.window.hooking import Around, contained, ranks_of_forward, tensors_in, wrap
from kcap.capture.window.window import Forward, Window

GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
STATE = "sglang.srt.distributed.parallel_state"
RUNNER_OF_GRAPHS = "decode_cuda_graph_runner"  # the name that a ModelRunner has it by


def hook_captures(window: Window) -> None:
    """Have the window capture the graphs of decodes. A recording has no need of it."""
    if window.session.extension:
        when_imported(GRAPHS, contained(window, functools.partial(_hook_runner, window=window)))


def _hook_runner(module: ModuleType, window: Window) -> None:
    def capture(original: Around, graphs: Any, *args: Any, **kwargs: Any) -> Any:
        runner = graphs.model_runner
        if runner.is_draft_worker or not _tables(graphs):
            return original(*args, **kwargs)
        run = functools.partial(original, *args, **kwargs)
        return window.capture(functools.partial(_tables, graphs), run, compares=may_run_again(runner))

    wrap(module.DecodeCudaGraphRunner, "capture", capture)


def _tables(graphs: Any) -> list[dict[Any, Any]]:
    """Where a backend keeps its graphs, and what each returns, by the batch that it is for; empty where it has none."""
    backend = getattr(graphs, "backend", None)
    tables = (getattr(backend, name, None) for name in ("_graphs", "_outputs"))
    return [table for table in tables if isinstance(table, dict)]


def may_run_again(runner: Any) -> bool:
    """Whether a decode may be run again: not one that would go on from what it made of a state space model's states,
    nor one that would wait for replicas that share its experts, and may run another kind of step; nor a draft's, nor
    where graphs are kept that cannot be exchanged."""
    pool, graphs = getattr(runner, "req_to_token_pool", None), getattr(runner, RUNNER_OF_GRAPHS, None)
    keeps_states = any(hasattr(pool, name) for name in ("mamba_pool", "mamba_cache"))
    shares_experts = getattr(getattr(runner, "server_args", None), "enable_dp_attention", False)
    keeps_graphs = hasattr(graphs, "backend") and not _tables(graphs)
    return not (keeps_states or shares_experts or keeps_graphs or getattr(runner, "is_draft_worker", False))


def forward(runner: Any, run: functools.partial[Any]) -> Forward:
    """`run` for the window: a call of the runner's, whose output has the logits of a decode."""
    given = list(tensors_in(run.args, run.keywords))  # from an earlier stage, which layers add to
    return Forward(
        run,
        lambda rows: rows,
        lambda: given,
        functools.partial(_without_graphs, runner),
        hidden=_token_logits,
        ranks=functools.partial(ranks_of_forward, STATE),
    )


@contextmanager
def _without_graphs(runner: Any) -> Iterator[None]:
    graphs = getattr(runner, RUNNER_OF_GRAPHS, None)
    setattr(runner, RUNNER_OF_GRAPHS, None)
    try:
        yield
    finally:
        setattr(runner, RUNNER_OF_GRAPHS, graphs)


def _token_logits(output: Any) -> Any:
    """[sequences, vocabulary] of a decode; None of an early stage of a pipeline."""
    return getattr(getattr(output, "logits_output", None), "next_token_logits", None)
