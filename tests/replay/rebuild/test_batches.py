"""Arguments that no Sample holds, made from the sequences of the step that ran their Call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import Values

from kcap.replay.rebuild.batches import StepBatch, StepBatches, sampled_routing
from kcap.replay.rebuild.operators import Operator
from kcap.replay.rebuild.rebuild import Rebuilder, apply_rule
from kcap.schemas.derive import families
from kcap.schemas.derive.bound_call import BoundCall, Skip, bind_call
from kcap.schemas.recording.recording import Recording, load, write_recording
from kcap.schemas.recording.records import Argument, Call, Launch, Metadata, Program, Sample, Step
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import StepCoverage

MIXED = {"lengths": [321, 64, 200], "queries": [1, 64, 72]}  # a decode, a prefill, the rest of a long prompt


def attention(number: int, tokens: int, sequences: int, **more: Any) -> Call:
    """FlashAttention 3 over pages of 16 rows."""
    cache = TensorSpec((4000, 16, 8, 128), "bfloat16", storage=1)
    values = {
        "q": TensorSpec((tokens, 32, 128), "bfloat16", storage=0),
        "k": cache,
        "v": TensorSpec(cache.shape, "bfloat16", storage=2),
        "cu_seqlens_q": TensorSpec((sequences + 1,), "int32", storage=3),
        "seqused_k": TensorSpec((sequences,), "int32", storage=4),
        "page_table": TensorSpec((sequences, 128), "int32", storage=5),
        **more,
    }
    args = [Argument(name=name, value=value) for name, value in values.items() if value is not None]
    return Call(id=number, operator="_vllm_fa3_C::fwd", args=args)


def recording_of(
    path: Path, calls: list[Call], profiled: dict[str, Any], steps: Sequence[Step] = (),
    samples: Sequence[Sample] = (), values: Values | None = None,
) -> Recording:  # fmt: skip
    """All `calls` are of one Program, which a profiled step ran."""
    program = Program(id=0, kind="step", calls=[call.id for call in calls])
    write_recording(path, Metadata(), calls, [program], steps, samples, values.files if values else {})
    step = {"index": 0, "phase": "mixed", "program": 0, **profiled}
    coverage.write(path / coverage.FILE, [StepCoverage.model_validate(step)])
    return load(path)


def filled(recording: Recording, number: int, sample: Sample | None = None) -> BoundCall:
    call = recording.calls[number]
    bound = bind_call(call, sample, None, recording.value)
    StepBatches(recording).fill(bound, call, sample)
    return bound


def content(bound: BoundCall, name: str) -> list[int] | None:
    values = bound.content(name)
    return None if values is None else values.tolist()


def test_a_call_that_only_a_profiled_step_ran_has_its_sequences(tmp_path: Path) -> None:
    recording = recording_of(tmp_path / "r", [attention(0, 137, 3)], MIXED)
    bound = filled(recording, 0)
    assert content(bound, "cu_seqlens_q") == [0, 1, 65, 137]
    assert content(bound, "seqused_k") == [321, 64, 200]
    apply_rule(bound, families.replay_rule_for(bound.operator))
    table = bound.content("page_table")
    assert table is not None
    used = [table[row, : -(-n // 16)] for row, n in enumerate(MIXED["lengths"])]
    assert torch.cat(used).unique().numel() == bound.spec("k").shape[0] == 21 + 4 + 13, "each has pages of its own"


def test_rebuilding_asks_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recording_of(tmp_path / "r", [attention(0, 137, 3)], MIXED)
    rule = families.replay_rule_for("_vllm_fa3_C::fwd")
    monkeypatch.setattr(Rebuilder, "_resolve_operator", lambda *_: (Operator("fwd", lambda: None, None), rule))
    resolved = Rebuilder("cpu", "cpu", recording.path).resolve(recording.calls[0], None)
    assert content(resolved.bound, "cu_seqlens_q") == [0, 1, 65, 137]


def test_arguments_without_names_are_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.22's FlashMLA: no Sample can hold what has no name."""
    shapes = {"_0": (3, 1, 16, 576), "_1": (900, 64, 1, 576), "_3": (3,), "_4": (3, 8)}
    dtypes = {"_3": "int32", "_4": "int32"}
    args = [
        Argument(name=name, value=TensorSpec(shapes[name], dtypes.get(name, "bfloat16"), storage=place))
        if name in shapes
        else Argument(name=name, value=value)
        for place, (name, value) in enumerate({"_0": 0, "_1": 0, "_2": 512, "_3": 0, "_4": 0, "_5": 0.1}.items())
    ]
    operator = "_flashmla_C::dense_decode_fwd"
    profiled = {"phase": "decode", "lengths": [20, 90, 7], "queries": [1, 1, 1]}
    recording = recording_of(tmp_path / "r", [Call(id=0, operator=operator, args=args)], profiled)
    rule = families.replay_rule_for(operator)
    monkeypatch.setattr(Rebuilder, "_resolve_operator", lambda *_: (Operator(operator, lambda: None, None), rule))
    bound = Rebuilder("cpu", "cpu", recording.path).resolve(recording.calls[0], None).bound
    assert content(bound, "seqlens_k") == [20, 90, 7]
    assert bound.spec("kcache").shape[0] == 4


