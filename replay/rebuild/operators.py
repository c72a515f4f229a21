"""The callable behind a Call's name: a registered operator, a library's function, or an engine's own operator class.

An operator is looked up in torch's table, by its whole name: nothing is resolved attribute by attribute. What registers
it is imported in the worker and never in the command's own process: the modules of its namespace's library, and those
of an engine that register this operator in Python.

A function of FlashInfer's or DeepGEMM's (`flashinfer::rmsnorm`) runs if it is one of FUNCTIONS, none of which compiles
or loads what its arguments say. No other Python object can be named.

An engine's class (`sglang_op::RMSNorm`) is a region and not timed, but the reference of its Definition is compared with
it: a new object gets the attributes of the recorded one. A name is looked up only among the classes that derive from
the engine's base class of operators. A Recording has no private attributes: PRIVATE lists those that the classes need.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

import torch

from kcap.errors import kind_and_line
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.recording.operators import DEFAULT, OperatorError, to_trace, why_not_called
from kcap.schemas.recording.recording import Call
from kcap.schemas.recording.values import Group

TORCH_NAMESPACES = frozenset({"aten", "prims", "quantized", "_quantized", "onednn", "mkldnn", "sparse"})  # torch itself

WAIT = "_c10d_functional::wait_tensor"  # for a collective whose own replay waits already: it does nothing


@dataclass(frozen=True)
class Operator:
    """A registered operator: the callable below Python's wrappers, and its schema; `notes` for its measurements.

    For a kernel with a source of its own, `schema` is its Parameters.
    """

    name: str
    call: Callable[..., Any]
    schema: Any
    notes: Sequence[str] = ()


@cache
def resolve_operator(name: str, in_group: bool = False) -> Operator:
    """The operator called `name` (`aten::add.Tensor`, `_C::rms_norm`); Skip says why there is none.

    `in_group`: this process has the peers that a collective needs, and `name` is one that may be called.
    """
    try:
        namespace, base, overload = to_trace(name).split(".")
    except OperatorError as error:
        raise Skip(error.reason) from None
    if not (in_group or name == WAIT) and (reason := why_not_called(name)):
        raise Skip(reason)
    base, overload = f"{namespace}::{base}", "" if overload == DEFAULT else overload
    if not is_registered(base, overload) and namespace not in TORCH_NAMESPACES:
        load_library(name)
    if not is_registered(base, overload):
        raise Skip(f"torch {torch.__version__} and the libraries here have no operator {name}")
    call, *_ = torch._C._get_operation_overload(base, overload)
    return Operator(name, call, torch._C._get_schema(base, overload))


def is_registered(base: str, overload: str) -> bool:
    """Whether torch's dispatcher has this operator and overload now (a library may add it when imported)."""
    return (f"{base}.{overload}" if overload else base) in torch._C._dispatch_get_all_op_names()


