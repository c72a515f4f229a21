from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.flashinfer.dataset import files
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.flashinfer.definition import from_bytes as definition_from_bytes
from kcap.schemas.flashinfer.definition import read as read_definition
from kcap.schemas.flashinfer.kernel_description import (
    DTYPES,
    KernelDescription,
    check_kernel_description,
    from_bytes,
    from_definition,
    to_bytes,
    to_definition,
)

PUBLISHED = Path(__file__).parents[2] / "data" / "flashinfer-trace"
NORM: dict[str, Any] = {
    "id": "rmsnorm",
    "axes": {"G": {"type": "var"}, "B": {"type": "var", "parent": "G"}, "D": {"type": "const", "value": 4}},
    "assumptions": ["B > 0"],
    "inputs": {
        "input": {"shape": ["B", "D"], "dtype": "float32"},
        "eps": {"shape": [], "dtype": "float32"},
        "groups": {"shape": ["G"]},
    },
    "outputs": {"output": {"shape": ["B", "D"], "dtype": "float32"}, "peak": {"shape": [], "dtype": "float32"}},
    "reference_code": """import torch
def run(input, eps, groups, output, peak):
    output.copy_(input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + eps))
    peak.fill_(output.max())
""",
}


def described(**change: Any) -> KernelDescription:
    return from_bytes(orjson.dumps(NORM | change))


def run_of(code: str) -> Any:
    space: dict[str, Any] = {}
    exec(code, space)
    return space["run"]


@st.composite
def descriptions(draw: st.DrawFn) -> KernelDescription:
    axes = draw(st.dictionaries(st.text(min_size=1), st.none() | st.integers(0, 99), min_size=1))
    shapes = st.lists(st.sampled_from(sorted(axes)), max_size=3)
    tensors = st.dictionaries(
        st.text(min_size=1), st.fixed_dictionaries({"shape": shapes}, optional={"dtype": st.sampled_from(DTYPES)})
    )
    inputs = draw(tensors)
    outputs = {name: tensor for name, tensor in draw(tensors).items() if name not in inputs}
    parents = st.fixed_dictionaries({}, optional={"parent": st.none() | st.sampled_from(sorted(axes))})
    document = {
        "id": draw(st.text(min_size=1)),
        "axes": {
            name: {"type": "var", **draw(parents)} if size is None else {"type": "const", "value": size}
            for name, size in axes.items()
        },
        "inputs": inputs,
        "outputs": outputs,
        "reference_code": "...",
    }
    return KernelDescription.model_validate(document)


@given(descriptions())
def test_what_is_written_is_read_back(description: KernelDescription) -> None:
    assert from_bytes(to_bytes(description)) == description


@given(st.binary())
def test_arbitrary_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(FormatError):
        from_bytes(content)


def test_both_names_of_a_field_are_read_and_the_tables_written() -> None:
    other = {{"id": "name", "reference_code": "code"}.get(key, key): value for key, value in NORM.items()}
    assert orjson.loads(to_bytes(from_bytes(orjson.dumps(other)))) == NORM


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "rmsnorm"}, "id and name are one field"),
        ({"code": "..."}, "reference_code and code are one field"),
        ({"axes": {**NORM["axes"], "B": {"type": "var", "parent": "Z"}}}, r"axes\.B: its parent Z is not among axes"),
        ({"axes": {"B": {"type": "var"}, "D": {"type": "var"}}}, r"inputs\.groups: its axis G is not among axes"),
        ({"inputs": {"x": {"shape": None}}}, r"inputs\.x\.shape"),
        ({"inputs": {"x": {"shape": [], "dtype": "int32"}}}, r"inputs\.x\.dtype"),
        ({"inputs": {"x": {"shape": [], "dtype": "float8_e4m3fn"}}}, r"inputs\.x\.dtype"),
        ({"outputs": NORM["inputs"]}, "input: both an input and an output; eps: both"),
        ({"assumptions": ["B >"]}, "assumptions: no valid Python"),
        ({"reference_code": "def run("}, "reference_code: no valid Python"),
        ({"op_type": "norm"}, "op_type"),
    ],
)
def test_what_the_set_does_not_have_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        described(**change)


def test_code_that_cannot_be_called_is_told() -> None:
    assert check_kernel_description(described()) == []
    assert check_kernel_description(described(reference_code="...")) == [
        "reference_code: defines no plain function run at its top level"
    ]
    assert check_kernel_description(described(reference_code="def run(input): ...")) == [
        "reference_code: run takes 1 parameters, but is given 5"
    ]


