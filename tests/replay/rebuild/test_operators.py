"""A file's word reaches registered operators and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcap.replay.rebuild import operators
from kcap.replay.rebuild.operators import Operator, resolve_operator
from kcap.schemas.derive.bound_call import Skip


@pytest.mark.parametrize(
    "name",
    [
        "aten::from_file",
        "aten::from_file.out",
        "aten::save",
        "debugprims::load_tensor",
        "torch::load_library",
        "aten::load_library",
        "__import__",
        "__import__::os",
        "os::system",
        "aten::__class__",
        "aten::add.__init__",
        "aten::mm; import os",
        "aten.mm",
        "aten::mm.nope",
        "_C::open_mem_handle",
        "_C_cache_ops::swap_blocks",
        "aten::set_data",
        "aten::record_stream",
        "_C::create_onednn_mm_handler",
        "_C::release_dnnl_matmul_handler",
        "c10d::allreduce_",
        "prim::Print",
        "profiler::_record_function_enter",
        "",
    ],
)
def test_a_name_that_is_no_kernel_never_resolves(name: str) -> None:
    with pytest.raises(Skip):
        resolve_operator(name)


@given(st.text(max_size=40))
def test_arbitrary_text_is_an_operator_or_a_reason(text: str) -> None:
    try:
        assert isinstance(resolve_operator(text), Operator)
    except Skip as reason:
        assert str(reason)


def test_a_registered_operator_resolves_to_its_overload() -> None:
    assert resolve_operator("aten::add.Tensor").schema.overload_name == "Tensor"
    assert resolve_operator("aten::mm").schema.overload_name == ""


def test_a_missing_library_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operators.LIBRARIES, "nolib", operators.Library("no-lib", ("kcap_no_such_module",)))
    with pytest.raises(Skip, match="needs no-lib: pip install no-lib"):
        resolve_operator("nolib::kernel")


SCALE = """import torch

@torch.library.custom_op("kcap_engine::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by
"""
NEGATE = """import torch

library = torch.library.Library("kcap_engine", "FRAGMENT")
library.define("negate(Tensor x) -> Tensor")
library.impl("negate", torch.neg, "CPU")
"""
BROKEN = """raise OSError("no driver")

@custom_op("kcap_engine::broken")
def broken(): ...
"""
ENDING = BROKEN.replace('OSError("no driver")', "SystemExit(3)").replace("broken", "ending")


def test_of_an_engine_only_what_registers_the_operator_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kcap_engine" / "ops").mkdir(parents=True)
    sources = {"__init__": "", "scale": SCALE, "negate": NEGATE, "broken": BROKEN, "ending": ENDING}
    for name, source in {"../__init__": "", **sources}.items():
        (tmp_path / "kcap_engine" / "ops" / f"{name}.py").write_text(source)
    (tmp_path / "kcap_engine" / "gone.py").symlink_to("nowhere")
    (tmp_path / "kcap_engine" / "folder.py").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(operators.LIBRARIES, "kcap_engine", operators.Library("engine", package="kcap_engine"))
    monkeypatch.setitem(operators.LIBRARIES, "kcap_absent", operators.Library("absent", package="kcap_absent"))
    resolved = resolve_operator("kcap_engine::scale")
    assert [argument.name for argument in resolved.schema.arguments] == ["x", "by"]
    assert torch.equal(resolved.call(torch.ones(2), 3.0), torch.full((2,), 3.0))
    assert "kcap_engine.ops.negate" not in sys.modules
    assert resolve_operator("kcap_engine::negate").call(torch.ones(1)) == -1
    for operator, reason in {
        "kcap_engine::scal": "have no operator kcap_engine::scal",
        "kcap_engine::broken": r"needs engine.*import kcap_engine.ops.broken: OSError: no driver",
        "kcap_engine::ending": r"needs engine.*import kcap_engine.ops.ending: SystemExit: 3",
        "kcap_absent::scale": r"needs absent: pip install absent .*No module named 'kcap_absent'",
    }.items():
        with pytest.raises(Skip, match=reason):
            resolve_operator(operator)


def test_an_unknown_namespace_says_so() -> None:
    with pytest.raises(Skip, match="no library is known"):
        resolve_operator("nobody::kernel")
