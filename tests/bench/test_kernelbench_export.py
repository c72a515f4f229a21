"""KernelBench's files: run as KernelBench runs them, and equal to the reference on the values that were recorded."""

from __future__ import annotations

import ast

import pytest
import torch
from bench_calls import reasons
from bench_datasets import LOOKUP, SCALE, counted, definition, of, stored, workload, write_small

from kcap.bench.exports.kernelbench import MAX_RATIO, MAX_STORED, stored_bytes
from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import ScalarInput


def files(output):
    return {f"{path.parent.name}/{path.stem}": path.read_text() for path in output.glob("level*/*.py")}


def loaded(source, precision=torch.float32):
    """As KernelBench's eval does it: every tensor, integers too, is cast; so is the module."""

    def cast(value):
        return value.to(dtype=precision) if isinstance(value, torch.Tensor) else value

    context = {}
    exec(compile(source, "<problem>", "exec"), context)
    torch.manual_seed(42)
    model = context["Model"](*map(cast, context["get_init_inputs"]())).to(dtype=precision)
    return model, [cast(value) for value in context["get_inputs"]()]


def test_problems_are_numbered_by_their_counts_and_levelled_by_their_tags(exported, tmp_path):
    output, loss = exported(write_small(tmp_path / "set"), "kernelbench")
    assert set(files(output)) == {"level1/1_scale", "level1/2_lookup", "level1/3_scale", "level2/1_masked"}
    assert (loss["total"], loss["exported"]) == (80, 65)
    assert set(reasons(loss)) == {"x::two", "x::fp8"}
    assert "one output tensor" in reasons(loss)["x::two"]
    assert "float8_e4m3fn" in reasons(loss)["x::fp8"]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_every_problem_runs_as_kernelbench_runs_it(precision, exported, tmp_path):
    output, _ = exported(write_small(tmp_path / "set"), "kernelbench")
    for source in files(output).values():
        model, inputs = loaded(source, precision)
        assert isinstance(model(*inputs), torch.Tensor)


def test_integers_are_buffers_that_no_cast_reaches(exported, tmp_path):
    output, loss = exported(write_small(tmp_path / "set"), "kernelbench")
    model, inputs = loaded(files(output)["level1/2_lookup"])
    assert model.given_rows.tolist() == [1, 0]
    assert model.given_rows.dtype == torch.int32
    assert [tensor.shape for tensor in inputs] == [(2, 4)]
    assert torch.equal(model(*inputs), inputs[0][[1, 0]])
    assert ("x::lookup", 20) in [(one["operator"], one["count"]) for one in loss["reduced"]]


def test_drawn_booleans_and_integers_are_new_each_time_and_reach_the_reference_as_they_are(exported, tmp_path):
    one = definition(
        "pick", {"x": of("n m", "int64"), "keep": of("n m", "bool")}, {"y": of("n m", "int64")},
        "torch.where(keep, x, -x)",
    )  # fmt: skip
    source = next(iter(exported_one(exported, tmp_path, one, workload(one, "w", m=64))[0].values()))
    for precision in (torch.float32, torch.bfloat16):
        model, first = loaded(source, precision)
        assert [tensor.dtype for tensor in first] == [precision, precision]
        x, keep = first[0].long(), first[1].bool()
        assert torch.equal(model(*first), torch.where(keep, x, -x))
    context = {}
    exec(source, context)
    assert not torch.equal(context["get_inputs"]()[0], context["get_inputs"]()[0])


@pytest.mark.parametrize("m", [2, 0])
def test_a_problem_of_one_constant_result_is_a_loss(m, exported, tmp_path):
    inputs = {"rows": of("m", "int32")} if m else {"x": of("m n")}
    one = definition("same", inputs, {"y": of("m")}, "rows + 1" if m else "x.sum(-1)")
    given = {"rows": stored(one, "u", "rows")} if m else {}
    blobs = {"u": {"rows": torch.zeros(m, dtype=torch.int32)}} if m else {}
    found, loss = exported_one(exported, tmp_path, one, workload(one, "u", m=m, **given), blobs=blobs)
    assert (found, "one constant result" in reasons(loss)["same"]) == ({}, True)


def test_scalars_reach_init_as_they_are(exported, tmp_path):
    output, _ = exported(write_small(tmp_path / "set"), "kernelbench")
    model, inputs = loaded(files(output)["level1/1_scale"])
    assert torch.equal(model(*inputs), inputs[0] * 0.5)
    assert inputs[0].shape == (3, 4)


def exported_one(exported, tmp_path, one, *workloads, blobs=None, counts=()):
    write_dataset(tmp_path / "one", [one], {one.name: list(workloads)}, blobs or {}, counts)
    output, loss = exported(tmp_path / "one", "kernelbench")
    return files(output), loss


def test_workloads_without_counts_count_as_one_each(exported, tmp_path):
    eps = ScalarInput(value=1.0)
    given = [workload(SCALE, uuid, m=m, eps=eps) for uuid, m in (("a", 1), ("b", 2))]
    found, loss = exported_one(exported, tmp_path, SCALE, *given)
    assert (len(found), loss["total"], loss["exported"]) == (2, 2, 2)


