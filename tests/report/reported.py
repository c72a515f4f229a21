"""Inputs of reports, written by hand: with everything that a page shows, and with hostile texts in every place."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from pathlib import Path
from typing import Any

import orjson

from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, Sample, Tap, write_recording
from kcap.schemas.recording.records import Launch, Program, Request, SampledTensor, Step
from kcap.schemas.recording.turns import Turn, TurnAnswer, TurnMessage, Usage, write_turns
from kcap.schemas.recording.values import Drift, Folded, TensorSpec
from kcap.schemas.results import coverage
from kcap.schemas.results.applied import (
    Applied,
    Difference,
    FreshEngines,
    LogitsCompared,
    PlanCompared,
    StepsCompared,
    TokensCompared,
)
from kcap.schemas.results.bench_run import RUN_FILE, Machine, RefusedFile, RunRecord
from kcap.schemas.results.coverage import KernelTime, StepCoverage
from kcap.schemas.results.outcome import (
    REFERENCE_CHECKS_FILE,
    Clocked,
    Outcome,
    ReferenceCheck,
    WrongElements,
    write_outcomes,
    write_reference_checks,
)

HOSTILE = (
    r"""$\frac{$ </script><img src=x onerror="hacked=1"><script>hacked=1</script><!-- '"&lt;@@report@@ ${hacked=1} """
    + "\u202e"
)


TOKENS = ("prompt", "cached", "computed", "again")  # of a request
ATTENTION = 4  # the Call's id
PRODUCT = "gemm_bf16_n32_k64"  # the Definition of Calls 0 and 1


def tensor(name: str, *shape: int, dtype: str = "bfloat16", **more: Any) -> Argument:
    return Argument(name=name, value=TensorSpec(shape, dtype, device="cuda:0", **more))


def counts(decode: int, prefill: int = 0) -> list[Count]:
    graph = [Count(phase="decode", mode="graph", count=decode)]
    return graph + ([Count(phase="prefill", count=prefill)] if prefill else [])


class Texts:
    """`texts("operator")` is the place's name, with something hostile behind it where that is asked for."""

    def __init__(self, hostile: bool = False) -> None:
        self.hostile = hostile
        self.places: set[str] = set()

    def __call__(self, place: str) -> str:
        self.places.add(place)
        return f"{place} {HOSTILE}" if self.hostile else place

    def file(self, content: str, suffix: str, kernels: dict[str, bytes]) -> str:
        """The name of a file in kernels/ that holds the content."""
        name = f"{hashlib.sha256(content.encode()).hexdigest()}{suffix}"
        kernels[name] = content.encode()
        return name


def calls_of(texts: Texts, kernels: dict[str, bytes]) -> list[Call]:
    """Products and norms of two batch sizes, a launch with its source, one without, and a library's function."""
    launch = Launch(
        kernel=texts.file(f"def f():\n    {texts('source')!r}\n", ".py", kernels),
        fragment=texts.file(texts("fragment"), ".txt", kernels),
        function=texts("function"),
        grid=[24, 1, 1],
        constexprs={"XBLOCK": 1024, "WHAT": texts("constexpr")},
        num_warps=4,
    )
    unread = Launch(function="g", unread=texts("unread"))
    products = [
        Call(
            id=number,
            operator="aten::mm",
            args=[tensor("self", tokens, 64), tensor("mat2", 64, 32, strides=(1, 64), storage=1)],
            counts=counts(40, 2) if tokens == 1 else counts(20),
        )
        for number, tokens in enumerate((1, 16))
    ]
    fused = Call(
        id=2, operator="triton::fused.s0123", args=[tensor("in_ptr0", 16, 64)], launch=launch, counts=counts(60)
    )
    lost = Call(id=3, operator="triton::lost", launch=unread, counts=counts(3))
    attention = Call(
        id=ATTENTION,
        operator=texts("operator"),
        parent=texts("parent"),
        args=[
            tensor("q", 16, 4, 64),
            tensor(texts("argument"), 16, 8, dtype="int32", storage=1),
            Argument(name="scale", value=Drift("float")),
            Argument(name="layer", value=Folded(texts("layer"))),
            Argument(value=texts("value"), default=True),
        ],
        counts=counts(20, 2),
    )
    view = Call(id=5, operator="aten::view", work=False, args=[tensor("self", 16, 64)], counts=counts(90))
    return [*products, fused, lost, attention, view]


def samples_of(texts: Texts) -> list[Sample]:
    pages = {"1": SampledTensor(file="a.safetensors", low=3, high=511)}
    return [
        Sample(call=4, phase="decode", step=step, scalars={"2": 0.125, "9": texts("sample")}, tensors=pages)
        for step in range(6)
    ]