def test_a_description_becomes_a_definition_that_computes_the_same() -> None:
    definition = to_definition(described(), "norm")
    x = torch.randn(3, 4)
    output, peak = torch.empty(3, 4), torch.empty(())
    run_of(NORM["reference_code"])(x, 1e-5, torch.ones(2), output, peak)
    returned = run_of(definition.reference)(x, 1e-5, torch.ones(2))
    assert torch.equal(returned[0], output)
    assert returned[1] == peak.item()
    assert definition.inputs["eps"].shape is None
    assert definition.axes["B"].description == "nested in G"
    assert definition.constraints == ["B > 0"]


def test_a_definition_becomes_a_description_that_computes_the_same() -> None:
    definition = to_definition(described(), "norm")
    description, left_out = from_definition(definition)
    assert left_out == ["op_type", "axes.B.description"]
    x, output, peak = torch.randn(3, 4), torch.empty(3, 4), torch.empty(())
    run_of(description.reference_code)(x, 1e-5, torch.ones(2), output, peak)
    assert torch.equal(output, run_of(definition.reference)(x, 1e-5, torch.ones(2))[0])
    assert peak == output.max()


def test_the_fp8_type_goes_by_each_sets_name() -> None:
    code = "def run(a, b): b.copy_(a)"
    tensor = {"shape": ["B"], "dtype": "float8_e4m3"}
    definition = to_definition(described(inputs={"a": tensor}, outputs={"b": tensor}, reference_code=code), "copy")
    assert definition.inputs["a"].dtype == "float8_e4m3fn"
    a = torch.ones(3).to(torch.float8_e4m3fn)
    assert run_of(definition.reference)(a).dtype == torch.float8_e4m3fn
    assert from_definition(definition)[0].inputs["a"].dtype == "float8_e4m3"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reference_code": "..."}, "reference_code: defines no plain function run"),
        ({"id": "a/b"}, "name: must be a file name"),
        (
            {
                "outputs": {"output": {"shape": ["Z"]}, "o": {"shape": []}},
                "axes": {**NORM["axes"], "Z": {"type": "var"}},
            },
            "outputs.output: no input has its axis Z",
        ),
        ({"outputs": {"output": {"shape": []}, "not a name": {"shape": []}}}, "not a name: rename it"),
        ({"outputs": {"output": {"shape": []}, "torch": {"shape": []}}}, "torch: rename it"),
    ],
)
def test_a_description_that_cannot_be_a_definition_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        to_definition(described(**change), "norm")


def test_every_published_definition_is_carried_or_refused_for_its_dtype() -> None:
    carried, refused = [], []
    for path in files(PUBLISHED / "definitions", "json"):
        definition = read_definition(path)
        try:
            description, _ = from_definition(definition)
        except FormatError as error:
            refused.append(error.reason.split("has no ")[1].split(";")[0])
        else:
            assert check_kernel_description(description) == []
            assert to_definition(description, definition.op_type).axes.keys() == definition.axes.keys()
            carried.append(definition.op_type)
    assert (len(carried), set(carried)) == (31, {"gdn", "gemm", "moe", "rmsnorm"})
    assert (len(refused), set(refused)) == (47, {"int32", "int64"})


def test_a_published_kernel_computes_the_same_there_and_back() -> None:
    definition = read_definition(PUBLISHED / "definitions" / "rmsnorm" / "fused_add_rmsnorm_h2048.json")
    again = to_definition(from_definition(definition)[0], definition.op_type)
    inputs = [torch.randn(3, 2048).bfloat16(), torch.randn(3, 2048).bfloat16(), torch.randn(2048).bfloat16()]
    there, back = run_of(definition.reference)(*inputs), run_of(again.reference)(*inputs)
    assert len(again.outputs) == len(back if isinstance(back, tuple) else [back])
    assert torch.equal(there, back)


def test_a_definition_with_indices_cannot_be_a_description() -> None:
    document = {
        "name": "take",
        "op_type": "take",
        "axes": {"N": {"type": "var"}},
        "outputs": {},
        "inputs": {"rows": {"shape": ["N"], "dtype": "int32"}},
        "reference": "def run(rows): ...",
    }
    with pytest.raises(FormatError, match="rows: a Kernel Description has no int32"):
        from_definition(definition_from_bytes(orjson.dumps(document)))
    assert Definition.model_validate(document)
