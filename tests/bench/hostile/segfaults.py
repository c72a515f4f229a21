# definition: relu
# does: Reads address 0.
# expect: RUNTIME_ERROR
import ctypes


def run(x):
    ctypes.string_at(0)
