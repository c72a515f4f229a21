"""Merging: one Recording is itself, order and grouping do not matter, and no count is lost or made."""

from __future__ import annotations

from collections import Counter
from functools import reduce

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.errors import CallError, FormatError
from kcap.schemas.diff import diff_calls
from kcap.schemas.merge.recordings import merge_recordings
from kcap.schemas.recording.phases import PHASES
from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, Program, Recording, Sample, Step, load
from kcap.schemas.recording.recording import write_recording as write
from kcap.schemas.recording.records import Rank, Request, totals
from kcap.schemas.recording.values import TensorSpec

phases = st.sampled_from(PHASES)
counts = st.builds(
    Count, phase=phases, rank=st.integers(0, 2), mode=st.sampled_from(["eager", "graph"]), count=st.integers(1, 99)
)


def distinct(found):
    return list({(one.phase, one.rank, one.mode): one for one in found}.values())


@st.composite
def recordings(draw, hosts=False):
    """A whole Recording: Calls that differ, Programs of them (graphs among them), steps, Samples and totals."""
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["kernel", "region"])), unique=True, max_size=5)
    )
    calls = [
        Call(
            id=number,
            operator="aten::relu",
            kind=kind,
            work=size % 2 == 0,
            args=[Argument(value=TensorSpec((size,), "float32"))],
            counts=distinct(draw(st.lists(counts, max_size=4))),
        )
        for number, (size, kind) in enumerate(shapes)
    ]
    programs = list(draw(st.lists(st.builds(tuple), max_size=0)))
    for number in range(draw(st.integers(0, 3)) if calls else 0):
        graphs = [program.id for program in programs if program.kind == "graph"]
        kind = draw(st.sampled_from(["graph", "step"]))
        named = draw(st.lists(st.integers(0, len(calls) - 1), max_size=3))
        used = draw(st.lists(st.sampled_from(graphs), max_size=2)) if graphs and kind == "step" else []
        body = Program(id=number, kind=kind, calls=named, graphs=[(0, graph) for graph in used])
        if any(body.model_copy(update={"id": p.id, "counts": p.counts}) == p for p in programs):
            continue
        numbered = body.model_copy(update={"id": len(programs)})
        programs.append(numbered.model_copy(update={"counts": distinct(draw(st.lists(counts, max_size=2)))}))
    steps = [
        Step(index=index, rank=0, phase=draw(phases), program=draw(st.sampled_from([p.id for p in programs] or [None])))
        for index in range(draw(st.integers(0, 3)))
    ]
    samples = [
        Sample(
            call=one.id, phase="decode", step=draw(st.none() | st.integers(0, 3)), scalars={"0": draw(st.integers())}
        )
        for one in calls
        if draw(st.booleans())
    ]
    metadata = Metadata(
        model="m",
        framework="vLLM",
        kernel_ids="definition",
        world_size=3,
        complete=draw(st.booleans()),
        steps=dict(Counter(step.phase for step in steps)),
        batches=draw(st.lists(st.fixed_dictionaries({"phase": phases, "steps": st.integers(1, 9)}), max_size=1)),
        totals=totals(calls),
        dropped=draw(st.dictionaries(st.sampled_from(["overflow", "samples"]), st.integers(1, 9))),
        notes=draw(st.lists(st.sampled_from(["one", "two"]), unique=True)),
        command=draw(st.sampled_from([["serve"], ["other"]])),
    )
    return memory(metadata, calls, programs, steps, samples)


def memory(metadata, calls, programs=(), steps=(), samples=(), name="memory"):
    """A Recording that was never written."""
    from pathlib import Path

    made = Recording(Path(name), metadata)
    vars(made).update(calls=list(calls), programs=list(programs), steps=list(steps), samples=list(samples))
    return made


def merged(*several, hosts=False):
    found = merge_recordings(several, hosts)
    return memory(found.metadata, found.calls, found.programs, found.steps, found.samples)


