"""Solutions in the place of registered operators: exactly where they were judged, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from applied_plans import plan_of, python_solution

import kcap
from kcap.bench.apply.matching import Matching
from kcap.bench.apply.process import place
from kcap.bench.apply.seams import NoSeam, Operators, Replacements, copies_of, values_of
from kcap.bench.apply.views import NoView, views_of
from kcap.schemas.derive.derive import derive
from kcap.schemas.recording.recording import Recording
from kcap.schemas.results.plan import Plan

X, W, OUT = torch.randn(4, 8), torch.randn(8, 16), torch.empty(4, 16)
MM = "def run(a, b):\n    return a @ b.T + 1.0\n"  # of the Definition, whose second input is transposed


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A product into a tensor, one that is returned, and a sum: each on one shape."""
    output = tmp_path_factory.mktemp("recorded") / "out.kcap"
    with torch.no_grad(), kcap.record(output):
        torch.mm(X, W, out=OUT)
        torch.relu(X)
        torch.add(X, X, alpha=2)
        torch.softmax(X, 1)
    return kcap.load(output)


def definition_of(recording: Recording, operator: str) -> str:
    """The name of the Definition that its calls have."""
    kernels = [kernel for kernel in derive(recording).kernels if kernel.uses[0].call.operator == operator]
    assert len(kernels) == 1
    return kernels[0].definition.name


Install = Callable[..., Replacements]


@pytest.fixture
def install(recording: Recording, tmp_path: Path) -> Iterator[Install]:
    """`install(operator, source)` puts a Solution for the operator's recorded calls in."""
    seams = []

    def put_in(operator: str, source: str) -> Replacements:
        plan = plan_of(recording, python_solution(definition_of(recording, operator), source))
        replacements = Replacements(place(plan, tmp_path))
        seams.append(Operators(replacements))
        seams[-1].install()
        return replacements

    yield put_in
    for seam in seams:
        seam.uninstall()


def test_what_is_exactly_as_it_was_recorded_runs_the_solution(install: Install) -> None:
    replacements = install("aten::mm.out", MM)
    out = torch.empty(4, 16)
    assert torch.mm(X, W, out=out) is out
    torch.testing.assert_close(out, X @ W + 1.0)
    assert [one.eager for one in replacements.placed] == [1]


def test_what_the_operator_returns_is_what_the_solution_returned(install: Install) -> None:
    install("aten::relu", "def run(x):\n    return x.abs()\n")
    torch.testing.assert_close(torch.relu(X), X.abs())
    torch.testing.assert_close(torch.relu(X[:2]), X[:2].clamp(min=0))


def unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        (X[:2].clone(), W, "shape"),
        (X.t().contiguous().t(), W, "strides"),
        (X.double(), W.double(), "dtype"),
        (unaligned(X), W, "aligned"),
        (X, W[:, :8].clone(), "shape"),
    ],
)
def test_anything_else_runs_the_engines_own(
    install: Install, a: torch.Tensor, b: torch.Tensor, difference: str
) -> None:
    replacements = install("aten::mm.out", MM)
    out = torch.empty(len(a), b.shape[1], dtype=a.dtype)
    torch.mm(a, b, out=out)
    torch.testing.assert_close(out, a @ b)
    (placed,) = replacements.placed
    assert placed.eager == 0
    assert any(difference in miss for miss in placed.misses), placed.misses


def test_a_scalar_and_shared_memory_must_be_as_they_were(install: Install) -> None:
    replacements = install("aten::softmax.int", "def run(x):\n    return x * 0\n")
    assert not torch.softmax(X, 1).any()
    torch.testing.assert_close(torch.softmax(X, 0), X.exp() / X.exp().sum(0))
    assert replacements.placed[0].misses == {"argument 1: value": 1}


def test_what_shares_memory_is_told_from_what_does_not(recording: Recording) -> None:
    (call,) = [call for call in recording.calls if call.operator == "aten::add.Tensor"]
    assert Matching(call).mismatch({"0": X, "1": X, "2": 2}) == ""
    assert Matching(call).mismatch({"0": X, "1": X.clone(), "2": 2}) == "which tensors share their memory"
    assert Matching(call).mismatch({"0": X, "1": X, "2": 3}) == "argument 2: value"


def test_one_that_takes_numbers_for_tensors_is_refused(install: Install) -> None:
    """Its kernel would get `x + 1.5` with a float, which its original does not take."""
    with pytest.raises(NoSeam, match="passes numbers to it as tensors"):
        install("aten::add.Tensor", "def run(*inputs):\n    return inputs[0] * 0\n")
    torch.testing.assert_close(X + 1.5, X - -1.5)


