from __future__ import annotations

from kcap.schemas.recording.recording import Argument, Call, Count
from kcap.schemas.recording.signature import call_key, call_signature, signature
from kcap.schemas.recording.values import Drift, TensorSpec, TorchConstant

MATRIX = Argument(value=TensorSpec((64, 4096), "bfloat16"))
TRANSPOSED = Argument(value=TensorSpec((4096, 64), "float8_e4m3fn", (1, 4096)))


def test_tensors_that_follow_one_another_are_joined_by_x() -> None:
    assert signature([MATRIX, TRANSPOSED]) == "bf16[64, 4096] x float8_e4m3fn[4096, 64]{1, 4096}"


def test_defaults_are_left_out_and_keywords_named() -> None:
    keyword = Argument(name="dtype", value=TorchConstant("dtype", "float32"), keyword=True)
    assert signature([MATRIX, Argument(value=1, default=True), keyword]) == "bf16[64, 4096], dtype=f32"


def test_flags_and_none_are_named_where_the_schema_names_them() -> None:
    flags = [Argument(name="keepdim", value=True), Argument(name="bias", value=None), Argument(value=False)]
    assert signature([MATRIX, *flags, Argument(name="dim", value=1)]) == (
        "bf16[64, 4096], keepdim=True, bias=None, False, 1"
    )


def test_long_lists_are_cut_and_drift_is_marked() -> None:
    args = [Argument(value=list(range(100))), Argument(value=Drift("int"))]
    assert signature(args) == "[0, 1, 2, 3, 4, 5, … 94 more], ~int"


def test_no_arguments_are_an_empty_text() -> None:
    assert signature([]) == ""


def test_key_joins_recordings_whatever_the_counts_and_ids() -> None:
    here = Call(id=0, operator="aten::mm", args=[MATRIX], counts=[Count(phase="decode", count=1)])
    there = Call(id=9, operator="aten::mm", args=[MATRIX.model_copy(update={"name": "self"})])
    assert call_key(here) == call_key(there)
    assert len(call_key(here)) == 12
    assert int(call_key(here), 16) >= 0


def test_key_tells_operator_parent_and_arguments_apart() -> None:
    call = Call(id=0, operator="aten::mm", args=[MATRIX])
    changes = ({"operator": "aten::bmm"}, {"parent": "x::y"}, {"args": [TRANSPOSED]}, {"args": []})
    others = [call.model_copy(update=change) for change in changes]
    assert len({call_key(each) for each in [call, *others]}) == 5


def test_key_does_not_change_between_versions() -> None:
    assert call_key(Call(id=0, operator="aten::mm", args=[MATRIX, TRANSPOSED])) == "efcefe3b640d"


def test_a_weight_behind_a_handle_is_shown_as_a_factor() -> None:
    args = [
        Argument(name="c", value=TensorSpec((32, 256), "bfloat16"), written=True),
        Argument(name="a", value=TensorSpec((32, 128), "bfloat16", storage=1)),
        Argument(name="bias"),
        Argument(name="handler_tensor", value=TensorSpec((), "int64", storage=2)),
    ]
    product = Call(id=0, operator="_C::onednn_mm", args=args)
    assert call_signature(product) == "bf16[32, 128] x packed[128, 256], bias=None -> bf16[32, 256]"
    other = product.model_copy(update={"args": args[:2]})
    assert call_signature(other) == signature(other.args)


def test_a_call_has_its_key_wherever_its_memory_lies():
    own, mapped = (TensorSpec((4,), "int32", device="cuda", mapped=mapped) for mapped in (False, True))
    calls = [Call(id=0, operator="aten::clone", args=[Argument(value=[spec])]) for spec in (own, mapped)]
    assert call_key(calls[0]) == call_key(calls[1])
