from __future__ import annotations

import pytest

from kcap.schemas.recording.operators import OperatorError, check_operator_name, does_work, from_trace, to_trace
from kcap.schemas.recording.recording import Argument, Call


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("aten::add.Tensor", "aten.add.Tensor"),
        ("aten::mm", "aten.mm.default"),
        ("_vllm_fa3_C::fwd", "_vllm_fa3_C.fwd.default"),
        ("aten::__lshift__.Scalar", "aten.__lshift__.Scalar"),
    ],
)
def test_both_spellings(operator, name):
    assert to_trace(operator) == name
    assert from_trace(name) == operator


def test_the_older_name_of_an_overload_becomes_todays():
    assert from_trace("aten.sum.SymInt") == "aten::sum.dim_IntList"


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("__import__('os').system('true')", 10),
        ("aten.mm", 7),
        ("aten.mm.default.x", 15),
        ("aten.mm.default ", 15),
        ("aten.mm.default\n", 15),
        ("aten..mm", 5),
        ("", 0),
        ("aten.mm.défaut", 9),
        ("aten.from_file.default", 5),
        ("aten.save.default", 5),
        ("prim.Print.default", 0),
        ("load_library.x.y", 0),
        ("aten.load_library.x", 5),
        ("aten.mm.load_library", 8),
        ("image.read_file.default", 6),
        ("aten.__class__.default", 5),
        ("aten.mm.__globals__", 8),
        ("__builtins__.eval.default", 0),
        ("__and__.mm.default", 0),
        ("a" * 300 + ".b.c", 256),
    ],
)
def test_refused_names(name, offset):
    with pytest.raises(OperatorError) as caught:
        check_operator_name(name)
    assert caught.value.offset == offset
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "operator", ["my_triton_kernel", "aten::", "aten::from_file", "flashinfer.norm.rmsnorm", "a::b.c.d"]
)
def test_calls_without_a_trace_name(operator):
    with pytest.raises(OperatorError):
        to_trace(operator)


def test_every_registered_operator_has_a_trace_name_or_is_refused_on_purpose():
    torch = pytest.importorskip("torch")
    refused = set()
    for schema in torch._C._jit_get_all_schemas():
        operator = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        try:
            assert from_trace(to_trace(operator)) == operator
        except OperatorError:
            refused.add(schema.name)
    kept_from_files = {"aten::from_file", "aten::save", "debugprims::load_tensor"}
    assert {
        name for name in refused if name.split("::")[0] not in ("prim", "profiler") and "__" not in name
    } <= kept_from_files
    assert {"aten::from_file", "aten::save"} <= refused


@pytest.mark.parametrize("operator", ["triton::mul_silu.s0a1b2c3d", "cpp::kernel.s0a1b2c3d", "triton::load.s00000000"])
def test_a_kernel_with_a_source_of_its_own_has_no_name_in_a_trace_file(operator):
    with pytest.raises(OperatorError, match="no operator name that BackendBench knows"):
        to_trace(operator)


def test_what_computes_a_dtype_or_waits_does_no_work() -> None:
    names = ("aten::promote_types", "aten::result_type.Scalar", "aten::can_cast", "_c10d_functional::wait_tensor")
    names += ("_c10d_functional::_wrap_tensor_autograd", "_C::weak_ref_tensor")
    assert not any(does_work(Call(id=0, operator=name)) for name in names)
    assert does_work(Call(id=0, operator="aten::add.Tensor"))


def test_a_dropout_does_work_in_training_alone():
    for train in (True, False):
        call = Call(
            id=0, operator="aten::dropout", args=[Argument(name="p", value=0.0), Argument(name="train", value=train)]
        )
        assert does_work(call) is train


def test_a_cache_update_that_ran_nothing_does_no_work():
    """An encoder's: where a layer has a cache, what it runs is recorded in it."""
    assert not does_work(Call(id=0, operator="vllm::unified_kv_cache_update"))
