"""lora_shrink and lora_expand: the references against vLLM's Triton kernels, interpreted; replay's weights; names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import Launcher, kernels
from safetensors.torch import save

from kcap.bench.check.checker import invocation_with_inputs
from kcap.replay.datasets.inputs import make_inputs
from kcap.replay.rebuild.memory import Target, build_inputs
from kcap.replay.rebuild.operators import Operator
from kcap.replay.rebuild.persistent import is_persistent_name
from kcap.replay.rebuild.rebuild import ResolvedCall, apply_rule, set_argument
from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import CostInputs, cost_of_instance
from kcap.schemas.derive.derive import derive
from kcap.schemas.derive.families import cost_function_for, replay_rule_for
from kcap.schemas.flashinfer.definition import RandomInput, ScalarInput, Workload
from kcap.schemas.recording.recording import load, write_recording
from kcap.schemas.recording.records import Argument, Call, Count, Launch, Metadata, Sample, SampledTensor
from kcap.schemas.recording.values import TensorSpec

FOLDER = "lora/ops/triton_ops/"
SHRINK, EXPAND = "triton::_lora_shrink_kernel.s01234567", "triton::_lora_expand_kernel.s01234567"
RANK, HIDDEN, SLICE, LORAS = 16, 48, 40, 3
Arguments = dict[str, Any]
BATCHES = [[0], [2, 2, -1, 0, 2, -1, 0], [-1, 1, -1], list(range(-1, 3)) * 9]  # each token's adapter; -1: none


@pytest.fixture(scope="module")
def launchers() -> dict[str, Launcher]:
    return kernels("vllm", *(f"{FOLDER}{name}.py" for name in ("kernel_utils", "lora_shrink_op", "lora_expand_op")))


def sorted_tokens(mapping: list[int]) -> Arguments:
    """What vLLM's LoRAKernelMeta prepares of each token's adapter."""
    tokens = torch.tensor(mapping)
    ids, counts = torch.unique(tokens, return_counts=True)
    room = LORAS + 1 - len(ids)
    return {
        "token_indices_sorted_by_lora_ids": torch.sort(tokens, stable=True).indices.int(),
        "num_tokens_per_lora": torch.nn.functional.pad(counts, (0, room)).int(),
        "lora_token_start_loc": torch.nn.functional.pad(counts.cumsum(0), (1, room)).int(),
        "lora_ids": torch.nn.functional.pad(ids, (0, room), value=-1).int(),
    }


def addresses(weights: torch.Tensor) -> torch.Tensor:
    """As vLLM passes the weights of several slices, [slices, adapters, rows, columns]; of one, itself."""
    return weights[0] if len(weights) == 1 else torch.tensor([w.data_ptr() for w in weights], dtype=torch.uint64)


def shrunk(mapping: list[int], weights: torch.Tensor, **more: Any) -> Arguments:
    dtype = weights.dtype
    return {
        "input_ptr": randn(len(mapping), HIDDEN, dtype=dtype, seed=1),
        "lora_ptr": addresses(weights),
        "out_ptr": torch.zeros(len(weights), len(mapping), RANK),
        "M": len(mapping),
        "N": RANK,
        "K": HIDDEN,
        **sorted_tokens(mapping),
        "scaling": 0.5,
        "SPLIT_K": 1,
        "SLICE_NUM": len(weights),
        **more,
    }


def run_shrink(launchers: dict[str, Launcher]) -> Callable[..., None]:
    def run(SPLIT_K: int, SLICE_NUM: int, **call: Any) -> None:
        x, out = call["input_ptr"], call["out_ptr"]
        launchers["_lora_shrink_kernel"][SPLIT_K * -(-len(x) // 16), SLICE_NUM, LORAS + 1](
            *call.values(),
            *(*x.stride(), RANK * HIDDEN, HIDDEN, 1, *out.stride()),
            *(16, 16, 16, HIDDEN % (16 * SPLIT_K) == 0, SPLIT_K, 8, SLICE_NUM, False, False),
        )

    return run


def weights_of(slices: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return randn(slices, LORAS, rows, columns, dtype=dtype, seed=2)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("slices", [1, 2])
def test_shrink_is_vllms_kernel(launchers: dict[str, Launcher], slices: int, splits: int):
    for dtype, mapping in zip([torch.bfloat16, torch.float16] * 2, BATCHES, strict=True):
        weights = weights_of(slices, RANK, HIDDEN, dtype)
        hidden = {"lora": weights} if slices > 1 else {}
        before = randn(slices, len(mapping), RANK, dtype=torch.float32, seed=3)
        arguments = shrunk(mapping, weights, SPLIT_K=splits, out_ptr=before)
        kernel = agrees(SHRINK, run_shrink(launchers), hidden, **arguments)
        assert kernel.op_type == kernel.family == "lora_shrink"
    assert kernel.name == f"lora_shrink{'_add' if splits > 1 else ''}_fp16_s{slices}_r16_k48"
    assert kernel.flops() == 2 * slices * RANK * HIDDEN * 27


def expanded(mapping: list[int], weights: torch.Tensor, room: int = 0, **more: Any) -> Arguments:
    """`room`: columns of the output after those of the slices."""
    slices = len(weights)
    starts = torch.tensor([part * SLICE for part in range(slices)], dtype=torch.uint64)
    return {
        "input_ptr": randn(slices, len(mapping), RANK, dtype=torch.float32, seed=1),
        "lora_ptr": addresses(weights),
        "out_ptr": randn(len(mapping), slices * SLICE + room, dtype=weights.dtype, seed=3),
        "M": len(mapping),
        "N": SLICE,
        "K": RANK,
        **sorted_tokens(mapping),
        "slice_start_loc": starts if slices > 1 else room,
        "output_hs_ptr": SLICE,
        "ADD_INPUTS": True,
        "SAME_STRIDE": True,
        **more,
    }


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("slices", "room"), [(1, 0), (1, 8), (2, 0)])
def test_expand_is_vllms_kernel(launchers: dict[str, Launcher], slices: int, room: int, adds: bool):
    def run(output_hs_ptr: int, ADD_INPUTS: bool, SAME_STRIDE: bool, **call: Any) -> None:
        x, out = call["input_ptr"], call["out_ptr"]
        grid = (-(-x.shape[1] // 16) * -(-SLICE // 16), slices, LORAS + 1)
        launchers["_lora_expand_kernel"][grid](
            *call.values(),
            *(*x.stride(), SLICE * RANK, RANK, 1, *out.stride(), output_hs_ptr),
            *(16, 16, 16, True, ADD_INPUTS, True, slices, SAME_STRIDE, False, False),
        )

    for dtype, mapping in zip([torch.bfloat16, torch.float16] * 2, BATCHES, strict=True):
        weights = weights_of(slices, SLICE, RANK, dtype)
        hidden = {"lora": weights} if slices > 1 else {}
        kernel = agrees(EXPAND, run, hidden, **expanded(mapping, weights, room, ADD_INPUTS=adds))
    place = f"_at{room}of{SLICE + room}" if room else ""
    assert kernel.name == f"lora_expand{'_add' if adds else ''}_fp16_s{slices}_n40_r16{place}"


SIZES = [SLICE, 8, 24]  # queries, keys and values


def expanded_apart(mapping: list[int], weights: list[torch.Tensor]) -> Arguments:
    """Slices of SIZES, each with weights of its own, [adapters, rows, columns]."""
    arguments = expanded(mapping, weights_of(3, SLICE, RANK), SAME_STRIDE=False)
    arguments["lora_ptr"] = torch.tensor([weight.data_ptr() for weight in weights], dtype=torch.uint64)
    arguments["out_ptr"] = randn(len(mapping), sum(SIZES), dtype=torch.bfloat16, seed=3)
    arguments["slice_start_loc"] = torch.tensor([0, 40, 48], dtype=torch.uint64)
    arguments["output_hs_ptr"] = torch.tensor(SIZES)
    strides = ([size * RANK for size in SIZES], [RANK] * 3, [1] * 3)
    return {**arguments, **{f"ls_d{dim}_ptr": torch.tensor(table) for dim, table in enumerate(strides)}}


def run_apart(launchers: dict[str, Launcher]) -> Callable[..., None]:
    def run(**call: Any) -> None:
        x, out = call["input_ptr"], call["out_ptr"]
        names = [name for name in call if not name.startswith(("ls_", "output_hs", "ADD", "SAME"))]
        tables = [call[f"ls_d{dim}_ptr"] for dim in range(3)]
        launchers["_lora_expand_kernel"][-(-x.shape[1] // 16) * 3, 3, LORAS + 1](
            *(call[name] for name in names),
            *(*x.stride(), *tables, *out.stride(), call["output_hs_ptr"]),
            *(16, 16, 16, True, call["ADD_INPUTS"], True, 3, False, False, False),
        )

    return run


@pytest.mark.parametrize("mapping", BATCHES)
def test_an_expansion_into_slices_of_several_sizes_is_vllms_kernel(launchers: dict[str, Launcher], mapping: list[int]):
    weights = [randn(LORAS, size, RANK, dtype=torch.bfloat16, seed=size) for size in SIZES]
    hidden = {"lora": torch.cat(weights, 1)}
    kernel = agrees(EXPAND, run_apart(launchers), hidden, **expanded_apart(mapping, weights))
    assert kernel.name == "lora_expand_add_s3_n40_8_24_r16"
    definition = checked(kernel)
    assert definition.const_axes == {"num_slices": 3, "rank": RANK, "output_size": sum(SIZES)}
    rows = sum(number >= 0 for number in mapping)
    assert cost_of_instance(kernel).flops == 2 * rows * RANK * sum(SIZES)


def test_the_sizes_of_slices_are_found_in_samples(tmp_path: Path):
    """No argument shows them in a Call, which has no values."""
    arguments = expanded_apart(BATCHES[1], [torch.empty(LORAS, size, RANK) for size in SIZES])
    fixed = {name: arguments.pop(name) for name in ("ADD_INPUTS", "SAME_STRIDE")}
    args = bound_call(EXPAND, arguments).args
    place = str([argument.name for argument in args].index("output_hs_ptr"))
    counts = [Count(phase="decode", count=1)]
    launch = Launch(function="expand", constexprs=fixed)
    call = Call(id=0, operator=EXPAND, args=args, launch=launch, counts=counts)
    content = save({"value": torch.tensor(SIZES)})
    file = f"{hashlib.sha256(content).hexdigest()}.safetensors"
    sample = Sample(call=0, phase="decode", tensors={place: SampledTensor(file=file, low=8, high=SLICE)})
    names = []
    for number, samples in enumerate(([], [sample])):
        path = tmp_path / f"{number}.kcap"
        write_recording(path, Metadata(), [call], samples=samples, values={file: content})
        names.append([kernel.definition.name for kernel in derive(load(path)).kernels])
    assert names == [[], ["lora_expand_add_s3_n40_8_24_r16"]]


def test_replay_makes_slices_of_several_sizes(launchers: dict[str, Launcher]):
    """With weights, strides and starts that agree with the sizes that the Sample holds."""
    arguments = expanded_apart(BATCHES[1], [torch.empty(LORAS, size, RANK) for size in SIZES])
    bound, rule = bound_call(EXPAND, arguments), replay_rule_for("triton::_lora_expand_kernel")
    bound.set_content("output_hs_ptr", torch.tensor(SIZES))
    apply_rule(bound, rule)
    inputs = build_inputs(bound, Target("cpu", "cpu"), {})
    for name, value in rule.rebuild_args(bound, inputs).items():
        set_argument(bound, inputs, name, value)
    call = dict(zip([argument.name or "" for argument in bound.args], inputs.args, strict=True))
    lora = inputs.keep[0].lora
    assert lora.shape == (LORAS, sum(SIZES), RANK) and rule.extra_bytes(bound) == lora.numel() * 2
    agrees(EXPAND, run_apart(launchers), {"lora": lora}, **call, ADD_INPUTS=True, SAME_STRIDE=False)


def test_hidden_weights_are_those_that_the_reference_gets():
    """By the name under which a family asks for them."""
    bound = bound_call(SHRINK, shrunk(BATCHES[1], weights_of(2, RANK, HIDDEN)))
    rule = replay_rule_for("triton::_lora_shrink_kernel")
    apply_rule(bound, rule)
    inputs = build_inputs(bound, Target("cpu", "cpu"), {})
    set_argument(bound, inputs, "lora_ptr", rule.rebuild_args(bound, inputs)["lora_ptr"])
    resolved = ResolvedCall(Operator("shrink", lambda: None, None), rule, bound, [], 0)
    call = Call(id=0, operator=SHRINK, args=bound.args, launch=Launch(function="shrink", constexprs={"SPLIT_K": 1}))
    lora = invocation_with_inputs(resolved, inputs, call).hidden["lora"]
    assert [weight.data_ptr() for weight in lora] == inputs.args[1].tolist()


def test_what_no_argument_shows_is_declined():
    """Slices of sizes that are not known, parts of a product, unknown constants."""
    pair = weights_of(2, SLICE, RANK)
    unknown = torch.empty(2, dtype=torch.int64, device="meta")
    assert declined(EXPAND, **expanded([0, 1], pair, SAME_STRIDE=False, output_hs_ptr=unknown))
    assert declined(EXPAND, **expanded([0, 1], pair, room=3))
    assert declined(EXPAND, **{**expanded([0, 1], pair[:1]), "ADD_INPUTS": None})
    assert declined(SHRINK, **shrunk([0, 1], weights_of(1, RANK, HIDDEN), STORE_PARTIALS=True))
    assert declined(SHRINK, **shrunk([0, 1], weights_of(1, RANK, HIDDEN + 1)))


@pytest.mark.parametrize("mapping", [[0, 1, 2], list(range(3)) * 5])
def test_valid_inputs_give_each_adapter_its_tokens(mapping: list[int]):
    kernel = kernel_of(SHRINK, **shrunk(mapping, weights_of(1, RANK, HIDDEN)))
    definition, sizes = checked(kernel), kernel.sizes()
    given: dict[str, Any] = {name: RandomInput() for name in definition.inputs}
    given["scaling"] = ScalarInput(value=1.0)
    workload = Workload(uuid="one", axes={name: sizes[name] for name in definition.var_axes}, inputs=given)
    made = dict(zip(definition.inputs, make_inputs(definition, workload, None).inputs, strict=True))
    assert sorted(made["token_indices_sorted_by_lora_ids"].tolist()) == list(range(len(mapping)))
    assert made["lora_ids"].tolist() == [0, 1, 2, -1]
    counts = made["num_tokens_per_lora"].tolist()
    assert min(counts[:3]) > 0 == counts[3] and sum(counts) == len(mapping)
    assert made["lora_token_start_loc"].tolist() == [sum(counts[:n]) for n in range(5)]
    cost = cost_function_for("lora_shrink")
    assert cost is not None and kernel.touched is not None
    assert cost(CostInputs(definition, made)).bytes == kernel.touched()
    assert cost(CostInputs(definition, made)).flops == kernel.flops()


def test_names_and_cost():
    arguments = shrunk(BATCHES[1], weights_of(1, RANK, HIDDEN))
    kernel = kernel_of(SHRINK, **arguments)
    definition = checked(kernel)
    assert definition.const_axes == {"num_slices": 1, "rank": RANK, "hidden_size": HIDDEN}
    assert list(definition.inputs)[:3] == ["x", "lora_a", "shrunk"] and list(definition.outputs) == ["shrunk_out"]
    cost = cost_of_instance(kernel)
    rows, used = 5, 2
    assert cost.flops == 2 * rows * RANK * HIDDEN
    assert kernel.touched is not None
    assert kernel.touched() == rows * (HIDDEN * 2 + RANK * 4) + used * RANK * HIDDEN * 2


def bound_call(operator: str, arguments: Arguments) -> BoundCall:
    """The Call of these arguments as recorded, its indices sampled."""
    args, contents = [], {}
    for place, (name, value) in enumerate(arguments.items()):
        if isinstance(value, torch.Tensor):
            if value.dtype == torch.int32:
                contents[str(place)] = value
            value = TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."), storage=place)
        if not name.isupper() or len(name) == 1:
            args.append(Argument(name=name, value=value))
    return BoundCall(operator, args, contents)


@pytest.mark.parametrize("slices", [1, 2])
def test_replay_makes_the_weights_and_their_addresses(launchers: dict[str, Launcher], slices: int):
    """Recorded addresses would be read from memory that is no longer theirs."""
    bound = bound_call(SHRINK, shrunk(BATCHES[1], weights_of(slices, RANK, HIDDEN)))
    rule = replay_rule_for("triton::_lora_shrink_kernel")
    rebuilt = apply_rule(bound, rule)
    assert "lora_ptr" in rebuilt
    inputs = build_inputs(bound, Target("cpu", "cpu"), {})
    made, place = rule.rebuild_args(bound, inputs), bound.index("lora_ptr")
    assert place is not None
    inputs.args[place] = made.get("lora_ptr", inputs.args[place])
    weights = inputs.args[place][None] if slices == 1 else inputs.keep[0].lora
    assert weights.shape == (slices, LORAS, RANK, HIDDEN) and weights.dtype == torch.bfloat16
    assert rule.extra_bytes(bound) == (weights.numel() * 2 if slices > 1 else 0)
    call = dict(zip([argument.name or "" for argument in bound.args], inputs.args, strict=True))
    agrees(SHRINK, run_shrink(launchers), {"lora": weights}, **call, SPLIT_K=1, SLICE_NUM=slices)


def test_a_single_expansions_weights_follow_the_first_in_memory():
    """vLLM passes the first adapter's alone: what is behind it belongs to the others."""
    arguments = expanded(BATCHES[1], weights_of(1, SLICE, RANK))
    bound = bound_call(EXPAND, {**arguments, "lora_ptr": arguments["lora_ptr"][0]})
    apply_rule(bound, replay_rule_for("triton::_lora_expand_kernel"))
    assert bound.spec("lora_ptr").shape == (LORAS, SLICE, RANK)
    assert bound["slice_start_loc"] == 0
    recorded = kernel_of(EXPAND, **{**arguments, "lora_ptr": arguments["lora_ptr"][0]})
    assert recorded.inputs["lora_b"].get().is_meta and recorded.name == "lora_expand_add_s1_n40_r16"


def test_slices_of_sizes_that_no_sample_holds_are_skipped():
    arguments = {**expanded([0, 1], weights_of(2, SLICE, RANK)), "output_hs_ptr": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(Skip, match="sizes of their own"):
        apply_rule(bound_call(EXPAND, arguments), replay_rule_for("triton::_lora_expand_kernel"))


def test_adapters_are_kept_from_step_to_step_and_their_indices_are_not():
    assert is_persistent_name("lora_ptr")
    assert not any(is_persistent_name(name) for name in sorted_tokens([0]))