def profiled_steps(texts: Texts) -> list[StepCoverage]:
    """Two decode steps of a graph, one after the other with a gap; times of Calls add up to whole microseconds."""
    ran = [(0, 5.0), (2, 2.0), (4, 8.0), (1, 5.0), (None, 1.0)]
    starts = (0.0, 5.0, 7.5, 40.0, 45.0)
    steps = []
    for index in range(2):
        launched = [
            KernelTime(name=texts("kernel"), us=us, call=call, start_us=start, reason=None if call is not None else "x")
            for (call, us), start in zip(ran, starts, strict=True)
        ]
        facts = {"phase": "decode", "tokens": 16, "sequences": 16, "mode": "full", "padded": 16}
        steps.append(StepCoverage(index=index, gpu_us=21.0, explained_us=20.0, kernels=launched, **facts))
    return steps


def metadata_of(texts: Texts) -> Metadata:
    unexplained = [{"name": texts("unexplained"), "reason": texts("reason"), "count": 2, "us": 2.0}]
    return Metadata(
        model=texts("model"),
        framework=texts("framework"),
        device=texts("device"),
        complete=False,
        steps={"decode": 20, "prefill": 2},
        batches=[
            {"phase": "decode", "sequences": n, "tokens": n, "steps": 5, "mode": "full", "padded": 16}
            for n in (1, 4, 9, 16)
        ]
        + [{"phase": "prefill", "sequences": 1, "tokens": 512, "steps": 2}],
        taps=[
            Tap(name=texts("tap"), status="off", detail=texts("detail")),
            Tap(name="broken", status="failed", detail=texts("failure")),
        ],
        dropped={"overflow": 3, texts("dropped"): 2},
        notes=[texts("note")],
        coverage={"share": 0.952, "gpu_us": 42.0, "explained_us": 40.0, "unexplained": unexplained},
    )


def programs_of(calls: list[Call]) -> list[Program]:
    """What each decode step and each prefill step ran, of these Calls."""
    known = {call.id for call in calls}
    ran = {"decode": ([0, 0, 1, 2, 2, 2, ATTENTION], 20), "prefill": ([0, ATTENTION], 2)}
    return [
        Program(
            id=number,
            calls=[call for call in of_step if call in known],
            counts=[Count(phase=phase, count=count)],  # type: ignore[arg-type]
        )
        for number, (phase, (of_step, count)) in enumerate(ran.items())
    ]


def steps_of() -> list[Step]:
    """Decode steps of four requests, of which ten lines name the requests."""
    facts: dict[str, Any] = {"phase": "decode", "tokens": 4, "sequences": 4, "program": 0}
    named = {"requests": [0, 1, 2, 3], "queries": [1] * 4}
    return [Step(index=i, lengths=[100 + i] * 4, **facts, **(named if i < 10 else {})) for i in range(20)]


def requests_of(texts: Texts) -> list[Request]:
    """Of which the second shares blocks with the first that the cache had, and the third those that it had not."""
    facts: dict[str, Any] = {"generated": 21, "decoded": 20, "prefills": 1, "decodes": 20, "first": 0}
    tokens = [(64, 0, 64, 0), (96, 64, 32, 0), (64, 0, 64, 0), (80, 16, 70, 6)]
    return [
        Request(id=texts(f"request{n}"), blocks=[1, 2, n + 3], **dict(zip(TOKENS, of_request, strict=True)), **facts)
        for n, of_request in enumerate(tokens)
    ]


def turns_of(texts: Texts) -> list[Turn]:
    """A session whose first turn calls tools and whose second goes on with their result; one that was refused."""
    calls = [{"id": "c", "function": {"name": texts("tool"), "arguments": texts("arguments")}}]
    asked = TurnMessage(role=texts("role"), chars=12, content=texts("asked"), parts={texts("part"): 2})
    calling = TurnAnswer(
        tools=[texts("tool")], finish="tool_calls", tool_calls=calls, reasoning_content=texts("reasoning")
    )
    result = TurnMessage(role="tool", chars=5, content=texts("result"), name=texts("name"), tool_call_id=texts("call"))
    answered = TurnAnswer(chars=7, content=texts("answered"), refusal=texts("refusal"), finish=texts("finish"))
    usage = Usage(prompt=64, cached=0, generated=21)
    facts: dict[str, Any] = {"model": texts("agents model"), "status": 200}
    return [
        Turn(number=0, requests=[0], sent=100.0, first=100.5, ended=102.0, stream=True, messages=[asked],
             answers=[calling], usage=usage, tools=[texts("offered")], parameters={texts("parameter"): 0.5}, **facts),
        Turn(number=1, session=0, turn=1, parent=0, shared=2, requests=[1, 2], sent=103.0, first=103.5, ended=104.0,
             messages=[result], answers=[answered], **facts),
        Turn(number=2, session=1, requests=[3], sent=101.0, ended=101.5, model="m", status=400, error=texts("error"),
             unread=texts("unread turn")),
    ]  # fmt: skip