def content(recording, steps=True):
    """Everything but the order of Calls, Programs, steps and Samples; `steps`: with the numbers of steps."""
    keys = {call.id: call.model_copy(update={"id": 0, "counts": []}).line() for call in recording.calls}

    def program(one):
        graphs = [(place, program(recording.programs[number])[:-1]) for place, number in one.graphs]
        return one.kind, [keys[n] for n in one.calls], graphs, tally(one.counts)

    def step(one):
        ran = None if one.program is None else program(recording.programs[one.program])[:-1]
        return one.index if steps else 0, one.rank, one.phase, ran

    metadata = recording.metadata.model_dump()
    for name in ("notes", "taps", "batches"):
        metadata[name] = sorted(map(repr, metadata[name]))
    return {
        "calls": sorted((keys[call.id], tally(call.counts)) for call in recording.calls),
        "programs": sorted(map(repr, map(program, recording.programs))),
        "steps": sorted(map(repr, map(step, recording.steps))),
        "samples": sorted(
            (keys[s.call], s.rank, s.step or 0 if steps else 0, repr(s.scalars)) for s in recording.samples
        ),
        "metadata": metadata,
    }


def tally(found):
    return sorted((one.phase, one.rank, one.mode, one.count) for one in found)


@settings(max_examples=40, deadline=None)
@given(recordings())
def test_merging_one_recording_gives_itself(a):
    same = merged(a)
    assert same.metadata == a.metadata
    for table in ("calls", "programs", "steps", "samples"):
        assert getattr(same, table) == getattr(a, table)


@settings(max_examples=40, deadline=None)
@given(recordings(), recordings(), recordings())
def test_merging_is_associative(a, b, c):
    whole = content(merged(a, b, c))
    assert content(merged(merged(a, b), c)) == whole
    assert content(merged(a, merged(b, c))) == whole


@settings(max_examples=40, deadline=None)
@given(recordings(), recordings())
def test_merging_is_commutative_but_for_the_steps_numbers(a, b):
    one, other = content(merged(a, b), steps=False), content(merged(b, a), steps=False)
    assert one.pop("metadata") == other.pop("metadata")
    assert one == other


@settings(max_examples=40, deadline=None)
@given(st.lists(recordings(), min_size=1, max_size=3))
def test_counts_add_by_call_phase_rank_and_mode(several):
    def tallied(found):
        total = Counter()
        for recording in found:
            for call in recording.calls:
                for one in call.counts:
                    total[call.operator, call.kind, repr(call.args), one.phase, one.rank, one.mode] += one.count
        return total

    whole = merged(*several)
    assert tallied([whole]) == tallied(several)
    assert whole.metadata.totals == totals(whole.calls)
    summed = reduce(lambda x, y: x + y, (Counter(one.metadata.steps) for one in several))
    assert Counter(whole.metadata.steps) == summed


@settings(max_examples=50, deadline=None)
@given(recordings(), recordings())
def test_samples_and_steps_still_name_the_calls_and_programs_they_did(a, b):
    whole = merged(a, b)
    named = [whole.calls[sample.call].args for sample in whole.samples]
    assert named == [part.calls[sample.call].args for part in (a, b) for sample in part.samples]
    ran = [whole.programs[step.program].kind for step in whole.steps if step.program is not None]
    assert ran == [part.programs[s.program].kind for part in (a, b) for s in part.steps if s.program is not None]
    assert len({(step.index, step.rank) for step in whole.steps}) == len(whole.steps)


@settings(max_examples=50, deadline=None)
@given(recordings())
def test_a_recording_does_not_differ_from_itself(a):
    assert diff_calls(a.calls, a.calls).equal


def host(*ranks, world=2, steps=5):
    one = Call(id=0, operator="aten::mm", counts=[Count(phase="decode", rank=rank, count=7) for rank in ranks])
    metadata = Metadata(model="m", framework="vLLM", world_size=world, steps={"decode": steps}, totals=totals([one]))
    return memory(metadata, [one], steps=[Step(index=3, rank=ranks[0], phase="decode")])


