"""The grammar of fragments: what torch writes is read as it was meant, and nothing else does anything."""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from fused import LIKE, SUB, A, computed, holding, launched, tensor
from hypothesis import given
from hypothesis import strategies as st

from kcap.schemas.derive.fragment.binding import Nodes
from kcap.schemas.derive.fragment.reference import MISREAD, FragmentReference, Unknown, reference_from
from kcap.schemas.derive.fragment.text import Fragment, Layout, read_fragment
from kcap.schemas.derive.fragment.values import FragmentError, Parser, Ref, Size, Word, size_of
from kcap.schemas.derive.generic.family import fused_family
from kcap.schemas.recording.recording import Call
from kcap.schemas.recording.values import TensorSpec, TorchConstant

DATA = Path(__file__).parents[2] / "data" / "fragments"
KERNELS = [orjson.loads(line) for file in sorted(DATA.glob("*.jsonl")) for line in file.read_bytes().splitlines()]
ODD = st.sampled_from(
    ["%", "(", ")", "[", "]", "{", "}", ",", "'", '"', "\n", "s77", "-", "torch.", "import os", "\0", "é"]
)
ALLOWED = (
    "Module Import alias FunctionDef arguments arg Assign Name Store Load Return Tuple List Call Attribute Constant "
    "keyword Subscript BinOp UnaryOp USub Add Sub Mult FloorDiv Mod"
).split()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("%add_1", Ref("add_1")),
        ("[%a, [1, -1], None, True]", [Ref("a"), [1, -1], None, True]),
        ("(%a,)", [Ref("a")]),
        ("1e-05", 1e-05),
        ("-inf", -float("inf")),
        ("9223372036854775807", 9223372036854775807),
        ("torch.bfloat16", TorchConstant("dtype", "bfloat16")),
        ("torch.contiguous_format", TorchConstant("memory_format", "contiguous_format")),
        ("cuda:0", TorchConstant("device", "cuda:0")),
        ("tanh", Word("tanh")),
        ("s27 - ((s27//2))", Size("-", (Size("s27"), Size("//", (Size("s27"), 2))))),
        ("Max(1, 2*s0 + 1)", Size("Max", (1, Size("+", (Size("*", (2, Size("s0"))), 1))))),
    ],
)
def test_values_are_what_torch_meant(text: str, value: object) -> None:
    assert Parser(text).whole() == value


@pytest.mark.parametrize(
    "text", ["", "[1", "(1, 2", "1 2", "%", "torch.load", "a.b", "s0 + tanh", "{'a': 1}", "[" * 99, "9" * 5000]
)
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(FragmentError):
        Parser(text).whole()


def sizes() -> st.SearchStrategy[Size | int]:
    leaves: st.SearchStrategy[Size | int] = st.integers(0, 99) | st.sampled_from([Size("s0"), Size("s77")])
    operations = st.sampled_from(["+", "-", "*", "//", "%"])
    return st.recursive(leaves, lambda inner: st.builds(lambda o, a, b: Size(o, (a, b)), operations, inner, inner))


@given(sizes(), st.integers(1, 9), st.integers(1, 9))
def test_a_size_is_read_as_it_is_written(size: Size | int, first: int, second: int) -> None:
    names = {"s0": "s0", "s77": "s77"}
    text = size.text(names) if isinstance(size, Size) else str(size)
    again = Parser(text).whole()
    assert again == size and isinstance(again, Size | int)
    assert size_of(again, {"s0": first, "s77": second}) == size_of(size, {"s0": first, "s77": second})


def test_a_fragment_holds_buffers_operations_and_what_kcap_added() -> None:
    fragment = read_fragment(
        "%buf4 : Tensor  = PlaceHolder[target=buf4]\n"
        '%x : Tensor "f8e4m3fn[s0, 8][8, 1]cuda:0" = PlaceHolder[target=x]\n'
        "%split : [num_users=2] = call_function[target=torch.ops.aten.split.Tensor](args = (%x, 4, -1), kwargs = {})\n"
        "return %a,%buf5,%a\n%empty = buf0\n%arg0_1 = s0\n%n = 2*s0\nreuse(buf6, buf1)\n"
        "call(buf0, reinterpret_tensor(buf6, (4, 2), (2, 1), 0), 64*s0, stream=stream0)\n"
    )
    layout = Layout("float8_e4m3fn", (Size("s0"), 8), (8, 1), "cuda:0")
    assert fragment.reads == {"buf4": None, "x": layout}
    assert fragment.operations["split"].args == [Ref("x"), 4, -1] and fragment.operations["split"].layout is None
    assert fragment.writes == ["a", "buf5"] and fragment.buffers == {"empty": "buf0"}
    assert fragment.sizes == {"arg0_1": Size("s0"), "n": Size("*", (2, Size("s0")))}
    assert fragment.reused == {"buf6": "buf1"} and fragment.call == ["buf0", None, None]


@pytest.mark.parametrize(
    "line",
    [
        "what",
        "%a = [1]",
        "return a",
        '%a : Tensor "f99[1][1]cpu" = PlaceHolder[target=a]',
        "%a : [num_users=1] = call_function[target=torch.ops.aten.neg.default](args = 5, kwargs = {})",
        "%a : [num_users=1] = call_function[target=torch.ops.aten.neg.default](args = %b, kwargs = {})",
    ],
)
def test_a_line_that_is_none_is_named(line: str) -> None:
    with pytest.raises(FragmentError, match="line 2 of its fragment"):
        read_fragment(f"return %a\n{line}\n")


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_fragment_or_refused(text: str) -> None:
    with suppress(FragmentError):
        assert isinstance(read_fragment(text), Fragment)


