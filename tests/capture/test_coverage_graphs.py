"""Which Call a kernel of a replayed graph is of: by node numbers, and by names where these do not fit."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from profiles import Profile, calls, differences, reasons

from kcap.capture.fold.coverage import Attributed, ProfiledStep, Ran, Replayed, attribute, read_trace
from kcap.capture.shards.lines import GraphLine

H200 = Path(__file__).parents[1] / "data" / "coverage" / "h200.json.gz"
REGION = Ran(0, "vllm::unified_attention", region=True)
FORWARD, MM, WIDE = Ran(1, "_vllm_fa3_C::fwd"), Ran(2, "aten::mm.out"), Ran(3, "aten::mm.out")
NORM, SILU = Ran(4, "triton::norm.ab", "norm"), Ran(5, "triton::silu.cd", "silu")
ADD, FILL = Ran(6, "aten::add"), Ran(7, "aten::zero_")
UNKNOWN = "the graph's nodes are not known, and no call of it is known to launch this"
SEVERAL = "the graph's nodes are not known, and it may be of several of its calls"


@pytest.fixture
def profile() -> Profile:
    made = Profile()
    made.step(0, 0, 1000)
    return made


def replayed(profile: Profile, *graphs: Replayed, kernels: tuple[str, ...], by: str = "cudaGraphLaunch") -> Attributed:
    for number in range(len(graphs)):
        profile.launch(100 + 100 * number, *kernels, by=by)
    return profile.one(*graphs)


def numbered(body: list[Ran], *nodes: int) -> Replayed:
    """A graph of calls that follow each other, each of so many nodes."""
    ends = list(accumulate(nodes))
    ranges = [(end - count, end) for end, count in zip(ends, nodes, strict=True)]
    return Replayed(body, sum(nodes), ranges)


def test_kernels_tell_when_they_started_and_when_they_were_launched(profile: Profile) -> None:
    profile.launch(50, "copy", by="cudaMemcpyAsync")
    result = replayed(profile, numbered([MM], 2), kernels=("gemm", "reduce"))
    times = [(kernel.start_us, kernel.launched_us) for kernel in result.kernels]
    assert times == [(0.0, -1000.0), (50.0, -949.0), (51.0, -949.0)]  # a graph's launch has returned


def test_a_kernel_of_an_unknown_launch_tells_when_it_started_alone(profile: Profile) -> None:
    profile.gpu("lost", 500.0)
    (kernel,) = profile.one(MM).kernels
    assert (kernel.start_us, kernel.launched_us) == (0.0, None)


def in_order(result: Attributed) -> list[int | None]:
    return [kernel.call for kernel in result.kernels]


@pytest.mark.parametrize("by", ["cudaGraphLaunch", "cudaGraphLaunch_v10000", "cuGraphLaunch"])
def test_nodes_tell_which_call_a_kernel_is_of(by: str, profile: Profile) -> None:
    graph = numbered([MM, NORM, REGION, FORWARD, WIDE], 2, 1, 0, 1, 1)
    result = replayed(profile, graph, kernels=("gemm", "reduce", "norm", "flash", "gemm"), by=by)
    assert in_order(result) == [2, 2, 4, 1, 3]
    assert all(kernel.graph for kernel in result.kernels)
    assert differences(result) == []


def test_a_region_has_no_nodes_of_its_own(profile: Profile) -> None:
    result = replayed(profile, Replayed([REGION, FORWARD], 2, [(0, 2), (1, 2)]), kernels=("scatter", "flash"))
    assert in_order(result) == [None, 1]
    assert reasons(result)["scatter"] == "launched by the region vllm::unified_attention itself"


def test_ranges_tell_what_lies_in_and_between_the_calls(profile: Profile) -> None:
    graph = Replayed([MM, REGION, NORM, FORWARD, WIDE], 7, [(0, 1), (2, 5), (2, 3), (4, 5), (5, 7)])
    result = replayed(profile, graph, kernels=("gemm", "stray", "norm", "scatter", "flash", "wide", "reduce"))
    assert in_order(result) == [2, None, 4, None, 1, 3, 3]
    assert reasons(result)["stray"] == "captured while no recorded call was under way"
    assert reasons(result)["scatter"] == "launched by the region vllm::unified_attention itself"


@pytest.mark.parametrize(
    ("ranges", "total"),
    [
        ([(0, 1), (1, 2)], 3),
        ([(0, 1), (1, 2)], 0),
        ([(0, 1)], 2),
        ([(0, 1), (1, 3)], 2),
        ([(-1, 1), (1, 2)], 2),
        ([(1, 0), (1, 2)], 2),
        ([(1, 2), (0, 1)], 2),
        ([(0, 1), (1, 1)], 2),
        ([(0, 1), (1, 2), (1, 2)], 2),
    ],
)
def test_ranges_that_do_not_fit_are_not_used(ranges: list[tuple[int, int]], total: int, profile: Profile) -> None:
    result = replayed(profile, Replayed([FORWARD, NORM], total, ranges), kernels=("flash", "norm"))
    assert calls(result) == {"flash": None, "norm": 4}
    assert reasons(result)["flash"] == UNKNOWN


def replay_graph(profile: Profile, *kernels: tuple[str, int, int, int | None]) -> None:
    """Replay a graph of kernels, each with its name, its start, its stream and its node's id, if that is told."""
    profile.launch(100, by="cudaGraphLaunch")
    correlation = profile.events[-1]["args"]["correlation"]
    for name, start, stream, node in kernels:
        told = {} if node is None else {"graph node id": node}
        profile.gpu(name, start, correlation=correlation, stream=stream, **told)


