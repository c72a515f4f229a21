"""Fragments of Triton kernels that torch 2.11 wrote on an H200, read and made references of without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch
from fused import SUB, A, B, computed, holding, launched, tensor

from kcap.bench.check.checker import as_list
from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.fragment.reference import MISREAD, FragmentReference, Unknown, reference_from
from kcap.schemas.derive.generic.family import fused_family
from kcap.schemas.recording.recording import Call

DATA = Path(__file__).parents[2] / "data" / "fragments"


def kernels_in(file: str) -> list[tuple[Call, str]]:
    lines = [orjson.loads(line) for line in (DATA / file).read_bytes().splitlines()]
    return [(Call.model_validate(line["call"]), str(line["fragment"])) for line in lines]


MEANS = [*kernels_in("h200_means.jsonl"), *kernels_in("cpu_means.jsonl")]  # that one kernel sums and others divide
JOINTS = kernels_in("cpu_joints.jsonl")  # which write the parts of a concatenation
COPIED = kernels_in("h200_copied.jsonl")  # into an argument whose content nothing reads
SHARED = kernels_in("h200_shared.jsonl")  # the fragment of a group of kernels
SIZES = kernels_in("h200_sizes.jsonl")  # that no input has
LAYERNORM = kernels_in("cpu_layernorm.jsonl")  # which takes its mean away itself
KERNELS = [*kernels_in("h200.jsonl"), *MEANS, *JOINTS, *COPIED, *SHARED, *SIZES, *LAYERNORM]
IDS = [call.operator.split("::")[1] for call, _ in KERNELS]


def torchs_own(fragment: str) -> str:
    """The fragment as a wrapper has it that was compiled without kcap."""
    lines = fragment.splitlines()
    return "\n".join(lines[: 1 + next(i for i, line in enumerate(lines) if line.startswith("return "))])


@pytest.mark.parametrize(("call", "fragment"), KERNELS, ids=IDS)
def test_a_kernel_recorded_on_a_gpu_has_a_reference_that_runs_on_a_cpu(call: Call, fragment: str) -> None:
    reference = reference_from(call, fragment)
    assert isinstance(reference, FragmentReference), reference
    inputs = [torch.zeros(port.shape, dtype=getattr(torch, port.dtype)) for port in reference.inputs]
    results = as_list(compile_reference(reference.source, "fused")(*inputs))
    specs = [(tuple(result.shape), str(result.dtype).removeprefix("torch.")) for result in results]
    assert specs == [(port.shape, port.dtype) for port in reference.outputs]


@pytest.mark.parametrize(("call", "fragment"), KERNELS, ids=IDS)
def test_without_what_kcap_adds_a_reference_is_the_same_or_there_is_none(call: Call, fragment: str) -> None:
    reference = reference_from(call, torchs_own(fragment))
    assert isinstance(reference, Unknown) or reference == reference_from(call, fragment)


def test_most_fragments_stand_without_what_kcap_adds() -> None:
    others = [one for one in KERNELS if one not in (*MEANS, *JOINTS, *COPIED, *SHARED, *SIZES)]
    references = [reference_from(call, torchs_own(fragment)) for call, fragment in others]
    assert sum(isinstance(reference, FragmentReference) for reference in references) >= len(others) // 2 - 1


def test_one_kernel_has_one_reference_whatever_its_graph_calls_its_nodes() -> None:
    call, fragment = KERNELS[0]
    renamed = fragment.replace("arg1_1", "arg31_1").replace("%add ", "%add_77 ").replace("%add,", "%add_77,")
    renamed = renamed.replace("s77", "s72")
    assert renamed != fragment
    assert reference_from(call, renamed) == reference_from(call, fragment)


INTO_A = launched(tensor("in_out_ptr0", 8, 4), tensor("in_ptr0", 8, 4))


def test_two_buffers_that_either_could_be_written_over_are_no_guess() -> None:
    reference = reference_from(INTO_A, f"{A}{B}{SUB}return %sub\n")
    assert reference == Unknown("2 orders fit the buffers that it reads")


@pytest.mark.parametrize(("over", "source"), [("a", "(in_out_ptr0, in_ptr0)"), ("b", "(in_ptr0, in_out_ptr0)")])
def test_the_wrapper_tells_which_buffer_is_written_over(over: str, source: str) -> None:
    other = {"a": "b", "b": "a"}[over]
    arguments = f"buf1, reinterpret_tensor({other}, (8, 4), (4, 1), 0), 32"
    text = f"{A}{B}{SUB}return %sub\n%sub = buf1\nreuse(buf1, {over})\ncall({arguments})\n"
    reference = reference_from(INTO_A, text)
    assert isinstance(reference, FragmentReference), reference
    assert f"torch.ops.aten.sub.Tensor{source}" in reference.source
    assert [port.name for port in reference.outputs] == ["in_out_ptr0_out"]


def test_a_buffer_of_partial_results_that_it_reads_leaves_no_reference() -> None:
    partial = '%buf0 : Tensor "f32[s0, 1][1, s0]cuda:0" = PlaceHolder[target=buf0]\n'
    call = launched(tensor("in_ptr0", 8, 4), tensor("in_ptr1", 8, 4), tensor("in_ptr2", 8, 1), tensor("out_ptr3", 8, 4))
    reference = reference_from(call, f"{A}{B}{partial}{SUB}return %sub\n")
    assert reference == Unknown("it reads %buf0, which none of its fragment's operators takes")


def test_a_fragment_of_other_shapes_is_of_another_use() -> None:
    call = launched(tensor("in_ptr0", 32), tensor("in_ptr1", 32), tensor("out_ptr2", 32))
    text = f"{A}{B}{SUB}return %sub\n%sub = buf0\ncall(a, b, buf0, 32)\n"
    assert reference_from(call, text) == Unknown("its fragment's %a is not like argument 0: it is of another use")


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ("torch.ops.aten.from_file.default", "from_file reaches files or libraries: not called from files"),
        ("torch.ops.aten.rand_like.default", "aten.rand_like.default draws random numbers"),
        ("torch.ops.aten.sub_.Tensor", "aten.sub_.Tensor writes to its argument"),
        ("torch.ops.aten.sub", "not an operator's name: it must be namespace.operator.overload"),
        ("os.system", "its fragment does not say all that %sub comes from"),
        ("torch.ops.aten.__class__.default", "__class__ is no operator's name"),
    ],
)
def test_operators_that_no_reference_may_call_are_refused(operator: str, reason: str) -> None:
    call = launched(tensor("in_ptr0", 8, 4), tensor("in_ptr1", 8, 4), tensor("out_ptr2", 8, 4))
    text = f"{A}{B}{SUB}return %sub\n".replace("torch.ops.aten.sub.Tensor", operator)
    assert reference_from(call, text) == Unknown(reason)


def test_an_operator_that_inductor_fuses_into_no_kernel_comes_after_it() -> None:
    call = launched(tensor("in_ptr0", 8, 4), tensor("in_ptr1", 8, 4), tensor("out_ptr0", 8, 4))
    after = SUB.replace("%sub", "%all_reduce").replace("aten.sub.Tensor", "vllm.all_reduce.default")
    after = after.replace("(%a, %b)", "(%sub, tp:0)")
    reference = reference_from(call, f"{A}{B}{SUB}{after}return %buf0\ncall(a, b, buf0, 32)\n")
    assert isinstance(reference, FragmentReference)
    assert reference == reference_from(call, f"{A}{B}{SUB}return %sub\n%sub = buf0\ncall(a, b, buf0, 32)\n")


def test_a_mean_that_its_readers_divide_is_a_sum_until_then() -> None:
    ((call, fragment),) = [one for one in MEANS if "mean_mul_pow_silu" in one[0].operator]
    reference = reference_from(call, fragment)
    assert isinstance(reference, FragmentReference)
    x = torch.ones(16, 8192, dtype=torch.bfloat16)
    found = compile_reference(reference.source, "fused")(x, x)
    assert torch.allclose(found, 1024 * torch.ones(16, 8, 1).sigmoid() ** 2)
    own = fragment.replace("return %buf0", "return %mean").replace("buf0", "buf1")
    own = own.replace("%arg1_1 = s72\n", "%arg1_1 = s72\n%mean = buf1\n")
    divided = reference_from(call, own)
    assert isinstance(divided, FragmentReference) and "aten.mean.dim" in divided.source


def test_a_sum_that_another_kernel_made_is_divided_where_it_is_read() -> None:
    """Mamba-2's gated norm, in eight groups; the mean of its squares is no node's buffer."""
    ((call, fragment),) = [one for one in MEANS if "mean_mul_pow_rsqrt_silu" in one[0].operator]
    reference = reference_from(call, fragment)
    assert isinstance(reference, FragmentReference)
    torch.manual_seed(0)
    weight, x, gate = torch.randn(8192), torch.randn(16, 8192), torch.randn(16, 8192)
    weight, x, gate = (tensor.bfloat16() for tensor in (weight, x, gate))
    gated = (x * torch.nn.functional.silu(gate.float())).view(16, 8, 1024)
    sums = gated.pow(2).sum(-1, keepdim=True)
    found = compile_reference(reference.source, "fused")(weight, x, gate, sums)
    normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.allclose(found.float(), (weight * normed.view(16, 8192).bfloat16()).float(), atol=1e-2, rtol=1e-2)


def test_of_several_sums_each_is_the_mean_at_its_place() -> None:
    """Gemma-2's two norms and a sum: the kernel is given that of the first, and makes the other two itself."""
    ((call, fragment),) = [one for one in MEANS if one[0].operator.endswith("add_rms_norm.sea51a8a1")]
    reference = reference_from(call, fragment)
    assert isinstance(reference, FragmentReference)
    assert "div = torch.ops.aten.div.Tensor(in_ptr2, 3584)" in reference.source
    assert "mul_2 = torch.ops.aten.mul.Tensor(cast_3, rsqrt_1)" in reference.source  # of in_ptr1
    assert reference.source.count("aten.mean.dim") == 2
    other = fragment.replace("PlaceHolder[target=buf9]", "PlaceHolder[target=arg77_1]").replace("%buf9", "%arg77_1")
    assert isinstance(reference_from(call, other), Unknown), "which of three means two sums are is not certain"