@given(st.sampled_from(KERNELS), st.data())
def test_a_changed_fragment_gives_plain_operators_or_a_reason(kernel: dict[str, object], data: st.DataObject) -> None:
    text = str(kernel["fragment"])
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 20)))
        text = text[:start] + data.draw(ODD) + text[end:]
    found = reference_from(Call.model_validate(kernel["call"]), text)
    check_understood(found)


@given(st.sampled_from(KERNELS), st.data())
def test_a_fragment_of_other_tensors_gives_plain_operators_or_a_reason(
    kernel: dict[str, Any], data: st.DataObject
) -> None:
    call = Call.model_validate(kernel["call"])
    args = [argument for argument in call.args if isinstance(argument.value, TensorSpec)]
    others = data.draw(st.lists(st.sampled_from(args), min_size=1, max_size=3, unique_by=id))
    shapes = st.sampled_from([argument.value.shape for argument in args]) | st.just((3, 5))
    change = st.builds(lambda shape: {"shape": shape, "strides": None}, shapes) | st.builds(dict, storage=st.just(99))
    changed = {other.name: replace(other.value, **data.draw(change)) for other in others}
    args = [arg.model_copy(update={"value": changed.get(arg.name, arg.value)}) for arg in call.args]
    found = reference_from(call.model_copy(update={"args": args}), kernel["fragment"])
    check_understood(found)


def test_a_target_that_names_no_operator_is_a_reason() -> None:
    kernel = next(kernel for kernel in KERNELS if "target=torch.ops.aten.mean.dim" in str(kernel["fragment"]))
    text = str(kernel["fragment"]).replace("target=torch.ops.aten.mean.dim", "target=torch.ops.aten")
    assert isinstance(reference_from(Call.model_validate(kernel["call"]), text), Unknown)


def check_understood(found: FragmentReference | Unknown) -> None:
    """A reason of kcap's own, or a reference that has nothing but torch's operators on what `run` is given."""
    if isinstance(found, Unknown):
        assert found.reason and MISREAD not in found.reason
        return
    tree = ast.parse(found.source)
    assert {type(node).__name__ for node in ast.walk(tree)} <= set(ALLOWED)
    assert [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names] == ["torch"]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        assert (
            called.startswith("torch.ops.") or called.endswith((".to", ".clone")) or called in ("float", "max", "min")
        )


def test_a_long_chain_of_operators_is_read_and_written() -> None:
    like = 'Tensor "f32[8][1]cpu"'
    lines = [f"%x0 : {like} = PlaceHolder[target=x0]"]
    for i in range(3000):
        call = f"call_function[target=torch.ops.aten.neg.default](args = (%x{i},), kwargs = {{}})"
        lines.append(f"%x{i + 1} : {like}[num_users=1] = {call}")
    tensor = {"tensor": {"shape": [8], "dtype": "float32", "device": "cpu", "storage": 0}}
    args = [{"name": "in_ptr0", "value": tensor}, {"name": "out_ptr0", "value": tensor}]
    call = Call.model_validate({"id": 0, "operator": "cpp::neg.s0", "args": args})
    found = reference_from(call, "\n".join([*lines, "return %x3000"]))
    assert isinstance(found, FragmentReference) and found.source.count("neg.default") == 3000


def test_what_reading_a_fragment_raises_costs_its_definition_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nodes, "stored_node", lambda *_: [].index("cat"))
    found = reference_from(Call.model_validate(KERNELS[0]["call"]), KERNELS[0]["fragment"])
    assert isinstance(found, Unknown) and found.reason == f"{MISREAD}: ValueError: 'cat' is not in list"


def test_a_cast_to_the_type_that_it_is_given_is_copied() -> None:
    cast = SUB.replace("aten.sub.Tensor", "prims.convert_element_type.default").replace(
        "(%a, %b)", "(%a, torch.float32)"
    )
    x = torch.randn(8, 4)
    (found,) = computed(launched(tensor("in_ptr0", 8, 4), tensor("out_ptr0", 8, 4)), f"{A}{cast}return %sub\n", x)
    assert torch.equal(found, x)


def test_an_operator_of_torchs_compiler_is_written_by_those_that_all_have() -> None:
    """As inductor_prims.py of torch has it, which a process without inductor does not import."""
    name, column = "prims.prepare_softmax_online.default", LIKE.replace("[s0, 4][4, 1]", "[s0, 1][1, 1]")
    softmax = f"%both : [num_users=2] = call_function[target=torch.ops.{name}](args = (%a, -1), kwargs = {{}})\n"
    for i, part in enumerate(("most", "sum")):
        item = f"call_function[target=operator.getitem](args = (%both, {i}), kwargs = {{}})"
        softmax += f"%{part} : {column}[num_users=1] = {item}\n"
    call = launched(tensor("in_ptr0", 8, 4), tensor("out_ptr0", 8, 1), tensor("out_ptr1", 8, 1))
    x = torch.randn(8, 4)
    text = f"{A}{softmax}return %most,%sum\n%most = buf0\n%sum = buf1\ncall(a, buf0, buf1, 8)\n"
    most, total = computed(call, text, x)
    torch.testing.assert_close((x - most).exp() / total, x.softmax(-1))
    assert fused_family(call, holding(text)) == "softmax"
    unknown = reference_from(call, text.replace("prepare_softmax_online", "fma"))
    assert unknown == Unknown("prims.fma.default is there for torch's compiler alone")
