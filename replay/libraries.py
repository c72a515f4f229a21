"""Which Python library registers the operators of a namespace, or has its classes: one entry each.

A library is imported in the worker, when the first Call needs it, and never in the command's own process.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from kcap.replay.skip import Skip


@dataclass(frozen=True)
class Library:
    """`modules` register the operators when imported, in this order; `install` is what pip calls it."""

    install: str
    modules: tuple[str, ...]


_VLLM = Library("vllm", ("vllm._custom_ops",))
_VLLM_FLASH = Library("vllm", ("vllm.vllm_flash_attn.flash_attn_interface",))
_VLLM_PYTHON = Library(
    "vllm",
    (
        "vllm._custom_ops",
        "vllm.model_executor.layers.layernorm",
        "vllm.model_executor.layers.fused_moe",
        "vllm.kernels",
    ),
)
LIBRARIES: dict[str, Library] = {
    "_C": _VLLM,
    "_C_cache_ops": _VLLM,
    "_C_cuda_utils": _VLLM,
    "_C_utils": _VLLM,
    "_moe_C": _VLLM,
    "_rocm_C": _VLLM,
    "vllm": _VLLM_PYTHON,
    "vllm_ir": _VLLM_PYTHON,
    "vllm_custom_op": Library(
        "vllm", ("vllm.model_executor.layers.layernorm", "vllm.model_executor.layers.activation")
    ),
    "_vllm_fa2_C": _VLLM_FLASH,
    "_vllm_fa3_C": _VLLM_FLASH,
    "_flashmla_C": Library("vllm", ("vllm.third_party.flashmla.flash_mla_interface",)),
    "sgl_kernel": Library("sgl-kernel", ("sgl_kernel",)),
    "sglang": Library("sglang", ("sglang.srt.layers.activation", "sglang.srt.layers.rotary_embedding")),
    "sglang_op": Library(
        "sglang",
        ("sglang.srt.layers.layernorm", "sglang.srt.layers.activation", "sglang.srt.layers.rotary_embedding.factory"),
    ),
    "flashinfer": Library("flashinfer-python", ("flashinfer",)),
    "flash_attn": Library("flash-attn", ("flash_attn",)),
    "flash_attn_3": Library("flash-attn-3", ("flash_attn_interface",)),
    "trtllm": Library("tensorrt-llm", ("tensorrt_llm",)),
    "torchvision": Library("torchvision", ("torchvision",)),
    "torchao": Library("torchao", ("torchao",)),
    "xformers": Library("xformers", ("xformers.ops",)),
    "fbgemm": Library("fbgemm-gpu", ("fbgemm_gpu",)),
    "bitsandbytes": Library("bitsandbytes", ("bitsandbytes",)),
}


def load(namespace: str) -> list[str]:
    """Import the library of `namespace` once and return what went wrong in its later modules; Skip if it is absent."""
    library = LIBRARIES.get(namespace)
    if library is None:
        raise Skip(f"no library is known to register the operators of '{namespace}'")
    errors = [message for module in library.modules if (message := _import(module))]
    if len(errors) == len(library.modules):
        raise Skip(f"needs {library.install}: pip install {library.install} ({errors[0]})")
    return errors


def _import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a library that is there but does not load on this machine raises anything
        return f"import {module}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return None