def test_a_graphs_padding_has_no_tokens(tmp_path: Path) -> None:
    profiled = {"phase": "decode", "lengths": [20, 33], "queries": [1, 1], "mode": "full", "padded": 4}
    bound = filled(recording_of(tmp_path / "r", [attention(0, 4, 4)], profiled), 0)
    assert content(bound, "cu_seqlens_q") == [0, 1, 2, 2, 2]
    assert content(bound, "seqused_k") == [20, 33, 0, 0]


def test_positions_and_slots_of_a_batch(tmp_path: Path) -> None:
    names = {"query_start_loc_ptr": 4, "positions_ptr": 137, "slot_mapping_ptr": 256}
    args = [Argument(name=name, value=TensorSpec((size,), "int64", storage=size)) for name, size in names.items()]
    args.append(Argument(name="block_table_ptr", value=TensorSpec((8, 128), "int32", storage=1)))
    call = Call(id=0, operator="triton::_compute_slot_mapping_kernel.s01234567", args=args)
    bound = filled(recording_of(tmp_path / "r", [call], MIXED), 0)
    assert content(bound, "positions_ptr") == [320, *range(64), *range(128, 200)]
    assert content(bound, "query_start_loc_ptr") == [0, 1, 65, 137]
    apply_rule(bound, families.replay_rule_for("triton::_compute_slot_mapping_kernel"))
    assert bound.content("block_table_ptr") is not None and bound.content("slot_mapping_ptr") is not None


def test_a_sample_comes_first_and_then_its_own_step(tmp_path: Path) -> None:
    """The first Sample holds both, the second lacks what its graph's own memory held."""
    values, step = Values(), {"index": 7, "phase": "mixed", "program": 0, "lengths": [400, 64, 100]}
    whole = {"3": values([0, 2, 66, 137]), "4": values([9, 99, 199])}
    samples = [Sample(call=0, phase="mixed", step=7, tensors=tensors) for tensors in (whole, {})]
    steps = [Step.model_validate({**step, "queries": [1, 64, 72]})]
    recording = recording_of(tmp_path / "r", [attention(0, 137, 3)], MIXED, steps, samples, values)
    assert content(filled(recording, 0, samples[0]), "cu_seqlens_q") == [0, 2, 66, 137]
    assert content(filled(recording, 0, samples[0]), "seqused_k") == [9, 99, 199]
    assert content(filled(recording, 0, samples[1]), "seqused_k") == [400, 64, 100]


def test_the_step_that_is_meant_goes_before_others_that_ran_the_call(tmp_path: Path) -> None:
    recording = recording_of(tmp_path / "r", [attention(0, 4, 4)], {"lengths": [90, 80, 70], "queries": [1, 1, 1]})
    bound = bind_call(recording.calls[0], None, None, recording.value)
    batches = StepBatches(recording)
    batches.meant = StepBatch.of_fields({"queries": [1, 1], "lengths": [20, 33], "padded": 4})
    batches.fill(bound, recording.calls[0], None)
    assert content(bound, "seqused_k") == [20, 33, 0, 0]


@pytest.mark.parametrize(("length", "kept"), [(101, True), (200, False)])
def test_a_sample_of_another_context_gives_way_to_the_step_that_is_meant(
    length: int, kept: bool, tmp_path: Path
) -> None:
    values = Values()
    sample = Sample(call=0, phase="decode", tensors={"3": values([0, 1, 2, 2, 2]), "4": values([100, 100, 0, 0])})
    recording = recording_of(tmp_path / "r", [attention(0, 4, 4)], MIXED, samples=[sample], values=values)
    bound = bind_call(recording.calls[0], sample, None, recording.value)
    batches = StepBatches(recording)
    batches.meant = StepBatch.of_fields({"queries": [1, 1], "lengths": [length, length], "padded": 4})
    batches.fill(bound, recording.calls[0], sample)
    assert content(bound, "seqused_k") == ([100, 100, 0, 0] if kept else [200, 200, 0, 0])


def test_the_keys_of_cross_attention_are_not_the_steps(tmp_path: Path) -> None:
    """Whisper's decoder reads 1,500 frames of each sequence, however many tokens that has."""
    values = Values()
    sample = Sample(
        call=0, phase="decode", step=7, tensors={"3": values([0, 1, 2, 2, 2]), "4": values([1500, 1500, 0, 0])}
    )
    step = Step.model_validate({"index": 7, "phase": "decode", "program": 0, "lengths": [13, 9], "queries": [1, 1]})
    recording = recording_of(tmp_path / "r", [attention(0, 4, 4)], MIXED, [step], [sample], values)
    bound = bind_call(recording.calls[0], sample, None, recording.value)
    batches = StepBatches(recording)
    batches.meant = StepBatch.of_fields({"queries": [1, 1], "lengths": [20, 33], "padded": 4})
    batches.fill(bound, recording.calls[0], sample)
    assert content(bound, "seqused_k") == [1500, 1500, 0, 0]