def test_what_a_librarys_kernel_wrote_is_no_sum() -> None:
    """OLMo-2's norms of what attention and feed-forward add, each a product's result; one comes with its sum."""
    ((call, fragment),) = [one for one in MEANS if one[0].operator.endswith("s60677f48")]
    reference = reference_from(call, fragment)
    assert isinstance(reference, FragmentReference)
    torch.manual_seed(0)
    stream, late, early = (torch.randn(1, 288, 128).bfloat16() for _ in range(3))
    weights = torch.randn(2, 128).bfloat16()
    sums = early.float().pow(2).sum(-1, keepdim=True)
    found = compile_reference(reference.source, "fused")(stream, late, early, sums, *weights)
    normed = [torch.nn.functional.rms_norm(x.float(), (128,), eps=1e-5).bfloat16() for x in (early, late)]
    assert torch.equal(found, stream + normed[0] * weights[0] + normed[1] * weights[1])


def test_a_norm_that_two_products_take_is_written_for_each() -> None:
    ((call, fragment),) = [one for one in MEANS if one[0].operator.endswith("sc2d53dd2")]
    reference = reference_from(call, fragment)
    assert isinstance(reference, FragmentReference)
    tokens, table, weight = torch.arange(288, dtype=torch.int32), torch.randn(2048, 128).bfloat16(), torch.ones(128)
    found = compile_reference(reference.source, "fused")(tokens, table, weight.bfloat16())
    assert len(found) == 2 and torch.equal(*found) and found[0].data_ptr() != found[1].data_ptr()
    for users in (1, 3):  # as many take it as there are buffers, or it is not certain
        other = fragment.replace(
            '%convert_element_type_3 : Tensor "bf16[s72, 128][128, 1]cpu"[num_users=2]',
            f'%convert_element_type_3 : Tensor "bf16[s72, 128][128, 1]cpu"[num_users={users}]',
        )
        assert other != fragment and isinstance(reference_from(call, other), Unknown)
        twice = "args = (%convert_element_type_3, %convert_element_type_3, %weight_elsewhere), kwargs = {})"
        operation = f"%experts : [num_users=1] = call_function[target=torch.ops.vllm.moe_forward.default]({twice}"
        unknown = isinstance(reference_from(call, other.replace("\nreturn", f"\n{operation}\nreturn")), Unknown)
        assert unknown == (users != 1)  # of one operator both arguments, as experts take their tokens


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts. `x`: [tokens, heads, 2, dim / 2], `cos`, `sin`: [tokens, dim / 2]."""
    first, second, cos, sin = x[:, :, 0], x[:, :, 1], cos[:, None], sin[:, None]
    return first * cos - second * sin, second * cos + first * sin


def test_parts_of_a_concatenation_are_written_where_they_lie_in_it() -> None:
    """Cohere's: of each pair of neighbours both are rotated, and joined again by `stack`."""
    reference = reference_from(*JOINTS[0])
    assert isinstance(reference, FragmentReference) and len(reference.scratch) == 2  # the sums of two norms
    torch.manual_seed(0)
    qkv, weights = torch.randn(288, 256).bfloat16(), [torch.randn(heads, 32).bfloat16() for heads in (4, 2)]
    positions, table = torch.randperm(288), torch.randn(2048, 32).bfloat16()
    found = compile_reference(reference.source, "fused")(qkv, weights[0], positions, table, weights[1])
    halves = []
    for x, weight in zip((qkv[:, :128].view(-1, 4, 32), qkv[:, 128:192].view(-1, 2, 32)), weights, strict=True):
        normed = (torch.nn.functional.rms_norm(x.float(), (32,), eps=1e-5) * weight.float()).bfloat16()
        halves += rotated(normed.unflatten(-1, (16, 2)).transpose(-1, -2), *table[positions].chunk(2, -1))
    assert [tuple(part.shape) for part in found] == [(288, 4, 16, 1)] * 2 + [(288, 2, 16, 1)] * 2
    for part, half in zip(found, halves, strict=True):
        torch.testing.assert_close(part.squeeze(-1), half, rtol=0.02, atol=0.05)


