from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.flashinfer import definition as file
from kcap.schemas.flashinfer.dataset import files
from kcap.schemas.flashinfer.definition import DTYPES, Definition, check_definition, from_bytes, to_bytes

PUBLISHED = Path(__file__).parents[2] / "data" / "flashinfer-trace"
GEMM: dict[str, Any] = {
    "name": "gemm_n8_k4",
    "op_type": "gemm",
    "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 8}, "K": {"type": "const", "value": 4}},
    "inputs": {"A": {"shape": ["M", "K"], "dtype": "float16"}, "B": {"shape": ["N", "K"], "dtype": "float16"}},
    "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16"}},
    "reference": "def run(A, B):\n    return A @ B.T",
}
NAMES = st.from_regex(r"\A[a-z][a-z0-9_]{0,8}\Z").filter(lambda name: name.isidentifier() and name != "as")


@st.composite
def definitions(draw: st.DrawFn) -> Definition:
    axes = draw(st.dictionaries(NAMES, st.one_of(st.none(), st.integers(0, 2**40)), min_size=1, max_size=4))
    names = draw(st.lists(st.from_regex(r"\A[t-z][0-9]{1,4}\Z"), min_size=1, max_size=6, unique=True))
    shapes = st.one_of(st.none(), st.lists(st.sampled_from(sorted(axes)), max_size=4))
    tensors = {name: {"shape": draw(shapes), "dtype": draw(st.sampled_from(DTYPES))} for name in names}
    cut = draw(st.integers(0, len(names)))
    document = {
        "name": draw(NAMES),
        "op_type": draw(NAMES),
        "axes": {a: {"type": "var"} if n is None else {"type": "const", "value": n} for a, n in axes.items()},
        "inputs": {name: tensors[name] for name in names[:cut]},
        "outputs": {name: tensors[name] for name in names[cut:]},
        "reference": f"def run({', '.join(names[:cut])}): ...",
    }
    optional = {
        "tags": draw(st.lists(st.text(min_size=1, max_size=9).filter(str.isprintable))),
        "description": draw(st.one_of(st.none(), st.text())),
        "constraints": draw(st.lists(st.sampled_from(["M == N", " x.shape[0] > 1", "a % 2 == 0"]))),
    }
    return Definition.model_validate(
        document | {key: optional[key] for key in draw(st.sets(st.sampled_from([*optional])))}
    )


def refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        from_bytes(orjson.dumps(GEMM | change))


def test_all_published_definitions_are_written_as_they_were_read() -> None:
    paths = files(PUBLISHED / "definitions", "json")
    assert len(paths) == 78
    for path in paths:
        again = orjson.loads(to_bytes(file.read(path)))
        assert again == orjson.loads(path.read_bytes())
        assert list(again["inputs"]) == list(orjson.loads(path.read_bytes())["inputs"])


def test_two_published_references_take_their_inputs_in_another_order() -> None:
    told = {p.stem: check_definition(file.read(p)) for p in files(PUBLISHED / "definitions", "json")}
    wrong = {name: reasons for name, reasons in told.items() if reasons}
    assert sorted(wrong) == [
        "trtllm_fp4_block_scale_moe_topk1_e128_h5120_i8192",
        "trtllm_fp8_per_tensor_scale_moe_topk1_e16_h5120_i8192",
    ]
    assert all("run takes routing_logits, routing_bias, hidden_states" in reasons[0] for reasons in wrong.values())


@given(definitions())
def test_what_is_written_is_read_back(definition: Definition) -> None:
    assert from_bytes(to_bytes(definition)) == definition


