# definition: relu
# does: Sleeps for ever in its first call.
# expect: TIMEOUT
import time


def run(x):
    time.sleep(10**6)
