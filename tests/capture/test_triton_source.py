"""A Triton kernel's source, collected: whole, the same everywhere, and runnable from its text alone."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("triton")

from kcap.capture.taps.kernels import triton_source
from kcap.capture.taps.kernels.triton_functions import is_jit
from kcap.capture.taps.kernels.triton_source import Source, Unreadable, human_name, read_source

HEAD = "import triton\nimport triton.language as tl\n"
HELPERS = """
SCALE = tl.constexpr(2.5)

@triton.jit
def scaled(x):
    return x * SCALE
"""
KERNEL = """
from triton.language import math as tl_math
from triton.language.extra import libdevice
from triton.language.extra.libdevice import tanh
from helpers import scaled as grown

KIND = tl.float32
OFFSET = tl.constexpr(-0.5)
DEVICE = tl.constexpr(False)

@triton.jit
def shifted(x):
    return x + OFFSET

@triton.jit
def kept(x):
    return x

@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, LEAST: tl.constexpr = 1):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(KIND)
    if DEVICE:
        x = tanh(libdevice.exp(x))
    tl.store(out_ptr + at, kept(shifted(tl_math.exp(grown(x)))) + LEAST, mask=at < n)
"""
RUN = """
import sys, torch, triton
sys.path.insert(0, {folder!r})
from {module} import {function} as kernel
x, out = torch.linspace(-1, 1, 100), torch.zeros(100)
kernel[(4,)](x, out, 100, BLOCK=32)
print(out.tolist())
"""

Load = Callable[..., ModuleType]


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Write a module under `name` and import it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(text: str, name: str = "kernels") -> ModuleType:
        file = tmp_path / f"{name}.py"
        file.write_text(HEAD + textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return make


def inductor(number: int, names: str = "mul_silu_slice") -> str:
    return f"""
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
    @triton.jit
    def triton_poi_fused_{names}_{number}(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
        xnumel = 128
        at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
        x = triton_helpers.maximum(tl_math.abs(tl.load(in_ptr0 + at)), max(0, 1))
        tl.store(out_ptr0 + at, libdevice.sqrt(x), at < xnumel)
    """


def test_the_text_alone_gives_the_same_output_in_a_fresh_process(tmp_path: Path) -> None:
    original, alone = tmp_path / "original", tmp_path / "alone"
    original.mkdir()
    alone.mkdir()
    (original / "helpers.py").write_text(HEAD + HELPERS)
    (original / "kernels.py").write_text(HEAD + KERNEL)
    run = RUN.format(folder=str(original), module="kernels", function="kernel")
    read = run + "from kcap.capture.taps.kernels.triton_source import read_source\ns = read_source(kernel)\n"
    write = f"open({str(alone)!r} + '/recorded.py', 'w').write(s.text); print(s.function)\n"
    expected, function = python(read + write, TRITON_INTERPRET="1").splitlines()
    run = RUN.format(folder=str(alone), module="recorded", function=function)
    forget = "import sys; sys.modules['helpers'] = sys.modules['kernels'] = None\n"
    (got,) = python(forget + run, TRITON_INTERPRET="1").splitlines()
    assert got == expected
    assert len(set(eval(got))) > 90, "the kernel did compute something"


def test_interpreted_and_compiled_functions_have_one_text(load: Load, tmp_path: Path) -> None:
    """A Recording made under the interpreter names its kernels as the GPU's does."""
    load(HELPERS, "helpers")
    compiled = read_source(load(KERNEL).kernel)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom kernels import kernel\n"
    code += "from kcap.capture.taps.kernels.triton_source import read_source\nprint(read_source(kernel).id)"
    for seed in ("1", "2"):
        assert python(code, TRITON_INTERPRET="1", PYTHONHASHSEED=seed).strip() == compiled.id
        assert python(code, PYTHONHASHSEED=seed).strip() == compiled.id
    assert compiled.file == f"{compiled.digest}.py" and compiled.id == f"s{compiled.digest[:8]}"


def test_the_text_read_again_is_the_same_text(load: Load) -> None:
    """A source that changes as it is collected would have another id in the Recording of a replay."""
    load(HELPERS, "helpers")
    first = read_source(load(KERNEL).kernel)
    again = load(first.text.removeprefix(HEAD), "again")
    assert read_source(again.kernel).text == first.text


def test_a_kernel_has_one_id_whatever_number_inductor_gives_it(load: Load) -> None:
    one = read_source(load(inductor(1), "one").triton_poi_fused_mul_silu_slice_1)
    seven = read_source(load(inductor(7), "seven").triton_poi_fused_mul_silu_slice_7)
    assert one == seven
    assert (one.name, one.function) == ("mul_silu_slice", "mul_silu_slice")
    assert "def mul_silu_slice(" in one.text and "triton_poi" not in one.text


def drop(kernel: object) -> None:
    """What inductor does to a kernel that a compile worker sends to its parent process."""
    vars(kernel).update(fn=None, __globals__=None, used_global_vals=None, _hash_lock=None)


def test_a_kernel_from_a_compile_worker_has_the_same_text(load: Load) -> None:
    whole = read_source(load(inductor(1), "one").triton_poi_fused_mul_silu_slice_1)
    dropped = load(inductor(1), "two").triton_poi_fused_mul_silu_slice_1
    drop(dropped)
    tuner = SimpleNamespace(fn=dropped)
    assert read_source(tuner) == whole


def test_a_dropped_global_that_nobody_knows_is_named(load: Load) -> None:
    load(HELPERS, "helpers")
    kernel = load(KERNEL).kernel
    drop(kernel)
    with pytest.raises(Unreadable, match="'DEVICE' in kernel is \\(inductor dropped its globals\\)"):
        read_source(kernel)


@pytest.mark.parametrize("names", ["max", "tl", "lambda"])
def test_a_kernel_never_takes_the_name_of_what_it_uses(load: Load, names: str) -> None:
    """`def max` in the text would be the `max` that the kernel calls."""
    source = read_source(vars(load(inductor(3, names)))[f"triton_poi_fused_{names}_3"])
    assert (source.function, source.name) == (f"{names}_kernel", names)
    assert f"def {names}_kernel(" in source.text


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("triton_poi_fused_mul_silu_slice_1", "mul_silu_slice"),
        ("triton_red_fused_fused_add_rms_norm_0", "fused_add_rms_norm"),
        ("triton_per_fused__to_copy_add_12", "_to_copy_add"),
        ("triton_poi_fused_0", "fused"),
        ("triton_", "triton_"),
        ("_fwd_kernel_stage2", "_fwd_kernel_stage2"),
        ("triton_mm_3", "triton_mm_3"),
        ("__kernel", "_kernel"),
        ("noyau_é", "noyau__"),
    ],
)
def test_names_for_people(function: str, name: str) -> None:
    assert human_name(function) == name


