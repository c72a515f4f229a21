"""Whatever a trace line can hold reads back as it was written."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from kcap.schemas.backendbench import TraceLine, parse_arguments, read, read_loss, serialize, write
from kcap.schemas.backendbench.calls import canonical
from kcap.schemas.backendbench.lexer import QUOTED_DEVICE, TORCH
from kcap.schemas.recording.dtypes import BY_WORD
from kcap.schemas.recording.values import Opaque, TensorSpec, TorchConstant

WORDS = sorted(dtype.name for dtype in BY_WORD.values())


@st.composite
def tensor_specs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4096), max_size=4)))
    strides = draw(st.none() | st.tuples(*[st.integers(0, 1 << 20)] * len(shape)))
    device = draw(st.sampled_from(["cuda", "cpu", "cuda:1", "meta"]))
    spec = canonical(TensorSpec(shape, draw(st.sampled_from(WORDS)), strides, device=device))
    return (
        spec if spec.extent * spec.bits <= 8 << 44 and spec.numel <= 2**62 else TensorSpec((), "float32", device=device)
    )


constants = st.sampled_from(sorted(TORCH.values(), key=repr)) | st.sampled_from(
    [TorchConstant("device", "cuda"), TorchConstant("device", "cuda:1"), TorchConstant("device", "cpu")]
)
opaques = st.sampled_from(
    [Opaque("ST([10, 3], f16, 7)"), Opaque("ST([2], f32,  5)"), Opaque("torch.randint(0, 9, (8,), dtype=torch.int32)")]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.sampled_from(
        ["f16", "bf16", "'f16'", "', 'f16", "it's", '"', "\\", "\ud800", "cuda:0", "torch.float16", "a\nb"]
    )
).filter(lambda value: not (isinstance(value, str) and QUOTED_DEVICE.fullmatch(value)))
values = st.recursive(
    scalars | tensor_specs() | constants | opaques, lambda inner: st.lists(inner, max_size=4), max_leaves=12
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in BY_WORD)


@st.composite
def trace_lines(draw):
    operator = draw(st.sampled_from(["aten.mm.default", "aten.add.Tensor", "_C.rms_norm.default"]))
    args = draw(st.lists(values, max_size=4))
    kwargs = draw(st.dictionaries(names, values, max_size=3))
    storages = iter(range(1000))
    renumbered = [number(value, storages) for value in args]
    return TraceLine(
        operator,
        draw(st.integers(0, 2**40)),
        renumbered,
        {name: number(value, storages) for name, value in kwargs.items()},
    )


def number(value, storages):
    """The same Value with its tensors' storages numbered in order of appearance."""
    if isinstance(value, list):
        return [number(item, storages) for item in value]
    if isinstance(value, TensorSpec):
        return TensorSpec(value.shape, value.dtype, value.strides, 0, value.device, next(storages))
    return value


@given(st.lists(values, max_size=4), st.dictionaries(names, values, max_size=3))
def test_what_is_written_reads_back(args, kwargs):
    storages = iter(range(1000))
    args = [number(value, storages) for value in args]
    kwargs = {name: number(value, storages) for name, value in kwargs.items()}
    text = serialize(args, kwargs)
    assert text.isascii() and "\n" not in text
    assert repr(parse_arguments(text)) == repr((args, kwargs))


@given(st.text())
@example("', 'f16")
@example("f16', '")
@example("f16")
def test_backendbench_sees_the_same_strings(text):
    """BackendBench replaces every `'f16'` by `f16` before it evaluates: no string may contain that."""
    line = serialize([text], {})
    for word in BY_WORD:
        assert f"'{word}'" not in line


@given(st.lists(trace_lines(), max_size=5))
def test_written_lines_read_back(tmp_path_factory, lines):
    file = tmp_path_factory.mktemp("traces") / "trace.txt"
    write(file, lines)
    assert [repr(replace(line, line=0)) for line in read(file)] == [repr(line) for line in lines]
    assert read_loss(file.with_suffix(".loss.json")).totals.written == sum(line.count for line in lines)