@given(
    st.one_of(st.binary(), st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
)
def test_arbitrary_content_is_read_or_refused(content: Any) -> None:
    raw = content if isinstance(content, bytes) else orjson.dumps(content)
    with pytest.raises(FormatError):
        from_bytes(raw)


@given(st.text())
def test_an_arbitrary_reference_is_read_or_refused(source: str) -> None:
    try:
        from_bytes(orjson.dumps(GEMM | {"reference": source}))
    except FormatError as error:
        assert error.reason.startswith("reference")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": ""}, "^Definition: name: "),
        ({"name": "../x"}, "name: must be a file name"),
        ({"name": ".."}, "name: must be a file name"),
        ({"name": "a\nb"}, "name: must be a file name"),
        ({"name": "x" * 201}, "at most 200 bytes"),
        ({"op_type": "a/b"}, "op_type: must be a file name"),
        ({"axes": {**GEMM["axes"], "M": {"type": "var", "value": 3}}}, r"axes\.M\.value: "),
        ({"axes": {**GEMM["axes"], "N": {"type": "const", "value": -1}}}, r"axes\.N\.value: "),
        ({"axes": {**GEMM["axes"], "N": {"type": "const", "value": "8"}}}, r"axes\.N\.value: "),
        ({"axes": {**GEMM["axes"], "N": {"type": "const", "value": 8.0}}}, r"axes\.N\.value: "),
        ({"axes": {"M": {"type": "var"}, "K": {"type": "var"}}}, r"inputs\.B: its axis N is not among axes"),
        ({"outputs": {"A": {"shape": ["M"], "dtype": "int8"}}}, "A: both an input and an output"),
        ({"outputs": {"C": {"shape": ["M"], "dtype": "uint8"}}}, r"outputs\.C\.dtype: "),
        ({"outputs": {"C": {"dtype": "int8"}}}, r"outputs\.C\.shape: Field required"),
        ({"tags": [""]}, r"tags\.0: "),
        ({"constraints": ["M =="]}, "constraints: no valid Python"),
        ({"constraints": ["M = N"]}, "constraints: no valid Python"),
        ({"sources": []}, "sources: "),
        ({"reference": "..."}, "reference: defines no plain function run"),
        ({"reference": "def f():\n    def run(A, B): ..."}, "no plain function run"),
        ({"reference": "async def run(A, B): ..."}, "no plain function run"),
        ({"reference": "run = print"}, "no plain function run"),
        ({"reference": "def run(A): ..."}, "takes 1 parameters, but is given 2"),
        ({"reference": "def run(A, B, C): ..."}, "takes 3 parameters, but is given 2"),
        ({"reference": "def run(A, B, *, c): ..."}, "keyword-only parameter without a default"),
        ({"reference": "def run(A, B) return A"}, "no valid Python: .* \\(line 1\\)"),
        ({"reference": "def run(A, B): ...\0"}, "no valid Python: it has a zero byte"),
        ({"reference": "-" * 400_000 + "1"}, "nested too deeply"),
        ({"reference": "(" * 5_000}, "no valid Python: too many nested"),
        ({"reference": "x = " + "+1" * 200_000}, "nested too deeply"),
        ({"reference": "#" * (1 << 19) + "#"}, "longer than 524288 characters"),
    ],
)
def test_what_flashinfer_bench_could_not_use_is_refused(change: dict[str, Any], reason: str) -> None:
    refused(change, reason)


@pytest.mark.parametrize(
    "source",
    ["def run(*inputs): ...", "def run(A, B, C=1, *, d=2): ...", "def run(A, /, B=None): ...", "def run(x, y): ..."],
)
def test_run_may_be_anything_that_takes_the_inputs_by_position(source: str) -> None:
    assert from_bytes(orjson.dumps(GEMM | {"reference": source}))


def test_a_reference_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    source = f"open({str(ran)!r}, 'w')\ndef run(A, B=open({str(ran)!r}, 'w')): ..."
    from_bytes(orjson.dumps(GEMM | {"reference": source, "constraints": [f"open({str(ran)!r}, 'w')"]}))
    assert not ran.exists()


def test_null_tags_and_constraints_are_read_as_none_and_not_written() -> None:
    definition = from_bytes(orjson.dumps(GEMM | {"tags": None, "constraints": None}))
    assert (definition.tags, definition.constraints) == ([], [])
    assert b"null" not in to_bytes(definition)


def test_a_scalar_and_a_tensor_without_dimensions_stay_apart() -> None:
    inputs = {"A": {"shape": [], "dtype": "float32"}, "B": {"shape": None, "dtype": "float32"}}
    definition = from_bytes(orjson.dumps(GEMM | {"inputs": inputs}))
    assert (definition.inputs["A"].shape, definition.inputs["B"].shape) == ([], None)
    assert orjson.loads(to_bytes(definition))["inputs"] == inputs


def test_a_definition_made_in_python_is_written_with_its_axis_types() -> None:
    definition = Definition(
        **{**GEMM, "axes": {"M": file.AxisVar(), "N": file.AxisConst(value=8), "K": file.AxisConst(value=4)}}
    )
    assert orjson.loads(to_bytes(definition)) == GEMM


def test_a_shape_becomes_sizes_and_an_unbound_axis_is_named() -> None:
    definition = from_bytes(orjson.dumps(GEMM))
    assert definition.sizes(["M", "K"], {"M": 3}) == (3, 4)
    assert (definition.const_axes, definition.var_axes) == ({"N": 8, "K": 4}, ["M"])
    with pytest.raises(ValueError, match="axis M of gemm_n8_k4 has no size"):
        definition.sizes(["M"], {})


def test_parameters_under_other_names_are_told() -> None:
    told = [
        check_definition(from_bytes(orjson.dumps(GEMM | {"reference": f"def run({names}): ..."})))
        for names in ("B, A", "A, C=1", "A, B, C=1", "A, *others", "*inputs")
    ]
    assert told == [
        ["reference: run takes B, A; the inputs are A, B"],
        ["reference: run takes A, C; the inputs are A, B"],
        [],
        [],
        [],
    ]


def test_a_variable_axis_that_no_input_has_is_told() -> None:
    axes = {**GEMM["axes"], "P": {"type": "var"}}
    assert check_definition(from_bytes(orjson.dumps(GEMM | {"axes": axes}))) == [
        "axes.P: variable, but no input has it"
    ]