def test_one_that_raises_is_taken_out_and_the_original_runs(install: Install) -> None:
    replacements = install("aten::mm.out", "def run(*inputs):\n    raise ValueError('not today')\n")
    told: list[BaseException] = []
    replacements.failed = lambda placed, error: told.append(error)
    for _ in range(2):
        out = torch.empty(4, 16)
        torch.mm(X, W, out=out)
        torch.testing.assert_close(out, X @ W)
    (placed,) = replacements.placed
    assert placed.off == "ValueError: not today" and len(told) == 1 and placed.eager == 0


@pytest.mark.parametrize("checks", [0, 1])
def test_one_that_raises_after_it_wrote_in_place_is_told_as_such(
    recording: Recording, tmp_path: Path, checks: int
) -> None:
    """Unless it was being checked: then it wrote to copies."""
    source = "def run(x):\n    x.zero_()\n    raise ValueError('too late')\n"
    (made,) = place(plan_of(recording, python_solution(definition_of(recording, "aten::relu"), source)), tmp_path)
    assert not made.replacement.in_place
    written = [view.model_copy(update={"argument": "0", "result": None}) for view in made.replacement.outputs]
    made.replacement = made.replacement.model_copy(update={"outputs": written, "returned": []})
    assert made.replacement.in_place
    x = torch.ones(4, 8)
    Replacements([made], checks=checks).run(made, {"0": x}, x.relu_)
    assert made.off.startswith("ValueError: too late")
    assert ("in place" in made.off) == (checks == 0) == bool((x == 0).all())


@pytest.mark.parametrize("made", ["inputs[0][:2]", "inputs[0].double()", "(inputs[0], inputs[0])"])
def test_one_that_returns_something_else_is_taken_out(install: Install, made: str) -> None:
    replacements = install("aten::relu", f"def run(*inputs):\n    return {made}\n")
    torch.testing.assert_close(torch.relu(X), X.clamp(min=0))
    assert "returned" in replacements.placed[0].off


def test_a_solution_that_calls_what_it_replaces_gets_the_original(install: Install) -> None:
    replacements = install("aten::relu", "import torch\n\ndef run(x):\n    return torch.relu(x) + 1\n")
    torch.testing.assert_close(torch.relu(X), X.clamp(min=0) + 1)
    assert replacements.placed[0].eager == 1


def test_switched_off_or_uninstalled_all_is_the_engines_own(install: Install) -> None:
    replacements = install("aten::relu", "def run(x):\n    return x * 0 + 7\n")
    replacements.on = None
    torch.testing.assert_close(torch.relu(X), X.clamp(min=0))
    replacements.on = 0
    assert (torch.relu(X) == 7).all()


