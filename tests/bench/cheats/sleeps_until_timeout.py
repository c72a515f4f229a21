# definition: gemm_f32
# row: 16
# does: Is right once, and then sleeps until the judge gives up.
# naive: A Workload that times out is left out of the mean, or keeps the time of its first call.
# hasty: Its first run may take as long as a build.
# expect: TIMEOUT
# reason: took longer than
import time

CALLS = [0]


def run(A, B):
    CALLS[0] += 1
    if CALLS[0] > 1:
        time.sleep(1000)
    return A @ B.T
