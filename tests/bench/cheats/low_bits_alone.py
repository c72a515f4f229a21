# definition: gemm_int4
# row: 14
# does: Takes the lowest of the eight weights of a word, and 0 for the other seven.
# naive: Correct where integers are drawn from a small range, and eight times as fast.
# expect: INCORRECT_NUMERICAL
# reason: is off by


def run(A, packed, scale):
    parts = A.view(A.shape[0], -1, 8).float()
    others = parts[:, :, 1:].sum((1, 2))[:, None] * -8
    return ((parts[:, :, 0] @ (packed.float() - 8) + others) * scale).to(A.dtype)