def test_a_workload_without_counts_beside_others_counts_as_none(exported, tmp_path):
    eps = ScalarInput(value=1.0)
    given = [workload(SCALE, uuid, m=m, eps=eps) for uuid, m in (("a", 1), ("b", 2))]
    found, loss = exported_one(exported, tmp_path, SCALE, *given, counts=[counted(SCALE, "a", 9, 0)])
    assert (len(found), loss["total"], loss["exported"]) == (2, 9, 9)


def test_recorded_values_that_are_gone_are_a_loss(exported, tmp_path):
    given = workload(LOOKUP, "gone", rows=stored(LOOKUP, "gone", "rows"))
    found, loss = exported_one(exported, tmp_path, LOOKUP, given, counts=[counted(LOOKUP, "gone", 9, 0)])
    assert (found, "not in the dataset" in reasons(loss)["x::lookup"]) == ({}, True)


def test_a_workload_that_is_no_instance_is_a_loss(exported, tmp_path):
    other = workload(SCALE, "o").model_copy(update={"axes": {}})
    found, loss = exported_one(exported, tmp_path, SCALE, other, counts=[counted(SCALE, "o", 9, 0)])
    assert (found, loss["lost"][0]["reason"], loss["exported"]) == ({}, "axes: m has no size", 0)


def test_a_blob_of_another_shape_is_refused_before_it_is_read(kcap, tmp_path):
    given = workload(LOOKUP, "u", rows=stored(LOOKUP, "u", "rows"))
    rows = torch.zeros(7, 3, dtype=torch.int32)
    write_dataset(tmp_path / "one", [LOOKUP], {"lookup": [given]}, {"u": {"rows": rows}})
    done = kcap("export", tmp_path / "one", "--to", "kernelbench", "-o", tmp_path / "out")
    assert (done.code, "rows is [7, 3]" in done.err, len(done.err.splitlines())) == (1, True, 1)


def test_values_that_cannot_fit_are_not_even_compressed():
    rows = torch.empty(1, dtype=torch.int8).expand((MAX_STORED + 1) * MAX_RATIO)  # takes a byte
    assert stored_bytes(rows) > MAX_STORED


def test_values_too_many_for_a_source_file_are_a_loss(exported, tmp_path):
    rows = torch.randint(0, 2**31 - 1, (1 << 19,), dtype=torch.int32)
    given = workload(LOOKUP, "big", m=1 << 19, rows=stored(LOOKUP, "big", "rows"))
    found, loss = exported_one(exported, tmp_path, LOOKUP, given, blobs={"big": {"rows": rows}})
    assert (found, "MiB" in reasons(loss)["lookup"]) == ({}, True)


def test_numbers_that_a_rule_draws_are_a_loss(exported, tmp_path):
    one = definition("pick", {"probs": of("m n")}, {"y": of("m", "int64")}, "probs.argmax(-1)", op_type="sampling")
    found, loss = exported_one(exported, tmp_path, one, workload(one, "p"))
    assert (found, "probs has one of its own" in reasons(loss)["pick"]) == ({}, True)


NAMES = ["x): import os  #", "self", "run", "class", "torch", 'q"""', "x\ny", "ünicode"]


def test_names_from_a_file_are_never_code(exported, tmp_path):
    inputs = {name: of("m n") for name in NAMES}
    reference = "import torch\n\n\ndef run(a, b, c, d, e, f, g, h):\n    return a + b + c + d + e + f + g + h\n"
    one = definition("names\u00e9", inputs, {"y": of("m n")}, "", reference=reference)
    found, _ = exported_one(exported, tmp_path, one, workload(one, "w"))
    (source,) = found.values()
    imported = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    plain = [n.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for n in node.names]
    assert (set(imported), set(plain)) == ({"torch"}, {"torch"})
    model, given = loaded(source)
    assert torch.allclose(model(*given), sum(given))


def test_a_tuple_of_one_output_is_unpacked(exported, tmp_path):
    one = definition("tuple", {"x": of("m n")}, {"y": of("m n")}, "(x,)")
    found, _ = exported_one(exported, tmp_path, one, workload(one, "w"))
    model, inputs = loaded(*found.values())
    assert torch.equal(model(*inputs), inputs[0])


def test_an_optional_input_that_is_left_out_is_none(exported, tmp_path):
    inputs = {"x": of("m n"), "bias": of("m n", optional=True)}
    one = definition("add", inputs, {"y": of("m n")}, "x if bias is None else x + bias")
    given = workload(one, "w").model_copy(update={"inputs": {"x": workload(one, "w").inputs["x"]}})
    found, _ = exported_one(exported, tmp_path, one, given)
    model, made = loaded(*found.values())
    assert torch.equal(model(*made), made[0])


def test_floats_of_several_dtypes_are_said_to_be_cast_to_one(exported, tmp_path):
    one = definition("mixed", {"x": of("m n", "bfloat16"), "w": of("n")}, {"y": of("m n")}, "x * w")
    _, loss = exported_one(exported, tmp_path, one, workload(one, "w"))
    assert "casts all to one" in loss["reduced"][0]["reason"]
