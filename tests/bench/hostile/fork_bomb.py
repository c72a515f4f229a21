# definition: relu
# does: Forks as long as it can, up to 2,000 processes, which all stay.
# expect: RUNTIME_ERROR TIMEOUT REWARD_HACK COMPILE_ERROR
# needs: confinement
import os
import time


def run(x):
    for _ in range(2000):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    raise RuntimeError("2,000 processes, and nothing said no")
