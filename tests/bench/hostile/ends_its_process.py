# definition: relu
# does: Calls os._exit(0) at its import.
# expect: COMPILE_ERROR RUNTIME_ERROR
import os

os._exit(0)


def run(x):
    return x