def ranks_of(recording):
    return sorted(one.rank for call in recording.calls for one in call.counts)


def test_ranks_that_hosts_share_are_moved_up():
    whole = merged(host(0, 1), host(0, 1), host(0, 1), hosts=True)
    assert ranks_of(whole) == [0, 1, 2, 3, 4, 5]
    assert whole.metadata.world_size == 6
    assert [step.rank for step in whole.steps] == [0, 2, 4]


def test_ranks_of_the_whole_world_stay():
    whole = merged(host(0, 1, world=4), host(2, 3, world=4), hosts=True)
    assert (ranks_of(whole), whole.metadata.world_size) == ([0, 1, 2, 3], 4)


def test_the_steps_of_hosts_are_those_of_one_run():
    whole = merged(host(0, 1), host(0, 1), hosts=True)
    assert whole.metadata.steps == {"decode": 5}
    assert [step.index for step in whole.steps] == [3, 3]


def half(*ranks, world=4, group=None, places=(), steps=5, name="half"):
    """What a host tells since format 1.4."""
    made = host(*ranks, world=world, steps=steps)
    program = Program(id=0, calls=[0], counts=[Count(phase="decode", rank=rank, count=steps) for rank in ranks])
    told = [
        Rank(rank=rank, places=dict(places), groups={"tp": list(group)} if group else {}, steps={"decode": steps})
        for rank in ranks
    ]
    metadata = made.metadata.model_copy(update={"ranks": told})
    return memory(metadata, made.calls, [program], made.steps, name=name)


def test_two_hosts_halves_of_one_run_are_one_world():
    world = range(4)
    whole = merged(half(0, 1, group=world), half(2, 3, group=world), hosts=True)
    assert (ranks_of(whole), whole.metadata.world_size) == ([0, 1, 2, 3], 4)
    assert [(rank.rank, rank.groups) for rank in whole.metadata.ranks] == [(n, {"tp": [*world]}) for n in world]
    assert whole.metadata.steps == {"decode": 5}
    assert whole.metadata.disagreements == []


def test_ranks_that_must_agree_are_compared_over_hosts():
    one, other = half(0, 1, group=range(4)), half(2, 3, group=range(4))
    vars(other)["programs"] = [other.programs[0].model_copy(update={"calls": [0, 0]})]
    found = merged(one, other, hosts=True).metadata.disagreements
    assert [(each.ranks, each.calls[0].counts) for each in found] == [([0, 2], [5, 10]), ([0, 3], [5, 10])]


def test_one_rank_of_a_world_from_two_hosts_is_refused():
    with pytest.raises(CallError, match=r"one and two both have rank 1, and one is a part of a world of 4 ranks"):
        merged(half(0, 1, name="one"), half(1, 2, name="two"), hosts=True)


def test_halves_of_one_world_are_no_runs_that_follow_one_another():
    with pytest.raises(CallError, match=r"one and two have different ranks of a world of 4: pass --hosts"):
        merged(half(0, 1, name="one"), half(2, 3, name="two"))


def test_one_rank_of_a_world_in_two_runs_ran_longer():
    whole = merged(half(0, 1), half(0, 1))
    assert [(rank.rank, rank.steps) for rank in whole.metadata.ranks] == [(n, {"decode": 10}) for n in (0, 1)]


def test_hosts_with_a_world_each_are_replicas_whose_steps_add():
    whole = merged(half(0, 1, world=2, group=(0, 1)), half(0, 1, world=2, group=(0, 1)), hosts=True)
    assert whole.metadata.steps == {"decode": 10}
    assert [(rank.rank, rank.places, rank.groups["tp"]) for rank in whole.metadata.ranks] == [
        (0, {"dp": 0}, [0, 1]),
        (1, {"dp": 0}, [0, 1]),
        (2, {"dp": 1}, [2, 3]),
        (3, {"dp": 1}, [2, 3]),
    ]