def test_a_concatenation_that_is_read_where_its_parts_were_written_is_no_input() -> None:
    """Nemotron's: half of each head is rotated, joined, and joined to the other half."""
    reference = reference_from(*JOINTS[1])
    assert isinstance(reference, FragmentReference)
    assert [port.name for port in reference.inputs] == ["in_ptr0", "in_ptr1", "in_ptr2"]
    torch.manual_seed(0)
    qkv, positions, table = torch.randn(288, 256).bfloat16(), torch.randperm(288), torch.randn(2048, 16).bfloat16()
    found = compile_reference(reference.source, "fused")(qkv, positions, table)
    expected = []
    for x in (qkv[:, :128].view(-1, 4, 32), qkv[:, 128:192].view(-1, 2, 32)):
        halves = rotated(x[..., :16].unflatten(-1, (2, 8)), *table[positions].chunk(2, -1))
        expected += [*halves, torch.cat(halves, -1), x[..., 16:]]
    for part, right in zip(found, expected, strict=True):
        torch.testing.assert_close(part, right, rtol=0.02, atol=0.05)


def test_a_concatenation_of_a_view_that_is_read_where_it_was_written_is_no_input() -> None:
    """Gemma 3's: the second half of each head, negated, is joined to the first, which no operator but a slice gives."""
    reference = reference_from(*JOINTS[2])
    assert isinstance(reference, FragmentReference)
    assert [port.name for port in reference.inputs] == ["in_ptr0", "in_ptr1", "in_ptr3", "in_ptr4"]
    torch.manual_seed(0)
    query, key = torch.randn(40, 4, 32).bfloat16(), torch.randn(40, 2, 32).bfloat16()
    cos, sin = torch.randn(2, 40, 32).bfloat16()
    found = compile_reference(reference.source, "fused")(query, cos, sin, key)
    rotary = [torch.cat([-x[..., 16:], x[..., :16]], -1) * sin[:, None] + x * cos[:, None] for x in (query, key)]
    assert [tuple(part.shape) for part in found] == [(40, 4, 16), (40, 4, 32), (40, 2, 16), (40, 2, 32)]
    for part, right in zip(found[1::2], rotary, strict=True):
        torch.testing.assert_close(part, right, rtol=0.02, atol=0.05)