def test_what_a_default_reads_of_an_object_is_kept(load: Load) -> None:
    """Kernels of vLLM take `torch.finfo(…).max` as a default."""
    kernel = load("""
        import torch
        info = torch.finfo(torch.float16)
        @triton.jit
        def kernel(x_ptr, MOST: tl.constexpr = info.max, LEAST: tl.constexpr = info.min):
            tl.store(x_ptr, min(max(tl.load(x_ptr), LEAST), MOST))
    """).kernel
    made = load(read_source(kernel).text, "made")
    assert [parameter.default for parameter in made.kernel.params[1:]] == [65504.0, -65504.0]


def test_constants_come_back_as_they_were(load: Load) -> None:
    text = """
    A, B, C, D = tl.constexpr(1e300 * 1e10), tl.constexpr(None), tl.constexpr((1, "x")), tl.constexpr(tl.bfloat16)
    E, F, G = tl.float8e5, 7, (True, 2.5)
    @triton.jit
    def kernel(x_ptr, N: tl.constexpr = (A, B, C, D, E, F, G)):
        tl.store(x_ptr, A)
    """
    first = load(text)
    made = load(read_source(first.kernel).text, "made")
    for name in "ABCDEFG":
        before, after = vars(first)[name], vars(made)[name]
        assert type(after) is type(before)
        assert getattr(after, "value", after) == getattr(before, "value", before)


def test_settings_of_the_decorator_are_kept(load: Load) -> None:
    text = """
    @triton.jit(noinline=True)
    def helper(x):
        return x
    @triton.jit(do_not_specialize=["n", 2], debug=True)
    def kernel(x_ptr, n, m):
        tl.store(x_ptr, helper(n) + m)
    """
    source = read_source(load(text).kernel)
    assert "@triton.jit(noinline=True)\ndef helper" in source.text
    assert "@triton.jit(do_not_specialize=['n', 2], debug=True)\ndef kernel" in source.text


def test_what_a_kernel_closes_over_is_kept(load: Load) -> None:
    text = """
    def make(width):
        size = tl.constexpr(width)
        @triton.jit
        def kernel(x_ptr):
            tl.store(x_ptr + tl.arange(0, size), 1.0)
        return kernel
    """
    module = load(text)
    four, eight = read_source(module.make(4)), read_source(module.make(8))
    assert "size = triton.language.constexpr(4)" in four.text
    assert four.id != eight.id


