"""Operator names: their two spellings, which names a file may not use, which are never called, which do no work.

A Recording has the dispatcher's spelling (`aten::add.Tensor`, `aten::mm`), a trace file PyTorch's Python one
(`aten.add.Tensor`, `aten.mm.default`). A name that passes here is only well-formed: to call it, it is looked up in
the table of registered schemas, never by attributes of `torch.ops`.
"""

from __future__ import annotations

import re

from kcap.errors import KcapError
from kcap.schemas.recording.recording import Call
from kcap.schemas.recording.values import TensorSpec, TorchConstant, contiguous_strides

LONGEST_NAME = 256
DEFAULT = "default"
_TRACE = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
_DISPATCHER = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", re.ASCII)
_PREFIX = re.compile(r"(?:[A-Za-z_]\w*\.){0,2}(?:[A-Za-z_]\w*)?", re.ASCII)
REFUSED_NAMESPACES = frozenset({"prim", "profiler"})

REFUSED_NAMES = frozenset(
    "from_file save save_tensor load load_tensor load_library load_torch_library loaded_libraries import_module "
    "read_file write_file".split()
)

BITWISE = frozenset(
    f"__{name}__" for name in "and or xor iand ior ixor lshift rshift ilshift irshift".split()
)  # aten's own names; every other double underscore is an attribute of Python's

# A file may name these, but they are never called for it: they take raw addresses, share or free memory by name.
UNCALLED = re.compile(
    r"(aten|_C|_C_cache_ops|_C_cuda_utils|_C_custom_ar|vllm)::"
    r"(load\w*|open_mem_handle|\w*shm_manager|init_cpu_memory_env|init_custom_ar|dispose|\w*_ptrs?|swap_blocks\w*|"
    r"release_dnnl_matmul_handler|create_onednn\w*|get_cuda_view_from_cpu_tensor|weak_ref_tensors?|"
    r"_cudnn_init_dropout_state|set_data|record_stream)(\.\w+)?"
    r"|trtllm::attention(_inplace)?"  # their caches are addresses in a tensor
)

COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor", "_C_custom_ar", "pynccl"}
)

NOT_KERNELS = REFUSED_NAMESPACES | {"debugprims", "export", "debug_mode_ops", "rngprims", "static_runtime"}

# Kernels launched from a source of their own have these in place of a namespace; no file of names alone carries them.
NO_NAME = "has no operator name that BackendBench knows"
SOURCES = {"triton": f"a Triton kernel {NO_NAME}", "cpp": f"a C++ kernel of inductor {NO_NAME}"}
LAUNCHED = {**SOURCES, "tvm": f"a function of a compiled library {NO_NAME}"}  # by the language of the Launch
RENAMED = {"aten.sum.SymInt": "aten.sum.dim_IntList"}


class OperatorError(KcapError):
    """A name that is no operator's or that a file may not call; `offset` is where in it the fault lies."""

    def __init__(self, name: str, reason: str, offset: int = 0) -> None:
        super().__init__(f"{name[:80]!r}: {reason}")
        self.reason = reason
        self.offset = offset


def check_operator_name(name: str) -> None:
    """Raise OperatorError unless `name` is `namespace.operator.overload` and may be called from a file."""
    if len(name) > LONGEST_NAME:
        raise OperatorError(name, f"an operator's name has at most {LONGEST_NAME} characters", LONGEST_NAME)
    if not _TRACE.fullmatch(name):
        raise OperatorError(name, "not an operator's name: it must be namespace.operator.overload", _fault(name))
    _check_parts(name, name.split("."))


def _fault(name: str) -> int:
    good = _PREFIX.match(name)
    return good.end() if good else 0


def _check_parts(name: str, parts: list[str]) -> None:
    if parts[0] in REFUSED_NAMESPACES:
        raise OperatorError(name, f"operators of {parts[0]} are not called from files")
    offset = 0
    for index, part in enumerate(parts):
        if part in REFUSED_NAMES:
            raise OperatorError(name, f"{part} reaches files or libraries: not called from files", offset)
        if part.startswith("__") and not (index == 1 and part in BITWISE):
            raise OperatorError(name, f"{part} is no operator's name", offset)
        offset += len(part) + 1


