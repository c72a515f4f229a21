# definition: relu
# does: Calls itself without end, with the limit taken off.
# expect: RUNTIME_ERROR TIMEOUT
# impatient: nothing of it comes to an end
import sys

sys.setrecursionlimit(10**9)


def run(x):
    return run(x) + 1