def test_parts_that_lie_apart_are_of_no_concatenation() -> None:
    call, fragment = JOINTS[0]
    apart = [
        arg.model_copy(update={"value": replace(arg.value, storage=99)}) if arg.name == "out_ptr2" else arg
        for arg in call.args
    ]
    found = reference_from(call.model_copy(update={"args": apart}), fragment)
    assert isinstance(found, Unknown) and MISREAD not in found.reason


def rms_normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=1e-6).bfloat16() * weight


def test_a_kernel_that_shares_its_fragment_is_of_the_operators_that_give_what_it_writes() -> None:
    """DeepSeek's: the latent part of a projection is normed by one kernel, the other is rotated by another."""
    torch.manual_seed(0)
    x, weight = torch.randn(16, 576).bfloat16(), torch.randn(512).bfloat16()
    (normed,) = computed(*SHARED[0], x, weight)
    torch.testing.assert_close(normed, rms_normed(x[:, :512], weight), rtol=0.02, atol=0.05)
    x, positions, table = torch.randn(16, 2112).bfloat16(), torch.randperm(16), torch.randn(163840, 64).bfloat16()
    (found,) = computed(*SHARED[1], x, positions, table)
    pairs = x[:, None, 2048:].unflatten(-1, (32, 2)).transpose(-1, -2)
    both = torch.stack(rotated(pairs, *table[positions].chunk(2, -1)), -1).flatten(-2)
    torch.testing.assert_close(found, both, rtol=0.02, atol=0.05)