def write_reported(path: Path, texts: Texts, profiled: bool = True, attention: bool = True) -> Path:
    """A Recording with everything that a report shows, but where told otherwise a profile, or attention."""
    kernels: dict[str, bytes] = {}
    calls, metadata = calls_of(texts, kernels), metadata_of(texts)
    if not profiled:
        metadata = metadata.model_copy(update={"coverage": None})
    if not attention:
        calls = calls[:ATTENTION]
    samples = samples_of(texts) if attention else []
    write_recording(
        path, metadata, calls, programs_of(calls), steps_of(), samples, kernels=kernels, requests=requests_of(texts)
    )
    write_turns(path, turns_of(texts))
    if profiled:
        coverage.write(path / coverage.FILE, profiled_steps(texts))
    return path


def write_judged(folder: Path, texts: Texts) -> Path:
    """An output of `kcap bench`: one Solution passed on both Workloads, one was wrong on the second."""
    folder.mkdir()
    refused = [RefusedFile(file=texts("refused"), reason="no run")]
    run = RunRecord(
        kcap="0", path="r", identity="i", device="cpu", machine=Machine(devices=[texts("machine")]), refused=refused
    )
    (folder / RUN_FILE).write_bytes(orjson.dumps(run.model_dump(mode="json")))
    clock = {"q1_us": 1.0, "q3_us": 9.0}
    passed = {
        "status": "PASSED",
        "time": Clocked(median_us=4.0, **clock),
        "reference": Clocked(median_us=8.0, **clock),
        "floor_us": 1.0,
    }
    wrong = WrongElements(
        output=texts("output"), index=[3], expected=1.0, found=2.0, wrong=1, total=4, where="row 3 alone"
    )
    failed = {
        "status": "INCORRECT_NUMERICAL",
        "reason": texts("verdict"),
        "log": texts("log"),
        "wrong": [wrong],
    }
    outcomes = [
        Outcome(
            solution=name, author=texts("author"), definition=texts("definition"), workload=workload, count=n, **how
        )
        for name, workload, n, how in (
            ("good", "w1", 30, passed),
            ("good", "w2", 10, passed),
            ("bad", "w1", 30, passed),
            ("bad", "w2", 10, failed),
        )
    ]
    write_outcomes(folder / "outcomes.jsonl", outcomes)
    (folder / "dataset").mkdir()
    check = ReferenceCheck(definition=PRODUCT, operator="aten::mm", call=0, status="agrees")
    write_reference_checks(folder / "dataset" / REFERENCE_CHECKS_FILE, [check])
    return folder


def write_applied(file: Path, texts: Texts) -> Path:
    """An output of `kcap ab` of two plans, of which one ran nowhere."""
    difference = Difference(us=-30.0, half_interval_us=10.0, pairs=12)
    control = Difference(us=5.0, half_interval_us=9.0, pairs=12)
    gained = StepsCompared(
        phase="decode", sequences=16, steps=300, engine_us=1000.0, solutions=difference, control=control,
        predicted_us=-20.0, held=1.0,
    )  # fmt: skip
    first, second = texts("plan"), texts("other plan")
    applied = Applied(
        plans=[
            PlanCompared(plan=first, solutions={texts("author/solution"): "0" * 64}, compared=[gained]),
            PlanCompared(plan=second, solutions={}, compared=[gained.model_copy(update={"held": 0.0})]),
        ],
        quality={first: LogitsCompared(tokens=128, top1=0.992, kl=0.001, rms=0.01)},
        problems=[texts("problem")],
        fresh=FreshEngines(
            engine_us=[1000.0] * 3,
            solutions_us=[970.0] * 3,
            median_ratio=0.97,
            half_interval=0.004,
            tokens=TokensCompared(requests=48, same=0.75, agreed=0.9),
        ),
    )
    file.write_bytes(applied.model_dump_json().encode())
    return file


def write_fidelity(folder: Path, texts: Texts) -> Path:
    """An output of `kcap replay --compare-engine`."""
    folder.mkdir()
    state = {"engine_us": 20.0, "replayed_us": 19.0, "missing_us": 0.0, "error": 0.05}
    kind = {"phase": "decode", "tokens": 16, "sequences": 16, "mode": "full", "padded": 16, "steps": 2}
    kinds = [{**kind, "outside": [texts("outside")], "states": {"serving": state, "Program": state}}]
    document = {
        "holds": False,
        "engine_us": 40.0,
        "replayed_us": 38.0,
        "missing_us": 0.0,
        "error": 0.05,
        "kinds": kinds,
    }
    (folder / "fidelity.json").write_bytes(orjson.dumps(document))
    return folder


def unpack(page: Path, part: str = "data") -> dict[str, Any]:
    """What a report holds: its `data`, or the `details` of its Calls."""
    found = re.search(rf'<script type="application/octet-stream" id="{part}">([^<]*)</script>', page.read_text())
    assert found is not None
    document: dict[str, Any] = orjson.loads(gzip.decompress(base64.b64decode(found[1])))
    return document
