"""References against recorded operators: a wrong one is found, and what cannot run is never called verified."""

from __future__ import annotations

import math
import os
import threading
import time
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from derived_calls import HIDDEN, METADATA, call, embedding, floats, linear, ranged

from kcap.bench.accuracy import Difference, compare
from kcap.bench.check import checker as checker_module
from kcap.bench.check import verification
from kcap.bench.check.checker import Checker, compare_outputs, is_informative
from kcap.bench.check.verification import Checkers, calls_to_check, check_references, tag_definitions, with_status
from kcap.bench.contents import CheckTarget, open_contents
from kcap.bench.exports.flashinfer_bench import check_lines
from kcap.bench.problems import problems_of
from kcap.replay.rebuild.operators import Operator, resolve_operator
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.bound_call import Inputs, ReplayRule
from kcap.schemas.derive.derive import bind_family, derive_calls
from kcap.schemas.derive.kernel import DerivedDefinition, KernelInstance
from kcap.schemas.flashinfer.definition import DRAFT, VERIFIED
from kcap.schemas.recording.recording import Call, write_recording
from kcap.schemas.recording.values import Group, Opaque, Value
from kcap.schemas.results.outcome import ReferenceCheck
from kcap.system.worker_process import Worker


def checker(kernel: DerivedDefinition) -> Checker:
    return Checker([kernel], Rebuilder("cpu", "cpu", None))


def kernel_of(one) -> DerivedDefinition:
    return derive_calls([one], METADATA).kernels[0]


def with_reference(kernel: DerivedDefinition, before: str, after: str) -> DerivedDefinition:
    text = kernel.definition.reference
    assert before in text
    changed = kernel.definition.model_copy(update={"reference": text.replace(before, after)})
    return replace(kernel, definition=changed)


@pytest.mark.parametrize("seed", range(3))
def test_a_reference_agrees_with_its_operator_on_fresh_inputs(seed: int) -> None:
    kernel = kernel_of(linear(0, 7))
    assert checker(kernel).check(kernel.definition.name, 0, None, seed)["status"] == "agrees"