def test_the_ids_of_nodes_go_before_the_times(profile: Profile) -> None:
    replay_graph(profile, ("wide", 2000, 7, 12), ("gemm", 2001, 13, 10), ("flash", 2002, 7, 11))
    assert calls(profile.one(numbered([MM, FORWARD, WIDE], 1, 1, 1))) == {"gemm": 2, "flash": 1, "wide": 3}


def test_without_ids_the_start_tells_then_the_stream(profile: Profile) -> None:
    replay_graph(profile, ("wide", 2001, 13, None), ("flash", 2001, 7, None), ("gemm", 2000, 13, None))
    assert calls(profile.one(numbered([MM, FORWARD, WIDE], 1, 1, 1))) == {"gemm": 2, "flash": 1, "wide": 3}


def test_a_function_in_anothers_place_makes_the_graph_fall_back_to_names(profile: Profile) -> None:
    graph = numbered([NORM, SILU, FORWARD], 1, 1, 1)
    result = replayed(profile, graph, kernels=("silu", "norm", "flash"))
    assert calls(result) == {"silu": 5, "norm": 4, "flash": None}
    assert reasons(result)["flash"] == UNKNOWN


def test_a_function_whose_kernel_is_missing_makes_the_graph_fall_back_to_names(profile: Profile) -> None:
    result = replayed(profile, numbered([NORM, SILU], 1, 1), kernels=("norm", "flash"))
    assert calls(result) == {"norm": 4, "flash": None}


@pytest.mark.parametrize("total", [0, 3])
def test_without_ranges_names_tell(total: int, profile: Profile) -> None:
    graph = Replayed([NORM, SILU, FORWARD], total)
    result = replayed(profile, graph, kernels=("silu", "norm", "flash"))
    assert calls(result) == {"silu": 5, "norm": 4, "flash": None}


def plainly(profile: Profile, *names: tuple[str, str]) -> list[Ran]:
    """Launch kernels by operators outside of any graph."""
    for number, (operator, kernel) in enumerate(names):
        at = 500 + 20 * number
        profile.op(operator, at, at + 10)
        profile.launch(at + 5, kernel)
    return [Ran(90 + number, operator) for number, (operator, _) in enumerate(names)]


def test_names_are_learnt_from_plain_launches_of_any_step(profile: Profile) -> None:
    profile.step(1, 5000, 6000)
    profile.launch(5100, "gemm", "flash", "strange", by="cudaGraphLaunch")
    ran = plainly(profile, ("aten::mm", "gemm"), ("_vllm_fa3_C::fwd", "flash"), ("aten::add", "strange"))
    steps = [ProfiledStep(1, [Replayed([MM, FORWARD])]), ProfiledStep(0, list(ran))]
    graph, plain = profile.attribute(*steps)
    assert calls(graph) == {"gemm": 2, "flash": 1, "strange": None}
    assert calls(plain) == {"gemm": 90, "flash": 91, "strange": 92}


def test_by_name_two_calls_of_an_operator_need_a_kernel_each(profile: Profile) -> None:
    ran = plainly(profile, ("aten::mm", "gemm"))
    profile.launch(100, "gemm", "gemm", by="cudaGraphLaunch")
    profile.launch(200, "gemm", "gemm", "gemm", by="cudaGraphLaunch")
    profile.launch(300, "gemm", "gemm", "gemm", by="cudaGraphLaunch")
    result = profile.one(Replayed([MM, WIDE]), Replayed([MM, WIDE]), Replayed([MM, MM]), *ran)
    assert in_order(result) == [2, 3, None, None, None, 2, 2, 2, 90]
    assert {kernel.reason for kernel in result.kernels[2:5]} == {SEVERAL}


