"""sampling: greedy against aten's and vLLM's operators; what may be drawn under top-k and top-p; penalties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn
from interpreted import kernels

from kcap.replay.datasets.reference import compile_reference

SIZES = [(1, 1024), (3, 5000), (7, 2048), (2, 32000), (16, 1500)]


def test_reference_is_atens_argmax():
    for seed, (rows, v) in enumerate(SIZES):
        for dtype in (torch.float32, torch.bfloat16):
            logits = randn(rows, v, dtype=dtype, seed=seed)
            agrees("aten::argmax", torch.ops.aten.argmax.default, self=logits, dim=-1, keepdim=False)


def test_reference_is_vllms_cpu_operator():
    load_vllm_kernels()
    for seed, (rows, v) in enumerate(SIZES):
        agrees("_C::greedy_argmax", torch.ops._C.greedy_argmax, logits=randn(rows, v, dtype=torch.float32, seed=seed))


def test_an_argmax_of_something_else_is_declined():
    logits = torch.empty(2, 128256, device="meta")
    assert kernel_of("aten::argmax", self=logits, dim=-1).name == "greedy_sampling_v128256"
    assert declined("aten::argmax", self=logits[:, :149], dim=-1)
    assert declined("aten::argmax", self=logits, dim=0)
    assert declined("aten::argmax", self=logits, dim=None)
    assert declined("aten::argmax", self=logits, dim=-1, keepdim=True)
    assert declined("aten::argmax", self=logits.int(), dim=-1)


def probabilities(rows: int, v: int, seed: int = 0) -> torch.Tensor:
    return torch.softmax(3 * randn(rows, v, dtype=torch.float32, seed=seed), dim=-1)


def drawn(kernel: Any, times: int) -> torch.Tensor:
    """What the reference draws, [times, batch_size]."""
    run = compile_reference(kernel.definition().reference, kernel.name)
    return torch.stack([run(*(slot.get() for slot in kernel.inputs.values())) for _ in range(times)])


def test_top_k_draws_each_of_the_k_most_likely_and_no_other():
    torch.manual_seed(0)
    probs = probabilities(3, 50)
    kernel = kernel_of(
        "flashinfer::top_k_sampling_from_probs", probs=probs, top_k=torch.tensor([1, 3, 0], dtype=torch.int32)
    )
    samples = drawn(kernel, 400)
    for row, k in ((0, 1), (1, 3)):
        assert set(samples[:, row].tolist()) == set(probs[row].topk(k).indices.tolist())
    assert len(set(samples[:, 2].tolist())) > 10  # no limit
    share = (samples[:, 1] == probs[1].argmax()).float().mean()
    top = probs[1].topk(3).values
    assert abs(share - top[0] / top.sum()) < 0.1


def test_top_p_keeps_the_token_that_reaches_p():
    torch.manual_seed(0)
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).repeat(4, 1)
    p = torch.tensor([0.4, 0.6, 0.0, 1.0])
    samples = drawn(kernel_of("flashinfer::top_p_sampling_from_probs", probs=probs, top_p=p), 200)
    assert [set(samples[:, row].tolist()) for row in range(4)] == [{0}, {0, 1}, {0}, {0, 1, 2, 3}]


@pytest.mark.parametrize("scores", ["probs", "logits"])
def test_top_k_comes_before_top_p(scores: str):
    torch.manual_seed(0)
    probs = torch.tensor([[0.3, 0.3, 0.2, 0.2]])  # of the first two, each has half
    given = {scores: probs.log() + 1 if scores == "logits" else probs}
    kernel = kernel_of(f"flashinfer::top_k_top_p_sampling_from_{scores}", **given, top_k=2, top_p=0.45)
    assert checked(kernel).name == f"top_k_top_p_sampling_from_{scores}_v4"
    assert set(drawn(kernel, 100)[:, 0].tolist()) <= {0, 1}
    assert len(set(drawn(kernel, 100)[:, 0].tolist())) == 1


def test_joint_filters_are_over_all_probabilities():
    torch.manual_seed(0)
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    limits = {"top_k": 2, "top_p": 0.5}  # of the first two alone, the first has more than half
    operator = "flashinfer::top_k_top_p_sampling_from_probs"
    first = kernel_of(operator, probs=probs, filter_apply_order="top_k_first", **limits)
    joint = kernel_of(operator, probs=probs, filter_apply_order="joint", **limits)
    of_sglang = kernel_of("sgl_kernel::top_k_top_p_sampling_from_probs", probs=probs, **limits)
    assert [set(drawn(kernel, 100)[:, 0].tolist()) for kernel in (first, joint)] == [{0}, {0, 1}]
    assert of_sglang.key == joint.key


def test_names_and_dtypes_are_flashinfer_benchs():
    probs = torch.empty(4, 128256, device="meta")
    definition = checked(kernel_of("flashinfer::top_k_sampling_from_probs", probs=probs, top_k=50, indices=None))
    assert definition.name == "top_k_sampling_from_probs_v128256"
    assert {name: (t.shape, t.dtype) for name, t in definition.inputs.items()} == {
        "probs": (["batch_size", "vocab_size"], "float32"),
        "top_k": (["batch_size"], "int32"),
    }
    assert definition.outputs["samples"].dtype == "int64"
    both = {
        "maybe_top_k_arr": torch.ones(4, dtype=torch.int64),
        "top_k_val": 0,
        "maybe_top_p_arr": None,
        "top_p_val": 0.9,
    }
    kernel = kernel_of("sgl_kernel::top_k_top_p_sampling_from_probs", probs=probs, output=torch.empty(4), **both)
    assert kernel.name == "top_k_top_p_sampling_from_probs_joint_v128256"
    assert kernel.inputs["top_k"].dtype == "int32"


def test_selected_rows_and_another_order_are_declined():
    probs = torch.empty(4, 128256, device="meta")
    assert declined("flashinfer::top_p_sampling_from_probs", probs=probs, top_p=0.9, indices=torch.zeros(4))
    limits = {"top_k": 5, "top_p": 0.9, "filter_apply_order": "top_p_first"}
    assert declined("flashinfer::top_k_top_p_sampling_from_probs", probs=probs, **limits)


def test_repetition_penalties_of_vllm():
    apply = pytest.importorskip("vllm._custom_ops").apply_repetition_penalties_torch
    for seed, (rows, v) in enumerate(SIZES):
        masks = [randn(rows, v, dtype=torch.float32, seed=s) > 0.5 for s in (seed, seed + 1)]
        agrees(
            "_C::apply_repetition_penalties_",
            lambda logits, prompt_mask, output_mask, repetition_penalties: apply(
                logits, prompt_mask, output_mask, repetition_penalties
            ),
            logits=randn(rows, v, dtype=torch.float32, seed=seed),
            prompt_mask=masks[0],
            output_mask=masks[1],
            repetition_penalties=torch.rand(rows) + 0.5,
        )


V2 = "v1/worker/gpu/sample/"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "file"), [("temperature", "gumbel.py"), ("min_p", "min_p.py")])
def test_settings_of_requests_are_vllms(name: str, file: str, dtype: torch.dtype):
    """Rows of one request share its setting; those without one stay as they are."""
    kernel = kernels("vllm", V2 + file)[f"_{name}_kernel"]
    settings = torch.tensor([0.0, 0.7, 1.0, 0.05, 1.3 if name == "temperature" else 0.3])

    def run(**call: Any) -> None:
        logits = call["logits_ptr"]
        pointers = (call["expanded_idx_mapping_ptr"], call[f"{name}_ptr"], call["vocab_size"])
        grid = (len(logits), 2) if name == "temperature" else (len(logits),)
        kernel[grid](logits, logits.stride(0), *pointers, BLOCK_SIZE=64)

    arguments = {
        "logits_ptr": randn(7, 100, dtype=dtype),
        "expanded_idx_mapping_ptr": torch.tensor([4, 0, 1, 1, 2, 3, 0], dtype=torch.int32),
        f"{name}_ptr": settings,
        "vocab_size": 100,
    }
    operator = f"triton::_{name}_kernel.s01234567"
    instance = agrees(operator, run, **arguments)
    assert instance.name == f"{name}{'' if dtype == torch.float32 else '_bf16'}_v100"
    assert declined(operator, **{**arguments, "vocab_size": 90})