@pytest.mark.parametrize(("factor", "status"), [(1.0, "agrees"), (1.02, "differs")])
def test_a_kernel_need_not_round_where_its_reference_does(
    factor: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of float32 from bfloat16, as fused kernels keep sums: the reference rounds to bfloat16 on the way."""
    kernel = kernel_of(linear(0, 7))
    rounding = with_reference(kernel, "torch.matmul(A, B.T)", "torch.matmul(A, B.T).float()")

    def run(use: object, resolved: object, inputs: object, form: KernelInstance) -> list[torch.Tensor]:
        a, b = (slot.get().float() for slot in form.inputs.values())
        return [factor * (a @ b.T)]

    monkeypatch.setattr(checker_module, "run_operator", run)
    assert checker(rounding).check(kernel.definition.name, 0, None, 0)["status"] == status


def test_what_a_reference_means_in_float64_alone_is_no_truth() -> None:
    """In bfloat16 it loses all digits."""
    kernel = kernel_of(linear(0, 7))
    product = "torch.matmul(A, B.T)"
    losing = with_reference(kernel, product, f"{product} * 1000 - {product} * 999")
    assert checker(losing).check(kernel.definition.name, 0, None, 0)["status"] == "differs"


def in_group(number: int, operator: str, size: int, rank: int, **arguments: Value) -> Call:
    name = "handle" if operator.startswith("_C::") else "group_name"
    return call(number, operator, **{**arguments, name: Group(size, rank, "tp")})


def collectives(size: int) -> list[Call]:
    """As ranks 0 and 1 of `size` recorded them."""
    gathered = {"input": floats(3, HIDDEN), "group_size": size}
    reduced = {"input": floats(5, HIDDEN), "reduce_op": "sum"}
    scattered = {"input": floats(3 * size, HIDDEN), "reduce_op": "sum", "group_size": size}
    operators = (
        ("all_gather_into_tensor", gathered),
        ("all_reduce", reduced),
        ("all_reduce_", reduced),
        ("all_reduce", {**reduced, "reduce_op": "max"}),
        ("reduce_scatter_tensor", scattered),
    )
    return [
        in_group(2 * index + rank, f"_c10d_functional::{name}", size, rank, **arguments)
        for index, (name, arguments) in enumerate(operators)
        for rank in (0, 1)
    ]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("size", [2, 4])
def test_a_collective_is_checked_by_as_many_processes_as_its_group_had(size: int, tmp_path: Path) -> None:
    write_recording(tmp_path / "rec.kcap", METADATA, collectives(size))
    contents = open_contents(tmp_path / "rec.kcap", allow_truncated=True)
    derived = derive_calls(contents.calls, METADATA)
    with Checkers(contents, CheckTarget(device="cpu")) as checkers:
        checks = list(check_references(checkers, derived))
    kinds = {"all_reduce", "all_reduce_max", "all_gather", "reduce_scatter"}
    assert {check.definition for check in checks} == {f"{kind}_ws{size}_h{HIDDEN}" for kind in kinds}
    assert {check.operator.split("::")[1] for check in checks} >= {"all_gather_into_tensor", "all_reduce"}
    assert {check.status for check in checks} == {"agrees"}, checks


FLASHINFER_COMM = """
import torch
import torch.distributed as dist
from types import SimpleNamespace

def create_allreduce_fusion_workspace(backend, world_size, rank, max_token_num, hidden_dim, dtype, comm_backend):
    return SimpleNamespace(backend=backend, world_size=world_size, rank=rank, tokens=max_token_num, destroy=int)

def allreduce_fusion(input, workspace, pattern, residual_out, norm_out, residual_in, rms_gamma, rms_eps):
    assert (workspace.backend, workspace.rank, len(input)) == ("trtllm", dist.get_rank(), 5) and workspace.tokens >= 5
    x = input.float()
    dist.all_reduce(x)
    x += residual_in
    residual_out.copy_(x)
    norm_out.copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], rms_gamma.float(), rms_eps))
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_what_the_ranks_of_a_collective_do_not_exchange_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's sum with its residual and norm, in place, which only GPUs run: here the same by gloo."""
    package = tmp_path / "stub/flashinfer/comm"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(FLASHINFER_COMM)
    (package / "mnnvl.py").write_text(
        "class TorchDistBackend:\n    def __init__(self, group): assert group is not None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"), prepend=os.pathsep)
    x, residual = floats(5, HIDDEN), floats(5, HIDDEN, storage=1)
    values = {"input": x, "workspace": Opaque("TRTLLMAllReduceFusionWorkspace"), "pattern": 1}
    values |= {"residual_out": residual, "norm_out": x, "residual_in": residual}
    values |= {"rms_gamma": floats(HIDDEN, storage=2), "rms_eps": 1e-5, "group": Group(2, 0, "tp")}
    write_recording(tmp_path / "rec.kcap", METADATA, [call(0, "flashinfer::allreduce_fusion", **values)])
    contents = open_contents(tmp_path / "rec.kcap", allow_truncated=True)
    with Checkers(contents, CheckTarget(device="cpu")) as checkers:
        (check,) = check_references(checkers, derive_calls(contents.calls, METADATA))
    assert (check.definition, check.status) == (f"all_reduce_fused_add_rmsnorm_ws2_h{HIDDEN}", "agrees"), check


def test_a_wrong_reference_of_a_collective_is_found_by_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers' part is played here: every rank sums the tensors that all of them draw."""
    reduce = in_group(0, "_c10d_functional::all_reduce", 2, 0, input=floats(5, HIDDEN), reduce_op="sum")
    right = kernel_of(reduce)
    for kernel, status in ((right, "agrees"), (with_reference(right, "sum(dim=0)", "amax(dim=0)"), "differs")):
        for rank in (0, 1):
            drawn: list[torch.Tensor] = []

            def build(resolved, drawn=drawn):
                drawn.append(torch.randn(5, HIDDEN).bfloat16())
                return Inputs([drawn[-1], "sum", None], {}, {})

            schema = resolve_operator("_c10d_functional::all_reduce", in_group=True).schema
            operator = Operator(reduce.operator, lambda *_, drawn=drawn: drawn[0] + drawn[1], schema)
            rebuilder = Rebuilder("cpu", "cpu", None, collective=lambda call, op=operator: (op, ReplayRule()))
            monkeypatch.setattr(rebuilder, "build", build)
            checker = Checker([kernel], rebuilder, rank=rank)
            assert checker.check(kernel.definition.name, 0, None, 1)["status"] == status


