"""TensorRT-LLM's PyTorch backend and AutoDeploy: where their steps begin and end.

Written from its source (1.1 to 1.2) and **not yet run with the real engine**. Its tests run a stand-in with its names,
in one process and over MPI, which proves the logic of the hooks and no compatibility.

A step is an engine's `forward` and the `PyExecutor._sample_async` after it. The window opens when `create_py_executor`
returns, so that the memory estimation, for which it makes an executor of dummy requests, does not count, nor do warm-up
and graph capture. Workers are processes of MPI, which find kcap by their environment (see `kcap.capture.startup`).
Each name is asked for before it is used: one that is not there is an absent tap of the Recording.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson

from kcap.capture.engines import Framework, Server, Start
from kcap.capture.engines.trtllm.requests import Requests
from kcap.capture.hooks.imports import when_imported
from kcap.capture.hooks.patching import Patches
from kcap.capture.window.hooking import Around, announce, contained, run_after_pause, wrap
from kcap.capture.window.process import rank_facts
from kcap.capture.window.window import Window

CREATORS = (
    "_torch.pyexecutor.py_executor_creator:create_py_executor",
    "_torch.auto_deploy.shim.ad_executor:create_autodeploy_executor",
)
FORWARDS = (
    "_torch.pyexecutor.model_engine:PyTorchModelEngine.forward",
    "_torch.auto_deploy.shim.ad_executor:ADEngine.forward",
)
SAMPLE = "_torch.pyexecutor.py_executor:PyExecutor._sample_async"
FRAMEWORK = Framework(
    "TRT-LLM",
    "tensorrt_llm",
    ("tensorrt-llm",),
    pip=("install tensorrt-llm",),
    servers=(Server(("trtllm-serve",), 8000),),
    tried="1.2.1",
    untried="not yet run with the real engine: hooks read in the source of 1.2.1",
    hooks=(*CREATORS, *FORWARDS, SAMPLE),
)
OFFLINE = "kcap.capture.engines.trtllm.offline"
ABSENT = {  # what a Recording lacks where a hook is not there
    **dict.fromkeys(CREATORS, "executors that it makes are not recorded"),
    **dict.fromkeys(FORWARDS, "its steps are not recorded"),
    SAMPLE: "steps have no sampling",
}
FLAGS = {  # of an engine, and what a Recording lacks where it is not there
    "is_warmup": "a warm-up after the window's opening counts",
    "is_draft_model": "a draft model's steps are not told apart",
}
LATE_TOKENS = ("new_tensors_device", "new_tokens_device")  # those that the GPU still has; the second is AutoDeploy's
STARTING = {"warmup": "warming up"}


def arguments(start: Start) -> dict[str, Any]:
    """The arguments of `tensorrt_llm.LLM`."""
    chosen: dict[str, Any] = {"model": start.target.path, "load_format": start.load_format}
    if not start.target.tokenizer and "tokenizer" not in start.given:
        chosen["skip_tokenizer_init"] = True
    if start.target.bundled:
        chosen |= {"dtype": "bfloat16", "max_seq_len": start.context}
    if start.num_layers is not None:
        chosen["model_kwargs"] = {"num_hidden_layers": start.num_layers}
    if start.eager:
        chosen["cuda_graph_config"] = None
    return start.merged(chosen)


def hook(window: Window) -> None:
    """Hook TensorRT-LLM's modules, now or as they are imported."""
    when_imported(FRAMEWORK.package, contained(window, lambda package: _hook_package(package, window)))


def _hook_package(package: ModuleType, window: Window) -> None:
    steps = Steps(window)
    wrappers: dict[str, Around] = {
        **dict.fromkeys(CREATORS, functools.partial(_create, window)),
        **dict.fromkeys(FORWARDS, steps.forward),
        SAMPLE: steps.sample,
    }
    for name, around in wrappers.items():
        module = name.partition(":")[0]
        if not _is_there(package, module):
            steps.absent(name, ABSENT[name])
            continue
        hook_member = functools.partial(_hook_member, name=name, around=around, steps=steps)
        when_imported(f"{package.__name__}.{module}", contained(window, hook_member))


def _is_there(package: ModuleType, module: str) -> bool:
    """Whether the package has the module, which is not imported for it."""
    files = (Path(folder, *module.split(".")) for folder in package.__path__)
    return any(file.with_suffix(".py").is_file() or file.is_dir() for file in files)


