"""layernorm: the reference against PyTorch's operators, and against vLLM's gated norms in Triton, interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import Launcher, kernels

from kcap.replay.source import calls_of_trace
from kcap.schemas.derive.derive import derive_calls
from kcap.schemas.recording.recording import Metadata

MAMBA, FLA = "triton::_layer_norm_fwd_1pass_kernel.s01234567", "triton::layer_norm_fwd_kernel.s01234567"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", [("weight", "bias"), ("weight",), ()])
def test_layer_norm_is_atens(dtype: torch.dtype, parts: tuple[str, ...]) -> None:
    arguments = {name: randn(48, dtype=dtype, seed=seed + 1) for seed, name in enumerate(parts)}
    arguments = {"weight": None, "bias": None, **arguments, "input": randn(3, 5, 48, dtype=dtype), "eps": 1e-5}
    for name in ("layer_norm", "native_layer_norm"):
        operator = getattr(torch.ops.aten, name)
        instance = agrees(f"aten::{name}", operator, normalized_shape=[48], **arguments)
    words = "".join(f"_no{name}" for name in ("weight", "bias") if name not in parts)
    assert instance.name == f"layernorm{'' if dtype == torch.bfloat16 else '_fp32'}{words}_h48"


def test_a_trace_file_leaves_out_atens_epsilon(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(
        "Operator: aten.layer_norm.default\ncnt: 3, ((T([8, 64], bf16), [64], T([64], bf16), T([64], bf16)), {})\n"
    )
    (kernel,) = derive_calls(calls_of_trace(tmp_path / "t.txt", None), Metadata()).kernels
    assert kernel.definition.name == "layernorm_h64"
    assert "1e-05" in kernel.definition.reference


def test_layer_norm_over_more_dimensions_is_declined() -> None:
    assert declined("aten::layer_norm", input=randn(3, 5, 48), normalized_shape=[5, 48], eps=1e-5)


def test_name_axes_and_bytes() -> None:
    x, weight = torch.empty(7, 768, device="meta"), torch.empty(768, device="meta")
    instance = kernel_of("aten::layer_norm", input=x, normalized_shape=[768], weight=weight, bias=weight, eps=1e-12)
    definition = checked(instance)
    assert definition.name == "layernorm_fp32_eps1e-12_h768" and definition.op_type == "layernorm"
    assert definition.const_axes == {"hidden_size": 768} and list(definition.inputs) == [
        "hidden_states",
        "weight",
        "bias",
    ]


def gated(dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    x = randn(5, 80, dtype=dtype)[:, :64]
    arguments = {
        "X": x,
        "Y": torch.empty(5, 64, dtype=dtype),
        "W": randn(64, dtype=dtype, seed=1),
        "B": None,
        "Z": randn(5, 64, dtype=dtype, seed=2),
        "Mean": torch.empty(4 * 5),
        "Rstd": torch.empty(4 * 5),
        "eps": 1e-5,
        "N": 64,
        "NORM_BEFORE_GATE": False,
        "IS_RMS_NORM": True,
    }
    return {**arguments, **more}


CASES = [
    ({}, "pregated_rmsnorm"),
    ({"N": 16}, "pregated_rmsnorm", "_g16"),
    ({"NORM_BEFORE_GATE": True}, "gated_rmsnorm"),
    ({"IS_RMS_NORM": False, "B": randn(64, seed=3)}, "pregated_layernorm"),
    ({"IS_RMS_NORM": False, "Z": None, "N": 32}, "layernorm", "_nobias_g32"),
    ({"Z": None, "N": 32}, "rmsnorm", "_g32"),
    ({"Z": None}, "rmsnorm"),
]


def launched(kernel: Launcher, **fixed: Any) -> Any:
    def run(**call: Any) -> None:
        groups = call["X"].shape[1] // call["N"]
        strides = {
            f"stride_{name.lower()}_row": call[name].stride(0) if call[name] is not None else 0 for name in "XYZ"
        }
        rows = {"M": len(call["X"]), "BLOCK_N": call["N"]}
        kernel[(len(call["X"]), groups)](**call, **strides, **rows, **fixed)

    return run


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gated_norms_of_mamba_are_vllms(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    kernel = kernels("vllm", "model_executor/layers/mamba/ops/layernorm_gated.py")["_layer_norm_fwd_1pass_kernel"]
    changed, begin, end = (*case, "")[:3]
    instance = agrees(MAMBA, launched(kernel), **gated(dtype, **changed))
    assert instance.name == f"{begin}{'' if dtype == torch.bfloat16 else '_fp32'}{end}_h64"


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("before", [False, True])
def test_gated_norms_of_flash_linear_attention_are_vllms(activation: str, before: bool) -> None:
    found = kernels("vllm", "third_party/flash_linear_attention/ops/layernorm_guard.py")["layer_norm_fwd_kernel"]
    arguments = gated(torch.bfloat16, NORM_BEFORE_GATE=before, ACTIVATION=activation)
    instance = agrees(FLA, launched(found, ROWS_PER_BLOCK=1), **arguments)
    assert instance.name.startswith("gated_" if before else "pregated_")
    assert ("_sigmoid" in instance.name) == (activation == "sigmoid")


PACKAGES = {
    "sglang": ("kernels/ops/attention/fla/fused_norm_gate.py", {"USE_GDC": False}),
    "vllm": ("third_party/flash_linear_attention/ops/fused_norm_gate.py", {"launch_pdl": False}),
}
ROWS, HEADS, WIDTH = 36, 3, 48


def gated_after(dtype: torch.dtype = torch.bfloat16, **more: Any) -> dict[str, Any]:
    """As both engines call it for Qwen3-Next, whose rows are normed in place. A gate may have strides."""
    x, wide = randn(ROWS, WIDTH, dtype=dtype), randn(ROWS // HEADS, 200, dtype=dtype, seed=1)
    gate = wide[:, : HEADS * WIDTH].unflatten(1, (HEADS, WIDTH))
    call = {"x": x, "g": gate, "y": x, "w": randn(WIDTH, dtype=dtype, seed=2), "b": None, "eps": 1e-6}
    call |= dict.fromkeys(("residual", "residual_out")) | {"mean": torch.empty(ROWS), "rstd": torch.empty(ROWS)}
    return {**call, "ACTIVATION": "silu", "IS_RMS_NORM": True, **more}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kernel", ["layer_norm_gated_fwd_kernel", "layer_norm_gated_fwd_kernel1"])
@pytest.mark.parametrize(
    ("changed", "kind", "end"),
    [
        ({}, "gated_rmsnorm", ""),
        ({"ACTIVATION": "sigmoid"}, "gated_rmsnorm", "_sigmoid"),
        ({"ACTIVATION": "swish", "w": None}, "gated_rmsnorm", "_noweight"),
        ({"IS_RMS_NORM": False, "b": randn(WIDTH, seed=3)}, "gated_layernorm", ""),
    ],
)
def test_norms_that_are_gated_after_are_the_kernels(
    package: str, kernel: str, changed: dict[str, Any], kind: str, end: str
) -> None:
    """Of the kernel for one row the gate has no strides."""
    file, fixed = PACKAGES[package]
    launcher, tiled = kernels(package, file)[kernel], kernel.endswith("l")
    strided = {"H": HEADS, "g_stride_n": 200, "G_STRIDED": True, "G_HEADS": HEADS, "stride_g_tok": 200}
    rows = {**strided, "stride_g_head": WIDTH, "T": ROWS, "BT": 16} if tiled else {}

    def run(**call: Any) -> None:
        present = {"HAS_WEIGHT": call["w"] is not None, "HAS_BIAS": call["b"] is not None}
        flags = {"STORE_RESIDUAL_OUT": False, "HAS_RESIDUAL": False, **present}
        launcher[(3,) if rows else (ROWS,)](**call, **flags, **fixed, **rows, D=WIDTH, BD=64)

    for dtype in (torch.bfloat16, torch.float32):
        gate = {} if tiled else {"g": randn(ROWS, WIDTH, dtype=dtype, seed=1)}
        name = agrees(f"triton::{kernel}.s01234567", run, **gated_after(dtype, **gate, **changed)).name
        assert name == f"{kind}{'_fp32' if dtype == torch.float32 else ''}{end}_eps1e-06_h48"


def test_gates_come_after_the_bias() -> None:
    """Of Flash Linear Attention's other kernel, too, which gates before or after."""
    kernel = kernels("vllm", "third_party/flash_linear_attention/ops/layernorm_guard.py")["layer_norm_fwd_kernel"]
    arguments = gated(torch.bfloat16, NORM_BEFORE_GATE=True, B=randn(64, seed=3), ACTIVATION="silu")
    agrees(FLA, launched(kernel, ROWS_PER_BLOCK=1), **arguments)


def test_gated_norms_that_are_declined() -> None:
    operator = "triton::layer_norm_gated_fwd_kernel.s01234567"
    for name, value in {"residual": randn(ROWS, WIDTH), "g": randn(ROWS, 24), "ACTIVATION": None}.items():
        assert declined(operator, **gated_after(**{name: value})), name


def test_what_is_declined() -> None:
    assert declined(MAMBA, **gated(torch.bfloat16, IS_RMS_NORM=None))
    assert declined(MAMBA, **gated(torch.bfloat16, N=48))
    assert declined(FLA, **gated(torch.bfloat16, ACTIVATION="gelu"))