def test_compiled_code_calls_it_and_nothing_is_compiled_anew(recording: Recording, tmp_path: Path) -> None:
    """Inductor's code calls `aten::mm.out`, which is looked up when it runs."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: torch.relu(torch.mm(a, b)))
    with torch.no_grad():
        plain = compiled(X, W)
        frames = torch._dynamo.utils.counters["frames"]["total"]
        plan = plan_of(recording, python_solution(definition_of(recording, "aten::mm.out"), MM))
        replacements = Replacements(place(plan, tmp_path))
        seam = Operators(replacements)
        seam.install()
        try:
            replaced = compiled(X, W)
        finally:
            seam.uninstall()
        after = compiled(X, W)
    torch.testing.assert_close(plain, torch.relu(X @ W))
    torch.testing.assert_close(replaced, torch.relu(X @ W + 1.0))
    torch.testing.assert_close(after, plain)
    assert torch._dynamo.utils.counters["frames"]["total"] == frames
    assert replacements.placed[0].eager == 1


def test_an_operator_that_the_engine_lacks_is_an_error(recording: Recording, tmp_path: Path) -> None:
    plan = plan_of(recording, python_solution(definition_of(recording, "aten::relu"), "def run(x):\n    return x\n"))
    (one,) = plan.replacements
    gone = one.model_copy(update={"call": one.call.model_copy(update={"operator": "_C::relu_of_another_release"})})
    with pytest.raises(NoSeam, match="no registered operator of this engine"):
        Operators(Replacements(place(plan.only([gone]), tmp_path))).install()


def test_arguments_that_equal_their_default_have_their_places() -> None:
    schema = torch._C._get_schema("aten::add", "Tensor")
    assert values_of(schema, (X, X), {}) == {"0": X, "1": X, "2": 1}


def test_a_cache_may_have_other_pages_than_it_had(recording: Recording) -> None:
    (call,) = [call for call in recording.calls if call.operator == "aten::relu"]
    longer = {"0": torch.randn(9, 8)}
    assert Matching(call).mismatch(longer) == "argument 0: shape"
    assert Matching(call, {"0": {0}}).mismatch(longer) == ""
    assert Matching(call, {"0": {0}}).mismatch({"0": torch.randn(9, 9)}) == "argument 0: shape"


def test_an_operator_that_writes_more_than_its_definition_says_has_no_views(recording: Recording) -> None:
    kernel = next(k for k in derive(recording).kernels if k.uses[0].call.operator == "aten::mm.out")
    use = kernel.uses[0]
    views = views_of(kernel.definition, use)
    assert [view.argument for view in views.outputs] == ["2"] and not views.returned
    more = [argument.model_copy(update={"written": True}) for argument in use.call.args]
    with pytest.raises(NoView, match="writes its argument self, which is no output"):
        views_of(kernel.definition, type(use)(use.call.model_copy(update={"args": more}), use.bind))


def test_the_plan_says_what_each_is_for(recording: Recording) -> None:
    made: Plan = plan_of(
        recording, python_solution(definition_of(recording, "aten::relu"), "def run(x):\n    return x\n")
    )
    (one,) = made.replacements
    assert (one.seam, one.call.operator, one.several) == ("operator", "aten::relu", False)
    assert [new.shape for new in one.returned] == [[4, 8]]
    assert made.saved_us("other") == pytest.approx(5.0 * one.call.total)


def test_one_that_is_wrong_on_the_engines_numbers_is_taken_out(recording: Recording, tmp_path: Path) -> None:
    """One element of the output in a hundred."""
    wrong = "def run(a, b):\n    out = a @ b.T\n    out[0, 0] += 1.0\n    return out\n"
    for source, off in ((wrong, "its output 0 is off by"), ("def run(a, b):\n    return a @ b.T\n", "")):
        plan = plan_of(recording, python_solution(definition_of(recording, "aten::mm.out"), source))
        replacements = Replacements(place(plan, tmp_path), checks=2)
        seam = Operators(replacements)
        seam.install()
        try:
            for _ in range(3):
                out = torch.empty(4, 16)
                torch.mm(X, W, out=out)
                torch.testing.assert_close(out, X @ W)
        finally:
            seam.uninstall()
        (placed,) = replacements.placed
        assert placed.off.startswith(off) and bool(placed.off) == bool(off)
        assert (placed.checked, placed.eager) == ((1, 0) if off else (2, 1))


def test_copies_share_memory_as_the_arguments_do() -> None:
    whole = torch.randn(4, 16)
    values = {"0": whole[:, :8], "1": whole[:, 8:], "2": 3}
    copies = copies_of(values, {"1"})
    assert copies is not None
    assert torch.equal(copies["0"], values["0"]) and copies["1"].stride() == values["1"].stride()
    copies["0"].as_strided((4, 16), (16, 1)).zero_()
    assert not copies["1"].any() and values["1"].any()
    assert copies_of(values, ()) == values


def test_views_of_one_tensor_must_lie_as_far_apart_as_they_did(tmp_path: Path) -> None:
    whole = torch.randn(4, 16)
    with torch.no_grad(), kcap.record(tmp_path / "out.kcap"):
        torch.mul(whole[:, :8], whole[:, 8:])
    (call,) = [call for call in kcap.load(tmp_path / "out.kcap").calls if call.operator == "aten::mul.Tensor"]
    matching = Matching(call)
    assert matching.mismatch({"0": whole[:, :8], "1": whole[:, 8:]}) == ""
    assert matching.mismatch({"0": whole[:, :8], "1": whole[:, 4:12]}) == "which tensors share their memory"
    assert matching.mismatch({"0": whole[:, :8], "1": whole[:, :8]}) == "which tensors share their memory"


def test_a_cache_with_more_pages_lies_as_the_recorded_one(tmp_path: Path) -> None:
    """Keys and values, one after the other in one memory, and what is not so."""
    cache = torch.randn(2, 3, 4, 8)
    with torch.no_grad(), kcap.record(tmp_path / "out.kcap"):
        torch.mul(cache[0], cache[1])
    (call,) = [call for call in kcap.load(tmp_path / "out.kcap").calls if call.operator == "aten::mul.Tensor"]
    matching = Matching(call, {"0": {0}, "1": {0}})
    larger, apart = torch.randn(2, 10, 4, 8), torch.randn(3, 10, 4, 8)
    assert matching.mismatch({"0": larger[0], "1": larger[1]}) == ""
    for others in ((larger[1], larger[0]), (larger[0], larger[0]), (apart[0], apart[2]), (apart[0], larger[1])):
        assert matching.mismatch(dict(zip("01", others, strict=True))) == "which tensors share their memory"