def base_of(operator: str) -> str:
    """`aten::mm.out` -> `aten::mm`; `triton::fused.s1234abcd` -> `triton::fused`.

    Of a TVM library's kernels without the numbers by which its compiler tells them apart:
    `tvm::fused_matmul3_add1.1234abcd` -> `tvm::fused_matmul_add`.
    """
    namespace, _, name = operator.rpartition("::")
    base, _, variant = name.partition(".")
    if namespace == "tvm" and variant:
        base = re.sub(r"\d+(?=_|$)", "", base)
    return f"{namespace}::{base}"


def is_module_function(operator: str) -> bool:
    """Whether it is a function of a tvm-ffi module, `tvm::NAME`; a kernel of a Relax VM's library is `tvm::NAME.ID`."""
    return operator.startswith("tvm::") and "." not in operator


def to_trace(operator: str) -> str:
    """`aten::mm` -> `aten.mm.default`; OperatorError if it is no torch operator's name or may not be called."""
    if reason := SOURCES.get(operator.split("::")[0]):
        raise OperatorError(operator, reason)
    if not _DISPATCHER.fullmatch(operator):
        raise OperatorError(operator, "not a torch operator (namespace::operator)")
    name = operator.replace("::", ".")
    name = name if "." in operator else f"{name}.{DEFAULT}"
    check_operator_name(name)
    return name


def from_trace(name: str) -> str:
    """`aten.mm.default` -> `aten::mm`. The older name of a renamed overload becomes today's, as in BackendBench."""
    check_operator_name(name)
    namespace, operator, overload = RENAMED.get(name, name).split(".")
    return f"{namespace}::{operator}" if overload == DEFAULT else f"{namespace}::{operator}.{overload}"


def why_not_called(operator: str) -> str | None:
    """Why the operator of this well-formed name (`aten::set_data`) is not run for a file; None: it may be."""
    namespace = operator.split("::")[0]
    if namespace in COLLECTIVES:
        return "a collective needs its process group"
    if namespace in NOT_KERNELS:
        return f"operators of '{namespace}' are not kernels"
    if UNCALLED.fullmatch(operator):
        return "refused: it takes raw addresses or shares memory by name"
    return None


# Operators that return their input where nothing needs changing, and copy otherwise.
MAY_COPY = frozenset(
    {"aten::contiguous", "aten::reshape", "aten::flatten", "aten::to", "aten::type_as", "aten::_to_copy"}
)

NO_WORK = frozenset(  # those that compute a dtype run on the host, as a step of another operator
    f"aten::{name}" for name in "detach_ requires_grad_ resize_ set_ promote_types result_type can_cast".split()
) | {
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "_C::weak_ref_tensor",  # another tensor over the same memory
    "vllm::unified_kv_cache_update",  # a region, except in an encoder's layers, which cache nothing
}


def does_work(call: Call) -> bool:
    """False for views, allocations, waits for a collective, and what computes a dtype.

    And where `contiguous`, `reshape` or `to` return their input, and a dropout does, out of training. A `reshape` of
    strided memory is taken for a copy, though some of them are views.
    """
    base = call.operator.split(".")[0]
    if base in NO_WORK:
        return False
    if base == "aten::dropout":
        return not any(arg.name == "train" and arg.value is False for arg in call.args)
    if base not in MAY_COPY:
        return call.work
    source = next((arg.value for arg in call.args if isinstance(arg.value, TensorSpec)), None)
    if source is None:
        return call.work
    if base in ("aten::to", "aten::_to_copy", "aten::type_as"):
        return _converts(call, source)
    return source.effective_strides != contiguous_strides(source.shape)


def _converts(call: Call, source: TensorSpec) -> bool:
    if any(arg.name == "copy" and arg.value is True for arg in call.args) or call.operator.startswith("aten::_to_copy"):
        return True
    targets = [arg.value for arg in call.args[1:]]
    for target in targets:
        if isinstance(target, TensorSpec) and (target.dtype, target.device) != (source.dtype, source.device):
            return True
        if isinstance(target, TorchConstant) and target.kind == "dtype" and target.name != source.dtype:
            return True
        if isinstance(target, TorchConstant) and target.kind == "device" and target.name != source.device:
            return True
    return False