@pytest.mark.parametrize(
    ("after", "status"),
    [
        ("torch.matmul(A, B.T) * 1.1", "differs"),
        ("torch.matmul(A, B.T).float()", "differs"),
        ("torch.matmul(A, B.T)[:1]", "differs"),
        ("A.fill_(float('nan'))", "differs"),
        ("(torch.matmul(A, B.T), A)", "failed"),
        ("undefined", "failed"),
    ],
)
def test_a_wrong_reference_is_found(after: str, status: str) -> None:
    kernel = with_reference(kernel_of(linear(0, 7)), "torch.matmul(A, B.T)", after)
    assert checker(kernel).check(kernel.definition.name, 0, None, 1)["status"] == status


def test_an_operator_that_is_not_here_is_skipped_not_verified() -> None:
    arguments = {"out": floats(4, 64), "input": floats(4, 128, storage=1)}
    kernel = kernel_of(call(0, "sgl_kernel::silu_and_mul", **arguments))
    answer = checker(kernel).check(kernel.definition.name, 0, None, 1)
    assert answer["status"] == "skipped" and "sgl_kernel" in answer["reason"]
    assert with_status(kernel.definition, {"skipped"}).tags.count(DRAFT) == 1


def test_a_call_that_is_derived_otherwise_once_its_library_is_loaded_has_the_reason_and_is_shown() -> None:
    refused = {7: "its library does not tell its outputs' sizes"}
    there = Checker([], Rebuilder("cpu", "cpu", None), refused)
    answer = there.check("gdn", 7, None, 1)
    draw = {
        "definition": "gdn",
        "call": 7,
        "sample": None,
        "seed": 0,
        "target": "",
        "integers": (0, 1),
        "tolerated": (),
    }
    assert (answer["status"], there.try_draws(draw, None)["status"]) == ("failed", "refused")
    reason = "where its library is loaded, its library does not tell its outputs' sizes"
    assert answer["reason"] == there.try_draws(draw, None)["reason"] == reason
    check = ReferenceCheck(definition="gdn", operator="_C::gdn", call=7, **answer)
    agrees = ReferenceCheck(definition="d", operator="aten::mm", call=1, status="agrees")
    assert check_lines([check, agrees, check]) == [f"  failed: 2 checks: {reason}"]


@pytest.mark.parametrize("tokens", [0, 7])
def test_outputs_without_a_number_are_no_agreement(tokens: int) -> None:
    kernel = kernel_of(linear(0, tokens))
    if tokens:  # both give nothing but nan
        kernel = with_reference(kernel, "torch.matmul(A, B.T)", "torch.matmul(A, B.T) * float('nan')")
        kernel = replace(kernel, uses=(replace(kernel.uses[0], bind=lambda i: nothing(bind_family(i))),))
    answer = checker(kernel).check(kernel.definition.name, 0, None, 1)
    assert answer["status"] == "skipped" and "no number" in answer["reason"]


def nothing(form: KernelInstance) -> KernelInstance:
    """`form` with an output of nan."""
    (name, slot), *_ = form.outputs.items()
    return replace(form, outputs={name: replace(slot, value=lambda: slot.get() * float("nan"))})


def test_one_disagreement_leaves_a_draft() -> None:
    definition = kernel_of(linear(0, 7)).definition
    assert VERIFIED in with_status(definition, {"agrees", "skipped"}).tags
    for statuses in ({"agrees", "differs"}, {"agrees", "failed"}, set()):
        assert VERIFIED not in with_status(definition, statuses).tags


def test_a_recordings_references_are_checked_in_a_process_of_their_own(tmp_path: Path) -> None:
    write_recording(tmp_path / "a.kcap", METADATA, [linear(0, 1), embedding(1, 9)], samples=[ranged(1, 0, 50)])
    contents = open_contents(tmp_path / "a.kcap", False)
    found = problems_of(contents)
    assert found.derived is not None
    with Checkers(contents, CheckTarget()) as checkers:
        checks = list(check_references(checkers, found.derived))
    assert {check.operator: check.status for check in checks} == {"aten::linear": "agrees", "aten::embedding": "agrees"}
    tag_definitions(found.problems, checks)
    assert all(VERIFIED in problem.definition.tags for problem in found.problems)


