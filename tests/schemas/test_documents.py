"""The documents' own examples: each is read, or refused for what is wrong with it, and read once that is mended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter

from kcap.errors import FormatError
from kcap.schemas.backendbench import parse_arguments, read
from kcap.schemas.files.jsonfile import parse_json
from kcap.schemas.files.python_source import check_positional, function
from kcap.schemas.flashinfer import agent_trace, benchmark_result, calling_record, definition, kernel_description

EXAMPLES = Path(__file__).parents[1] / "data" / "documents"
READERS: dict[str, Callable[[Path], Any]] = {
    "definition": definition.read,
    "kernel_description": kernel_description.read,
    "calling_record": calling_record.read,
    "benchmark_result": benchmark_result.read,
    "agent_trace": agent_trace.read,
}
VALID = [
    "definition_1",
    "kernel_description_1",  # with id, and code in place of reference_code in the others
    "kernel_description_3",
    "kernel_description_4",
    "kernel_description_5",
    "calling_record_1",
    "agent_trace_3",
]


Step = tuple[str, str, str]  # what is said of the example, and what mends that: replace this by that
COMMA = "trailing comma"
NO_COMMA = r":\d+:\d+: unexpected character, expected ','"
NO_RUN = "reference: defines no plain function run at its top level"
ELIDED = '"..."'
COMMA_LEFT_OUT = (NO_COMMA, '  ]\n  "axes"', '  ],\n  "axes"')
LAST_COMMA = (COMMA, '"...",', ELIDED)


def left_out(*inputs: str) -> Step:
    return NO_RUN, ELIDED, f'"def run({", ".join(inputs)}): ..."'


REFUSED: dict[str, list[Step]] = {
    "definition_2": [
        (NO_COMMA, '    ]\n  "axes"', '    ],\n  "axes"'),
        left_out("A", "B", "A_scale", "B_scale"),
    ],
    "definition_3": [COMMA_LEFT_OUT, LAST_COMMA, left_out("A", "B")],
    "definition_4": [COMMA_LEFT_OUT, left_out("A", "B", "A_scale", "B_scale")],
    "definition_5": [
        (COMMA, 'output",\n}', 'output"\n}'),
        ("op_type: Field required", '"type": "norm"', '"op_type": "norm"'),
    ],
    "definition_6": [COMMA_LEFT_OUT, LAST_COMMA, left_out("q", "k", "v")],
    "kernel_description_2": [
        (COMMA, '"value": 128 },\n  },', '"value": 128 }\n  },'),
        (COMMA, '},\n  },\n  "out', '}\n  },\n  "out'),
    ],
    "kernel_description_6": [  # a set, which JSON does not have
        (r":1\d:\d+: ", '{\n    "H_qo == H_kv * H_r"\n  }', '["H_qo == H_kv * H_r"]')
    ],
    "benchmark_result_1": [(COMMA, "1e-6,", "1e-6")],
    "benchmark_result_2": [LAST_COMMA],
    "agent_trace_1": [(COMMA, "],\n}", "]\n}")],
    "agent_trace_2": [(COMMA, "},\n  ],\n}", "}\n  ]\n}")],
}


@pytest.mark.parametrize("name", VALID)
def test_an_example_that_keeps_to_its_document_is_read(name: str) -> None:
    assert READERS[name.rsplit("_", 1)[0]](EXAMPLES / f"{name}.json")


@pytest.mark.parametrize("name", REFUSED)
def test_an_example_is_refused_for_what_is_wrong_with_it_and_read_when_mended(name: str, tmp_path: Path) -> None:
    file, text = tmp_path / "example.json", (EXAMPLES / f"{name}.json").read_text()
    reader = READERS[name.rsplit("_", 1)[0]]
    for reason, old, new in REFUSED[name]:
        file.write_text(text)
        with pytest.raises(FormatError, match=reason):
            reader(file)
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    assert reader(file)


def test_a_layout_with_comments_is_no_agent_trace() -> None:
    with pytest.raises(FormatError, match=r":4:5: "):
        agent_trace.read(EXAMPLES / "agent_trace_layout.json")


def test_a_message_may_lack_its_content() -> None:
    text = (EXAMPLES / "agent_trace_messages.json").read_text()
    with pytest.raises(FormatError, match=COMMA):
        parse_json(text.encode(), TypeAdapter(list[agent_trace.Message]), "messages")
    mended = text.replace('"user",', '"user"').encode()
    messages = parse_json(mended, TypeAdapter(list[agent_trace.Message]), "messages")
    assert [message.content is None for message in messages] == [False, True]


def test_every_example_is_in_a_test() -> None:
    listed = {*VALID, *REFUSED}
    assert {file.stem for file in EXAMPLES.glob("*_[0-9].json")} <= listed


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("axis_const", dict[str, kernel_description.Axis]),
        ("axis_var", dict[str, kernel_description.Axis]),
        ("definition_axis_const", dict[str, definition.Axis]),
        ("scalar", dict[str, dict[str, kernel_description.DescribedTensor]]),
        ("definition_scalar", dict[str, dict[str, definition.DefinitionTensor]]),
    ],
)
def test_an_example_of_a_part_is_read(name: str, model: Any) -> None:
    content = b"{%b}" % (EXAMPLES / f"{name}.json").read_bytes()
    parts = parse_json(content, TypeAdapter(model), name)
    assert TypeAdapter(model).dump_python(parts) == orjson.loads(content)


def test_the_variable_axis_of_the_newer_document_has_a_comma_too_many() -> None:
    with pytest.raises(FormatError, match="trailing comma"):
        parse_json(b"{%b}" % (EXAMPLES / "definition_axis_var.json").read_bytes(), TypeAdapter(dict), "axis")


def test_openais_response_is_read_once_its_two_commas_are_gone() -> None:
    text = (EXAMPLES / "agent_trace_response.json").read_text()
    with pytest.raises(FormatError, match="trailing comma"):
        parse_json(text.encode(), TypeAdapter(agent_trace.Response), "response")
    mended = text.replace("],\n            }", "]\n            }").replace("],\n}", "]\n}")
    assert parse_json(mended.encode(), TypeAdapter(agent_trace.Response), "response").choices[0].message.tool_calls


def test_the_example_of_code_writes_into_its_last_parameter() -> None:
    check_positional(function((EXAMPLES / "code.txt").read_text(), "run"), 3)


def test_the_example_of_a_trace_file_is_read() -> None:
    lines = [(line.operator, line.count) for line in read(EXAMPLES / "trace_file.txt")]
    assert lines == [("aten.add.Tensor", n) for n in (156, 89, 0)] + [("aten.relu.default", 234)]


def test_the_examples_of_operator_and_count_lines_are_read() -> None:
    assert list(read(EXAMPLES / "trace_operators.txt")) == []
    lines = (EXAMPLES / "trace_counts.txt").read_text().splitlines()
    assert [line.count for line in read(["Operator: aten.add.Tensor", *lines])] == [42, 0]
    with pytest.raises(FormatError, match="before any 'Operator:' line"):
        list(read(lines))


def test_the_examples_of_arguments_are_read() -> None:
    for text in (EXAMPLES / "trace_arguments.txt").read_text().splitlines():
        assert parse_arguments(text)
