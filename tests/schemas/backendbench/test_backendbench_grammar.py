from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.backendbench import parse_arguments
from kcap.schemas.backendbench.grammar import _tensors
from kcap.schemas.recording.dtypes import BY_WORD
from kcap.schemas.recording.values import Opaque, TensorSpec, TorchConstant


def one(text):
    args, kwargs = parse_arguments(f"(({text},), {{}})")
    assert kwargs == {}
    (value,) = args
    return value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("None", None),
        ("True", True),
        ("-5", -5),
        ("18446744073709551615", 2**64 - 1),
        ("-9223372036854775808", -(2**63)),
        ("1e-05", 1e-05),
        ("1.", 1.0),
        (".5", 0.5),
        ("-0.0", -0.0),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("nan", math.nan),
        ("float('nan')", math.nan),
        ("float('inf')", math.inf),
        ("float('-inf')", -math.inf),
        ("2j", 2j),
        ("(1+2j)", 1 + 2j),
        ("(1.5-2e3j)", 1.5 - 2000j),
        ("(nan+infj)", complex(math.nan, math.inf)),
        ("complex(-0.0, 1.0)", complex(-0.0, 1.0)),
        ("'cuda'", "cuda"),
        (r"'it\'s \x41\u00e9\n\q'", "it's Aé\n\\q"),
        ('"f16"', "f16"),
        ("'f16'", TorchConstant("dtype", "float16")),
        ("f16", TorchConstant("dtype", "float16")),
        ("torch.float16", TorchConstant("dtype", "float16")),
        ("torch.half", TorchConstant("dtype", "float16")),
        ("th.long", TorchConstant("dtype", "int64")),
        ("torch.float8_e4m3fn", TorchConstant("dtype", "float8_e4m3fn")),
        ("torch.strided", TorchConstant("layout", "strided")),
        ("torch.sparse_coo", TorchConstant("layout", "sparse_coo")),
        ("torch.channels_last", TorchConstant("memory_format", "channels_last")),
        ("torch.preserve_format", TorchConstant("memory_format", "preserve_format")),
        ("torch.device('cuda:0')", TorchConstant("device", "cuda:0")),
        ("torch.device(type='cuda', index=0)", TorchConstant("device", "cuda:0")),
        ("device(type='cpu')", TorchConstant("device", "cpu")),
        ("torch.device('cuda', 1)", TorchConstant("device", "cuda:1")),
        ("\"torch.device('cpu')\"", TorchConstant("device", "cpu")),
        ("[]", []),
        ("()", []),
        ("[1, -2, 3]", [1, -2, 3]),
        ("[1,2,]", [1, 2]),
        ("(1, (2, 3), [None])", [1, [2, 3], [None]]),
        ("(1)", 1),
        ("(1,)", [1]),
        ("ST([10], f16, 3)", Opaque("ST([10], f16, 3)")),
        ("torch.randint(0, 9, (8,), dtype=torch.int32)", Opaque("torch.randint(0, 9, (8,), dtype=torch.int32)")),
    ],
)
def test_values(text, value):
    assert repr(one(text)) == repr(value)


@pytest.mark.parametrize(
    ("text", "shape", "strides", "device"),
    [
        ("T([8, 4096], f32)", (8, 4096), None, "cuda"),
        ("T([8, 4096], f32, [1, 8])", (8, 4096), (1, 8), "cuda"),
        ("T([8, 4096], f32, stride=(1, 8))", (8, 4096), (1, 8), "cuda"),
        ("T([8, 4096], f32, stride=[1, 8], device='cpu')", (8, 4096), (1, 8), "cpu"),
        ("T((8, 4096), torch.float, (1, 8), torch.device('cuda:1'))", (8, 4096), (1, 8), "cuda:1"),
        ("T(size=[8], dtype=f32, stride=None)", (8,), None, "cuda"),
        ("T([8, 4096], f32, stride=(4096, 1))", (8, 4096), None, "cuda"),
        ("T([8, 1048576, 1048576], f32, stride=(0, 0, 0))", (8, 2**20, 2**20), (0, 0, 0), "cuda"),
        ("T([], f32)", (), None, "cuda"),
        ("T([0, 3], f32)", (0, 3), None, "cuda"),
        ("T( [ 2 ] , f32 )", (2,), None, "cuda"),
    ],
)
def test_tensors(text, shape, strides, device):
    for _ in range(2):  # the second time from the cache
        assert one(text) == TensorSpec(shape, "float32", strides, device=device)


@pytest.mark.parametrize("word", sorted(BY_WORD))
def test_every_dtype_word(word):
    assert one(f"T([2], {word})").dtype == BY_WORD[word].name
    assert one(f"T([2], '{word}')").dtype == BY_WORD[word].name


