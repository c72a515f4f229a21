"""PyTorch's softmax, log_softmax and topk over the last dimension: of a vocabulary's logits, or a router's.

softcap keeps logits in bounds by a tanh, by SGLang's Triton kernel (Gemma 2, arXiv:2408.00118).
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, written_or_returned
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, dtype_name, lazy_arg, tensor_arg

SOFTMAX = """import torch


@torch.no_grad()
def run(scores):
    assert scores.shape[-1] == {n}
    return torch.{function}(scores.to(torch.float32), dim=-1).to(torch.{dtype})
"""

TOPK = """import torch


@torch.no_grad()
def run(scores):
    assert scores.shape[-1] == {n}
    values, indices = torch.topk(scores, {k}, dim=-1, largest={largest}, sorted={ordered})
    return values, indices
"""

ROWS = ("batch_size", "num_columns")


@family("softmax", "aten::softmax", "aten::_softmax", "aten::_safe_softmax")
def softmax(call: Invocation) -> KernelInstance:
    return softmax_instance(call, "softmax")


@family("log_softmax", "aten::log_softmax", "aten::_log_softmax")
def log_softmax(call: Invocation) -> KernelInstance:
    return softmax_instance(call, "log_softmax")


def softmax_instance(call: Invocation, function: str) -> KernelInstance:
    """`self`: [..., num_columns], leading dimensions joined. `half_to_float` is `_softmax`'s word for float32."""
    x = rows_of(call)
    wanted = torch.float32 if call["half_to_float"] else call["dtype"]
    out = wanted if isinstance(wanted, torch.dtype) else x.dtype
    if not {x.dtype, out} <= set(FLOATS):
        raise Unrecognized("not of floats")
    n = x.shape[1]
    word = abbreviate(x.dtype, torch.float32) + (f"_to{abbreviate(out, x.dtype)}" if out != x.dtype else "")
    return KernelInstance(
        name=f"{function}{word}_n{n}",
        op_type="softmax",
        axes={"batch_size": None, "num_columns": n},
        inputs={"scores": tensor_arg(x, *ROWS)},
        outputs={"output": lazy_arg(out, ROWS, lambda: written_or_returned(call, "out").reshape(-1, n))},
        reference=SOFTMAX.format(n=n, function=function, dtype=dtype_name(out)),
        description=f"{function} of each row.",
        flops=5 * x.numel(),
    )


@family("topk", "aten::topk")
def topk(call: Invocation) -> KernelInstance:
    """Of equal scores any may be chosen: PyTorch's own choice is the reference's."""
    x, k = rows_of(call), int(call.number("k"))
    largest, ordered = (call[name] in (None, True) for name in ("largest", "sorted"))
    n, chosen = x.shape[1], ("batch_size", "top_k")
    word = abbreviate(x.dtype, torch.float32) + ("" if largest else "_smallest") + ("" if ordered else "_unsorted")

    def result(name: str, position: int) -> torch.Tensor:
        written = call.optional(name)
        tensor: torch.Tensor = call.result[position] if written is None else written
        return tensor.reshape(-1, k)

    return KernelInstance(
        name=f"topk{word}_k{k}_n{n}",
        op_type="topk",
        axes={"batch_size": None, "num_columns": n, "top_k": k},
        inputs={"scores": tensor_arg(x, *ROWS)},
        outputs={
            "values": lazy_arg(x.dtype, chosen, lambda: result("values", 0)),
            "indices": lazy_arg("int64", chosen, lambda: result("indices", 1)),
        },
        reference=TOPK.format(n=n, k=k, largest=largest, ordered=ordered),
        description=f"The {k} {'largest' if largest else 'smallest'} of each row.",
        flops=x.numel(),
    )


def rows_of(call: Invocation) -> torch.Tensor:
    """`self` as [batch_size, num_columns], if the operator goes along its last dimension."""
    x, dim = call.tensor("self", "input"), call["dim"]
    if x.dim() == 0 or (-1 if dim is None else dim) not in (-1, x.dim() - 1):
        raise Unrecognized("not along the last dimension")
    return x.reshape(-1, x.shape[-1])


SOFTCAP = """import torch


@torch.no_grad()
def run(logits):
    return (torch.tanh(logits.to(torch.float32) / {cap}) * {cap}).to(torch.{dtype})
"""


@family("softcap", "triton::softcap_inplace_logits_kernel")
def softcap(call: Invocation) -> KernelInstance:
    """`full_logits_ptr`: [..., vocabulary]; in place, or as float32 into `output_ptr`."""
    x, wide = call.tensor("full_logits_ptr"), call.optional("output_ptr")
    if call["APPLY_SOFTCAP"] is False or x.dtype not in FLOATS or x.dim() < 1:
        raise Unrecognized("a conversion of the logits alone")
    cap, n = float(call.number("softcapping_value")), x.shape[-1]
    out = x if wide is None else wide
    rows = ("num_rows", "vocab_size")
    return KernelInstance(
        name=f"softcap{cap:g}{abbreviate(x.dtype, torch.float32)}{'' if wide is None else '_wide'}_v{n}",
        op_type="softcap",
        axes={"num_rows": None, "vocab_size": n},
        inputs={"logits": tensor_arg(x.reshape(-1, n), *rows)},
        outputs={"output": lazy_arg(out.dtype, rows, lambda: out.reshape(-1, n))},
        reference=SOFTCAP.format(cap=cap, dtype=dtype_name(out.dtype)),
        description=f"Logits kept between -{cap:g} and {cap:g}.",
        in_place=(("logits", "output"),) if wide is None else (),
    )


cost_function("softcap")(CostInputs.whole)
cost_function("softmax", "topk")(CostInputs.whole)  # FLOPs are few, and not counted