OWN_FAMILIES = [*zip([*SHARED, *LAYERNORM], ("rmsnorm", "rope", "fill", "layernorm"), strict=True)]


@pytest.mark.parametrize(("kernel", "family"), OWN_FAMILIES)
def test_it_is_of_the_family_of_its_own_operators(kernel: tuple[Call, str], family: str) -> None:
    assert fused_family(kernel[0], holding(kernel[1])) == family


def test_what_is_only_filled_is_an_input_that_tells_its_sizes() -> None:
    reference = reference_from(*SHARED[2])
    assert isinstance(reference, FragmentReference)
    assert [port.name for port in (*reference.inputs, *reference.outputs)] == ["out_ptr0", "out_ptr0_out"]
    (zeros,) = computed(*SHARED[2], torch.ones(3, 32, 128).bfloat16())
    assert torch.equal(zeros, torch.zeros(3, 32, 128).bfloat16())


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (
            "%buf0",
            "several kernels share its fragment, and no operator in it is named %buf0",
        ),  # of two it may be either's
        ("%sub,%abs\n%sub = buf0\n%abs = buf1", "none of its arguments is its fragment's %b"),
    ],
)
def test_of_a_shared_fragment_nothing_is_guessed(names: str, reason: str) -> None:
    other = SUB.replace("%sub", "%abs").replace("aten.sub.Tensor", "aten.abs.default").replace("(%a, %b)", "(%b,)")
    call = launched(tensor("in_ptr0", 8, 4), tensor("out_ptr0", 8, 4))
    assert reference_from(call, f"{A}{B}{SUB}{other}return {names}\ncall(a, buf0, 32)\n") == Unknown(reason)


