# definition: gemm_f32
# row: 22
# does: Ends its process with exit code 0.
# naive: An exit code of 0 means that all assertions held.
# expect: RUNTIME_ERROR COMPILE_ERROR
# reason: its process ended: exit code 0
import os


def run(A, B):
    os._exit(0)
