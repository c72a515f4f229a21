"""What compilers and Python say, taken apart into file, line, column and text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.tasks.compiler_messages import MOST, compiler_messages

GCC = """\
[1/2] c++ -MMD -c /tmp/kcap/solution_1/main.cpp -o main.o
FAILED: main.o
/tmp/kcap/solution_1/main.cpp: In function 'void run()':
/tmp/kcap/solution_1/main.cpp:7:12: warning: unused variable 'n' [-Wunused-variable]
/tmp/kcap/solution_1/main.cpp:9:3: error: 'y' was not declared in this scope
    9 |   y[0] = 1;
      |   ^
/tmp/kcap/solution_1/main.cpp:3:10: fatal error: nothing.h: No such file or directory
"""
NVCC = """\
kernel.cu(12): error: identifier "blockIdy" is undefined
kernel.cu(20): warning #177-D: variable "i" was declared but never referenced
1 error detected in the compilation of "kernel.cu".
"""
RAISED = """\
Traceback (most recent call last):
  File "/tmp/slot/solution_1/norm.py", line 12, in run
    return helper(x)
  File "/tmp/slot/solution_1/norm.py", line 5, in helper
    return torch.mm(x, x)
  File "/usr/lib/python3/torch/functional.py", line 99, in mm
    return _mm(a, b)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)
"""
SYNTAX = """\
Traceback (most recent call last):
  File "/usr/lib/importlib.py", line 1, in import_module
    return load(name)
  File "/tmp/slot/solution_1/norm.py", line 4
    def run(x:
           ^
SyntaxError: '(' was never closed
"""
TRITON = """\
Traceback (most recent call last):
  File "/tmp/slot/solution_1/norm.py", line 30, in run
    kernel[(1,)](x)
  File "/usr/lib/triton/jit.py", line 5, in run
    raise CompilationError(source, node)
triton.compiler.errors.CompilationError: at 3:8: arange's range must be a power of 2
"""


def described(log, sources=("norm.py", "main.cpp")):
    return [(one.file, one.line, one.column, one.severity, one.text) for one in compiler_messages(log, sources)]


def test_gcc_names_file_line_and_column_and_errors_come_first():
    assert described(GCC) == [
        ("main.cpp", 9, 3, "error", "'y' was not declared in this scope"),
        ("main.cpp", 3, 10, "error", "nothing.h: No such file or directory"),
        ("main.cpp", 7, 12, "warning", "unused variable 'n' [-Wunused-variable]"),
    ]


def test_nvcc_names_file_and_line():
    assert described(NVCC)[0] == ("kernel.cu", 12, None, "error", 'identifier "blockIdy" is undefined')
    assert described(NVCC)[1][:4] == ("kernel.cu", 20, None, "warning")


def test_ptxas_names_its_line():
    log = "ptxas app.ptx, line 14; error   : Unknown symbol 'x'\nptxas fatal   : Ptx assembly aborted"
    assert described(log) == [("app.ptx", 14, None, "error", "Unknown symbol 'x'")]


@pytest.mark.parametrize(
    ("log", "line", "text"),
    [
        (RAISED, 5, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
        (SYNTAX, 4, "SyntaxError: '(' was never closed"),
        (TRITON, 30, "CompilationError: at 3:8: arange's range must be a power of 2"),
    ],
    ids=["raised", "syntax", "triton"],
)
def test_python_points_to_the_last_line_of_the_solutions_own(log, line, text):
    assert described(log) == [("norm.py", line, None, "error", text)]


def test_without_a_frame_of_its_own_it_is_the_last_frame():
    assert described(RAISED, sources=())[0][:2] == ("functional.py", 99)


def test_what_was_printed_is_no_message():
    assert described("loading weights: 3 of 7\nerror rate 0.1\n12:30: done\n") == []


def test_one_message_is_told_once_and_many_are_cut():
    assert len(described("a.cpp:1:1: error: x\n" * 3)) == 1
    assert len(described("".join(f"a.cpp:{n}:1: error: x\n" for n in range(1, 100)))) == MOST


@given(st.text())
def test_any_log_is_read(log):
    for message in compiler_messages(log, ["a.py"]):
        assert message.line >= 1
