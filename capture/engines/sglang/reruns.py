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
RUNNER_OF_GRAPHS = "decode_cuda_graph_runner"  # the name that a ModelRunner has it by; before, it was
OLDER = "graph_runner"
WITHOUT_GRAPHS = "EagerRunner"
# Whose graphs read buffers that were made once. FlashInfer's plans are made for each capture, and filled for the last.
ATTENTION = ("FlashAttentionBackend", "TritonAttnBackend")


def hook_captures(window: Window) -> None:
    """Have the window capture the graphs of decodes. A recording has no need of it."""
    if window.session.extension:
        when_imported(GRAPHS, contained(window, functools.partial(_hook_runner, window=window)))


def _hook_runner(module: ModuleType, window: Window) -> None:
    def capture(original: Around, graphs: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, *args, **kwargs)
        runner = getattr(graphs, "model_runner", None)
        if _is_draft(runner) or not _tables(graphs, runner):
            return run()
        return window.capture(functools.partial(_tables, graphs, runner), run, compares=may_run_again(runner))

    wrap(module.DecodeCudaGraphRunner, "capture", capture)


def _tables(graphs: Any, runner: Any) -> list[dict[Any, Any]]:
    """Where a backend keeps its graphs, and what each returns, by the batch that it is for; empty where these cannot be
    exchanged for others."""
    if type(getattr(runner, "attn_backend", None)).__name__ not in ATTENTION:
        return []
    backend = getattr(graphs, "backend", None)
    tables = (getattr(backend, name, None) for name in ("_graphs", "_outputs"))
    return [table for table in tables if isinstance(table, dict)]


def _is_draft(runner: Any) -> bool:
    return bool(getattr(runner, "is_draft_worker", False))


def may_run_again(runner: Any) -> bool:
    """Whether a decode may be run again: not one that would go on from what it made of a state space model's states,
    nor one that would wait for replicas that share its experts, and may run another kind of step; nor a draft's or one
    of drafts, which is planned ahead; nor where there are graphs that cannot be exchanged."""
    pool, server = getattr(runner, "req_to_token_pool", None), getattr(runner, "server_args", None)
    graphs = getattr(runner, RUNNER_OF_GRAPHS, None) or getattr(runner, OLDER, None)
    keeps_states = any(hasattr(pool, name) for name in ("mamba_pool", "mamba_cache"))
    keeps_graphs = graphs is not None and type(graphs).__name__ != WITHOUT_GRAPHS and not _tables(graphs, runner)
    drafts = _is_draft(runner) or getattr(server, "speculative_algorithm", None)
    return not (keeps_states or keeps_graphs or drafts or getattr(server, "enable_dp_attention", False))


def forward(runner: Any, run: functools.partial[Any]) -> Forward:
    """`run` for the window: a call of the runner's, whose output has the logits of a decode."""
    return Forward(
        run,
        lambda rows: rows,
        lambda: list(tensors_in(run.args, run.keywords)),  # from an earlier stage, which layers add to
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
