# definition: relu
# does: Sleeps for ever in its first call.
# expect: TIMEOUT
# impatient: nothing of it comes to an end
import time


def run(x):
    time.sleep(10**6)