def test_a_name_of_two_operators_is_neithers(profile: Profile) -> None:
    ran = plainly(profile, ("aten::mm", "copy"), ("_vllm_fa3_C::fwd", "copy"))
    profile.launch(100, "copy", by="cudaGraphLaunch")
    profile.launch(200, "copy", by="cudaGraphLaunch")
    result = profile.one(Replayed([MM, FORWARD]), Replayed([FORWARD, NORM]), *ran)
    assert in_order(result)[:2] == [None, 1]
    assert result.kernels[0].reason == SEVERAL


def test_the_nth_launch_of_a_step_is_its_nth_replay(profile: Profile) -> None:
    profile.launch(100, "k", by="cudaGraphLaunch")
    profile.launch(200, "k", by="cudaGraphLaunch")
    profile.launch(300, "k", by="cudaGraphLaunch")
    result = profile.one(numbered([MM], 1), FORWARD, numbered([WIDE], 1))
    assert in_order(result) == [2, 3, None]
    assert result.kernels[2].reason == "a graph was replayed that the recorder did not see"
    assert differences(result) == [("cudaGraphLaunch", 3, 2)]


def test_a_graph_that_the_profiler_did_not_see_is_told(profile: Profile) -> None:
    profile.gpu("k", 100, correlation=0)
    assert differences(profile.one(numbered([MM], 1))) == [("cudaGraphLaunch", 0, 1)]


def test_a_graphs_calls_are_not_looked_for_among_the_operators(profile: Profile) -> None:
    profile.op("aten::mm", 10, 50)
    profile.launch(30, "eager")
    profile.launch(100, "gemm", by="cudaGraphLaunch")
    result = profile.one(numbered([MM], 1), WIDE)
    assert calls(result) == {"eager": 3, "gemm": 2}
    assert differences(result) == []


BODY = (
    "aten::linear aten::linear aten::sum.dim_IntList kcaptest::region aten::mul.Tensor kcaptest::kernel "
    "triton::scale_kernel.ab aten::zeros aten::mm aten::softmax.int aten::t aten::contiguous aten::clone "
    "triton::scale_kernel.ab"
).split()
NODES = [1, 1, 1, 0, 1, 2, 1, 1, 1, 1, 0, 1, 1, 1]


def _of_gpu(operator: str, call: int) -> Ran:
    return Ran(call, operator, "scale_kernel" if "scale" in operator else None, "region" in operator)


@pytest.mark.parametrize("nodes", [NODES, []])
def test_a_gpus_own_trace_gives_a_graphs_kernels_to_the_calls_that_the_same_eager_ones_have(nodes: Any) -> None:
    """Steps 0 and 2 replayed a graph of what steps 1 and 3 ran: a side stream, a region, Triton (torch 2.11, H200)."""
    body = [_of_gpu(operator, call) for call, operator in enumerate(BODY)]
    upload, add = Ran(50, "aten::to.dtype_layout"), Ran(51, "aten::add.Tensor")
    eager = [ProfiledStep(index, [upload, *body]) for index in (1, 3)]
    graph = numbered(body, *nodes) if nodes else Replayed(body)
    graphs = [ProfiledStep(index, [upload, graph, add]) for index in (0, 2)]
    *plain, first, second = attribute(read_trace(H200), eager + graphs)
    expected = [call for call, count in enumerate(NODES) for _ in range(count)]
    assert [in_order(result) for result in plain] == [[50, *expected]] * 2
    if not nodes:
        expected[11] = None  # a copy in a graph is a kernel of a name of its own
    assert [in_order(result) for result in (first, second)] == [[50, *expected, 51]] * 2
    assert [result.disagreements for result in (*plain, first, second)] == [[]] * 4


def branches(*kernels: str, after: dict[int, list[int]], calls: list[Ran]) -> Replayed:
    """A graph of calls of one node each."""
    ranges = [(number, number + 1) for number in range(len(kernels))]
    return Replayed(calls, len(kernels), ranges, list(kernels), after)


def test_kernels_of_branches_that_overlap_are_told_by_their_names(profile: Profile) -> None:
    """`silu` and `flash` were captured after `mm`, and run beside it."""
    body = [NORM, MM, SILU, FORWARD, WIDE]
    graph = branches("norm", "gemm", "silu", "flash", "wide", after={2: [0], 4: [1, 3]}, calls=body)
    result = replayed(profile, graph, kernels=("norm", "silu", "gemm", "flash", "wide"))
    assert in_order(result) == [4, 5, 2, 1, 3]


