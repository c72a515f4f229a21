"""`kcap export --to calling-records`: what ran for each session of an agent trace, and for each kind of turn."""

import orjson
import pytest
from bench_calls import ADD, METADATA, MM

from kcap.schemas.flashinfer import calling_record
from kcap.schemas.recording.recording import Count, load, write_recording
from kcap.schemas.recording.records import Program, Request, Step
from kcap.schemas.recording.turns import Turn, TurnAnswer, write_turns

TOOLS = ["a/b", "a b"]  # one name as files have it


@pytest.fixture
def traced(tmp_path):
    """Four steps, each one product and two additions; the third is of both sessions, the last one is not listed."""
    calls = [MM.model_copy(update={"id": 0, "counts": [Count(phase="decode", count=4)]})]
    calls.append(ADD.model_copy(update={"id": 1, "counts": [Count(phase="decode", count=8)]}))
    requests_of_steps = [[0], [1], [1, 2]]
    steps = [Step(index=i, phase="decode", program=0, requests=places) for i, places in enumerate(requests_of_steps)]
    program = Program(id=0, calls=[0, 1, 1], counts=[Count(phase="decode", count=4)])
    path = tmp_path / "agents.kcap"
    metadata = METADATA.model_copy(update={"framework": "vLLM", "model": "m"})
    requests = [Request(id=str(place), decodes=2) for place in range(3)]
    write_recording(path, metadata, calls, [program], steps, requests=requests)
    answers = [[TurnAnswer(tools=[tool], finish="tool_calls")] for tool in TOOLS] + [[TurnAnswer(finish="stop")]]
    turns = [
        Turn(number=place, session=int(place == 2), requests=[place], status=200, answers=answer)
        for place, answer in enumerate(answers)
    ]
    write_turns(path, turns)
    return path


def counts_in(file):
    return {kernel.id: kernel.count for kernel in calling_record.read(file).kernels}


def test_sessions_and_kinds_of_turns_have_records(kcap, traced, exported):
    output, _ = exported(traced, "calling-records")
    product, addition = sorted(counts_in(output / "session-0.json"), key=counts_in(output / "session-0.json").get)
    assert counts_in(output / "session-0.json") == {product: 3, addition: 6}
    assert counts_in(output / "session-1.json") == {product: 1, addition: 2}
    kinds = orjson.loads((output / "kinds.json").read_bytes())
    by_kind = {kind: counts_in(output / file) for file, kind in kinds.items()}
    assert {kind: counts[product] for kind, counts in by_kind.items()} == {"calls a/b": 1, "calls a b": 2, "stop": 1}
    assert kcap("validate", output / "session-0.json").code == 0


def test_what_is_not_listed_is_lost_and_shared_steps_are_said(traced, exported):
    _, loss = exported(traced, "calling-records")
    assert (loss["total"], loss["exported"]) == (12, 9)
    assert sum(entry["count"] for entry in loss["reduced"]) == 9
    assert "several sessions" in loss["reduced"][0]["reason"]


@pytest.mark.parametrize(("missing", "said"), [("turns", "no turns"), ("model", "has no form for vLLM with no model")])
def test_what_no_record_can_be_made_of_is_refused(kcap, traced, tmp_path, missing, said):
    if missing == "turns":
        (traced / "turns.jsonl").unlink()
    else:
        recording = load(traced)
        metadata = recording.metadata.model_copy(update={"model": None})
        turns = (traced / "turns.jsonl").read_bytes()
        write_recording(traced, metadata, recording.calls, recording.programs, recording.steps)
        (traced / "turns.jsonl").write_bytes(turns)
    done = kcap("export", traced, "--to", "calling-records", "-o", tmp_path / "out")
    assert done.code == 2 and said in done.err and not (tmp_path / "out").exists()