def test_replicas_on_hosts_that_know_one_another_keep_their_ranks_and_their_steps_add():
    whole = merged(half(0, 1, places={"dp": 0}), half(2, 3, places={"dp": 1}), hosts=True)
    assert ranks_of(whole) == [0, 1, 2, 3]
    assert whole.metadata.steps == {"decode": 10}


def test_runs_add_up_on_the_ranks_they_have():
    whole = merged(host(0, 1), host(0, 1))
    assert ranks_of(whole) == [0, 1]
    assert [one.count for one in whole.calls[0].counts] == [14, 14]
    assert whole.metadata.steps == {"decode": 10}
    assert [step.index for step in whole.steps] == [3, 8]


def test_blocks_of_several_runs_keep_apart_and_their_size_is_known():
    several = [host(0), host(0), host(0)]
    for one, size in zip(several, (16, 16, None), strict=True):
        one.metadata = one.metadata.model_copy(update={"block_size": size})
        vars(one)["requests"] = [Request(prompt=40, blocks=[0, 1]), Request(prompt=40, blocks=[0, 2])]
    found = merge_recordings(several, False)
    assert [request.blocks for request in found.requests] == [[0, 1], [0, 2], [3, 4], [3, 5], [6, 7], [6, 8]]
    assert found.metadata.block_size == 16
    several[1].metadata = several[1].metadata.model_copy(update={"block_size": 32})
    assert merge_recordings(several, False).metadata.block_size is None


@pytest.mark.parametrize("name", ["model", "framework_version", "engine_arguments", "layers_recorded", "recorder"])
def test_other_settings_are_refused_by_name(name):
    values = {"engine_arguments": {"eager": True}, "layers_recorded": 2, "recorder": ["dispatch_mode"]}
    other = host(0)
    other.metadata = other.metadata.model_copy(update={name: values.get(name, "other")})
    with pytest.raises(CallError, match=f"differ in {name}:"):
        merged(host(0), other)


def test_a_recording_whose_calling_record_names_operators_merges_with_one_that_names_definitions():
    older, newer = host(0), host(0)
    newer.metadata = newer.metadata.model_copy(update={"kernel_ids": "definition"})
    assert merged(older, newer).metadata.kernel_ids == "definition"


@pytest.mark.parametrize("batch", [{"phase": "decode"}, {"phase": "decode", "steps": "many"}])
def test_a_batch_without_a_number_of_steps_is_refused(batch):
    with pytest.raises(FormatError, match="number of steps"):
        merged(memory(Metadata(batches=[batch]), []))


def test_a_program_of_a_call_that_is_not_there_is_named():
    damaged = memory(Metadata(), [], [Program(id=0, calls=[4])])
    with pytest.raises(FormatError, match=r"programs\.jsonl: names a Call 4"):
        merged(damaged)


@pytest.fixture
def two(tmp_path):
    """Two Recordings with a value each, one in both, and a kernel source."""
    import hashlib

    def named(content, suffix):
        return {f"{hashlib.sha256(content).hexdigest()}.{suffix}": content}

    call = Call(id=0, operator="aten::mm", counts=[Count(phase="decode", count=3)])
    metadata = Metadata(model="m", framework="vLLM", totals=totals([call]))
    shared = named(b"both", "safetensors")
    for name in ("a", "b"):
        values = {**shared, **named(name.encode(), "safetensors")}
        write(tmp_path / name, metadata, [call], values=values, kernels=named(b"kernel " + name.encode(), "py"))
    return tmp_path / "a", tmp_path / "b"