def test_what_is_checked_side_by_side_is_told_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recording(tmp_path / "a.kcap", METADATA, [linear(0, 1), linear(1, 7)])
    contents = open_contents(tmp_path / "a.kcap", False)
    derived = problems_of(contents).derived
    assert derived is not None
    kernels, together = [copy(derived.kernels[0]) for _ in range(4)], threading.Barrier(2, timeout=30)

    def check(_: Worker, kernel: DerivedDefinition) -> DerivedDefinition:
        together.wait()
        time.sleep(0.05 if kernel is kernels[0] else 0)
        return kernel

    monkeypatch.setattr(verification.os, "sched_getaffinity", lambda process: range(11))
    with Checkers(contents, CheckTarget()) as checkers:
        found = list(checkers.map(check, kernels))
        assert [worker.session["threads"] for worker in checkers._workers] == [5, 5]
    assert all(one is kernel for one, kernel in zip(found, kernels, strict=True))


def test_a_check_that_takes_too_long_names_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recording(tmp_path / "a.kcap", METADATA, [linear(0, 1)])
    contents = open_contents(tmp_path / "a.kcap", False)
    derived = problems_of(contents).derived
    assert derived is not None
    monkeypatch.setattr(verification, "TIMEOUT_S", 0)
    with Checkers(contents, CheckTarget()) as checkers:
        (check,) = check_references(checkers, derived)
    assert (check.status, check.reason) == ("skipped", "took longer than 0 s")


def test_the_smallest_and_the_largest_calls_are_chosen() -> None:
    calls = [linear(number, tokens) for number, tokens in enumerate((5, 900, 1, 60, 7))]
    assert [call.id for call in calls_to_check(calls)] == [2, 4, 1]


def test_a_difference_counts_in_units_of_what_is_allowed() -> None:
    ones = torch.ones(64, dtype=torch.bfloat16)
    assert compare(ones, ones).error == 0.0
    assert compare(ones * 1.01, ones).error < 1.0 < compare(ones * 1.2, ones).error


def test_outputs_are_compared_where_they_are_and_on_the_cpu_if_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` is in the place of a GPU."""
    form = cast(KernelInstance, SimpleNamespace(outputs={"C": None}))
    devices: list[tuple[str, str]] = []

    def compared(out: torch.Tensor, ref: torch.Tensor, *_: object) -> Difference:
        devices.append((out.device.type, ref.device.type))
        return Difference()

    def too_large(out: torch.Tensor, ref: torch.Tensor, *_: object) -> Difference:
        if "cpu" not in (out.device.type, ref.device.type):
            raise torch.OutOfMemoryError
        return Difference(2.0)

    out, ref = torch.empty(7, device="meta"), torch.ones(7)
    monkeypatch.setattr(checker_module, "compare", compared)
    assert compare_outputs(form, [out], [ref])["status"] == "agrees" and devices == [("meta", "meta")]
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self if device.type == "meta" else ref)
    monkeypatch.setattr(checker_module, "compare", too_large)
    assert compare_outputs(form, [out], [out])["status"] == "differs"


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_must_be_so_in_both(value: float) -> None:
    odd, others = torch.tensor([1.0, value]), torch.tensor([[1.0, 1.0], [1.0, 7e37], [1.0, -float("inf")]])
    assert compare(odd, odd).error == 0.0
    for other in others:
        assert compare(odd, other).error == compare(other, odd).error == float("inf") or torch.equal(odd, other)


def test_integers_must_be_equal_and_shapes_and_dtypes_the_same() -> None:
    ids = torch.tensor([1, 2])
    assert compare(ids, ids).error == 0.0
    for other in (torch.tensor([1, 3]), torch.tensor([1]), torch.tensor([1, 2], dtype=torch.int32)):
        assert compare(ids, other).error == float("inf")


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.bool])
def test_what_has_no_tolerance_must_hold_the_same_bits(dtype: torch.dtype) -> None:
    bits = torch.tensor([[1, 0], [0, 1]], dtype=torch.uint8)
    assert compare(bits.view(dtype).t(), bits.t().contiguous().view(dtype)).error == 0.0
    assert compare(bits.view(dtype), bits.flip(0).view(dtype)).error == float("inf")
    assert is_informative(bits.view(dtype)) and not is_informative(bits[:0].view(dtype))


@pytest.mark.parametrize(("values", "tells"), [([], False), ([math.nan] * 2, False), ([math.nan, 1.0], True)])
def test_an_output_of_no_number_tells_nothing(values: list[float], tells: bool) -> None:
    assert is_informative(torch.tensor(values, dtype=torch.bfloat16)) is tells