def _hook_member(module: ModuleType, name: str, around: Around, steps: Steps) -> None:
    """Put `around` in the place of the function, or the method of a class, that `name` is."""
    kind, _, method = name.partition(":")[2].rpartition(".")
    owner: Any = getattr(module, kind, None) if kind else module
    if not hasattr(owner, method):
        steps.absent(name, ABSENT[name])
    elif owner is module:
        _wrap_function(module, method, around)
    else:
        announce(steps.window.session, owner, STARTING)
        wrap(next(base for base in owner.__mro__ if method in vars(base)), method, around)


def _wrap_function(module: ModuleType, name: str, around: Around) -> None:
    """Also where another module of the package has imported it by name."""
    original = getattr(module, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    patches, package = Patches(), module.__name__.partition(".")[0]
    patches.replace(module, name, wrapper)
    patches.rebind_all([other for key, other in list(sys.modules.items()) if key.partition(".")[0] == package])


def _create(window: Window, original: Around, *args: Any, **kwargs: Any) -> Any:
    executor = original(*args, **kwargs)
    try:
        window.start(**_facts(executor, args[0] if args else kwargs.get("llm_args")))
        window.note(f"{FRAMEWORK.name}: {FRAMEWORK.untried}")
        for name, rank, ranks in _groups(executor):
            if window.recorder is not None:
                window.recorder.line(orjson.dumps({"t": "group", "name": name, "rank": rank, "ranks": ranks}))
    except Exception as error:
        window.failed(error)
    return executor


def _member(holder: Any, path: str) -> Any:
    """An attribute of an attribute; None where any is not there."""
    return functools.reduce(lambda part, name: getattr(part, name, None), path.split("."), holder)


def _facts(executor: Any, llm_args: Any) -> dict[str, Any]:
    """With attention's data parallelism the ranks of one world are replicas of each other."""
    facts, mapping = rank_facts(), _member(executor, "dist.mapping")
    rank, size = (_member(executor, f"dist.{name}") for name in ("rank", "world_size"))
    if isinstance(rank, int) and isinstance(size, int):  # MPI's, which torch.distributed need not know
        facts |= {"rank": rank, "world_size": size}
    if getattr(mapping, "enable_attention_dp", False):
        facts["places"] = {"dp": getattr(mapping, "tp_rank", rank)}
    model = getattr(llm_args, "model", None)
    layers = _member(executor, "model_engine.model.model_config.pretrained_config.num_hidden_layers")
    return {
        **facts,
        "model": str(model) if model else None,
        "layers": layers if isinstance(layers, int) else None,
        "framework": FRAMEWORK.name,
        "framework_version": getattr(sys.modules.get(FRAMEWORK.package), "__version__", None),
    }


def _groups(executor: Any) -> list[tuple[str, int, list[int]]]:
    """Name, place in it and ranks of each group of several that this rank is in."""
    mapping, groups = _member(executor, "dist.mapping"), []
    for name in ("tp", "pp"):
        rank, ranks = getattr(mapping, f"{name}_rank", None), getattr(mapping, f"{name}_group", None)
        if isinstance(rank, int) and ranks and len(ranks) > 1:
            groups.append((name, rank, [int(other) for other in ranks]))
    return groups


class Steps:
    """Brackets the steps of a process."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._absent: set[str] = set()
        self._requests = Requests(self.absent)

    def absent(self, name: str, detail: str) -> None:
        """A name of TensorRT-LLM's is not there: the Recording says once what it lacks for it."""
        if name not in self._absent:
            self._absent.add(name)
            self.window.tap_absent(name, detail)

    def forward(self, original: Around, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.window.following or self._flag(engine, "is_warmup"):
            self.window.finish_profiling()
            return original(*args, **kwargs)
        draft = self._flag(engine, "is_draft_model")
        began = self._begin(draft, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            self.window.discard()
            raise
        if began:  # a draft model's tokens are sampled elsewhere
            self.window.end() if draft or SAMPLE in self._absent else self.window.pause()
        return output

    def sample(self, original: Around, executor: Any, *args: Any, **kwargs: Any) -> Any:
        return run_after_pause(self.window, original, *args, **kwargs)

    def _begin(self, draft: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        try:
            scheduled = args[0] if args else kwargs["scheduled_requests"]
            late = args[2] if len(args) > 2 else next((kwargs[name] for name in LATE_TOKENS if name in kwargs), None)
            return bool(self.window.begin(self._requests.shape(scheduled, late is not None, draft)))
        except Exception as error:
            self.window.failed(error)
            return False

    def _flag(self, engine: Any, name: str) -> bool:
        try:
            if not hasattr(engine, name):
                self.absent(f"{type(engine).__name__}.{name}", FLAGS[name])
            return bool(getattr(engine, name, False))
        except Exception as error:
            self.window.failed(error)
            return False