@dataclass(frozen=True)
class Alias:
    """As in torch's schemas: whether the argument is written to."""

    is_write: bool


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, with the attributes of an argument in a torch schema."""

    name: str
    alias_info: Alias | None = None


@dataclass(frozen=True)
class Parameters:
    """A kernel's parameters in place of an operator's schema."""

    arguments: list[Parameter]

    @classmethod
    def of(cls, names: Iterable[str], written: Collection[str]) -> Parameters:
        """Those called `names`, of which those in `written` are written to."""
        return cls([Parameter(name, Alias(True) if name in written else None) for name in names])


@dataclass(frozen=True)
class Library:
    """`modules` register the operators when imported, in this order; `install` is what pip calls it.

    In `package` other modules register an operator each, in Python: which ones differs from release to release.
    """

    install: str
    modules: tuple[str, ...] = ()
    package: str = ""


_VLLM = Library("vllm", ("vllm._custom_ops",))
_VLLM_FLASH = Library("vllm", ("vllm.vllm_flash_attn.flash_attn_interface",))


LIBRARIES: dict[str, Library] = {
    "_C": _VLLM,
    "_C_cache_ops": _VLLM,
    "_C_cuda_utils": _VLLM,
    "_C_custom_ar": _VLLM,
    "_C_utils": _VLLM,
    "_moe_C": _VLLM,
    "_rocm_C": _VLLM,
    "vllm": Library("vllm", package="vllm"),
    "vllm_ir": Library("vllm", ("vllm.model_executor.layers.layernorm", "vllm.kernels")),
    "vllm_custom_op": Library(
        "vllm", ("vllm.model_executor.layers.layernorm", "vllm.model_executor.layers.activation")
    ),
    "_vllm_fa2_C": _VLLM_FLASH,
    "_vllm_fa3_C": _VLLM_FLASH,
    "_flashmla_C": Library("vllm", ("vllm.third_party.flashmla.flash_mla_interface",)),
    "sgl_kernel": Library("sgl-kernel", ("sgl_kernel", "sgl_kernel.flash_attn")),
    "sglang": Library("sglang", package="sglang"),
    "sglang_op": Library(
        "sglang",
        ("sglang.srt.layers.layernorm", "sglang.srt.layers.activation", "sglang.srt.layers.rotary_embedding.factory"),
    ),
    "flashinfer": Library(
        "flashinfer-python",
        ("flashinfer", "flashinfer.comm", "flashinfer.concat_ops", "flashinfer.fused_moe", "flashinfer.gemm"),
    ),
    "deep_gemm": Library("deep-gemm", ("deep_gemm", "vllm.third_party.deep_gemm")),
    "flash_attn": Library("flash-attn", ("flash_attn",)),
    "flash_attn_3": Library("flash-attn-3", ("flash_attn_interface",)),
    "trtllm": Library("tensorrt-llm", ("tensorrt_llm", "trtllm_kernel")),  # the second: its kernels alone
    "torchvision": Library("torchvision", ("torchvision",)),
    "torchao": Library("torchao", ("torchao",)),
    "xformers": Library("xformers", ("xformers.ops",)),
    "fbgemm": Library("fbgemm-gpu", ("fbgemm_gpu",)),
    "bitsandbytes": Library("bitsandbytes", ("bitsandbytes",)),
}


def preload_libraries(names: Iterable[str]) -> None:
    """Import what registers the operators called `names`, as far as it is here, each library once."""
    known = {name: LIBRARIES[namespace] for name in names if (namespace := name.split("::")[0]) in LIBRARIES}
    for name in {name if library.package else library: name for name, library in known.items()}.values():
        with suppress(Skip):  # the Call that needs it says so
            load_library(name)


def load_library(operator: str) -> list[str]:
    """Import what registers `operator`, and return the errors of modules that do not load; Skip if none does."""
    base = operator.split(".")[0]
    namespace, _, name = base.partition("::")
    library = LIBRARIES.get(namespace)
    if library is None:
        raise Skip(f"no library is known to register the operators of '{namespace}'")
    modules = [*library.modules, *_registering_modules(library.package, name)]
    errors = []
    for module in modules:
        if library.package and is_registered(base, ""):
            break
        errors += _import_errors(module)
    if len(errors) == len(modules):
        raise Skip(f"needs {library.install}: pip install {library.install} ({errors[0]})")
    return errors


def _registering_modules(package: str, name: str) -> list[str]:
    """Those of the installed `package` whose sources seem to register an operator called `name`, else the package.

    Sources are read, as to import them all would take minutes.
    """
    if not package:
        return []
    named = re.compile(
        rf"""["'](\w+::)?{re.escape(name)}["']|^ *def {re.escape(name)}\(|custom_op\w*\(\s*{re.escape(name)}\b""", re.M
    )
    found = [module for module, source in _sources(package).items() if name in source and named.search(source)]
    return found or [package]


REGISTERS = re.compile(r"custom_op|triton_op|\.define\(")


@cache
def _sources(package: str) -> dict[str, str]:
    """By module's name, the sources in `package` that register operators; none where it is not installed."""
    spec = importlib.util.find_spec(package)
    found = {}
    for root in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(root).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            with suppress(OSError):  # no file, or none that may be read
                source = path.read_text(errors="replace")
                if REGISTERS.search(source) and not {"test", "tests"} & {*parts}:
                    found[".".join((package, *parts)).removesuffix(".__init__")] = source
    return found


def _import_errors(module: str) -> list[str]:
    """The error of importing `module`, if there is one."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a library that does not load on this machine may raise anything
        return [f"import {module}: {kind_and_line(error)}"[:200]]
    return []


def _functions(namespace: str, names: str, *written: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys((f"{namespace}::{name}" for name in names.split()), written)


FUNCTIONS = {  # that a Recording may name, with the names of the arguments that they write
    **_functions(
        "flashinfer", "rmsnorm gemma_rmsnorm rmsnorm_quant silu_and_mul gelu_and_mul gelu_tanh_and_mul", "out"
    ),
    **_functions("flashinfer", "apply_rope_with_cos_sin_cache mm_bf16 tinygemm_bf16 fp8_blockscale_gemm_sm90", "out"),
    **_functions("flashinfer", "fused_add_rmsnorm gemma_fused_add_rmsnorm", "input", "residual"),
    **_functions("flashinfer", "fused_add_rmsnorm_quant", "out", "residual"),
    **_functions("flashinfer", "apply_rope_with_cos_sin_cache_inplace", "query", "key"),
    **_functions("flashinfer", "append_paged_kv_cache", "paged_kv_cache"),
    **_functions("flashinfer", "concat_mla_k", "k"),
    **_functions("flashinfer", "cutlass_fused_moe", "output"),
    **_functions("flashinfer", "fused_topk_deepseek", "topk_values", "topk_indices", "routing_replay_out"),
    **_functions("flashinfer", "chunk_gated_delta_rule", "output", "output_state", "state_checkpoints"),
    **_functions("flashinfer", "allreduce_fusion", "output", "residual_out", "norm_out", "quant_out", "scale_out"),
    **_functions("deep_gemm", "fp8_gemm_nt fp8_fp4_gemm_nt bf16_gemm_nt", "d"),
    **_functions("deep_gemm", "m_grouped_fp8_gemm_nt_contiguous m_grouped_fp8_gemm_nt_masked", "d"),
    **_functions("deep_gemm", "m_grouped_fp8_fp4_gemm_nt_contiguous m_grouped_fp8_fp4_gemm_nt_masked", "d"),
    **_functions("deep_gemm", "m_grouped_bf16_gemm_nt_contiguous m_grouped_bf16_gemm_nt_masked", "d"),
    **_functions("deep_gemm", "fp8_m_grouped_gemm_nt_masked bf16_m_grouped_gemm_nt_masked", "d"),
}


def is_function(call: Call) -> bool:
    """Whether `call` is of a library's function in Python, which the library may also register."""
    return call.operator in FUNCTIONS


