"""What a call of a module says of its step: the phase and the batch, where it is a transformers model's."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from kcap.capture.window.window import StepShape

OTHER = StepShape("other", [], [])
TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")  # [sequences, new tokens, …]
CACHES = ("past_key_values", "cache_params")
PROMPTS = ("inputs", "input_ids", "inputs_embeds")  # of `generate`
_pretrained_parts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Generation:
    """A call of `generate`: `prompt`, the tokens of a sequence before it, None where they are not told; its thread."""

    def __init__(self, prompt: int | None) -> None:
        self.prompt = prompt
        self.computed: dict[int, int] = {}  # tokens that each model's cache holds
        self.thread = threading.get_ident()

    @classmethod
    def of(cls, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generation:
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return cls(1)  # what it decodes starts from one token
        tokens = _first({"inputs": args[0]} if args else {}, PROMPTS) or _first(kwargs, PROMPTS)
        return cls(tokens[1] if tokens else None)


def shape(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generation: Generation | None) -> StepShape:
    """The step that a call of `module` is. Reads no tensor's values. Sequences count with their padding."""
    model = pretrained(module)
    if model is None:
        return OTHER
    arguments = _named(model, args, kwargs)
    tokens = _first(arguments, TOKENS)
    if tokens is None:
        return OTHER
    sequences, new = tokens
    if arguments.get("cu_seq_lens_q") is not None:  # packed: which sequences decode, the device knows
        return StepShape("other", [new] * sequences, [])
    cache = next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)
    past = _length(cache)
    if past is None and generation is not None:
        past = generation.computed.get(id(model), 0)
    if past is None:  # of a cache whose length only the device knows
        return StepShape("prefill" if new > 1 else "decode", [new] * sequences, [])
    if generation is not None and cache is not None:
        generation.computed[id(model)] = past + new
    prompt = generation.prompt if generation is not None else None
    return StepShape(_phase(past, new, prompt), [new] * sequences, [past + new] * sequences)


def _phase(past: int, new: int, prompt: int | None) -> str:
    if prompt is not None:
        return "prefill" if past < prompt or not past else "decode"
    return "decode" if past and new == 1 else "prefill"


def pretrained(module: Any) -> Any:
    """`module` if it is a transformers model, else the outermost one in it; None where there is none."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or isinstance(module, modeling.PreTrainedModel):
        return module if modeling else None
    if module not in _pretrained_parts:
        inner = next((part for part in module.modules() if isinstance(part, modeling.PreTrainedModel)), None)
        _pretrained_parts[module] = weakref.ref(inner) if inner is not None else lambda: None
    return _pretrained_parts[module]()


def facts(module: Any) -> dict[str, Any]:
    """What the Recording should know of the program, by the module that it called first."""
    import torch

    model = pretrained(module)
    if model is None:
        return {"framework": "PyTorch", "framework_version": torch.__version__}
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return {
        "framework": "transformers",
        "framework_version": sys.modules["transformers"].__version__,
        "model": getattr(model.config, "_name_or_path", "") or type(model).__name__,
        "layers": getattr(config, "num_hidden_layers", None),
    }


def _named(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. A module around the model may take them in a dictionary."""
    kind: Any = type(model)
    named = dict(zip(_parameters(kind), args, strict=False)) | kwargs
    if args and isinstance(args[0], dict):
        named |= args[0]
    return named


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _first(arguments: dict[str, Any], names: Sequence[str]) -> tuple[int, int] | None:
    """The first two sizes of the first tensor there that has them."""
    for name in names:
        sizes: Sequence[int] = getattr(arguments.get(name), "shape", ())
        if len(sizes) > 1:
            return int(sizes[0]), int(sizes[1])
    return None


def _length(cache: Any) -> int | None:
    """The tokens in a cache: 0 where there is none, None where they cannot be known without work for the device."""
    if cache is None:
        return 0
    if isinstance(cache, tuple | list):
        return int(cache[0][0].shape[-2]) if cache else 0
    parts = [cache, *list(getattr(cache, "layers", None) or ())[:1]]
    if any("Static" in kind.__name__ for part in parts for kind in type(part).__mro__):
        return None
    try:
        length = cache.get_seq_length()
    except (AttributeError, ValueError):  # of a recurrent model: it has no length
        return None
    return length if isinstance(length, int) else None