def test_of_a_shared_fragment_no_output_is_found_by_its_order() -> None:
    """The wrapper gives the kernel its output in another shape, which is that of another kernel's."""
    own, of_b = SUB.replace("(%a, %b)", "(%a, %a)"), "aten.abs.default](args = (%b,), kwargs = {})"
    other = f'%abs : Tensor "f32[4*s0, 1][1, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.{of_b}\n'
    call = launched(tensor("in_ptr0", 8, 4), tensor("out_ptr0", 32, 1))
    names = "return %sub,%abs\n%sub = buf0\n%abs = buf1\n"
    text = f"{A}{B}{own}{other}{names}call(a, reinterpret_tensor(buf0, (32, 1)), 32)\n"
    reason = "several kernels share its fragment, which does not name all that this one writes"
    assert reference_from(call, text) == Unknown(reason)


def test_a_buffer_of_another_node_is_taken_for_no_other() -> None:
    text = f"{A}{SUB.replace('(%a, %b)', '(%a, %a)')}return %sub\n%a = buf0\n%sub = buf1\ncall(buf1, buf2, 32)\n"
    call = launched(tensor("in_ptr0", 8, 4), tensor("out_ptr0", 8, 4))
    assert reference_from(call, text) == Unknown("its fragment's %a is buf0, and it is called with buf1")


def test_a_shared_fragment_whose_wrapper_names_no_buffer_leaves_no_reference() -> None:
    call, fragment = SHARED[0]
    unnamed = f"{fragment[: fragment.index('call(')]}call(*args, stream=stream0)\n"
    assert reference_from(call, unnamed) == Unknown(
        "it reads 2 buffers that its wrapper does not name, and its fragment has 5"
    )


def test_sizes_that_no_input_tells_are_those_of_what_is_computed_from_it() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, 6144).bfloat16()
    query, key = computed(*SIZES[0], qkv)
    for sums, part, heads in ((query, qkv[:, :4096], 32), (key, qkv[:, 4096:5120], 8)):
        torch.testing.assert_close(sums, part.view(5, heads, 128).float().pow(2).sum(-1, keepdim=True))
    x, residual, weight = (torch.randn(*shape).bfloat16() for shape in ((5, 4096), (5 * 4096,), (4096,)))
    (found,) = computed(*SIZES[1], x, residual, weight)
    total = x.float() + residual.view(5, 4096)
    torch.testing.assert_close(found, rms_normed(total, weight), rtol=0.02, atol=0.05)


def test_a_size_of_which_an_input_has_a_multiple_is_its_part() -> None:
    heads = torch.randn(3 * 32, 128).bfloat16()
    (rows,) = computed(*SIZES[2], heads)
    assert torch.equal(rows, heads.view(3, 4096))


def test_a_size_that_nothing_tells_leaves_no_reference() -> None:
    call = launched(tensor("in_ptr0", 8, 4), tensor("out_ptr0", 8, 4))
    view = SUB.replace("aten.sub.Tensor", "aten.reshape.default").replace("(%a, %b)", "(%a, [s7, 4])")
    reference = reference_from(call, f"{A}{view}return %sub\n%sub = buf0\ncall(a, buf0, 32)\n")
    assert reference == Unknown("no input, and nothing computed from one before it is needed, has the size s7")


def test_an_input_that_is_copied_into_another_argument_is_an_output() -> None:
    """Qwen3-Next's norm of what four tensors add up to; one of them is the next layer's, too."""
    torch.manual_seed(0)
    parts, weight = [torch.randn(5, 2048).bfloat16() for _ in range(4)], torch.randn(2048).bfloat16()
    normed, copied = computed(*COPIED[1], *parts, weight)
    total = (parts[0] + parts[1] + (parts[2] + parts[3])).float()
    expected = torch.nn.functional.rms_norm(total, (2048,), eps=1e-6) * (1 + weight.float())
    torch.testing.assert_close(normed, expected.bfloat16(), rtol=0.02, atol=0.05)
    assert torch.equal(copied, parts[2])