def resolve_function(call: Call) -> Operator:
    """The library's function that `call` is of, or the operator that it registers with the same parameters; Skip says
    why there is none. A process group, which the tap has added, is not passed to it.
    """
    load_library(call.operator)
    names = [argument.name or "" for argument in call.args]
    passed = [not isinstance(argument.value, Group) for argument in call.args]
    if is_registered(call.operator, ""):
        operator = resolve_operator(call.operator)
        taken, rest = operator.schema.arguments[: len(names)], operator.schema.arguments[len(names) :]
        if [argument.name for argument in taken] == names and all(one.has_default_value() for one in rest):
            return operator
    name = call.operator.removeprefix(f"{call.namespace}::")
    modules = LIBRARIES[call.namespace].modules
    function = next((one for module in modules if callable(one := _attribute(module, name))), None)
    if function is None or isinstance(function, type):
        raise Skip(f"the library here has no function {name}")
    if unknown := [given for given in compress(names, passed) if not _takes(function, given)]:
        raise Skip(f"the library's {name} here does not take {', '.join(unknown)}")

    def run(*values: Any) -> Any:
        return function(**dict(compress(zip(names, values, strict=True), passed)))

    return Operator(call.operator, run, Parameters.of(names, FUNCTIONS[call.operator]))


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` has a parameter of this `name`, or takes any, as far as Python can tell."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return True
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


BASES = {
    "sglang_op": (
        ("sglang.kernels.fused_op", "BaseFusedOp"),
        ("sglang.srt.layers.utils.multi_platform", "MultiPlatformOp"),
    ),
    "vllm_custom_op": (("vllm.model_executor.custom_op", "CustomOp"),),
}


PRIVATE = {
    "sglang_op": {"_apply_rotary_emb_wrapped": ("sglang.srt.layers.rotary_embedding.utils", "apply_rotary_emb")},
}


FORWARD_METHOD = "forward_native"  # by PyTorch's operators: the one that was recorded


def is_engine_class(call: Call) -> bool:
    """Whether `call` is of one of an engine's classes."""
    return call.namespace in BASES


def resolve_class(call: Call) -> Operator:
    """The operator that runs `call`; Skip says why there is none."""
    load_library(call.operator)
    kind = _find_class(call)
    taken = _forward_parameters(kind)
    names = [argument.name or "" for argument in call.args]
    private = {name: value for name, path in PRIVATE.get(call.namespace, {}).items() if (value := _attribute(*path))}

    def run(*values: Any) -> Any:
        arguments = dict(zip(names, values, strict=True))
        state = {name: value for name, value in arguments.items() if name not in taken}
        forward = getattr(_uninitialized_object(kind, {**private, **state}), FORWARD_METHOD)
        return forward(**{name: value for name, value in arguments.items() if name in taken})

    return Operator(call.operator, run, Parameters.of(names, ()))


def _find_class(call: Call) -> type[torch.nn.Module]:
    name = call.operator.split("::")[-1]
    for path in BASES[call.namespace]:
        for kind in _derived(_attribute(*path)):
            if getattr(kind, "name", kind.__name__) == name or kind.__name__ == name:
                return kind
    raise Skip(f"the library here has no operator class {name}")


def _attribute(module: str, name: str) -> Any:
    """The attribute; None where the library has no such module, or it was not imported."""
    return getattr(sys.modules.get(module), name, None)


def _derived(base: Any) -> Iterator[type[torch.nn.Module]]:
    for kind in base.__subclasses__() if base else ():
        yield kind
        yield from _derived(kind)


def _forward_parameters(kind: type[torch.nn.Module]) -> list[str]:
    """The names of the parameters of its forward method; Skip where it does not name them."""
    declared = inspect.signature(getattr(object.__new__(kind), FORWARD_METHOD)).parameters
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in declared.values()):
        raise Skip(f"{kind.__name__} does not say what it takes")
    return list(declared)


def _uninitialized_object(kind: type[torch.nn.Module], state: Mapping[str, Any]) -> torch.nn.Module:
    """An object whose __init__ did not run: it may need a running engine."""
    instance = object.__new__(kind)
    torch.nn.Module.__init__(instance)
    for name, value in state.items():
        setattr(instance, name, value)
    return instance