def test_the_command_joins_files_and_derives_the_rest(two, kcap, tmp_path):
    done = kcap("merge", *two, "-o", tmp_path / "c")
    assert done.code == 0, done.err
    whole = load(tmp_path / "c")
    assert [call.total for call in whole.calls] == [6]
    assert len(list((tmp_path / "c" / "values").iterdir())) == 3
    assert len(list((tmp_path / "c" / "kernels").iterdir())) == 2
    assert orjson.loads((tmp_path / "c" / "calling_record.json").read_bytes())["kernels"][0]["count"] == 6
    assert "cnt: 6" in (tmp_path / "c" / "trace.txt").read_text()
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("turns", "windows", "said"),
    [(True, 1, "turns"), (False, 2, "windows"), (True, 2, "turns and windows"), (False, 1, "")],
)
def test_what_stays_with_each_run_is_said(turns, windows, said, two, kcap, tmp_path):
    document = load(two[0]).metadata.model_copy(update={"windows": [{"first": 0, "steps": 1}] * windows})
    (two[0] / "recording.json").write_bytes(orjson.dumps(document.model_dump(mode="json")))
    if turns:
        (two[0] / "turns.jsonl").write_bytes(b"")
    assert kcap("merge", *two, "-o", tmp_path / "c").code == 0
    notes = [f"the {said} of what was merged are in those Recordings alone"] if said else []
    assert [note for note in load(tmp_path / "c").metadata.notes if "merged" in note] == notes


def sealed(path):
    from kcap.schemas.recording.seal import seal

    metadata = load(path).metadata
    names = [one.name for one in (path / "kernels").iterdir()]
    document = metadata.model_copy(update={"seal": seal(names)}).model_dump(mode="json")
    (path / "recording.json").write_bytes(orjson.dumps(document))


def test_the_merged_sources_are_sealed_only_if_all_were(two, kcap, tmp_path, monkeypatch):
    from kcap.schemas.recording.seal import holds

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    sealed(two[0])
    assert kcap("merge", *two, "-o", tmp_path / "half").code == 0
    assert load(tmp_path / "half").metadata.seal is None
    sealed(two[1])
    assert kcap("merge", *two, "-o", tmp_path / "whole").code == 0
    names = [one.name for one in (tmp_path / "whole" / "kernels").iterdir()]
    assert holds(load(tmp_path / "whole").metadata.seal, names)


def test_a_file_that_is_not_what_its_name_says_is_refused(two, kcap, tmp_path):
    kernel = next((two[1] / "kernels").iterdir())
    kernel.write_text("import os")
    done = kcap("merge", *two, "-o", tmp_path / "c")
    assert (done.code, "was changed" in done.err) == (1, True)
    assert not (tmp_path / "c").exists()


def test_what_is_to_be_replaced_stays_where_one_of_those_to_merge_is_damaged(two, kcap, tmp_path):
    assert kcap("merge", two[0], "-o", tmp_path / "c").code == 0
    (two[1] / "coverage.jsonl").write_text("{")
    assert kcap("merge", *two, "-o", tmp_path / "c", "--force").code == 1
    assert load(tmp_path / "c").calls[0].total == 3


def test_wrong_calls_of_merge_name_the_fix(two, kcap, tmp_path, recording):
    (tmp_path / "set" / "definitions").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    a, b = two
    for args, words in (
        ((a, a, "-o", tmp_path / "c"), "given twice"),
        ((a, tmp_path / "set", "-o", tmp_path / "c"), "only Recordings, or only datasets"),
        ((tmp_path / "set", "-o", tmp_path / "c", "--hosts"), "--hosts is for Recordings"),
        ((a, b, "-o", a), "already exists"),
        ((a, b, "-o", a, "--force"), "choose another -o"),
        ((a, b, "-o", a / "in"), "choose another -o"),
        ((a, b, "-o", tmp_path / "mine", "--force"), "choose another -o"),
        ((a, recording, "-o", tmp_path / "c"), "differ in model"),
    ):
        done = kcap("merge", *args)
        assert (done.code, words in done.err, len(done.err.splitlines())) == (2, True, 1), done.err
    assert load(a).calls