def test_sequences_of_an_encoder_are_not_the_steps(tmp_path: Path) -> None:
    """A vision encoder's images have other tokens; so have more sequences than a call has room for."""
    encoder = attention(0, 3000, 3, page_table=None, seqused_k=None, cu_seqlens_k=TensorSpec((4,), "int32", storage=6))
    recording = recording_of(tmp_path / "r", [encoder, attention(1, 137, 2)], MIXED)
    for number in (0, 1):
        bound = filled(recording, number)
        assert content(bound, "cu_seqlens_q") is None
        with pytest.raises(Skip, match=r"no step that lists its sequences, holds its query starts"):
            apply_rule(bound, families.replay_rule_for(bound.operator))


def test_windows_of_a_picture_that_only_a_profiled_step_saw_are_known(tmp_path: Path) -> None:
    """80 sequences of at most 64 rows have 5,120 rows only if each has 64; three of at most 2,000 may be any."""
    bounds = {"page_table": None, "seqused_k": None, "cu_seqlens_k": TensorSpec((81,), "int32", storage=6)}
    keys = {name: TensorSpec((5120, 16, 80), "bfloat16", storage=place) for place, name in enumerate("qkv")}
    windows = attention(0, 5120, 80, **keys, **bounds, max_seqlen_q=64, max_seqlen_k=64)
    recording = recording_of(tmp_path / "r", [windows], MIXED)
    bound = filled(recording, 0)
    apply_rule(bound, families.replay_rule_for(bound.operator))
    assert content(bound, "cu_seqlens_q") == content(bound, "cu_seqlens_k") == [*range(0, 5121, 64)]


def test_a_step_that_lists_no_sequences_gives_none(tmp_path: Path) -> None:
    recording = recording_of(tmp_path / "r", [attention(0, 137, 3)], {"tokens": 137, "sequences": 3})
    assert content(filled(recording, 0), "cu_seqlens_q") is None


def routed(number: int, experts: list[int], values: Values) -> tuple[Call, Sample]:
    """A kernel that multiplies by the experts of blocks of two slots, the last of which is padding."""
    names = {"b_ptr": (4, 8, 8), "expert_ids_ptr": (len(experts),), "sorted_token_ids_ptr": (2 * len(experts),)}
    dtypes = {"b_ptr": "bfloat16"}
    args = [
        Argument(name=name, value=TensorSpec(shape, dtypes.get(name, "int32"), storage=place))
        for place, (name, shape) in enumerate(names.items())
    ]
    slots = [*range(2 * len(experts) - 1), 2 * len(experts)]
    args.append(Argument(name="num_valid_tokens", value=2 * len(experts) - 1))
    launch = Launch(language="triton", function="fused_moe_kernel", constexprs={"BLOCK_SIZE_M": 2})
    call = Call(id=number, operator=f"triton::fused_moe_kernel.s0123456{number}", args=args, launch=launch)
    return call, Sample(call=number, phase="prefill", tensors={"1": values(experts), "2": values(slots)})


def test_the_routing_of_the_largest_batch_stands_for_all(tmp_path: Path) -> None:
    values = Values()
    calls, samples = zip(*(routed(i, experts, values) for i, experts in enumerate(([0], [3, 3, 1, -1]))), strict=True)
    recording = recording_of(tmp_path / "r", list(calls), MIXED, samples=samples, values=values)
    assert {count: chosen.tolist() for count, chosen in sampled_routing(recording).items()} == {4: [0, 2, 0, 4]}
    reference = samples[1].tensors["2"]
    (recording.path / "values" / reference.file).write_bytes(b"torn")
    assert {count: chosen.tolist() for count, chosen in sampled_routing(recording).items()} == {4: [1, 0, 0, 0]}


def test_a_call_without_experts_leaves_the_routing_of_the_others(tmp_path: Path) -> None:
    values = Values()
    calls, samples = zip(*(routed(i, [3, 3, 1, -1], values) for i in range(2)), strict=True)
    weight = calls[0].args[0].model_copy(update={"value": TensorSpec((), "bfloat16")})
    calls = (calls[0].model_copy(update={"args": [weight, *calls[0].args[1:]]}), calls[1])
    recording = recording_of(tmp_path / "r", list(calls), MIXED, samples=samples, values=values)
    assert {count: chosen.tolist() for count, chosen in sampled_routing(recording).items()} == {4: [0, 2, 0, 4]}
