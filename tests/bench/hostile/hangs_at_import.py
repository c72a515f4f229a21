# definition: relu
# does: Never comes back from its import.
# expect: TIMEOUT COMPILE_ERROR
import threading

threading.Event().wait()


def run(x):
    return x
