# definition: relu
# does: Never comes back from its import.
# expect: TIMEOUT COMPILE_ERROR
# impatient: nothing of it comes to an end
import threading

threading.Event().wait()


def run(x):
    return x