def test_an_annotation_that_names_nothing_here_is_not_evaluated(load: Load, tmp_path: Path) -> None:
    kernel = load("""
        class Pointer: pass
        @triton.jit
        def kernel(x_ptr: Pointer, N: tl.constexpr):
            tl.store(x_ptr, N)
    """).kernel
    (tmp_path / "made.py").write_text(read_source(kernel).text)
    made = importlib.import_module("made")
    assert made.kernel.constexprs == [1]


@pytest.mark.parametrize(
    ("before", "body", "reason"),
    [
        ("SIZES = [1, 2]", "tl.store(x_ptr, SIZES[0])", "'SIZES' is a list"),
        ("class Odd: pass\nodd = Odd()", "tl.store(x_ptr, odd)", "'odd' is a Odd"),
        ("def plain(x): return x", "tl.store(x_ptr, plain(1))", "'plain' is a function"),
        ("", "tl.store(x_ptr, nowhere)", "nothing says what 'nowhere' in kernel is"),
        ("import types; lost = types.ModuleType('lost')", "tl.store(x_ptr, lost.x)", "'lost' cannot be imported"),
    ],
)
def test_what_no_source_can_say_is_refused_by_name(load: Load, before: str, body: str, reason: str) -> None:
    kernel = load(f"{before}\n@triton.jit\ndef kernel(x_ptr):\n    {body}\n").kernel
    for _ in range(2):  # the second answer is a remembered one
        with pytest.raises(Unreadable, match=reason):
            read_source(kernel)


CLASHING = """
from helpers import scaled as grown, twice

SCALE = tl.constexpr(7.0)

@triton.jit
def scaled(x):
    return x + SCALE

@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, twice(scaled(x)) + grown(x) * SCALE, mask=at < n)
"""


def test_things_of_one_name_in_several_modules_are_told_apart(tmp_path: Path) -> None:
    """`scaled` and `SCALE` mean one thing in the kernel's module and another in that of what it calls."""
    original, alone = tmp_path / "original", tmp_path / "alone"
    for folder in (original, alone):
        folder.mkdir()
    (original / "helpers.py").write_text(HEAD + HELPERS + "@triton.jit\ndef twice(x):\n    return scaled(x) * 2\n")
    (original / "kernels.py").write_text(HEAD + CLASHING)
    read = f"import sys; sys.path.insert(0, {str(original)!r}); from kernels import kernel\n"
    read += "from kcap.capture.taps.kernels.triton_source import read_source\n"
    text = python(read + "print(read_source(kernel).text, end='')")
    assert text == python(read + "print(read_source(kernel).text, end='')")
    (alone / "alone.py").write_text(text)
    runs = ((original, "kernels"), (alone, "alone"))
    outputs = {python(RUN.format(folder=str(f), module=m, function="kernel"), TRITON_INTERPRET="1") for f, m in runs}
    assert len(outputs) == 1


def test_a_function_without_a_file_is_refused() -> None:
    code = """
import os; os.environ["TRITON_INTERPRET"] = "1"
import triton, triton.language as tl
space = {"triton": triton, "tl": tl}
source = "@triton.jit\\ndef kernel(x_ptr): tl.store(x_ptr, 1)"
exec(compile(source, "<made>", "exec"), space)  # as "<string>" Python 3.13 takes this program for its source
from kcap.capture.taps.kernels.triton_source import Unreadable, read_source
try:
    read_source(space["kernel"])
except Unreadable as error:
    print(error.reason)
"""
    assert "in no file" in python(code)
    with pytest.raises(Unreadable, match=r"not a function that @triton\.jit made"):
        read_source(len)


def test_a_function_is_read_once_and_forgotten_with_it(load: Load) -> None:
    load(HELPERS, "helpers")
    module = load(KERNEL)
    first = read_source(module.kernel)
    assert read_source(module.kernel) is first
    key = id(module.kernel)
    assert key in triton_source._known._entries
    del sys.modules["kernels"]
    from triton.runtime import jit

    getattr(jit, "_triton_jit_function_registry", {}).clear()
    del module
    gc.collect()
    assert key not in triton_source._known._entries


def test_a_source_that_was_exchanged_is_read_again(load: Load) -> None:
    load(HELPERS, "helpers")
    kernel = load(KERNEL).kernel
    before = read_source(kernel)
    kernel._unsafe_update_src(kernel.src.replace("+ LEAST", "- LEAST"))
    after = read_source(kernel)
    assert isinstance(after, Source) and after.id != before.id and "- LEAST" in after.text


def test_reading_needs_no_import_of_triton_or_torch() -> None:
    """The engine imports this module in every process, with or without Triton."""
    code = "import kcap.capture.taps.kernels.triton_source as _, sys\n"
    code += "print(sorted({'triton', 'torch', 'numpy'} & set(sys.modules)))"
    assert python(code).strip() == "[]"
    assert not is_jit(len)