def test_storages_are_numbered_in_order_of_appearance():
    args, kwargs = parse_arguments("((T([2], f32), [T([2], f32), T([3], f32)]), {'out': T([2], f32)})")
    specs = [args[0].storage, args[1][0].storage, args[1][1].storage, kwargs["out"].storage]
    assert specs == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 1, "expected '('"),
        ("((T([2], f32)), {})", 2, "one argument is written (x,)"),
        ("((1,), {}", 10, "expected ')', found the end"),
        ("((1,), {}) x", 12, "the end of the line"),
        ("((1 2,), {})", 5, "',' or ')'"),
        ("((foo,), {})", 3, "unknown word 'foo'"),
        ("((torch.ops.aten,), {})", 3, "unknown word"),
        ("(([1, {}],), {})", 7, "a dictionary holds keyword arguments only"),
        ("((1,), {'a': 1, 'a': 2})", 17, "given twice"),
        ("((1,), {a: 1})", 9, "a quoted name"),
        ("((1,), {'a b': 1})", 9, "a keyword must be a name"),
        ("((1,), {'f16': 1})", 9, "a keyword must be a name"),
        ("(('abc,), {})", 3, "a string without its end"),
        (r"(('\xzz',), {})", 3, "a broken escape"),
        (r"(('\U00110000',), {})", 3, "an escape beyond Unicode"),
        ("((18446744073709551616,), {})", 3, "does not fit 64 bits"),
        ("((-9223372036854775809,), {})", 3, "does not fit 64 bits"),
        ("((007,), {})", 3, "may not begin with 0"),
        ("((1+2,), {})", 4, "arithmetic is not read"),
        ("((True+2j,), {})", 7, "arithmetic is not read"),
        ("((9**9,), {})", 4, "found '*'"),
        ("((-None,), {})", 4, "expected a number"),
        ("((b'x',), {})", 3, "unknown word 'b'"),
        ("((x for x in y), {})", 3, "unknown word"),
        ("((T([2]),), {})", 3, "needs a dtype"),
        ("((T([2], cuda),), {})", 10, "unknown word 'cuda'"),
        ("((T([2, -1], f32),), {})", 3, "shape is a list of integers"),
        ("((T([2.0], f32),), {})", 3, "shape is a list of integers"),
        ("((T([True], f32),), {})", 3, "shape is a list of integers"),
        ("((T([2, 2], f32, [1]),), {})", 3, "differ in length"),
        ("((T([2], f32, [-1]),), {})", 3, "stride is a list of integers"),
        ("((T([2], f32, [1], 'x y'),), {})", 3, "device is a string"),
        ("((T([2], f32, [1], 'cpu', 5),), {})", 3, "T takes"),
        ("((T([2], f32, shape=[2]),), {})", 3, "T does not take shape"),
        ("((T([2], f32, names=[2]),), {})", 3, "T does not take names"),
        ("((T([2], stride=[1], f32),), {})", 22, "expected a keyword"),
        ("((1, T([1000000000000000], u8)), {})", 6, "more than 16 TiB"),
        ("((T([4611686018427387904, 2], u8, [0, 0]),), {})", 3, "more than 2**62 elements"),
        ("((T([99999999999999999999], u8),), {})", 6, "does not fit 64 bits"),
        ("((T([18446744073709551615], u8),), {})", 3, "shape is a list of integers"),
        ("((T([2, 2], u8, [9000000000000000000, 1]),), {})", 3, "more than 16 TiB"),
        ("((torch.device('../x'),), {})", 3, "a device is written"),
        ("((float('1'),), {})", 3, "float takes"),
        ("((complex('1j'),), {})", 3, "complex takes"),
    ],
)
def test_faults_have_their_column(text, column, reason):
    with pytest.raises(FormatError) as caught:
        parse_arguments(text, "f.txt")
    assert caught.value.place == f"f.txt:1:{column}"
    assert reason in caught.value.reason


CALLS = [
    "__import__('os').system('touch pwned')",
    "eval('1')",
    "exec('1')",
    "open('/etc/passwd')",
    "torch.load('x')",
    "torch.ops.load_library('x.so')",
    "torch.ops.aten.from_file('x')",
    "torch.classes.load_library('x.so')",
    "().__class__.__bases__",
    "'x'.join([])",
    "T.__init__([2])",
    "(lambda: 1)()",
    "[x for x in [1]]",
    "f'{1}'",
    "T([2], f32).numpy()",
]


@pytest.mark.parametrize("text", CALLS)
def test_nothing_in_the_arguments_is_run(text):
    with pytest.raises(FormatError):
        one(text)


@pytest.mark.parametrize("opening", ["(", "[", "T(", "ST(", "float(", "torch.randint(", "-", "[1,"])
def test_deep_nesting_is_a_fault_and_no_crash(opening):
    for text in (opening * 100_000, f"(({opening * 100_000},), {{}})"):
        with pytest.raises(FormatError):
            parse_arguments(text)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 1_000_000,
        "1" + "0" * 1_000_000 + ".5",
        "1e" + "9" * 1_000_000,
        "T([" + "9" * 1_000_000 + "], f32)",
        "T([" + "1, " * 300_000 + "x], f32)",
        "[" + "1, " * 300_000 + "x]",
        "'" + "\\" * 1_000_001,
        "a" * 1_000_000,
        "a." * 500_000,
        "T(" + "1" * 1_000_000,
        "ST(" * 30 + "'" * 1_000_001,
        " " * 1_000_000 + "?",
    ],
    ids=range(12),
)
def test_long_texts_are_refused_in_linear_time(text):
    started = time.process_time()
    with pytest.raises(FormatError) as caught:
        one(text)
    assert time.process_time() - started < 10
    assert len(str(caught.value)) < 300


def test_a_hundred_thousand_dimensions_of_a_huge_size_are_refused_at_once():
    started = time.process_time()
    with pytest.raises(FormatError, match="more than 64 dimensions"):
        one(f"T([{', '.join(['9223372036854775807'] * 100_000)}], f32)")
    assert time.process_time() - started < 10


def test_the_cache_of_tensors_is_bounded():
    for size in range(40_000):
        one(f"T([{size}], f32)")
    assert len(_tensors) <= 16384


@given(st.text() | st.text(alphabet="()[]{},:'\"=+-.0123456789TSjeinf \\torchx"))
def test_any_text_is_read_or_refused(text):
    for candidate in (text, f"(({text},), {{}})"):
        try:
            args, kwargs = parse_arguments(candidate)
        except FormatError as error:
            assert error.place.startswith("<arguments>:1:")
        else:
            assert isinstance(args, list) and isinstance(kwargs, dict)


def test_reading_imports_no_torch():
    code = "import kcap.schemas.backendbench, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
