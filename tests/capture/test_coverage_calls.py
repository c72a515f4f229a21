"""Which Call a plainly launched kernel is of, by handmade traces, and what no Call explains."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest
from profiles import OTHER, Profile, calls, differences, reasons

from kcap.capture.fold.coverage import ProfiledStep, Ran

ATTENTION, FORWARD = "vllm::unified_attention", "_vllm_fa3_C::fwd"


@pytest.fixture
def profile() -> Profile:
    """One step of 1,000 µs."""
    made = Profile()
    made.step(0, 0, 1000)
    return made


def test_a_kernel_is_of_the_outermost_aten_operator(profile: Profile) -> None:
    profile.op("aten::linear", 10, 50)
    profile.op("aten::mm", 20, 40)
    profile.launch(30, "gemm")
    result = profile.one(Ran(1, "aten::linear"), Ran(2, "aten::mm"))
    assert calls(result) == {"gemm": 1}
    assert differences(result) == [("aten::mm", 0, 1)]


def test_under_autocast_casts_and_the_call_that_follows_own_their_kernels(profile: Profile) -> None:
    profile.op("aten::linear", 10, 90)
    profile.op("aten::to", 20, 40)
    profile.op("aten::copy_", 25, 35)
    profile.launch(30, "cast")
    profile.op("aten::linear", 50, 80)
    profile.op("aten::addmm", 55, 75)
    profile.launch(60, "gemm")
    result = profile.one(Ran(1, "aten::to.dtype"), Ran(2, "aten::linear"))
    assert (calls(result), differences(result)) == ({"cast": 1, "gemm": 2}, [])


def test_a_solution_in_the_place_of_an_operator_is_counted_with_what_it_runs(profile: Profile) -> None:
    solution = "solution::gemm.0123abcd"
    profile.op("aten::linear", 10, 90)
    profile.op(solution, 20, 80)
    profile.op("aten::empty", 30, 40)
    profile.launch(60, "product")
    profile.op("aten::linear", 110, 190)
    profile.op("aten::empty", 120, 130)
    profile.launch(160, "gemm")
    replaced = [Ran(1, "aten::linear", region=True), Ran(2, solution, region=True), Ran(3, "aten::empty")]
    result = profile.one(*replaced, Ran(4, "triton::product", function="product"), Ran(5, "aten::linear"))
    assert (calls(result), differences(result)) == ({"product": 4, "gemm": 5}, [])


def test_overloads_do_not_hide_a_call(profile: Profile) -> None:
    profile.op("aten::add", 10, 50)
    profile.launch(30, "add")
    assert calls(profile.one(Ran(4, "aten::add.Tensor"))) == {"add": 4}


def test_equal_operators_are_told_apart_by_their_order(profile: Profile) -> None:
    for number in range(4):
        profile.op("aten::linear", 10 + 100 * number, 60 + 100 * number)
        profile.launch(30 + 100 * number, f"gemm{number}", f"reduce{number}")
    result = profile.one(*(Ran(call, "aten::linear") for call in (5, 6, 5, 7)))
    assert calls(result) == {
        f"{kernel}{number}": call for kernel in ("gemm", "reduce") for number, call in enumerate((5, 6, 5, 7))
    }
    assert differences(result) == []


def test_an_operator_that_ends_before_a_launch_does_not_own_it(profile: Profile) -> None:
    profile.op("aten::mm", 10, 20)
    profile.launch(20.5, "stray")
    profile.op("aten::add", 21, 30)
    result = profile.one(Ran(1, "aten::mm"), Ran(2, "aten::add.Tensor"))
    assert (calls(result), reasons(result)) == (
        {"stray": None},
        {"stray": "no recorded call was under way when it was launched"},
    )


def test_aten_operators_inside_a_kernel_are_its_detail(profile: Profile) -> None:
    profile.op("_C::norm", 10, 90)
    profile.op("aten::add", 20, 30)
    profile.launch(25, "inner")
    profile.launch(40, "own")
    profile.op("aten::add", 100, 120)
    profile.launch(110, "outer")
    result = profile.one(Ran(1, "_C::norm"), Ran(2, "aten::add.Tensor"))
    assert calls(result) == {"inner": 1, "own": 1, "outer": 2}
    assert differences(result) == []


def test_in_a_region_everything_counts_on_its_own_and_its_own_launches_are_unexplained(profile: Profile) -> None:
    profile.op(ATTENTION, 10, 90)
    profile.op("aten::mul", 20, 30)
    profile.launch(25, "mul")
    profile.op(FORWARD, 40, 60)
    profile.op("aten::empty", 41, 42)
    profile.launch(50, "flash")
    profile.launch(70, "of the region")
    result = profile.one(Ran(1, ATTENTION, region=True), Ran(2, "aten::mul.Tensor"), Ran(3, FORWARD))
    assert calls(result) == {"mul": 2, "flash": 3, "of the region": None}
    assert reasons(result)["of the region"] == f"launched by the region {ATTENTION} itself"
    assert differences(result) == []


def test_a_region_of_launches_alone_is_known_from_the_recording(profile: Profile) -> None:
    profile.op(ATTENTION, 10, 90)
    profile.op("aten::mul", 20, 30)
    profile.launch(25, "mul")
    profile.launch(50, "_attention_kernel")
    triton = Ran(3, "triton::_attention_kernel.12345678", "_attention_kernel")
    result = profile.one(Ran(1, ATTENTION, region=True), Ran(2, "aten::mul.Tensor"), triton)
    assert calls(result) == {"mul": 2, "_attention_kernel": 3}
    assert differences(result) == []


def test_a_region_that_the_recording_lacks_or_calls_a_kernel_is_known_from_the_profile(profile: Profile) -> None:
    profile.op(ATTENTION, 10, 90)
    profile.op("aten::mul", 20, 30)
    profile.launch(25, "mul")
    profile.op(FORWARD, 40, 60)
    profile.launch(70, "of the region")
    inner = [Ran(2, "aten::mul.Tensor"), Ran(3, FORWARD)]
    missed, kernel = profile.one(*inner), profile.one(Ran(1, ATTENTION), *inner)
    assert calls(missed) == calls(kernel) == {"mul": 2, "of the region": None}
    assert reasons(missed)["of the region"] == f"{ATTENTION} was not recorded"
    assert reasons(kernel)["of the region"] == f"launched by the region {ATTENTION} itself"


def test_an_operator_that_begins_with_the_one_around_it_lies_inside(profile: Profile) -> None:
    profile.op("aten::mm", 10, 40)
    profile.op("aten::linear", 10, 50)
    profile.launch(30, "gemm")
    assert calls(profile.one(Ran(1, "aten::linear"))) == {"gemm": 1}


def test_a_launched_function_goes_before_the_operator_around_it(profile: Profile) -> None:
    profile.op("vllm::fused", 10, 200)
    for at, name in ((20, "add_1"), (40, "add_10"), (60, "add_1_0d1d2de"), (80, "add_1x")):
        profile.launch(at, name, by="cuLaunchKernelEx")
    ran = [
        Ran(0, "vllm::fused"),
        *(Ran(n, f"triton::{f}.ab", f) for n, f in ((1, "add_1"), (2, "add_10"), (3, "add_1"))),
    ]
    result = profile.one(*ran)
    assert calls(result) == {"add_1": 1, "add_10": 2, "add_1_0d1d2de": 3, "add_1x": 0}
    assert differences(result) == []


def test_more_launches_than_were_recorded_are_not_explained(profile: Profile) -> None:
    profile.op("aten::mm", 10, 20)
    profile.launch(15, "first")
    profile.op("aten::mm", 30, 40)
    profile.launch(35, "second")
    profile.launch(50, "scale")
    profile.launch(60, "scale")
    result = profile.one(Ran(1, "aten::mm"), Ran(2, "triton::scale.ab", "scale"))
    assert [kernel.call for kernel in result.kernels] == [1, None, 2, None]
    assert reasons(result)["second"] == "aten::mm ran more often than it was recorded"
    assert differences(result) == [("aten::mm", 2, 1), ("scale", 2, 1)]


def test_of_two_functions_that_a_kernel_may_specialize_it_is_the_longer(profile: Profile) -> None:
    profile.launch(20, "norm_2d_0d1d")
    profile.launch(30, "norm_0d1d")
    result = profile.one(Ran(1, "triton::norm.ab", "norm"), Ran(2, "triton::norm_2d.ab", "norm_2d"))
    assert calls(result) == {"norm_2d_0d1d": 2, "norm_0d1d": 1}


def test_an_invented_call_is_named_though_the_profiler_never_saw_its_operator(profile: Profile) -> None:
    assert differences(profile.one(Ran(1, "aten::bmm"))) == [("aten::bmm", 0, 1)]


def test_an_operator_that_the_recorder_missed_is_named(profile: Profile) -> None:
    profile.op("_C::lost", 10, 40)
    profile.op("aten::add", 15, 30)
    profile.launch(20, "lost")
    result = profile.one(Ran(1, "aten::add.Tensor"))
    assert reasons(result) == {"lost": "_C::lost was not recorded"}
    assert differences(result) == [("_C::lost", 1, 0), ("aten::add", 0, 1)]


def test_a_call_that_only_a_library_makes_disagrees_with_nothing(profile: Profile) -> None:
    profile.launch(20, "RMSNormKernel")
    result = profile.one(Ran(1, "flashinfer::rmsnorm"))
    assert (calls(result), differences(result)) == ({"RMSNormKernel": None}, [])


def test_a_span_around_a_library_call_makes_it_a_call(profile: Profile) -> None:
    profile.op("kcap:call:flashinfer::rmsnorm", 10, 50, cat="user_annotation")
    profile.launch(20, "RMSNormKernel")
    result = profile.one(Ran(1, "flashinfer::rmsnorm"))
    assert (calls(result), differences(result)) == ({"RMSNormKernel": 1}, [])


@pytest.mark.parametrize("function", ["tvm::run", "pynccl::all_reduce"])
def test_the_one_function_of_a_module_in_a_kernel_is_its_detail(profile: Profile, function: str) -> None:
    """Beside the same function in a region, where it counts."""
    for at, around in ((100, "sglang::store_cache"), (200, "sglang::attend")):
        profile.op(around, at, at + 80)
        profile.op(f"kcap:call:{function}", at + 10, at + 70)
        profile.launch(at + 20, f"kernel{at}")
    result = profile.one(Ran(1, "sglang::store_cache"), Ran(2, "sglang::attend", region=True), Ran(3, function))
    assert calls(result) == {"kernel100": 1, "kernel200": 3}
    assert differences(result) == []


def test_what_a_compiler_or_an_autotuner_runs_is_no_part_of_the_step(profile: Profile) -> None:
    profile.op("aten::mm", 10, 30)
    profile.launch(20, "gemm")
    for start, end in ((100, 400), (150, 200), (500, 600)):
        profile.op("kcap:ignored", start, end, cat="user_annotation")
    profile.op("aten::zero_", 210, 230)
    profile.launch(220, "fill")
    profile.launch(300, "tuned")
    profile.launch(350, "another thread's", tid=OTHER)
    profile.op("aten::mm", 410, 430)
    profile.launch(420, "gemm")
    result = profile.one(Ran(1, "aten::mm"), Ran(1, "aten::mm"))
    assert calls(result) == {"gemm": 1, "another thread's": None}
    assert differences(result) == []


def test_ranges_that_are_no_operators_are_looked_through(profile: Profile) -> None:
    for name in (
        "Torch-Compiled Region: 0/0",
        "autograd::engine::evaluate_function: MmBackward0",
        "triton_poi_fused_1",
    ):
        profile.op(name, 10, 90)
    profile.op("aten::mm", 20, 80)
    profile.op("## Call CompiledFxGraph a::b ##", 25, 70, cat="user_annotation")
    profile.launch(30, "gemm")
    result = profile.one(Ran(1, "aten::mm"))
    assert (calls(result), differences(result)) == ({"gemm": 1}, [])


def test_threads_do_not_own_each_others_kernels(profile: Profile) -> None:
    profile.op("aten::mm", 10, 90)
    profile.op("aten::copy_", 10, 90, tid=OTHER)
    profile.launch(50, "gemm")
    profile.launch(50, "Memcpy DtoH", tid=OTHER)
    result = profile.one(Ran(1, "aten::mm"), Ran(2, "aten::copy_"))
    assert calls(result) == {"gemm": 1, "Memcpy DtoH": None}
    assert reasons(result)["Memcpy DtoH"] == "launched by another thread than the step's"
    assert differences(result) == [("aten::copy_", 0, 1)]


def test_what_no_step_launched_is_no_steps(profile: Profile) -> None:
    profile.step(5, 3000, 4000)
    profile.op("aten::mm", 1100, 1200)
    profile.launch(1150, "between")
    profile.launch(3500, "of a step that is not asked for")
    profile.gpu("before all", -50, correlation=None)
    assert profile.one().kernels == []


def test_a_step_of_two_spans_is_one(profile: Profile) -> None:
    profile.step(0, 2000, 2500)  # sampling, apart from the forward
    for start in (10, 1500, 2100):
        profile.op("aten::argmax", start, start + 50)
        profile.launch(start + 20, f"argmax{start}")
    result = profile.one(Ran(1, "aten::argmax"), Ran(2, "aten::argmax"))
    assert calls(result) == {"argmax10": 1, "argmax2100": 2}
    assert differences(result) == []


def test_steps_keep_their_own_order(profile: Profile) -> None:
    profile.step(1, 2000, 3000)
    for start in (10, 2010):
        profile.op("aten::mm", start, start + 50)
        profile.launch(start + 20, f"gemm{start}")
    first, second = profile.attribute(ProfiledStep(1, [Ran(2, "aten::mm")]), ProfiledStep(0, [Ran(1, "aten::mm")]))
    assert (first.index, calls(first)) == (1, {"gemm2010": 2})
    assert (second.index, calls(second)) == (0, {"gemm10": 1})


def test_two_steps_of_one_index_are_refused(profile: Profile) -> None:
    with pytest.raises(ValueError, match="two steps of index 0"):
        profile.attribute(ProfiledStep(0, []), ProfiledStep(0, []))


@pytest.mark.parametrize("args", [{}, {"correlation": None}, {"correlation": 0}, {"correlation": 999}])
def test_a_kernel_of_unknown_launch_counts_against_the_step_that_had_begun(args: Any, profile: Profile) -> None:
    profile.step(1, 5000, 6000)
    profile.gpu("orphan", 900, **args)
    result = profile.one(Ran(1, "aten::mm"))
    assert reasons(result) == {"orphan": "its launch is unknown"}


def test_a_step_that_the_trace_lacks_is_said_to_be_missing() -> None:
    result = Profile().one(Ran(1, "aten::mm"), Ran(2, "aten::add.Tensor"))
    assert (result.kernels, differences(result)) == ([], [("kcap:step:0", 0, 1)])


def test_a_launch_on_a_thread_of_another_name_is_placed_by_its_operator(profile: Profile) -> None:
    profile.op("aten::mm", 10, 50)
    profile.events[-1]["args"] = {"External id": 12}
    profile.launch(30, "gemm", tid=99999)
    profile.events[-2]["args"]["External id"] = 12
    assert calls(profile.one(Ran(1, "aten::mm"))) == {"gemm": 1}


def test_copies_and_memsets_are_attributed_too(profile: Profile) -> None:
    profile.op("aten::to", 10, 50)
    profile.launch(30, "Memcpy HtoD (Pageable -> Device)", cat="gpu_memcpy", by="cudaMemcpyAsync")
    profile.op("aten::zero_", 60, 90)
    profile.launch(70, "Memset (Device)", cat="gpu_memset", by="cudaMemsetAsync")
    result = profile.one(Ran(1, "aten::to.device"), Ran(2, "aten::zero_"))
    assert list(calls(result).values()) == [1, 2]


def test_a_trace_of_a_real_size_takes_seconds_at_most(profile: Profile) -> None:
    profile.events.clear()
    per_step, operators = 1000, 7
    for index in range(16):
        start = index * 1e6
        profile.step(index, start, start + 9e5)
        for number in range(per_step):
            at = start + 500 * number
            for depth in range(operators - 1):
                profile.op(("aten::linear", "aten::mm")[depth > 0], at + depth, at + 100 - depth)
            profile.launch(at + 50, f"gemm{number % 7}")
    assert len(profile.events) > 100_000
    ran = [Ran(number % 9, "aten::linear") for number in range(per_step)]
    began = process_time()
    result = profile.attribute(*(ProfiledStep(index, list(ran)) for index in range(16)))
    assert process_time() - began < 20  # some two seconds; a quadratic search takes minutes
    assert all(kernel.call is not None for each in result for kernel in each.kernels)
    assert sum(len(each.kernels) for each in result) == 16 * per_step


def test_the_kernels_of_a_tvm_function_are_its_calls_in_their_order(profile: Profile) -> None:
    for number in range(2):
        profile.launch(10 + 20 * number, "softmax_kernel", "softmax_kernel_1", by="cuLaunchKernelEx")
    profile.launch(50, "softmax2_kernel", "softmax_kernel_of_another")
    softmax = [Ran(call, "tvm::softmax.12345678", "softmax") for call in (1, 2)]
    result = profile.one(*softmax, Ran(3, "tvm::softmax2.12345678", "softmax2"))
    assert [(kernel.name, kernel.call) for kernel in result.kernels] == [
        *(("softmax_kernel", 1), ("softmax_kernel_1", 1), ("softmax_kernel", 2), ("softmax_kernel_1", 2)),
        *(("softmax2_kernel", 3), ("softmax_kernel_of_another", None)),
    ]
    assert differences(result) == []


def test_a_source_called_like_a_kernel_of_tvms_is_no_function_of_it(profile: Profile) -> None:
    profile.launch(10, "norm_kernel")
    result = profile.one(Ran(1, "triton::norm.ab", "norm"))
    assert calls(result) == {"norm_kernel": None}