def test_two_kernels_of_one_name_in_branches_are_told_apart_by_the_ids_of_their_nodes(profile: Profile) -> None:
    """The second of the branches began first; neither its name nor what it waits for tells that."""
    graph = branches("norm", "gemm", "gemm", "", after={1: [0], 2: [0], 3: [1, 2]}, calls=[NORM, MM, WIDE, ADD])
    replay_graph(profile, ("norm", 2000, 7, 40), ("gemm", 2001, 13, 42), ("gemm", 2002, 7, 41))
    result = profile.one(graph)
    assert [(kernel.start_us, kernel.call) for kernel in sorted(result.kernels, key=lambda k: k.start_us)] == [
        (0.0, 4),
        (1.0, 3),
        (2.0, 2),
    ]


def test_ids_that_do_not_fit_the_names_tell_nothing(profile: Profile) -> None:
    graph = branches("norm", "gemm", after={}, calls=[NORM, MM])
    replay_graph(profile, ("norm", 2000, 7, 11), ("gemm", 2001, 7, 10))
    assert calls(profile.one(graph)) == {"norm": 4, "gemm": 2}


def test_of_two_kernels_of_one_name_the_one_runs_that_waits_for_nothing(profile: Profile) -> None:
    """The first `gemm` to start is the second to be captured: the other still waits for `flash`."""
    body = [NORM, FORWARD, MM, WIDE, ADD]
    graph = branches("norm", "flash", "gemm", "gemm", "wide", after={3: [0], 4: [2, 3]}, calls=body)
    result = replayed(profile, graph, kernels=("norm", "gemm", "flash", "gemm", "wide"))
    assert in_order(result) == [4, 3, 1, 2, 6]


def test_what_waits_for_a_join_waits_for_all_that_joins(profile: Profile) -> None:
    """Node 3 runs nothing: an event was recorded there."""
    graph = branches(
        "norm", "flash", "gemm", "", "gemm", after={2: [0], 3: [1, 2], 4: [3]}, calls=[NORM, FORWARD, MM, ADD, WIDE]
    )
    result = replayed(profile, graph, kernels=("norm", "gemm", "flash", "gemm"))
    assert in_order(result) == [4, 2, 1, 3]


def test_copies_and_fills_are_what_the_driver_makes_of_them(profile: Profile) -> None:
    graph = branches("memset", "gemm", "memcpy", after={}, calls=[FILL, MM, WIDE])
    result = replayed(profile, graph, kernels=("Memset (Device)", "gemm", "memcpy32_post"))
    assert in_order(result) == [7, 2, 3]


def test_a_kernel_of_no_node_is_told_by_what_launched_such_kernels(profile: Profile) -> None:
    graph = branches("norm", "gemm", after={}, calls=[NORM, MM])
    result = replayed(profile, graph, kernels=("norm", "gemm", "unheard of"))
    assert in_order(result) == [4, 2, None] and reasons(result)["unheard of"] == UNKNOWN


def test_nodes_whose_names_are_other_functions_are_not_believed(profile: Profile) -> None:
    graph = branches("silu", "norm", after={}, calls=[NORM, SILU])
    result = replayed(profile, graph, kernels=("silu", "norm"))
    assert calls(result) == {"silu": 5, "norm": 4}


@pytest.mark.parametrize(
    ("kernels", "after", "names"),
    [
        ([0, 1, 0], [], ["a", "b", "a"]),
        ([0, 1, 0], [(2, [0, 1])], ["a", "b", "a"]),
        ([0, 1], [], []),
        ([0, 2, 0], [], []),
        ([0, 1, 0], [(1, [2])], []),
        ([0, 1, 0], [(1, [1])], []),
    ],
)
def test_names_that_do_not_fit_a_graphs_nodes_are_not_used(
    kernels: list[int], after: list[tuple[int, list[int]]], names: list[str]
) -> None:
    """They only tell whose a kernel is: the graph itself is whole."""
    line = {"t": "graph", "id": 0, "number": 0, "calls": [], "total": 3, "names": ["a", "b"]}
    assert GraphLine.model_validate({**line, "kernels": kernels, "after": after}).node_names == names


def test_names_of_another_kind_leave_the_order(profile: Profile) -> None:
    """As a profiler names them that demangles otherwise."""
    graph = branches("_Zgemm", "_Zflash", after={}, calls=[MM, FORWARD])
    assert in_order(replayed(profile, graph, kernels=("gemm<int>()", "flash<int>()"))) == [2, 1]
