"""conv: PyTorch's convolutions over one to three dimensions: of patches (ViT), of audio (Whisper)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, written_or_returned
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert weight.shape == {weight_shape}
    x, w = input.to(torch.float32), weight.to(torch.float32)
    y = torch.nn.functional.conv{d}d(x, w, {bias}, {settings})
    return y.to(input.dtype)
"""

SPACE = ("depth", "height", "width")  # the last of them are there


@family(
    "conv",
    "aten::conv1d",
    "aten::conv2d",
    "aten::conv3d",
    "aten::convolution",
    "aten::_convolution",
    "aten::cudnn_convolution",
)
def conv(call: Invocation) -> KernelInstance:
    """`input`: [batch_size, in_channels, …], `weight`: [out_channels, in_channels / groups, …], `bias`: [out_channels].

    The batch may be missing. Sizes but that of the batch are constant: only they say how large the output is.
    """
    call.refuse("transposed")
    x, w, bias = call.tensor("input", "self"), call.tensor("weight"), call.optional("bias")
    d, groups = w.dim() - 2, int(call["groups"] or 1)
    channels, *places = x.shape[-d - 1 :]
    batch = ("batch_size",) * (x.dim() - d - 1)
    if d not in (1, 2, 3) or x.dim() not in (d + 1, d + 2) or {x.dtype, w.dtype} != {x.dtype} or x.dtype not in FLOATS:
        raise Unrecognized("no batch of floats in one to three dimensions")
    stride, padding, dilation = (
        per_dimension(call[name], d, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    sizes = [
        (size + 2 * p - a * (k - 1) - 1) // s + 1
        for size, p, a, k, s in zip(places, padding, dilation, w.shape[2:], stride, strict=True)
    ]
    if min(sizes) < 1 or channels != groups * w.shape[1]:
        raise Unrecognized("its output has no elements, or its channels are not those of its groups")
    space = SPACE[3 - d :]
    axes = dict(zip((f"in_{axis}" for axis in space), places, strict=True))
    axes |= dict(zip((f"kernel_{axis}" for axis in space), w.shape[2:], strict=True))
    axes |= dict(zip((f"out_{axis}" for axis in space), sizes, strict=True))
    inputs = {
        "input": tensor_arg(x, *batch, "in_channels", *(f"in_{axis}" for axis in space)),
        "weight": tensor_arg(w, "out_channels", "group_channels", *(f"kernel_{axis}" for axis in space)),
    }
    if bias is not None:
        inputs["bias"] = tensor_arg(bias, "out_channels")
    word = "".join(
        f"_{letter}{'x'.join(map(str, values))}"
        for letter, values, usual in (("s", stride, 1), ("p", padding, 0), ("d", dilation, 1))
        if any(value != usual for value in values)
    ) + (f"_g{groups}" if groups > 1 else "")
    out = (*batch, "out_channels", *(f"out_{axis}" for axis in space))
    return KernelInstance(
        name=f"conv{d}d{'_bias' if bias is not None else ''}{abbreviate(x.dtype, torch.bfloat16)}"
        f"_o{w.shape[0]}_c{channels}_k{'x'.join(map(str, w.shape[2:]))}{word}_i{'x'.join(map(str, places))}"
        f"{'' if batch else '_unbatched'}",
        op_type="conv",
        axes={
            **dict.fromkeys(batch),
            "in_channels": channels,
            "out_channels": w.shape[0],
            "group_channels": w.shape[1],
            **axes,
        },
        inputs=inputs,
        outputs={"output": lazy_arg(x.dtype, out, lambda: written_or_returned(call, "out"))},
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            weight_shape=tuple(w.shape),
            d=d,
            bias="None" if bias is None else "bias.to(torch.float32)",
            settings=f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}",
        ),
        description=f"Convolution over {d} dimension{'s' if d > 1 else ''}.",
        flops=2 * (len(x) if batch else 1) * math.prod(sizes) * w.numel(),
    )


def per_dimension(value: object, d: int, default: int) -> tuple[int, ...]:
    """A setting for each of `d` dimensions: one for all of them, or a list; Unrecognized for a word such as `same`."""
    if value is None:
        return (default,) * d
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if len(values) not in (1, d) or not all(isinstance(item, int) for item in values):
        raise Unrecognized(f"not a number for each dimension: {value!r}")
    return tuple(int(item) for item in values) * (d // len(values))


@cost_function("conv")
def conv_cost(inputs: CostInputs) -> Cost:
    """Each element of the weight is multiplied once for each place of the output."""
    places = math.prod(
        size for axis, size in inputs.sizes.items() if axis.startswith("out_") and axis != "out_channels"
    )
    return inputs.whole(2 * inputs.sizes.get("batch_size", 1) * places * inputs["weight"].numel())
