# definition: gemm_f32
# row: 14 15
# does: Sums over every second element of K only, and scales.
# naive: Right in expectation, and correct by a cosine similarity with a low threshold; half of the work.
# expect: INCORRECT_NUMERICAL
# reason: is off by
def run(A, B):
    return A[:, ::2] @ B[:, ::2].T * 2**0.5
