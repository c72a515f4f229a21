"""Agent traces in other tools' forms: what is written is read as it was, but for the losses that are counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kcap.errors import CallError, FormatError
from kcap.schemas.flashinfer import agent_trace
from kcap.schemas.flashinfer.agents import AgentTurns, Asked, find_form, forms, link, read_trace
from kcap.schemas.recording.turns import Turn, TurnMessage, Usage, conversation
from kcap.schemas.results.export_loss import ExportLoss, LossLedger

WHOLE = {"agent-trace", "opentelemetry"}  # lose nothing but blocks
REAL = Path(__file__).parents[2] / "data" / "chat_answers"


def written(name: str, trace: AgentTurns) -> tuple[dict[str, bytes], ExportLoss]:
    losses = LossLedger()
    files = find_form(name).write(trace, losses)
    return files, losses.loss(name, len(trace.turns))


def read(name: str, files: dict[str, bytes]) -> AgentTurns:
    """One file, or several trajectories as one list."""
    if not files:
        return AgentTurns([])
    content = b"[" + b",".join(files.values()) + b"]" if len(files) > 1 else next(iter(files.values()))
    return find_form(name).read(content, name, Counter())


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
NAME = st.sampled_from(["look", "run", "x"])
ARGUMENTS = st.sampled_from(['{"city":"Rome"}', "{}", '{"a": 1}', "half {", '{"a":{"b":[1,2]}}'])
CALLS = st.lists(
    st.tuples(st.sampled_from(["c1", "c2", "c3"]), NAME, ARGUMENTS).map(
        lambda c: {"id": c[0], "type": "function", "function": {"name": c[1], "arguments": c[2]}}
    ),
    min_size=1,
    max_size=2,
    unique_by=lambda call: call["id"],
)
ANSWER = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT | st.none()},
    optional={"tool_calls": CALLS, "reasoning_content": TEXT},
)
NEW = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXT})
    | st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT, "tool_call_id": st.sampled_from(["c1", "c9"])}),
    min_size=1,
    max_size=2,
)
COUNTS = st.integers(0, 10_000)
FIELDS = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "org/m"]), "status": st.just(200)},
    optional={
        "usage": st.builds(Usage, prompt=COUNTS, generated=COUNTS, cached=st.none() | COUNTS),
        "id": st.sampled_from(["chatcmpl-1", "x"]),
        "sent": st.floats(1e9, 2e9),
        "ended": st.floats(1e9, 2e9),
        "first": st.floats(1e9, 2e9),
        "parameters": st.fixed_dictionaries({}, optional={"max_tokens": COUNTS, "temperature": st.floats(0, 2)}),
        "stream": st.booleans(),
        "tools": st.lists(NAME, max_size=2),
    },
)
FINISH = st.sampled_from(["", "stop", "tool_calls"])


@st.composite
def conversations(draw: Any) -> list[Asked]:
    """Of one session: each turn goes on with the one before, or with the one before that."""
    system = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    asked: list[Asked] = []
    for _ in range(draw(st.integers(1, 4))):
        before = draw(st.sampled_from(asked[-2:])) if asked else None
        messages = [*before.messages, before.answer] if before else system
        asked.append(Asked([*messages, *draw(NEW)], draw(ANSWER), draw(FINISH), fields=draw(FIELDS)))
    return asked


SESSIONS = st.lists(conversations(), min_size=1, max_size=3).map(
    lambda sessions: [one for of in sessions for one in of]
)


def in_order(asked: list[Asked]) -> AgentTurns:
    """Spans have no other order than their times."""
    times = sorted(one.fields.get("sent", 0.0) for one in asked)
    return AgentTurns(
        link(
            Asked(one.messages, one.answer, one.finish, fields={**one.fields, "sent": time, "ended": max(time, 2e9)})
            for one, time in zip(asked, times, strict=True)
        )
    )


TRACES = SESSIONS.map(in_order)
SAID, TOLD = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
# One asked twice, and gone on with without its answer.
WITHOUT_ITS_ANSWER = in_order(
    [Asked([SAID, TOLD, SAID, *more], TOLD, fields={"status": 200}) for more in ([], [], [SAID])]
)


@pytest.mark.parametrize("name", forms())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(trace=TRACES)
@example(trace=WITHOUT_ITS_ANSWER)
def test_what_a_form_holds_is_read_as_it_was_written(name: str, trace: AgentTurns) -> None:
    files, loss = written(name, trace)
    held = read(name, files)
    if not loss.lost and not loss.reduced:
        assert held.turns == trace.turns
    assert name not in WHOLE or not (loss.lost or loss.reduced)
    again, nothing = written(name, held)
    assert (nothing.lost, nothing.reduced) == ([], []), "what was read is what the form holds"
    assert read(name, again) == held


@pytest.mark.parametrize("name", sorted(set(forms()) - {"mooncake"}))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(trace=TRACES)
def test_the_texts_of_every_turn_are_there_or_counted(name: str, trace: AgentTurns) -> None:
    files, loss = written(name, trace)
    content = b"".join(files.values())
    lost = sum(entry.count for entry in loss.lost)
    assert loss.exported == len(trace.turns) - lost
    texts = [
        m.content for t in trace.turns for m in t.messages if m.role == "user" and m.content and m.content.isalnum()
    ]
    if not lost:
        assert all(orjson.dumps(text)[1:-1] in content for text in texts)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(COUNTS, COUNTS, st.lists(st.integers(0, 99), max_size=4)), min_size=1, max_size=6),
    size=st.sampled_from([16, 512]),
)
def test_a_trace_without_texts_is_whole_in_mooncakes_form(lengths: list[Any], size: int) -> None:
    turns = [
        Turn(
            number=number, session=number, api="completion", status=200, sent=float(number),
            messages=[TurnMessage(role="prompt", chars=prompt)], usage=Usage(prompt=prompt, generated=generated),
        )
        for number, (prompt, generated, _) in enumerate(lengths)
    ]  # fmt: skip
    blocks = {number: ids for number, (_, _, ids) in enumerate(lengths) if ids}
    trace = AgentTurns(turns, blocks, size if blocks else 0)
    files, loss = written("mooncake", trace)
    assert read("mooncake", files) == trace
    assert (loss.lost, loss.reduced) == ([], [])


WITHOUT_TEXT = AgentTurns(
    [
        Turn(number=0, status=200, messages=[TurnMessage(role="user", chars=5)], usage=Usage(prompt=9, generated=3)),
        Turn(number=1, session=1, status=400, error="BadRequestError", messages=[TurnMessage(role="user", chars=5)]),
    ],
    {0: [0, 1]},
    16,
)


@pytest.mark.parametrize("name", forms())
def test_a_trace_without_texts_is_written_or_counted_as_lost(name: str) -> None:
    files, loss = written(name, WITHOUT_TEXT)
    assert loss.exported == len(read(name, files).turns)
    if name in WHOLE:
        assert [turn.model_copy(update={"requests": []}) for turn in WITHOUT_TEXT.turns] == read(name, files).turns
        assert [entry.reason for entry in loss.reduced] == ["the blocks of its prompt"]
    else:
        assert loss.lost


@pytest.mark.parametrize("name", forms())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=TRACES, data=st.data())
def test_a_damaged_file_is_refused_with_its_place(name: str, trace: AgentTurns, data: st.DataObject) -> None:
    files, _ = written(name, trace)
    content = bytearray(next(iter(files.values()), b"{}"))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 8))] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"null", b"[", b"1"])
        )
    try:
        find_form(name).read(bytes(content), "file", Counter())
    except FormatError as error:
        assert str(error).startswith("file")


KEYS = (
    *("messages", "conversation", "conversations", "role", "content", "steps", "source", "input", "output", "from"),
    *("request", "response", "resourceSpans", "scopeSpans", "spans", "attributes", "key", "value", "type", "metadata"),
    *("prompt", "input_length", "output_length", "hash_ids", "session_id", "tool_calls"),
)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=15,
)


@pytest.mark.parametrize("name", forms())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(document=JSON)
def test_any_json_is_read_or_refused(name: str, document: Any) -> None:
    find_form(name).reads(document)
    with contextlib.suppress(FormatError):
        find_form(name).read(orjson.dumps(document), "file", Counter())


@pytest.mark.parametrize("name", forms())
def test_a_file_is_known_by_its_content(name: str, tmp_path: Path) -> None:
    user = {"role": "user", "content": "Where?"}
    fields = {"status": 200, "sent": 1e9, "usage": Usage(prompt=5, generated=2)}
    trace = AgentTurns(link([Asked([user], {"role": "assistant", "content": "Rome"}, fields=fields)]), {0: [0]}, 16)
    ((file, content), *_) = written(name, trace)[0].items()
    path = tmp_path / f"{file}{find_form(name).suffix}"
    path.write_bytes(content)
    assert read_trace(path)[0] == read(name, {file: content})


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(CallError, match="no agent trace that kcap knows"):
        read_trace(tmp_path / "x.json")


def test_the_documents_examples_and_a_real_answer_are_read(tmp_path: Path) -> None:
    answer = orjson.loads((REAL / "required.json").read_bytes())
    request = {"type": "llm_request", "model": "m", "conversation": [{"role": "user", "content": "?"}]}
    tool = {"type": "tool_call", "tool_name": "x", "arguments": {}, "result": "sun"}
    (tmp_path / "t.json").write_bytes(orjson.dumps([{**request, "response": answer}, tool]))
    trace, losses = read_trace(tmp_path / "t.json")
    assert trace.turns[0].usage == Usage(
        prompt=38, cached=trace.turns[0].usage.cached, generated=trace.turns[0].usage.generated
    )  # type: ignore[union-attr]
    assert trace.turns[0].answers[0].tools == ["get_weather"]
    assert sum(losses.values()) == 1


def test_what_is_written_as_an_agent_trace_is_one_by_the_schema() -> None:
    files, _ = written("agent-trace", WITHOUT_TEXT)
    entries = agent_trace.from_bytes(files["trace"])
    assert isinstance(entries, list) and len(entries) == 2


def test_atif_is_what_its_own_package_reads() -> None:
    atif = pytest.importorskip("atif", reason="atif is not installed")
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"city":"Rome"}'}}
    user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    more = [user, answer, {"role": "tool", "tool_call_id": "c1", "content": "sun"}, {"role": "tool", "content": "?"}]
    fields = {"status": 200, "sent": 1e9, "usage": Usage(prompt=5, generated=2, cached=0), "model": "m"}
    turns = link(
        [Asked([user], answer, fields=fields), Asked(more, {"role": "assistant", "content": "Sun."}, fields=fields)]
    )
    (content,) = written("atif", AgentTurns(turns))[0].values()
    trajectory = atif.Trajectory.model_validate_json(content)
    assert [step.source for step in trajectory.steps] == ["user", "agent", "agent"]
    assert trajectory.steps[0].step_id == 1
    assert conversation(turns, turns[1])[0].content == "?"
